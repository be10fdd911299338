"""The contract of every adapter, LangChain's own way of writing one, and LangChain's unit suite."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.load import dumps, loads
from langchain_core.runnables import RunnableLambda
from langchain_tests.unit_tests import EmbeddingsUnitTests
from pydantic import ValidationError
from tests.adapters import QUESTION, CallContract, dense

from langchain_millpond import (
    MillpondColBERTRetriever,
    MillpondCrossEncoder,
    MillpondEmbeddings,
    MillpondReranker,
    MillpondSparseEmbeddings,
)
from millpond import Engine, PoolingParams
from millpond.late_interaction import MemoryIndex
from millpond.testing import AdapterContract

TEXTS = ["Tides follow the moon.", "Bread rises because of yeast.", "The heart pumps blood."]
BETA = pytest.mark.filterwarnings("ignore:The function `loads?` is in beta")


def revive(text: str) -> Any:
    classes: Any = [MillpondEmbeddings, MillpondReranker, MillpondCrossEncoder, MillpondSparseEmbeddings]
    return loads(text, allowed_objects=classes, valid_namespaces=["langchain_millpond"])


class LangChainContract(AdapterContract):
    """What LangChain adds: fields that cannot be changed, hashes, ``dumps`` and ``loads``."""

    def test_fields_are_fixed_and_equal_adapters_are_one_key(self) -> None:
        one, same = (self.build(model="m", hf_overrides={"is_matryoshka": True}) for _ in range(2))
        other = self.build(model="m", hf_overrides={"is_matryoshka": False})
        assert one == same != other and {one: 1, other: 2}[same] == 1
        with pytest.raises(ValidationError, match="frozen"):
            one.model = "b"

    @BETA
    def test_dumps_and_loads_give_an_equal_adapter_without_its_engine(self, engine: Engine) -> None:
        written = {
            "revision": "v1", "device": ["cuda:0", "cuda:1"], "dtype": "float32", "max_length": 64,
            "hf_overrides": {"is_matryoshka": True, "lc": 1}, "quantization": "int8", "max_batch_tokens": 4096,
            "compile": True, "truncate": "error",
        }  # fmt: skip
        built = self.build(model_name="owner/name", **written)
        again = revive(dumps(built))
        assert type(again) is self.adapter and again == built and again.model_dump() == built.model_dump()
        with pytest.raises(NotImplementedError, match="doesn't implement serialization"):
            revive(dumps(self.build(engine=engine)))
        changed = json.loads(dumps(built))
        changed["kwargs"]["dimension"] = 8
        with pytest.raises(ValueError, match="dimension=8 is not available"):
            revive(json.dumps(changed))


class TestEmbeddings(LangChainContract, CallContract):
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

    def call(self, adapter: Any, texts: Any) -> Any:
        return adapter.embed_documents(texts)

    async def acall(self, adapter: Any, texts: Any) -> Any:
        return await adapter.aembed_documents(texts)


class TestSparseEmbeddings(LangChainContract, CallContract):
    """For Milvus, whose vectors are dicts; the vectors for Qdrant: test_vectors.py."""

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

    def call(self, adapter: Any, texts: Any) -> Any:
        return adapter.embed_documents(texts)

    async def acall(self, adapter: Any, texts: Any) -> Any:
        return await adapter.aembed_documents(texts)

    plain = staticmethod(dense)


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


def documents(texts: Any) -> Any:
    return texts if isinstance(texts, str) else [Document.model_construct(page_content=text) for text in texts]


class TestReranker(_ScorerContract, CallContract):
    adapter = MillpondReranker
    options: ClassVar = {"top_n": None}

    def ask(self, adapter: Any) -> Any:
        return by_text(self.call(adapter, TEXTS))

    async def aask(self, adapter: Any) -> Any:
        return by_text(await self.acall(adapter, TEXTS))

    def call(self, adapter: Any, texts: Any) -> Any:
        return adapter.compress_documents(documents(texts), QUESTION)

    async def acall(self, adapter: Any, texts: Any) -> Any:
        return await adapter.acompress_documents(documents(texts), QUESTION)

    def plain(self, results: Any) -> Any:
        return [document.metadata["relevance_score"] for document in results]


def by_text(found: list[Document]) -> list[list[float]]:
    """Their scores in the order of the texts."""
    scores = [document.metadata["relevance_score"] for document in found]
    assert scores == sorted(scores, reverse=True)
    found = sorted(found, key=lambda document: TEXTS.index(document.page_content))
    return [[document.metadata["relevance_score"]] for document in found]


class TestLangChainsSuite(EmbeddingsUnitTests):
    """Built from a name; nothing is loaded."""

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return MillpondEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": "sentence-transformers/all-MiniLM-L6-v2"}


@BETA
def test_a_line_of_the_replaced_class_survives() -> None:
    built = MillpondEmbeddings(model_name="owner/name", model_kwargs={"device": "cpu"}, query_instruction="ask: ")
    again = revive(dumps(built))
    assert again == built
    assert (again.device, again.query_prompt, again.document_prompt) == ("cpu", "ask: ", "")


@BETA
def test_a_retriever_holds_an_index_and_is_not_written_and_a_chain_with_a_reranker_is(engine: Engine) -> None:
    text = dumps(MillpondColBERTRetriever(index=MemoryIndex(engine)))
    assert json.loads(text)["type"] == "not_implemented"
    with pytest.raises(NotImplementedError, match="doesn't implement serialization"):
        revive(text)
    reranker = MillpondReranker(engine=engine)
    chain = RunnableLambda(lambda question: question) | RunnableLambda(reranker.compress_documents)
    assert dumps({"chain": chain, "reranker": reranker})
