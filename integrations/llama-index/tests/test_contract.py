"""The contract of every adapter, and LlamaIndex's positional arguments and its way of writing one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, ClassVar

import pytest
from llama_index.core.ingestion.pipeline import get_transformation_hash
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import ValidationError
from tests.adapters import QUESTION, CallContract, dense

from llama_index.embeddings.millpond import MillpondEmbedding
from llama_index.postprocessor.millpond_rerank import MillpondRerank
from llama_index.sparse_embeddings.millpond import MillpondSparseEmbedding
from millpond import Engine

TEXTS = ["Tides follow the moon.", "Bread rises because of yeast.", "The heart pumps blood."]


class LlamaIndexContract(CallContract):
    """What LlamaIndex adds."""

    def test_the_model_may_be_positional(self) -> None:
        assert self.adapter("a").model == self.adapter("a").model_name == "a"
        for options in ({"model": "b"}, {"model_name": "b"}):
            with pytest.raises(TypeError, match="twice: 'a' and model"):
                self.adapter("a", **options)
        with pytest.raises(TypeError, match="positional arguments"):
            self.adapter("a", 5, "b")

    def test_what_model_dump_writes_builds_an_equal_adapter(self) -> None:
        built = self.build(model="owner/name", dtype="float32", hf_overrides={"is_matryoshka": True}, truncate="error")
        again = self.adapter(**built.model_dump())
        assert again.model_dump() == built.model_dump()


class TestEmbedding(LlamaIndexContract):
    adapter = MillpondEmbedding
    named = "model_name"

    @pytest.fixture
    def model(self, prompted: str) -> str:
        return prompted

    @pytest.fixture
    def engine(self, prompted_engine: Engine) -> Engine:
        return prompted_engine

    def ask(self, adapter: Any) -> Any:
        texts = [adapter.get_text_embedding(text) for text in TEXTS]
        return [adapter.get_query_embedding(TEXTS[0]), *texts, *adapter.get_text_embedding_batch(TEXTS)]

    async def aask(self, adapter: Any) -> Any:
        texts = [await adapter.aget_text_embedding(text) for text in TEXTS]
        return [await adapter.aget_query_embedding(TEXTS[0]), *texts, *await adapter.aget_text_embedding_batch(TEXTS)]

    def expected(self, engine: Engine) -> Any:
        documents = engine.embed(TEXTS, role="document").embeddings
        return [engine.embed(TEXTS[:1], role="query").embeddings[0], *documents, *documents]

    def call(self, adapter: Any, texts: Any) -> Any:
        return adapter.get_text_embedding_batch(texts)

    async def acall(self, adapter: Any, texts: Any) -> Any:
        return await adapter.aget_text_embedding_batch(texts)


class TestSparseEmbedding(LlamaIndexContract):
    adapter = MillpondSparseEmbedding
    named = "model_name"

    @pytest.fixture
    def model(self, prompted_splade: str) -> str:
        return prompted_splade

    @pytest.fixture
    def engine(self, splade_engine: Engine) -> Engine:
        return splade_engine

    def ask(self, adapter: Any) -> Any:
        return dense([adapter.get_query_embedding(TEXTS[0]), *adapter.get_text_embedding_batch(TEXTS)])

    async def aask(self, adapter: Any) -> Any:
        documents = await adapter.aget_text_embedding_batch(TEXTS)
        return dense([await adapter.aget_query_embedding(TEXTS[0]), *documents])

    def expected(self, engine: Engine) -> Any:
        query, documents = engine.sparse_embed(TEXTS[:1], role="query"), engine.sparse_embed(TEXTS, role="document")
        return dense([*query.embeddings, *documents.embeddings])

    def call(self, adapter: Any, texts: Any) -> Any:
        return adapter.get_text_embedding_batch(texts)

    async def acall(self, adapter: Any, texts: Any) -> Any:
        return await adapter.aget_text_embedding_batch(texts)

    plain = staticmethod(dense)


class TestRerank(LlamaIndexContract):
    adapter = MillpondRerank
    options: ClassVar = {"top_n": None}

    @pytest.fixture
    def model(self, cross_encoder: str) -> str:
        return cross_encoder

    @pytest.fixture
    def engine(self, cross_encoder_engine: Engine) -> Engine:
        return cross_encoder_engine

    def ask(self, adapter: Any) -> Any:
        return by_text(self.call(adapter, TEXTS))

    async def aask(self, adapter: Any) -> Any:
        return by_text(await self.acall(adapter, TEXTS))

    def call(self, adapter: Any, texts: Any) -> Any:
        return adapter.postprocess_nodes(nodes(texts), query_str=QUESTION)

    async def acall(self, adapter: Any, texts: Any) -> Any:
        return await adapter.apostprocess_nodes(nodes(texts), query_str=QUESTION)

    def plain(self, results: Any) -> Any:
        return [hit.score for hit in results]

    def expected(self, engine: Engine) -> Any:
        return [[score] for score in engine.score(QUESTION, TEXTS).scores]


class Node(TextNode):
    """A node whose text may be none."""

    text: Any = ""

    def get_content(self, **_: Any) -> Any:
        return self.text


def nodes(texts: Any) -> Any:
    return texts if isinstance(texts, str) else [NodeWithScore(node=Node(text=text), score=0.5) for text in texts]


def by_text(found: list[NodeWithScore]) -> list[list[float]]:
    """Their scores in the order of the texts."""
    scores = {hit.node.get_content(): float(hit.score or 0) for hit in found}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    return [[scores[text]] for text in TEXTS]


@pytest.mark.contract
def test_the_import_costs_no_torch() -> None:
    program = (
        "import sys; from llama_index.embeddings.millpond import MillpondEmbedding as A; "
        "from llama_index.postprocessor.millpond_rerank import MillpondRerank as B; "
        "from llama_index.sparse_embeddings.millpond import MillpondSparseEmbedding as C; "
        "A('a'), B('a'), C('a'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


# One value for each option that changes vectors.
CHANGES = {
    "query_prompt": "ask: ",
    "document_prompt": "passage: ",
    "dimensions": 64,
    "normalize": False,
    "truncate": "start",
    "revision": "v1",
    "device": "cpu",
    "dtype": "float32",
    "max_length": 8,
    "pooling": "cls",
    "hf_overrides": {"is_matryoshka": True},
    "query_prompt_name": "query",
    "document_prompt_name": "query",
    "long_texts": "mean",
    "quantization": "int8",
    "compile": True,
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either model_name= .* or engine="),
        ({"model": "a", "model_name": "b"}, "model\n.*not permitted"),
        ({"model_name": "a", "dimension": 64}, "dimension=.* is not available here"),
        ({"model_name": "a", "dimensions": 0}, "greater than 0"),
        ({"model_name": "a", "embed_batch_size": 4096}, "2048"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MillpondEmbedding(**options)


def test_a_dict_without_its_engine_is_refused(engine: Engine, minilm: str) -> None:
    data = MillpondEmbedding(engine=engine, query_prompt="ask: ").to_dict()
    assert "engine" not in data
    with pytest.raises(ValidationError, match="pass that engine"):
        MillpondEmbedding.from_dict(data)
    assert MillpondEmbedding.from_dict(data, engine=engine).to_dict() == data
    with Engine(minilm, dtype="float32", max_length=8) as other, pytest.raises(ValidationError, match="another engine"):
        MillpondEmbedding.from_dict(data, engine=other)


@pytest.mark.parametrize("name", CHANGES)
def test_a_pipelines_cache_key_sees_every_option_that_changes_vectors(name: str) -> None:
    nodes = [TextNode(text="tides")]
    plain, changed = MillpondEmbedding(model_name="a"), MillpondEmbedding(model_name="a", **{name: CHANGES[name]})
    assert get_transformation_hash(nodes, plain) == get_transformation_hash(nodes, MillpondEmbedding(model_name="a"))
    assert get_transformation_hash(nodes, plain) != get_transformation_hash(nodes, changed)


def test_a_pipelines_cache_key_tells_engines_apart(engine: Engine, minilm: str) -> None:
    nodes = [TextNode(text="tides")]
    with Engine(minilm, dtype="float32", normalize=False) as raw, Engine(minilm, dtype="float32") as same:
        keys = [get_transformation_hash(nodes, MillpondEmbedding(engine=one)) for one in (engine, same, raw)]
    assert keys[0] == keys[1] != keys[2]
