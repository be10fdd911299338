"""LangChain's own serialization: ``dumps`` and ``loads`` give an equal object, and keep no engine and no secret."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.load import dumpd, dumps, load, loads
from langchain_core.runnables import RunnableLambda

from langchain_millpond import (
    MillpondColBERTRetriever,
    MillpondCrossEncoder,
    MillpondEmbeddings,
    MillpondReranker,
    MillpondSparseEmbeddings,
)
from millpond import Engine
from millpond.late_interaction import MemoryIndex

pytestmark = pytest.mark.filterwarnings("ignore:The function `loads?` is in beta")

ADAPTERS = (MillpondEmbeddings, MillpondReranker, MillpondCrossEncoder, MillpondSparseEmbeddings)
SHARED: dict[str, Any] = {
    "model": "owner/name",
    "revision": "v1",
    "device": ["cuda:0", "cuda:1"],
    "dtype": "float32",
    "max_length": 64,
    "hf_overrides": {"is_matryoshka": True, "lc": 1},
    "quantization": "int8",
    "max_batch_tokens": 4096,
    "compile": True,
    "truncate": "error",
}
OPTIONS: dict[Any, dict[str, Any]] = {
    MillpondEmbeddings: {
        "query_prompt": "",
        "document_prompt_name": "passage",
        "dimensions": 64,
        "normalize": False,
        "long_texts": "mean",
        "show_progress": True,
        "pooling": "cls",
        "cache": "vectors.cache",
    },
    MillpondReranker: {"top_n": None, "score_threshold": 0.0, "method": "cosine", "score_template": "{{ query }}"},
    MillpondSparseEmbeddings: {"query_prompt": "", "document_prompt_name": "passage", "show_progress": True},
    MillpondCrossEncoder: {"method": "maxsim", "activation": "sigmoid", "instruction": "", "convert": "embed"},
}


def revive(text: str) -> Any:
    return loads(text, allowed_objects=list(ADAPTERS), valid_namespaces=["langchain_millpond"])


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("options", ["few", "many"])
def test_dumps_and_loads_give_an_equal_object(adapter: Any, options: str) -> None:
    built = adapter(**(SHARED | OPTIONS[adapter] if options == "many" else {"model_name": "owner/name"}))
    again = revive(dumps(built))
    assert type(again) is adapter
    assert again == built
    assert again.model_dump() == built.model_dump()
    assert load(dumpd(built), allowed_objects=[adapter], valid_namespaces=["langchain_millpond"]) == built
    assert json.loads(dumps(built))["id"] == [
        "langchain_millpond",
        adapter.__module__.rsplit(".", 1)[-1],
        adapter.__name__,
    ]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_option_survives(adapter: Any) -> None:
    written = SHARED | OPTIONS[adapter]
    again = revive(dumps(adapter(**written)))
    for name, value in written.items():
        assert getattr(again, name) == (",".join(value) if name == "device" else value), name
    missing = set(adapter.model_fields) - set(written) - {"engine", "trust_remote_code"}
    assert missing <= {
        "document_prompt",
        "query_prompt_name",
        "instruction",
        "activation",
        "convert",
        "score_template",
        "method",
    }


def test_a_line_of_the_replaced_class_survives() -> None:
    built = MillpondEmbeddings(model_name="owner/name", model_kwargs={"device": "cpu"}, query_instruction="ask: ")
    again = revive(dumps(built))
    assert again == built
    assert (again.device, again.query_prompt, again.document_prompt) == ("cpu", "ask: ", "")


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_engine_is_never_written_and_says_so_when_loaded(adapter: Any, engine: Engine) -> None:
    text = dumps(adapter(engine=engine))  # tracing dumps every object, so this must not raise
    written = json.loads(text)
    assert written["type"] == "not_implemented"
    assert written["id"][-1] == adapter.__name__
    assert "kwargs" not in written
    with pytest.raises(NotImplementedError, match="doesn't implement serialization"):
        revive(text)


def test_a_retriever_holds_an_index_and_is_not_written_either(engine: Engine) -> None:
    text = dumps(MillpondColBERTRetriever(index=MemoryIndex(engine)))
    assert json.loads(text)["type"] == "not_implemented"
    with pytest.raises(NotImplementedError, match="doesn't implement serialization"):
        revive(text)


def test_the_reader_must_allow_the_class() -> None:
    text = dumps(MillpondEmbeddings(model="owner/name"))
    with pytest.raises(ValueError, match="not allowed"):
        loads(text, allowed_objects="core")
    with pytest.raises(ValueError, match="Invalid namespace"):
        loads(text, allowed_objects=[MillpondEmbeddings])


def test_written_options_are_checked_when_they_are_loaded() -> None:
    written = json.loads(dumps(MillpondEmbeddings(model="owner/name")))
    written["kwargs"]["dimension"] = 8
    with pytest.raises(ValueError, match="not permitted"):
        revive(json.dumps(written))


def test_a_chain_that_holds_an_adapter_can_be_dumped(engine: Engine) -> None:
    for reranker in (MillpondReranker(model="owner/name"), MillpondReranker(engine=engine)):
        chain = RunnableLambda(lambda question: question) | RunnableLambda(reranker.compress_documents)
        assert dumps({"chain": chain, "reranker": reranker})
