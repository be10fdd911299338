"""The components alone: scores against formulas of their own, options that are translated or refused, and indexes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from haystack import Document
from haystack.utils import ComponentDevice
from tests.gates import LoopGate, batches_through

from haystack_integrations.components.embedders.millpond import MillpondDocumentEmbedder, MillpondTextEmbedder
from haystack_integrations.components.rankers.millpond import MillpondLateInteractionRanker, MillpondSimilarityRanker
from haystack_integrations.components.retrievers.millpond import MillpondIndexRetriever
from haystack_integrations.components.retrievers.millpond.filters import to_conditions
from millpond import Engine, FingerprintMismatchError
from millpond.errors import ModelLoadError
from millpond.ingest import Record, ingest
from millpond.late_interaction import MemoryIndex, PlaidIndex
from millpond_qdrant import QdrantSink

pytestmark = pytest.mark.door

QUESTION = "What makes dough rise?"


def of(texts: list[str], **meta: Any) -> list[Document]:
    return [Document(id=f"d{n}", content=text, meta={"n": n, **meta}) for n, text in enumerate(texts)]


def scores(found: Any) -> dict[str, float]:
    return {document.id: document.score for document in found["documents"]}


async def test_a_cross_encoder_gives_sigmoids_or_logits(
    cross_encoder: str, cross_encoder_engine: Engine, texts: list[str]
) -> None:
    read = [f"<{text} | of mills>" for text in texts]
    logits = cross_encoder_engine.score(f"?{QUESTION}", read, activation=False).scores
    raw = {f"d{n}": float(logit) for n, logit in enumerate(logits)}
    scaled = {name: float(1 / (1 + np.exp(-logit))) for name, logit in raw.items()}
    ranker = MillpondSimilarityRanker(
        cross_encoder,
        dtype="float32",
        top_k=None,
        query_prefix="?",
        document_prefix="<",
        document_suffix=">",
        meta_fields_to_embed=["of"],
        embedding_separator="",
    )
    documents = [Document(id=f"d{n}", content=" | of mills", meta={"of": text}) for n, text in enumerate(texts)]
    for found in (ranker.run(QUESTION, documents), await ranker.run_async(QUESTION, documents)):
        assert scores(found) == pytest.approx(scaled, abs=1e-5)
    given = ranker.run(QUESTION, documents, scale_score=False)
    assert scores(given) == pytest.approx(raw, abs=1e-5) and raw != pytest.approx(scaled, abs=1e-3)
    order = [each.id for each in given["documents"]]
    assert order == sorted(raw, key=lambda name: -raw[name])
    best = ranker.run(QUESTION, documents, top_k=5, score_threshold=sorted(scaled.values())[-3] - 1e-6)
    assert [each.id for each in best["documents"]] == order[:3]
    assert all(document.score is None for document in documents)


async def test_late_interaction_is_the_sum_of_the_best_matches(minilm: str, engine: Engine, texts: list[str]) -> None:
    (question,) = engine.token_embed([QUESTION], role="query", normalize=True)
    rows = engine.token_embed(texts, role="document", normalize=True)
    expected = {f"d{n}": float((question @ row.T).max(axis=1).sum()) for n, row in enumerate(rows)}
    means = {f"d{n}": float((question @ row.T).mean(axis=1).sum()) for n, row in enumerate(rows)}
    ranker = MillpondLateInteractionRanker(minilm, dtype="float32", top_k=None)
    for found in (ranker.run(QUESTION, of(texts)), await ranker.run_async(QUESTION, of(texts))):
        assert scores(found) == pytest.approx(expected, rel=1e-5) and expected != pytest.approx(means, rel=1e-2)
    similarity = MillpondSimilarityRanker(engine=engine, top_k=None)  # an embedder ranks so by itself, unscaled
    assert scores(similarity.run(QUESTION, of(texts))) == pytest.approx(expected, rel=1e-5)
    cosines = engine.score(QUESTION, texts, method="cosine").scores
    by_cosine = MillpondSimilarityRanker(engine=engine, top_k=None, method="cosine").run(QUESTION, of(texts))
    assert scores(by_cosine) == pytest.approx({f"d{n}": float(s) for n, s in enumerate(cosines)}, abs=1e-5)
    with pytest.raises(ValueError, match="method='cosine' is not late interaction"):
        MillpondLateInteractionRanker(minilm, method="cosine")


def test_of_equal_ids_the_best_is_ranked_and_without_documents_nothing_is_loaded(minilm: str) -> None:
    twice = [Document(id="a", content="tides", score=score, meta={"s": score}) for score in (0.1, 0.9, None)]
    (found,) = MillpondLateInteractionRanker(minilm).run("sea", twice)["documents"]
    assert found.meta["s"] == 0.9
    assert MillpondSimilarityRanker("./no-such-folder").run("sea", []) == {"documents": []}
    with pytest.raises(ModelLoadError, match="no-such-folder"):
        MillpondSimilarityRanker("./no-such-folder").run("sea", twice)


def test_arguments_of_another_kind_are_refused(engine: Engine) -> None:
    with pytest.raises(TypeError, match="MillpondTextEmbedder takes a str, not a list"):
        MillpondTextEmbedder(engine=engine).run([Document(content="a")])
    for documents in ("text", ["text"], [Document(content="a"), None]):
        with pytest.raises(TypeError, match="MillpondDocumentEmbedder takes a list of documents"):
            MillpondDocumentEmbedder(engine=engine).run(documents)
        with pytest.raises(TypeError, match="MillpondSimilarityRanker takes a list of documents"):
            MillpondSimilarityRanker(engine=engine).run("q", documents)
    with pytest.raises(TypeError, match="query is of type list"):
        MillpondSimilarityRanker(engine=engine).run(["q"], [Document(content="a")])
    for top_k in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="top_k=.* must be an int from 1"):
            MillpondSimilarityRanker(engine=engine, top_k=top_k)
    assert MillpondDocumentEmbedder(engine=engine).run([])["documents"] == []


def test_options_are_translated_or_refused(minilm: str, engine: Engine) -> None:
    made = MillpondTextEmbedder(
        minilm,
        device=ComponentDevice.from_str("cpu"),
        truncate_dim=64,
        normalize_embeddings=True,
        batch_size=8,
        model_kwargs={"torch_dtype": "float32"},
        config_kwargs={"is_matryoshka": True},
    )
    assert (made._source.device, made._source.dtype, made._source.dimensions) == ("cpu", "float32", 64)
    assert len(made.run("tides")["embedding"]) == 64
    for options, message in (
        ({"backend": "onnx"}, "backend='onnx' is not available here"),
        ({"whatever": 1}, "whatever=1 is not available here"),
        ({"prefix": "a", "query_prompt": "b"}, "query_prompt"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            MillpondTextEmbedder(minilm, **options)
    with pytest.raises(ValueError, match="either model= .* or engine="):
        MillpondTextEmbedder()
    with pytest.raises(ValueError, match="dtype= is read when a model is loaded"):
        MillpondTextEmbedder(engine=engine, dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, engine: Engine, texts: list[str]) -> str:
    path = tmp_path_factory.mktemp("late") / "index"
    with PlaidIndex(path, engine) as index:
        index.add([f"d{n}" for n in range(len(texts))], texts, [{"n": n, "odd": n % 2 == 1} for n in range(len(texts))])
    return str(path)


async def test_an_index_is_searched_by_its_object_or_its_folder(
    folder: str, minilm: str, engine: Engine, texts: list[str]
) -> None:
    memory = MemoryIndex(engine)
    assert MillpondIndexRetriever(memory).run(QUESTION) == {"documents": []}  # an empty one is not opened again
    memory.add([f"d{n}" for n in range(len(texts))], texts, [{"n": n, "odd": n % 2 == 1} for n in range(len(texts))])
    expected = [(hit.id, hit.score) for hit in memory.search([QUESTION], k=3)[0]]
    placed = MillpondIndexRetriever(folder, model=minilm, dtype="float32", top_k=3)
    again = MillpondIndexRetriever.from_dict(placed.to_dict())
    for retriever in (MillpondIndexRetriever(memory, top_k=3), placed, again):
        for found in (retriever.run(QUESTION), await retriever.run_async(QUESTION)):
            got = [(each.id, each.score) for each in found["documents"]]
            assert [name for name, _ in got] == [name for name, _ in expected]
            assert [score for _, score in got] == pytest.approx([score for _, score in expected], rel=2e-2)
            assert found["documents"][0].content == texts[int(got[0][0][1:])]
            assert found["documents"][0].meta["n"] == int(got[0][0][1:])
    assert len(placed.run(QUESTION, top_k=1)["documents"]) == 1
    odd = {"field": "meta.odd", "operator": "==", "value": True}
    numbers = {"operator": "AND", "conditions": [odd, {"field": "meta.n", "operator": ">=", "value": 5}]}
    kept = placed.run(QUESTION, filters=numbers, top_k=12)["documents"]
    assert sorted(each.meta["n"] for each in kept) == [n for n in range(5, len(texts)) if n % 2]
    best = placed.run(QUESTION)["documents"][0].score
    strict = MillpondIndexRetriever(folder, engine=engine, score_threshold=best - 1e-6)
    assert [each.id for each in strict.run(QUESTION)["documents"]] == [expected[0][0]]
    for retriever in (placed, again, strict):
        retriever.close()


async def test_a_collection_is_searched_by_its_sink_or_its_url(
    minilm: str, prompted: str, engine: Engine, texts: list[str], tmp_path: Path
) -> None:
    records = [Record(f"d{n}", text, {"n": n}) for n, text in enumerate(texts)]
    with QdrantSink(str(tmp_path / "q"), "docs") as sink:
        ingest(records, engine=engine, sink=sink, show_progress=False)
        expected = [(hit.id, hit.score) for hit in sink.search(engine, QUESTION, k=4)]
        over = MillpondIndexRetriever(sink, engine=engine, top_k=4)
        for found in (over.run(QUESTION), await over.run_async(QUESTION)):
            assert scores(found) == pytest.approx(dict(expected), abs=1e-6)
            assert [each.id for each in found["documents"]] == [name for name, _ in expected]
        with pytest.raises(FingerprintMismatchError, match="two models do not compare"):
            MillpondIndexRetriever(sink, model=prompted).run(QUESTION)
    placed = MillpondIndexRetriever(f"qdrant+path:{tmp_path / 'q'}#docs", model=minilm, dtype="float32", top_k=4)
    found = MillpondIndexRetriever.from_dict(placed.to_dict()).run(QUESTION, filters={"n": {"lt": 6}})["documents"]
    assert found[0].id == expected[0][0] and all(each.meta["n"] < 6 for each in found)


def test_an_index_of_another_kind_is_refused(engine: Engine, folder: str) -> None:
    with pytest.raises(TypeError, match="index is of type int; pass a late-interaction index, a sink"):
        MillpondIndexRetriever(7, engine=engine)
    with pytest.raises(ValueError, match="model= is not read: the index has an engine"):
        MillpondIndexRetriever(MemoryIndex(engine), model="a")
    with pytest.raises(ValueError, match="either model= .* or engine="):
        MillpondIndexRetriever(folder)


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"field": "meta.a", "operator": "!=", "value": 1}, "the operator '!=' of 'a' is not"),
        ({"operator": "OR", "conditions": []}, "joined by 'OR'; millpond joins by AND"),
        (
            {"operator": "AND", "conditions": [{"field": "meta.a", "operator": "==", "value": n} for n in (1, 2)]},
            "two filters name the key 'a'",
        ),
    ],
)
def test_filters_that_millpond_lacks_are_refused(filters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_conditions(filters)


def test_filters_are_translated() -> None:
    leaf = {"field": "meta.day", "operator": ">=", "value": "2024-01-01"}
    other = {"field": "meta.day", "operator": "<", "value": "2025-01-01"}
    nested = {"operator": "AND", "conditions": [{"field": "lang", "operator": "in", "value": ["de", "en"]}, other]}
    assert to_conditions({"operator": "AND", "conditions": [leaf, nested]}) == {
        "day": {"gte": "2024-01-01", "lt": "2025-01-01"},
        "lang": ["de", "en"],
    }
    assert to_conditions({"lang": "de"}) == {"lang": "de"} and to_conditions(None) is to_conditions({}) is None


async def test_the_loop_goes_on_while_a_component_waits(engine: Engine) -> None:
    documents = of([f"the {n}th passage, about {n * n} things" for n in range(40)])
    ranker = MillpondLateInteractionRanker(engine=engine, top_k=None)
    for call in (
        MillpondDocumentEmbedder(engine=engine).run_async(documents),
        ranker.run_async(QUESTION, documents),
    ):
        gate = LoopGate()
        with batches_through(gate, engine):
            assert len((await gate.run(call))["documents"]) == 40
        assert gate.calls and not gate.blocked
