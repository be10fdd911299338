"""The contract of every adapter, and LangChain's own way of writing one."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from langchain_core.documents import Document
from langchain_core.load import dumps, loads
from pydantic import ValidationError

from langchain_millpond import MillpondCrossEncoder, MillpondEmbeddings, MillpondReranker, MillpondSparseEmbeddings
from millpond import Engine, PoolingParams
from millpond.testing import AdapterContract

QUESTION = "What makes dough rise?"
TEXTS = ["Tides follow the moon.", "Bread rises because of yeast.", "The heart pumps blood."]


class LangChainContract(AdapterContract):
    """What LangChain adds: fields that cannot be changed, hashes, ``dumps`` and ``loads``."""

    def test_fields_are_fixed_and_equal_adapters_are_one_key(self) -> None:
        one, same = (self.build(model="m", hf_overrides={"is_matryoshka": True}) for _ in range(2))
        other = self.build(model="m", hf_overrides={"is_matryoshka": False})
        assert one == same != other and {one: 1, other: 2}[same] == 1
        with pytest.raises(ValidationError, match="frozen"):
            one.model = "b"

    @pytest.mark.filterwarnings("ignore:The function `loads?` is in beta")
    def test_dumps_and_loads_give_an_equal_adapter_without_its_engine(self, engine: Engine) -> None:
        written = {
            "revision": "v1", "device": ["cuda:0", "cuda:1"], "dtype": "float32", "max_length": 64,
            "hf_overrides": {"is_matryoshka": True, "lc": 1}, "quantization": "int8", "max_batch_tokens": 4096,
            "compile": True, "truncate": "error",
        }  # fmt: skip
        built = self.build(model_name="owner/name", **written)
        allowed: Any = {"allowed_objects": [self.adapter], "valid_namespaces": ["langchain_millpond"]}
        again = loads(dumps(built), **allowed)
        assert type(again) is self.adapter and again == built and again.model_dump() == built.model_dump()
        with pytest.raises(NotImplementedError, match="doesn't implement serialization"):
            loads(dumps(self.build(engine=engine)), **allowed)


class TestEmbeddings(LangChainContract):
    adapter = MillpondEmbeddings

    @pytest.fixture
    def model(self, prompted: str) -> str:
        return prompted

    @pytest.fixture
    def engine(self, prompted_engine: Engine) -> Engine:
        return prompted_engine

    def ask(self, adapter: Any) -> Any:
        return [adapter.embed_query(TEXTS[0]), *adapter.embed_documents(TEXTS)]

    async def aask(self, adapter: Any) -> Any:
        return [await adapter.aembed_query(TEXTS[0]), *await adapter.aembed_documents(TEXTS)]

    def expected(self, engine: Engine) -> Any:
        documents = engine.embed(TEXTS, role="document").embeddings
        return [engine.embed(TEXTS[:1], role="query").embeddings[0], *documents]


class TestSparseEmbeddings(LangChainContract):
    """For Milvus, whose vectors are dicts; the vectors for Qdrant: test_sparse.py."""

    adapter = MillpondSparseEmbeddings
    options: ClassVar = {"store": "milvus"}

    @pytest.fixture
    def model(self, prompted_splade: str) -> str:
        return prompted_splade

    @pytest.fixture
    def engine(self, splade_engine: Engine) -> Engine:
        return splade_engine

    def ask(self, adapter: Any) -> Any:
        return dense([adapter.embed_query(TEXTS[0]), *adapter.embed_documents(TEXTS)])

    async def aask(self, adapter: Any) -> Any:
        return dense([await adapter.aembed_query(TEXTS[0]), *await adapter.aembed_documents(TEXTS)])

    def expected(self, engine: Engine) -> Any:
        def rows(texts: list[str], role: Any) -> Any:
            return engine.encode(texts, task="sparse_embed", params=PoolingParams(role=role))

        return dense([*rows(TEXTS[:1], "query"), *rows(TEXTS, "document")])


def dense(vectors: list[dict[int, float]]) -> list[list[float]]:
    return [[vector.get(token, 0.0) for token in range(512)] for vector in vectors]


class _ScorerContract(LangChainContract):
    @pytest.fixture
    def model(self, cross_encoder: str) -> str:
        return cross_encoder

    @pytest.fixture
    def engine(self, cross_encoder_engine: Engine) -> Engine:
        return cross_encoder_engine

    def expected(self, engine: Engine) -> Any:
        return [[score] for score in engine.score(QUESTION, TEXTS).scores]


class TestCrossEncoder(_ScorerContract):
    adapter = MillpondCrossEncoder

    def ask(self, adapter: Any) -> Any:
        return [[score] for score in adapter.score([(QUESTION, text) for text in TEXTS])]

    async def aask(self, adapter: Any) -> Any:
        return self.ask(adapter)  # LangChain's base class has no asynchronous method


class TestReranker(_ScorerContract):
    adapter = MillpondReranker
    options: ClassVar = {"top_n": None}

    def ask(self, adapter: Any) -> Any:
        return by_text(adapter.compress_documents([Document(page_content=text) for text in TEXTS], QUESTION))

    async def aask(self, adapter: Any) -> Any:
        return by_text(await adapter.acompress_documents([Document(page_content=text) for text in TEXTS], QUESTION))


def by_text(found: list[Document]) -> list[list[float]]:
    """Their scores in the order of the texts."""
    scores = [document.metadata["relevance_score"] for document in found]
    assert scores == sorted(scores, reverse=True)
    found = sorted(found, key=lambda document: TEXTS.index(document.page_content))
    return [[document.metadata["relevance_score"]] for document in found]
