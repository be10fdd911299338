"""LangChain's own serialization: ``dumps`` and ``loads`` give an equal object, and keep no engine and no secret."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.load import dumps, loads
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


def revive(text: str) -> Any:
    return loads(text, allowed_objects=list(ADAPTERS), valid_namespaces=["langchain_millpond"])


def test_a_line_of_the_replaced_class_survives() -> None:
    built = MillpondEmbeddings(model_name="owner/name", model_kwargs={"device": "cpu"}, query_instruction="ask: ")
    again = revive(dumps(built))
    assert again == built
    assert (again.device, again.query_prompt, again.document_prompt) == ("cpu", "ask: ", "")


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
    with pytest.raises(ValueError, match="dimension=8 is not available"):
        revive(json.dumps(written))


def test_a_chain_that_holds_an_adapter_can_be_dumped(engine: Engine) -> None:
    for reranker in (MillpondReranker(model="owner/name"), MillpondReranker(engine=engine)):
        chain = RunnableLambda(lambda question: question) | RunnableLambda(reranker.compress_documents)
        assert dumps({"chain": chain, "reranker": reranker})
