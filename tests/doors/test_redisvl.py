"""redisvl as installed: the vectorizer and the reranker in its own classes, over a Redis server with search."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redisvl.extensions.cache.embeddings import EmbeddingsCache
from redisvl.extensions.cache.llm import SemanticCache
from redisvl.extensions.message_history import SemanticMessageHistory
from redisvl.extensions.router import Route, SemanticRouter
from redisvl.index import AsyncSearchIndex, SearchIndex
from redisvl.query import VectorQuery
from redisvl.redis.utils import buffer_to_array
from redisvl.utils.rerank import HFCrossEncoderReranker
from redisvl.utils.rerank.base import BaseReranker
from redisvl.utils.vectorize import CustomVectorizer
from redisvl.utils.vectorize.base import BaseVectorizer
from tests.adapters import write_prompted
from tests.gates import LoopGate, batches_through
from tests.tiny.heads import write_cross_encoder

from millpond import Engine
from millpond.compat.redisvl import MillpondReranker, MillpondVectorizer
from millpond.errors import InvalidRequestError

pytestmark = pytest.mark.door

TEXTS = ["Tides follow the moon.", "Bread rises because of yeast.", "The heart pumps blood.", "Glaciers carve valleys."]
QUESTION = "What makes dough rise?"


@pytest.fixture(scope="module")
def engine(minilm: str) -> Iterator[Engine]:
    with Engine(minilm, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "cross"
    write_cross_encoder(folder)
    return str(folder)


@pytest.fixture(scope="module")
def vectorizer(engine: Engine) -> MillpondVectorizer:
    return MillpondVectorizer(engine=engine)


def same(rows: Any, expected: Any, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.array(rows, dtype=np.float64), expected, atol=atol)


async def test_the_vectors_are_the_engines(vectorizer: MillpondVectorizer, engine: Engine) -> None:
    assert isinstance(vectorizer, BaseVectorizer)
    assert (vectorizer.dims, vectorizer.dtype, vectorizer.type) == (384, "float32", "millpond")
    expected = engine.embed(TEXTS, role="document").embeddings
    same(vectorizer.embed(TEXTS[0]), expected[0])
    same(vectorizer.embed_many(TEXTS, batch_size=3), expected)
    same(await vectorizer.aembed(TEXTS[0]), expected[0])
    same(await vectorizer.aembed_many(TEXTS), expected)
    same(vectorizer.embed("TIDES FOLLOW THE MOON.", preprocess=str.capitalize), expected[0], 1e-2)
    assert vectorizer.embed_many([]) == []


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-6), ("float16", 1e-3), ("float64", 1e-6)])
def test_buffers_hold_the_vectors(minilm: str, engine: Engine, dtype: str, atol: float) -> None:
    vectorizer = MillpondVectorizer(minilm, dtype=dtype, engine_dtype="float32")
    buffers = vectorizer.embed_many(TEXTS, as_buffer=True)
    assert len(buffers[0]) == 384 * np.dtype(dtype).itemsize
    same([buffer_to_array(buffer, dtype) for buffer in buffers], engine.embed(TEXTS).embeddings, atol)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_whole_numbers_are_refused_for_they_would_be_zeros(minilm: str, engine: Engine, dtype: str) -> None:
    plain = CustomVectorizer(lambda text: engine.embed([text]).tolist()[0], dtype="int8")
    assert set(plain.embed(TEXTS[0], as_buffer=True)) == {0}
    with pytest.raises(ValueError, match="nearly all of them 0"):
        MillpondVectorizer(minilm, dtype=dtype)


def test_options_and_roles_change_the_vectors_and_the_name(minilm: str, tmp_path: Path) -> None:
    prompted = str(write_prompted(tmp_path / "prompted", minilm))
    documents, queries = (
        MillpondVectorizer(prompted, role=role, engine_dtype="float32") for role in ("document", "query")
    )
    with Engine(prompted, dtype="float32") as engine:
        same(documents.embed(QUESTION), engine.embed([QUESTION], role="document").embeddings[0])
        same(queries.embed(QUESTION), engine.embed([QUESTION], role="query").embeddings[0])
    assert documents._source.load() is queries._source.load()
    cut = MillpondVectorizer(minilm, dimensions=128, hf_overrides={"is_matryoshka": True})
    assert cut.dims == len(cut.embed(QUESTION)) == 128
    names = {each.model for each in (documents, queries, cut, MillpondVectorizer(minilm, engine_dtype="float32"))}
    assert len(names) == 4
    with pytest.raises(ValueError, match="dimension"):
        MillpondVectorizer(minilm, dimension=128)


async def test_the_event_loop_goes_on(vectorizer: MillpondVectorizer, engine: Engine) -> None:
    gate, reranker = LoopGate(), MillpondReranker(engine=engine)
    with batches_through(gate, engine):
        await gate.run(vectorizer.aembed_many(TEXTS))
        await gate.run(reranker.arank(QUESTION, TEXTS))
    assert gate.calls and not gate.blocked


async def test_a_cross_encoder_ranks_as_redisvls_own_reranker(cross_encoder: str) -> None:
    theirs = HFCrossEncoderReranker(model=cross_encoder, limit=3, device="cpu")
    ours = MillpondReranker(cross_encoder, limit=3, dtype="float32")
    assert isinstance(ours, BaseReranker)
    dicts = [{"content": text, "number": number} for number, text in enumerate(TEXTS)]
    for docs in (TEXTS, dicts):
        (expected, scores), (found, own) = theirs.rank(QUESTION, docs), ours.rank(QUESTION, docs)
        assert found == expected
        same(own, scores)
        assert await ours.arank(QUESTION, docs) == (found, own)
        assert ours.rank(QUESTION, docs, return_score=False, limit=1) == found[:1]


def test_fields_of_documents(engine: Engine) -> None:
    docs = [
        {"title": "Tides", "body": TEXTS[0]},
        {"title": "Bread", "body": TEXTS[1]},
        {"title": "Yeast", "body": None},
    ]
    reranker = MillpondReranker(engine=engine, rank_by=["title", "body"], limit=2, method="cosine")
    found, scores = reranker.rank(QUESTION, docs)
    assert found[0] is docs[1]
    read = ["Tides Tides follow the moon.", "Bread Bread rises because of yeast.", "Yeast"]
    expected = engine.rerank(QUESTION, read, method="cosine", top_n=2)
    same(scores, [each.relevance_score for each in expected])
    assert reranker.rank(QUESTION, docs[:2], rank_by=["body"])[1] != scores
    assert reranker.rank(QUESTION, []) == ([], [])
    assert reranker.rank(QUESTION, [], return_score=False) == []


def test_nonsense_is_refused(engine: Engine) -> None:
    reranker = MillpondReranker(engine=engine)
    with pytest.raises(ValueError, match=r"docs\[1\] has the fields \['text'\] and none of \['content'\]"):
        reranker.rank(QUESTION, [{"content": "a"}, {"text": "b"}])
    for docs in ("a text", {"content": "a"}, [1]):
        with pytest.raises(TypeError, match="docs"):
            reranker.rank(QUESTION, docs)
    with pytest.raises(ValueError, match="query is blank"):
        reranker.rank("", TEXTS)
    with pytest.raises(InvalidRequestError, match="top_n=0"):
        reranker.rank(QUESTION, TEXTS, limit=0)
    with pytest.raises(TypeError, match="top_n"):
        reranker.rank(QUESTION, TEXTS, top_n=1)
    with pytest.raises(ValueError, match="positive"):
        MillpondReranker(engine=engine, limit=0)
    with pytest.raises(ValueError, match="either model= .* or engine="):
        MillpondVectorizer()


def schema(vectorizer: MillpondVectorizer, name: str) -> dict[str, Any]:
    vector = {"dims": vectorizer.dims, "distance_metric": "cosine", "algorithm": "hnsw", "datatype": vectorizer.dtype}
    fields = [{"name": "content", "type": "text"}, {"name": "vector", "type": "vector", "attrs": vector}]
    return {"index": {"name": name, "prefix": name}, "fields": fields}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_index_in_redis_finds_what_the_engine_finds(redis_url: str, minilm: str, engine: Engine, dtype: str) -> None:
    vectorizer = MillpondVectorizer(minilm, dtype=dtype, engine_dtype="float32")
    index = SearchIndex.from_dict(schema(vectorizer, dtype), redis_url=redis_url)
    index.create()
    buffers = vectorizer.embed_many(TEXTS, as_buffer=True)
    index.load([{"content": text, "vector": buffer} for text, buffer in zip(TEXTS, buffers, strict=True)])
    query = VectorQuery(
        vectorizer.embed(QUESTION), "vector", return_fields=["content"], num_results=4, dtype=vectorizer.dtype
    )
    hits = index.query(query)
    scores = engine.embed(TEXTS).embeddings @ engine.embed([QUESTION]).embeddings[0]
    order = np.argsort(-scores)
    assert [hit["content"] for hit in hits] == [TEXTS[number] for number in order]
    same([float(hit["vector_distance"]) for hit in hits], 1 - scores[order], 1e-5 if dtype == "float32" else 2e-3)
    (best,), (score,) = MillpondReranker(engine=engine, limit=1).rank(QUESTION, hits)
    assert best["content"] == TEXTS[1]
    assert score == pytest.approx(engine.rerank(QUESTION, [TEXTS[1]])[0].relevance_score, abs=1e-4)


async def test_an_asynchronous_index(redis_url: str, vectorizer: MillpondVectorizer) -> None:
    async with AsyncSearchIndex.from_dict(schema(vectorizer, "async"), redis_url=redis_url) as index:
        await index.create()
        buffers = await vectorizer.aembed_many(TEXTS, as_buffer=True)
        await index.load([{"content": text, "vector": buffer} for text, buffer in zip(TEXTS, buffers, strict=True)])
        query = VectorQuery(await vectorizer.aembed(QUESTION), "vector", return_fields=["content"], num_results=1)
        assert [hit["content"] for hit in await index.query(query)] == [TEXTS[1]]


def test_redisvls_cache_of_embeddings_tells_models_apart(redis_url: str, minilm: str, engine: Engine) -> None:
    cache = EmbeddingsCache("millpond", redis_url=redis_url)
    before = engine.stats().texts_done
    one = MillpondVectorizer(engine=engine, cache=cache)
    first = one.embed(TEXTS[0])
    same(one.embed(TEXTS[0]), first)
    same(MillpondVectorizer(engine=engine, cache=cache).embed_many(TEXTS[:1]), [first])
    assert engine.stats().texts_done == before + 1
    other = MillpondVectorizer(minilm, cache=cache, engine_dtype="float32", pooling="cls")
    assert np.abs(np.array(other.embed(TEXTS[0])) - first).max() > 1e-2

    # All custom vectorizers have one name: the second is given the vector of the first.
    def custom(loaded: Engine) -> CustomVectorizer:
        return CustomVectorizer(lambda text: loaded.embed([text]).tolist()[0], cache=cache)

    same(custom(engine).embed(TEXTS[0]), custom(other._source.load()).embed(TEXTS[0]))


async def test_the_semantic_cache_the_router_and_the_history(redis_url: str, vectorizer: MillpondVectorizer) -> None:
    cache = SemanticCache("replies", vectorizer=vectorizer, redis_url=redis_url, distance_threshold=0.3)
    cache.store(QUESTION, "yeast")
    assert [hit["response"] for hit in cache.check("Why does dough rise?")] == ["yeast"]
    assert [hit["response"] for hit in await cache.acheck("Why does dough rise?")] == ["yeast"]
    assert cache.check("When is high tide?") == []
    await cache.adisconnect()
    routes = [
        Route(name="baking", references=["How long does dough rise?", "Which flour?"], distance_threshold=0.7),
        Route(name="sea", references=["When is high tide?", "How salty is the sea?"], distance_threshold=0.7),
    ]
    router = SemanticRouter("router", routes, vectorizer=vectorizer, redis_url=redis_url)
    assert router("What makes a dough rise?").name == "baking"
    history = SemanticMessageHistory("history", vectorizer=vectorizer, redis_url=redis_url, distance_threshold=0.4)
    history.store("When is high tide?", "At noon.")
    history.store("Which flour is it?", "Rye.")
    assert [each["content"] for each in history.get_relevant("When is high tide today?")] == ["When is high tide?"]
    with pytest.raises(ValueError, match="millpond"):  # redisvl makes only vectorizers of its own from a dict
        SemanticRouter.from_dict(router.to_dict(), redis_url=redis_url)
    again = SemanticRouter("router", routes, vectorizer=vectorizer, redis_url=redis_url, overwrite=True)
    assert again("What makes a dough rise?").name == "baking"
