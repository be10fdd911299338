"""Datatypes, quantization and hybrid search of a sink, stored and answered by Qdrant's real engine (qdrant-edge-py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from integrations.qdrant.tests.real_engine import RealEngine, edge
from tests.tiny.heads import write_splade

from millpond import Engine
from millpond.ingest import Record, ingest, point_id
from millpond_qdrant import QdrantSink

pytestmark = pytest.mark.contract

WORDS = ["river", "zip", "bread", "socket", "heart", "search", "glacier", "violin", "memory", "tide", "mill", "copper"]
RECORDS = [
    Record(f"{one} {two} {three}", f"{one} of a {two} and {three}", {"n": n % 4})
    for n, (one, two, three) in enumerate((a, b, c) for a in WORDS for b in WORDS for c in WORDS[:6] if a < b)
]
QUESTIONS = [
    "boats on a river",
    "an orchestra",
    "where do files go?",
    "what conducts electricity?",
    "yeast",
    "the moon",
]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[RealEngine]:
    client = RealEngine(tmp_path / "shard")
    yield client
    if client.shard is not None:
        client.shard.close()


@pytest.fixture(scope="module")
def exact(engine: Engine) -> npt.NDArray[np.float32]:
    """Cosines ``[questions, records]``."""
    documents = engine.embed([record.text for record in RECORDS], role="document", normalize=True).embeddings
    questions = engine.embed(QUESTIONS, role="query", normalize=True).embeddings
    return np.asarray(questions @ documents.T)


def recall(engine: Engine, sink: QdrantSink, exact: npt.NDArray[np.float32], **options: Any) -> float:
    """Of the ten nearest, those found."""
    found = 0
    for question, scores in zip(QUESTIONS, exact, strict=True):
        ids = {hit.id for hit in sink.search(engine, question, k=10, **options)}
        found += len(ids & {RECORDS[row].id for row in np.argsort(-scores)[:10]})
    return found / (10 * len(QUESTIONS))


def test_a_coarse_to_fine_search_has_the_hits_of_local_mode(engine: Engine, client: RealEngine) -> None:
    sinks = [QdrantSink(place, "docs", dimensions=[16, 384]) for place in (client, ":memory:")]
    for sink in sinks:
        ingest(RECORDS, engine=engine, sink=sink, show_progress=False)
    differing = 0
    for question in QUESTIONS:
        real, local = (sink.search(engine, question, k=8, candidates=15, coarse_to_fine=True) for sink in sinks)
        assert [hit.score for hit in real] == pytest.approx([hit.score for hit in local], abs=1e-5)
        assert {hit.id for hit in real[:7]} <= {hit.id for hit in local}  # of equal scores the last may be another
        straight = sinks[0].search(engine, question, k=8, coarse_to_fine=False)
        differing += [hit.id for hit in straight] != [hit.id for hit in real]
    assert differing  # otherwise the funnel could not be told from a plain search


# Not a quote or a backslash, which the sink refuses.
KEYS = [
    "",
    " ",
    "a b",
    "a.b",
    "a[0]",
    "[]",
    "1",
    "-1",
    "1.5",
    "a-b",
    "a/b",
    "*",
    "$x",
    "é",
    "漢字",
    "😀",
    "a\nb",
    "a'b",
]


@pytest.mark.parametrize("form", ["plain", "langchain", "llama_index"])
def test_the_path_of_every_key_is_that_key(engine: Engine, client: RealEngine, form: str) -> None:
    sink = QdrantSink(client, "docs", dimensions=[384], fields=form)
    rows = [Record(str(n), "text", {key: "its value"}) for n, key in enumerate(KEYS)]
    ingest(rows, engine=engine, sink=sink, show_progress=False)
    for n, key in enumerate(KEYS):
        assert [hit.id for hit in sink.search(engine, "text", k=99, filter={key: "its value"})] == [str(n)]


@pytest.mark.parametrize(
    ("datatype", "tolerance", "least"), [("float32", 1e-5, 1.0), ("float16", 1e-3, 0.98), ("uint8", 1e-2, 0.9)]
)
def test_scores_and_vectors_of_each_datatype(
    engine: Engine, client: RealEngine, exact: npt.NDArray[np.float32], datatype: str, tolerance: float, least: float
) -> None:
    sink = QdrantSink(client, "docs", dimensions=[64, 384], datatype=datatype)
    ingest(RECORDS, engine=engine, sink=sink, show_progress=False)
    assert client.shard.count(edge.CountRequest()) == len(RECORDS)
    reading = QdrantSink(client, "docs")  # knows the datatype from the collection
    ids = [record.id for record in RECORDS]
    errors = []
    for question, scores in zip(QUESTIONS, exact, strict=True):
        for coarse_to_fine in (True, False):
            hits = reading.search(engine, question, k=10, coarse_to_fine=coarse_to_fine)
            assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
            errors += [abs(hit.score - scores[ids.index(hit.id)]) for hit in hits]
    assert max(errors) < tolerance
    assert (max(errors) > 1e-6) == (datatype != "float32")  # else the engine did not store that datatype
    assert recall(engine, reading, exact, coarse_to_fine=False) >= least
    texts = [record.text for record in RECORDS[:5]]
    wanted = engine.embed(texts, role="document", dimensions=64, normalize=True).embeddings
    rows = reading.fetch([point_id(record.id) for record in RECORDS[:5]], widths=[64])
    stored = np.stack([rows[point_id(record.id)].vectors[64] for record in RECORDS[:5]])
    assert np.abs(stored - wanted).max() < {"float32": 1e-5, "float16": 1e-3, "uint8": 6e-3}[datatype]
    assert np.linalg.norm(stored, axis=1) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(("quantization", "least"), [("scalar", 0.98), ("product", 0.9), ("binary", 0.7)])
def test_quantized_searches_are_rescored(
    engine: Engine, client: RealEngine, exact: npt.NDArray[np.float32], quantization: str, least: float
) -> None:
    sink = QdrantSink(client, "docs", dimensions=[64, 384], index_quantization=quantization)
    ingest(RECORDS, engine=engine, sink=sink, show_progress=False)
    client.shard.optimize()
    ids = [record.id for record in RECORDS]
    raw = QdrantSink(client, "docs", rescore=False)
    over = QdrantSink(client, "docs")
    hits = {sink: sink.search(engine, QUESTIONS[0], k=10, coarse_to_fine=False) for sink in (raw, over)}
    errors = {of: [abs(hit.score - exact[0][ids.index(hit.id)]) for hit in found] for of, found in hits.items()}
    assert max(errors[over]) < 1e-5 and max(errors[raw]) > 1e-4  # else nothing is quantized
    assert recall(engine, over, exact, coarse_to_fine=False) >= least
    if quantization != "scalar":  # of which the copy alone finds nearly all
        assert (
            recall(engine, over, exact, coarse_to_fine=False) > recall(engine, raw, exact, coarse_to_fine=False) + 0.05
        )
    # The second stage of a funnel scores every candidate by the vectors themselves.
    funnel = QdrantSink(client, "docs").search(engine, QUESTIONS[0], k=10, candidates=200)
    assert [hit.score for hit in funnel] == pytest.approx([exact[0][ids.index(hit.id)] for hit in funnel], abs=1e-5)


@pytest.fixture(scope="module")
def sparse_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_splade(tmp_path_factory.mktemp("sparse") / "splade")
    with Engine(str(folder), dtype="float32", device="cpu") as engine:
        yield engine


def fused(*rankings: list[str]) -> dict[str, float]:
    scores: dict[str, float] = {}
    for ranking in rankings:
        for rank, id in enumerate(ranking, start=1):
            scores[id] = scores.get(id, 0.0) + 1 / (60 + rank)
    return scores


@pytest.mark.parametrize("number", [None, 2])
def test_hybrid_searches_fuse_the_two_rankings(
    engine: Engine,
    sparse_engine: Engine,
    client: RealEngine,
    exact: npt.NDArray[np.float32],
    number: int | None,
) -> None:
    sink = QdrantSink(client, "docs", dimensions=[384], hybrid=True)
    ingest(RECORDS, engine=engine, sink=sink, sparse_engine=sparse_engine, show_progress=False)
    documents = sparse_engine.sparse_embed([record.text for record in RECORDS], role="document").embeddings
    kept = [row for row, record in enumerate(RECORDS) if number is None or record.metadata["n"] == number]
    condition = None if number is None else {"n": number}
    for question, scores in zip(QUESTIONS, exact, strict=True):
        (query,) = sparse_engine.sparse_embed([question], role="query").embeddings
        dots = {row: sum(query[t] * w for t, w in documents[row].items() if t in query) for row in kept}
        dense = [RECORDS[row].id for row in sorted(kept, key=lambda row: -scores[row])[:50]]
        sparse = [RECORDS[row].id for row in sorted(dots, key=lambda row: -dots[row])[:50] if dots[row]]
        wanted = fused(dense, sparse)
        hits = sink.search(
            engine, question, k=10, candidates=50, filter=condition, hybrid=True, sparse_engine=sparse_engine
        )
        best = sorted(wanted.values(), reverse=True)[:10]
        assert [hit.score for hit in hits] == pytest.approx(best, abs=2e-4)  # two documents may be equally similar
        assert all(hit.score == pytest.approx(wanted[hit.id], abs=4e-4) for hit in hits)
        assert sparse and dense[:10] != [hit.id for hit in hits]
