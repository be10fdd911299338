"""The contract of every adapter, and LlamaIndex's positional arguments and its way of writing one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from llama_index.core.schema import NodeWithScore, TextNode
from tests.tiny import edit_json
from tests.tiny.heads import write_splade

from llama_index.embeddings.millpond import MillpondEmbedding
from llama_index.postprocessor.millpond_rerank import MillpondRerank
from llama_index.sparse_embeddings.millpond import MillpondSparseEmbedding
from millpond import Engine
from millpond.testing import AdapterContract

QUESTION = "What makes dough rise?"
TEXTS = ["Tides follow the moon.", "Bread rises because of yeast.", "The heart pumps blood."]


@pytest.fixture(scope="module")
def prompted_splade(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_splade(tmp_path_factory.mktemp("splade") / "model")
    edit_json(folder / "config_sentence_transformers.json", prompts={"query": "ask: ", "document": "passage: "})
    return str(folder)


@pytest.fixture(scope="module")
def splade_engine(prompted_splade: str) -> Iterator[Engine]:
    with Engine(prompted_splade, dtype="float32") as engine:
        yield engine


class LlamaIndexContract(AdapterContract):
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


def dense(vectors: list[dict[int, float]]) -> list[list[float]]:
    return [[vector.get(token, 0.0) for token in range(512)] for vector in vectors]


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
        return by_text(adapter.postprocess_nodes(nodes(), query_str=QUESTION))

    async def aask(self, adapter: Any) -> Any:
        return by_text(await adapter.apostprocess_nodes(nodes(), query_str=QUESTION))

    def expected(self, engine: Engine) -> Any:
        return [[score] for score in engine.score(QUESTION, TEXTS).scores]


def nodes() -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=text), score=0.5) for text in TEXTS]


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
