"""Documents of qdrant-client, embedded by engines: in points and in queries, wherever the client takes one."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integrations.qdrant.tests.fake_qdrant import FakeQdrant
from qdrant_client import QdrantClient, models
from tests.adapter_models import prompted as prompted
from tests.adapter_models import prompted_splade as prompted_splade
from tests.passages import TEXTS
from tests.tiny.heads import write_cross_encoder, write_m3, write_stanford

import millpond_qdrant
from millpond import Engine
from millpond.engine.shared import get_engine
from millpond.errors import InvalidRequestError, ModelLoadError, UnsupportedTaskError
from millpond.late_interaction import maxsim
from millpond_qdrant import MillpondQdrantClient

pytestmark = pytest.mark.contract

Checkpoints = Callable[..., Path]
QUESTION = "What makes dough rise?"
NAMES = [f"{n:08x}-0000-0000-0000-000000000000" for n in range(len(TEXTS))]
OPTIONS = {"dtype": "float32"}


def document(text: str, model: str, **options: Any) -> models.Document:
    return models.Document(text=text, model=model, options={**OPTIONS, **options})


@pytest.fixture
def client(minilm: str) -> Iterator[MillpondQdrantClient]:
    client = MillpondQdrantClient(":memory:")
    yield client
    client.close()


def create(client: Any, model: str, **options: Any) -> None:
    size = client.get_embedding_size(model)
    client.create_collection("docs", {"dense": models.VectorParams(size=size, distance=models.Distance.DOT)}, **options)


def points(model: str, texts: list[str] = TEXTS, **options: Any) -> list[models.PointStruct]:
    return [
        models.PointStruct(id=NAMES[n], vector={"dense": document(text, model, **options)}, payload={"text": text})
        for n, text in enumerate(texts)
    ]


def stored(client: Any, name: str = "dense") -> list[Any]:
    found = client.retrieve("docs", NAMES, with_vectors=True)
    return [dict(point.vector)[name] for point in sorted(found, key=lambda point: NAMES.index(point.id))]


def embedded(model: str, texts: list[str], role: Any) -> Any:
    return get_engine(model, **OPTIONS).embed(texts, role=role).embeddings


def test_points_and_queries_have_the_vectors_of_their_roles(client: MillpondQdrantClient, prompted: str) -> None:
    create(client, prompted)
    client.upsert("docs", points(prompted))
    with Engine(prompted, **OPTIONS) as engine:
        rows = {role: engine.embed(TEXTS, role=role).embeddings for role in ("document", "query")}
        (question,) = engine.embed([QUESTION], role="query").embeddings
    assert np.abs(np.array(stored(client)) - rows["document"]).max() < 1e-5
    assert np.abs(np.array(stored(client)) - rows["query"]).max() > 1e-3  # the other role
    found = client.query_points("docs", document(QUESTION, prompted), using="dense", limit=12).points
    scores = rows["document"] @ question
    assert [point.id for point in found] == [NAMES[n] for n in np.argsort(-scores)]
    assert [point.score for point in found] == pytest.approx(np.sort(scores)[::-1], abs=1e-5)


WRITES: dict[str, Callable[[Any, list[models.PointStruct]], Any]] = {
    "upsert": lambda client, points: client.upsert("docs", points),
    "batch": lambda client, points: client.upsert(
        "docs",
        models.Batch(
            ids=[point.id for point in points], vectors={"dense": [point.vector["dense"] for point in points]}
        ),
    ),
    "upload_points": lambda client, points: client.upload_points("docs", iter(points), parallel=2, batch_size=5),
    "upload_collection": lambda client, points: client.upload_collection(
        "docs", (point.vector for point in points), ids=[point.id for point in points]
    ),
    "update_vectors": lambda client, points: client.update_vectors(
        "docs", [models.PointVectors(id=point.id, vector=point.vector) for point in points]
    ),
    "batch_update_points": lambda client, points: client.batch_update_points(
        "docs", [models.UpsertOperation(upsert=models.PointsList(points=points))]
    ),
}


@pytest.mark.parametrize("write", WRITES)
def test_every_way_of_writing(client: MillpondQdrantClient, minilm: str, write: str) -> None:
    create(client, minilm)
    if write == "update_vectors":
        client.upsert("docs", [models.PointStruct(id=name, vector={"dense": [1.0] * 384}) for name in NAMES])
    WRITES[write](client, points(minilm))
    assert np.abs(np.array(stored(client)) - embedded(minilm, TEXTS, "document")).max() < 1e-5


def queries(ask: Callable[[str], Any]) -> dict[str, dict[str, Any]]:
    """Arguments of a query, with ``ask`` of a text where a vector or a document may stand."""
    nearest = models.NearestQuery(nearest=ask(QUESTION))
    pair = models.ContextPair(positive=ask("yeast"), negative=ask("moon"))
    inner = models.Prefetch(query=ask("a search"), using="dense", limit=9)
    outer = models.Prefetch(query=nearest, using="dense", limit=6, prefetch=[inner])
    examples = models.RecommendInput(
        positive=[ask("yeast"), NAMES[5], ask("bread")],
        negative=[ask("metal")],
        strategy=models.RecommendStrategy.BEST_SCORE,
    )
    target = models.DiscoverInput(target=ask(QUESTION), context=[pair, pair])  # one object in two places
    by_vector: dict[str, dict[str, Any]] = {
        "document": {"query": ask(QUESTION)},
        "nearest": {"query": nearest},
        "prefetch": {"query": ask(QUESTION), "prefetch": outer},
        "recommend": {"query": models.RecommendQuery(recommend=examples)},
        "discover": {"query": models.DiscoverQuery(discover=target)},
        "context": {"query": models.ContextQuery(context=[pair])},
    }
    parts = [models.Prefetch(query=ask(text), using="dense", limit=5) for text in (QUESTION, "the moon")]
    fused = {"query": models.FusionQuery(fusion=models.Fusion.RRF), "prefetch": parts}
    return {kind: {**asked, "using": "dense"} for kind, asked in by_vector.items()} | {"fused": fused}


@pytest.mark.parametrize("kind", queries(lambda text: [1.0]))
def test_every_way_of_asking(client: MillpondQdrantClient, prompted: str, kind: str) -> None:
    create(client, prompted)
    client.upsert("docs", points(prompted))
    asked = queries(lambda text: document(text, prompted))[kind]
    plain = queries(lambda text: embedded(prompted, [text], "query")[0].tolist())[kind]

    def answers(of: Any, arguments: dict[str, Any]) -> list[Any]:
        request = models.QueryRequest(**arguments, limit=5)
        groups = of.query_points_groups("docs", **arguments, limit=5, group_by="text").groups
        return [
            of.query_points("docs", **arguments, limit=5).points,
            of.query_batch_points("docs", [request])[0].points,
            [hit for group in groups for hit in group.hits],
        ]

    before = models.QueryRequest(**asked).model_dump_json()
    found, expected = answers(client, asked), answers(_plain(client), plain)
    for hits, wanted in zip(found, expected, strict=True):
        assert [hit.id for hit in hits] == [hit.id for hit in wanted] and len(wanted) == 5
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in wanted], abs=1e-5)
    assert models.QueryRequest(**asked).model_dump_json() == before  # the caller's own is not changed


def _plain(client: QdrantClient) -> QdrantClient:
    """qdrant-client itself over the points of another client."""
    plain = QdrantClient(":memory:")
    plain._client = client._client
    return plain


def test_a_model_of_each_kind_in_one_point(
    client: MillpondQdrantClient, checkpoint_of: Checkpoints, prompted_splade: str, minilm: str
) -> None:
    colbert, m3 = str(checkpoint_of(write_stanford)), str(checkpoint_of(write_m3))
    m3_rows = MillpondQdrantClient(":memory:", engines={m3: {"task": "token_embed"}}).get_embedding_size(m3)
    multi = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
    rows = {"colbert": document("", colbert), "m3-rows": document("", m3, task="token_embed")}
    client.create_collection(
        "docs",
        {
            name: models.VectorParams(size=size, distance=models.Distance.DOT, multivector_config=multi)
            for name, size in (("colbert", client.get_embedding_size(colbert)), ("m3-rows", m3_rows))
        }
        | {"m3": models.VectorParams(size=client.get_embedding_size(m3), distance=models.Distance.DOT)},
        sparse_vectors_config={"splade": models.SparseVectorParams(), "m3-words": models.SparseVectorParams()},
    )
    asked = {
        **rows,
        "m3": document("", m3),
        "splade": document("", prompted_splade),
        "m3-words": document("", m3, task="sparse_embed"),
    }

    def of(text: str) -> dict[str, models.Document]:
        return {name: each.model_copy(update={"text": text}) for name, each in asked.items()}

    client.upsert("docs", [models.PointStruct(id=NAMES[n], vector=of(text)) for n, text in enumerate(TEXTS)])
    for name, each in asked.items():
        engine = get_engine(each.model, **OPTIONS)
        found = client.query_points("docs", of(QUESTION)[name], using=name, limit=12).points
        scores = {point.id: point.score for point in found}
        if name in rows:
            wanted = engine.token_embed(TEXTS, role="document", normalize=True).embeddings
            question = engine.token_embed([QUESTION], role="query", normalize=True).embeddings
            assert all(np.abs(np.array(a) - b).max() < 1e-5 for a, b in zip(stored(client, name), wanted, strict=True))
            expected = maxsim(question, wanted)[0]
        elif name == "m3":
            vectors = embedded(each.model, TEXTS, "document")
            assert np.abs(np.array(stored(client, name)) - vectors).max() < 1e-5
            expected = vectors @ embedded(each.model, [QUESTION], "query")[0]
        else:
            weights = engine.sparse_embed(TEXTS, role="document")
            (words,) = engine.sparse_embed([QUESTION], role="query")
            for vector, row in zip(stored(client, name), weights, strict=True):
                assert dict(zip(vector.indices, vector.values, strict=True)) == pytest.approx(row, abs=1e-5)
            expected = np.array([sum(row.get(token, 0.0) * words[token] for token in words) for row in weights])
        for n, point in enumerate(NAMES):
            assert scores.get(point, 0.0) == pytest.approx(expected[n], rel=1e-6, abs=1e-5)


def test_the_options_of_a_document(client: MillpondQdrantClient, minilm: str, engine: Engine) -> None:
    cut = {"hf_overrides": {"is_matryoshka": True}, "dimensions": 64, "normalize": True}
    client.create_collection("docs", {"dense": models.VectorParams(size=64, distance=models.Distance.DOT)})
    client.upsert("docs", points(minilm, prompt="passage: ", **cut))
    expected = engine.embed(TEXTS, prompt="passage: ", dimensions=64, normalize=True).embeddings
    assert np.abs(np.array(stored(client)) - expected).max() < 1e-5
    found = client.query_points(
        "docs", document(QUESTION, minilm, prompt="ask: ", **cut), using="dense", limit=12
    ).points
    question = engine.embed([QUESTION], prompt="ask: ", dimensions=64, normalize=True).embeddings[0]
    assert [point.score for point in found] == pytest.approx(np.sort(expected @ question)[::-1], abs=1e-5)
    both = [document(QUESTION, minilm), document(QUESTION, minilm, prompt="ask: ")]  # groups of one model, by options
    first, second = client._local_models, client._resolved([*both, both[0]], True)
    assert np.abs(np.array(second[0]) - second[2]).max() == 0 and np.abs(np.array(second[0]) - second[1]).max() > 1e-3
    assert first is client._local_models


def test_mistakes_are_told(client: MillpondQdrantClient, minilm: str, checkpoint_of: Checkpoints) -> None:
    create(client, minilm)
    classifier = str(checkpoint_of(write_cross_encoder))
    wrong: list[tuple[Any, type[Exception], str]] = [
        (document(QUESTION, "./no-such-folder"), ModelLoadError, "no-such-folder"),
        (
            document(QUESTION, classifier),
            UnsupportedTaskError,
            r"makes no vectors \(it serves .*score.*name an embedder",
        ),
        (document(QUESTION, minilm, task="score"), InvalidRequestError, "task='score' of model=.*choose embed, sparse"),
        (document(QUESTION, minilm, task="sparse_embed"), UnsupportedTaskError, "sparse_embed"),
        (document(QUESTION, minilm, whatever=1), ValueError, "whatever"),
        (document(QUESTION, minilm, dimensions=64), InvalidRequestError, "64"),
        (document(QUESTION, "Qdrant/bm25"), InvalidRequestError, "counts words, which a server of Qdrant does"),
        (models.Image(image="a.png", model=minilm), InvalidRequestError, "asked for an image"),
    ]
    for query, kind, message in wrong:
        with pytest.raises(kind, match=message):
            client.query_points("docs", query, using="dense")
    assert client.query_points("docs", document(QUESTION, minilm), using="dense").points == []  # nothing is left over
    for model, message in ((classifier, "makes no vectors"), ("./no-such-folder", "no-such-folder")):
        with pytest.raises(Exception, match=message):
            client.get_embedding_size(model)
    with pytest.raises(InvalidRequestError, match="use QdrantClient"):
        MillpondQdrantClient("http://127.0.0.1:9", cloud_inference=True, check_compatibility=False)


def test_engines_by_name(minilm: str, engine: Engine) -> None:
    engines = {
        "narrow": {"model": minilm, **OPTIONS, "hf_overrides": {"is_matryoshka": True}, "dimensions": 64},
        "own": engine,
    }
    client = MillpondQdrantClient(":memory:", engines=engines)
    assert [client.get_embedding_size(name) for name in ("narrow", "own", minilm)] == [64, 384, 384]
    vectors = client._resolved([models.Document(text=QUESTION, model=name) for name in engines], True)
    for vector, width in zip(vectors, (64, None), strict=True):
        expected = engine.embed([QUESTION], role="query", dimensions=width).embeddings[0]
        assert np.abs(np.array(vector) - expected).max() < 1e-5
    _, source = client._local_models._source(minilm, OPTIONS)
    assert source.load() is get_engine(minilm, **OPTIONS)  # that of the process
    thing = models.InferenceObject(object=QUESTION, model="own")
    assert np.abs(np.array(client._resolved(thing, True)) - np.array(vectors[1])).max() == 0
    client.close()


def test_a_server_is_sent_vectors(server: FakeQdrant, minilm: str) -> None:
    client = MillpondQdrantClient(server.url, check_compatibility=False)
    create(client, minilm, sparse_vectors_config={"words": models.SparseVectorParams()})
    client.upsert("docs", points(minilm))
    found = client.query_points("docs", document(QUESTION, minilm), using="dense", limit=1).points
    assert found[0].id == NAMES[2]
    (sent,) = server.bodies("PUT", "/points")
    rows = np.array([point["vector"]["dense"] for point in sent["points"]])
    assert np.abs(rows - embedded(minilm, TEXTS, "document")).max() < 1e-5
    words = client._resolved(models.Document(text=QUESTION, model="Qdrant/bm25", options={"k": 1.2}), True)
    assert words == models.Document(text=QUESTION, model="Qdrant/bm25", options={"k": 1.2})  # which it embeds itself
    client.close()


def test_threads_share_a_client(server: FakeQdrant, prompted: str) -> None:
    client = MillpondQdrantClient(server.url, check_compatibility=False)
    create(client, prompted)
    client.upsert("docs", points(prompted))
    vectors = embedded(prompted, TEXTS, "query") @ embedded(prompted, TEXTS, "document").T
    together = threading.Barrier(4)

    def ask(n: int) -> None:
        together.wait(60)
        for row in range(n, 48, 4):
            text = TEXTS[row % 12]
            found = client.query_points("docs", document(text, prompted), using="dense", limit=1).points
            assert found[0].score == pytest.approx(vectors[row % 12].max(), abs=1e-5)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
    client.close()


def test_a_call_in_the_middle_of_another_disturbs_nothing(client: MillpondQdrantClient, minilm: str) -> None:
    """As in threads, of which none waits here for the other at the wrong moment by chance alone."""
    create(client, minilm)
    rest = iter(client._embed_models(points(minilm)))
    first = next(rest)
    client.query_points("docs", document("something else", minilm), using="dense", limit=1)
    client.upsert("docs", [first, *rest])
    assert np.abs(np.array(stored(client)) - embedded(minilm, TEXTS, "document")).max() < 1e-5

    def more() -> Iterator[models.PointStruct]:
        for point in points(minilm):
            client.query_points("docs", document("something else", minilm), using="dense", limit=1)
            yield point

    client.local_inference_batch_size = 1
    client.upload_points("docs", more())
    assert np.abs(np.array(stored(client)) - embedded(minilm, TEXTS, "document")).max() < 1e-5


def test_the_real_engine_takes_the_vectors(client: MillpondQdrantClient, prompted: str, tmp_path: Path) -> None:
    from integrations.qdrant.tests.real_engine import RealEngine

    real = RealEngine(tmp_path / "shard")
    client._client = real
    client.create_collection(
        "docs", vectors_config={"dense": models.VectorParams(size=384, distance=models.Distance.DOT)}
    )
    client.upsert("docs", points(prompted))
    found = client.query_points("docs", document(QUESTION, prompted), using="dense", limit=12).points
    scores = embedded(prompted, TEXTS, "document") @ embedded(prompted, [QUESTION], "query")[0]
    assert [point.id for point in found] == [NAMES[n] for n in np.argsort(-scores)]
    assert [point.score for point in found] == pytest.approx(np.sort(scores)[::-1], abs=1e-5)
    real.shard.close()
    real.close()


WITHOUT_FASTEMBED = """
import sys
sys.modules["fastembed"] = None
from qdrant_client import models
from millpond_qdrant import MillpondQdrantClient
client = MillpondQdrantClient(":memory:")
client.create_collection("docs", models.VectorParams(size=client.get_embedding_size(sys.argv[1]), distance="Cosine"))
document = models.Document(text="Bread rises.", model=sys.argv[1])
client.upsert("docs", [models.PointStruct(id=1, vector=document)])
print(round(client.query_points("docs", document).points[0].score, 3))
"""


def test_fastembed_is_not_needed(minilm: str) -> None:
    command = [sys.executable, "-c", WITHOUT_FASTEMBED, minilm]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout.strip()) == (0, "1.0"), run.stderr


def test_another_version_of_the_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "millpond_qdrant.client", raising=False)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.21.0")
    with pytest.raises(
        ImportError, match=r"qdrant-client 1\.21\.0 is installed.*pip install 'qdrant-client==1\.20\.\*'"
    ):
        _ = millpond_qdrant.MillpondQdrantClient
    assert millpond_qdrant.QdrantSink is not None
