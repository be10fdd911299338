"""Faults of the classes that users replace, each with the behaviour that ours has instead.

Where the other class can be imported, a test shows its fault, too.
"""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ValidationError
from sentence_transformers import SentenceTransformer
from tests.tiny import Layout, Pooling, write_checkpoint

from langchain_millpond import MillpondCrossEncoder, MillpondEmbeddings, MillpondReranker
from millpond import Engine
from millpond.compat import notices
from millpond.errors import InvalidRequestError, UnsupportedTaskError

QUESTION = "What makes dough rise?"


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has logged none of the lines that are logged once."""
    monkeypatch.setattr(notices, "_logged", {})


@pytest.fixture(scope="session")
def cased(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose tokenizer keeps newlines (a byte-level one), with prompts for both roles."""
    folder = tmp_path_factory.mktemp("faults") / "model"
    layout = Layout(modules=(Pooling(),), prompts={"query": "ask: ", "document": "read: "})
    return str(write_checkpoint(folder, "modernbert", sentence_transformers=layout))


@pytest.fixture
def documents(texts: list[str]) -> list[Document]:
    return [Document(id=f"id-{i}", page_content=text, metadata={"n": i, "deep": [i]}) for i, text in enumerate(texts)]


class Found(BaseRetriever):
    """A retriever that finds what it is given."""

    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return self.documents


def installed(name: str) -> Any:
    """A module of one of the others, or ``None``: then only the behaviour of ours is tested."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # langchain-community warns that it is not maintained any more
            return import_module(name)
    except ImportError:
        return None


def test_newlines_are_not_replaced(cased: str) -> None:
    lines, spaces = "def f():\n    return 1\n\n# end", "def f():     return 1  # end"
    plain = {"query_prompt": "", "document_prompt": "", "dtype": "float32"}
    ours = MillpondEmbeddings(model=cased, **plain)
    client = SentenceTransformer(cased)
    np.testing.assert_allclose(ours.embed_documents([lines])[0], client.encode(lines), atol=2e-5)
    np.testing.assert_allclose(ours.embed_query(lines), client.encode(lines), atol=2e-5)
    assert np.abs(np.subtract(ours.embed_query(lines), ours.embed_query(spaces))).max() > 1e-3  # this model sees them
    if module := installed("langchain_huggingface"):
        theirs = module.HuggingFaceEmbeddings(model_name=cased)
        np.testing.assert_allclose(theirs.embed_query(lines), client.encode(spaces), atol=2e-5)  # the fault


def test_multi_process_starts_no_pool_and_keeps_options(cased: str, texts: list[str], monkeypatch: Any) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", refuse)
    ours = MillpondEmbeddings(model_name=cased, multi_process=True, dtype="float32", document_prompt="")
    np.testing.assert_allclose(ours.embed_documents(texts), SentenceTransformer(cased).encode(texts), atol=2e-5)
    # encode_kwargs were ignored there: that is refused rather than guessed.
    with pytest.raises(ValidationError, match="multi_process with .*normalize_embeddings"):
        MillpondEmbeddings(model_name=cased, multi_process=True, encode_kwargs={"normalize_embeddings": True})


def test_the_score_and_the_id_survive_the_classic_retriever(cross_encoder: str, documents: list[Document]) -> None:
    module = pytest.importorskip("langchain_classic.retrievers")
    chain = module.ContextualCompressionRetriever(
        base_compressor=MillpondReranker(model=cross_encoder, dtype="float32", top_n=2),
        base_retriever=Found(documents=documents),
    )
    for found in (chain.invoke(QUESTION), asyncio.run(chain.ainvoke(QUESTION))):
        assert [document.id for document in found] == [f"id-{document.metadata['n']}" for document in found]
        assert all(isinstance(document.metadata["relevance_score"], float) for document in found)


def test_scores_belong_to_their_documents_whatever_the_order(cross_encoder: str, documents: list[Document]) -> None:
    pairs = [(QUESTION, document.page_content) for document in documents]
    scores = MillpondCrossEncoder(model=cross_encoder, dtype="float32").score(pairs)
    found = MillpondReranker(model=cross_encoder, dtype="float32", top_n=None).compress_documents(documents, QUESTION)
    kept = {document.metadata["n"]: document.metadata["relevance_score"] for document in found}
    np.testing.assert_allclose([kept[n] for n in range(len(documents))], scores, atol=2e-5)
    assert list(kept) != sorted(kept)


def test_a_model_of_two_classes_is_refused_and_not_misread(tmp_path: Path) -> None:
    model = str(write_checkpoint(tmp_path / "model", head="SequenceClassification", labels=2))
    with pytest.raises(UnsupportedTaskError, match="serves classify.*this head has 2"):
        MillpondCrossEncoder(model=model, dtype="float32").score([("a", "b")])


def test_duplicates_are_embedded_once(cased: str) -> None:
    with Engine(cased, dtype="float32") as engine:
        vectors = MillpondEmbeddings(engine=engine, document_prompt="").embed_documents(["a wheel"] * 50)
        assert engine.stats().batch_texts == 1
    assert vectors == [vectors[0]] * 50


def test_a_cache_knows_role_and_width(prompted: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "model": prompted,
        "dtype": "float32",
        "cache": tmp_path / "vectors",
        "hf_overrides": {"is_matryoshka": True},
    }
    wide = MillpondEmbeddings(**options)
    document, query = wide.embed_documents(["tides"])[0], wide.embed_query("tides")
    assert np.abs(np.subtract(document, query)).max() > 1e-3
    assert wide.embed_query("tides") == query
    assert len(MillpondEmbeddings(**options, dimensions=64).embed_query("tides")) == 64


def test_one_bad_text_is_named_and_takes_down_no_other_call(engine: Engine) -> None:
    embeddings = MillpondEmbeddings(engine=engine)
    errors: list[Exception] = []

    def bad() -> None:
        try:
            embeddings.embed_documents(["fine", None])  # type: ignore[list-item]
        except InvalidRequestError as error:
            errors.append(error)

    threads = [threading.Thread(target=bad) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert len(embeddings.embed_documents(["fine"] * 100)) == 100
    for thread in threads:
        thread.join()
    assert len(errors) == 4
    assert all("index 1" in str(error) for error in errors)


def test_nothing_is_read_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    MillpondEmbeddings(model="owner/name", cache_folder=None)
    assert os.listdir(tmp_path) == []
