"""An index that HuggingFaceEmbeddings built: the first embedding says where vectors differ and how to keep it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import Layout, Pooling, write_checkpoint

from langchain_millpond import MillpondEmbeddings
from millpond import Engine

NOTICE = "so vectors differ from those of an index built with HuggingFaceEmbeddings"


def checkpoint(folder: Path, **layout: Any) -> str:
    """A tiny checkpoint; each test has one of its own, since a notice is logged once in a process."""
    return str(write_checkpoint(folder, sentence_transformers=Layout(modules=(Pooling(),), **layout)))


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if NOTICE in record.getMessage()]


def settings(notice: str) -> dict[str, Any]:
    """The settings that keep the old vectors, as a user would copy them."""
    found = re.search(r"To keep its vectors: (.*?)\. To keep these", notice)
    assert found is not None
    return dict(eval(f"dict({found.group(1)})"))  # the line is Python, which is what is tested


@pytest.mark.torch
@pytest.mark.parametrize("first", ["documents", "query", "adocuments", "aquery"])
def test_the_first_embedding_says_once_how_to_keep_the_old_vectors(
    tmp_path: Path, texts: list[str], caplog: pytest.LogCaptureFixture, first: str
) -> None:
    from sentence_transformers import SentenceTransformer

    model = checkpoint(tmp_path / "model", prompts={"query": "search_query: ", "document": "search_document: "})
    calls: dict[str, Any] = {
        "documents": lambda adapter: adapter.embed_documents(texts),
        "query": lambda adapter: adapter.embed_query(texts[0]),
        "adocuments": lambda adapter: asyncio.run(adapter.aembed_documents(texts)),
        "aquery": lambda adapter: asyncio.run(adapter.aembed_query(texts[0])),
    }
    embeddings = MillpondEmbeddings(model=model, dtype="float32")
    assert notices(caplog) == []  # nothing is loaded yet
    calls[first](embeddings)
    (notice,) = notices(caplog)
    assert "\n" not in notice
    for call in calls.values():
        call(embeddings)
        call(MillpondEmbeddings(model=model, dtype="float32"))
    assert len(notices(caplog)) == 1

    client = SentenceTransformer(model)
    ours, theirs = np.asarray(embeddings.embed_documents(texts)), client.encode(texts)
    cosines = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    assert cosines.max() < 0.999  # the two really differ
    kept = MillpondEmbeddings(model=model, **settings(notice))
    assert settings(notice) == {"query_prompt": "", "document_prompt": "", "dtype": "float32"}
    np.testing.assert_allclose(kept.embed_documents(texts), theirs, atol=2e-5)
    np.testing.assert_allclose(kept.embed_query(texts[0]), theirs[0], atol=2e-5)


@pytest.mark.torch
def test_a_default_prompt_is_kept_for_both(tmp_path: Path, texts: list[str], caplog: pytest.LogCaptureFixture) -> None:
    from sentence_transformers import SentenceTransformer

    prompts = {"query": 'say "what":\n', "document": "read: "}
    model = checkpoint(tmp_path / "model", prompts=prompts, default_prompt_name="query")
    MillpondEmbeddings(model=model, dtype="float32").embed_query("a")
    (notice,) = notices(caplog)
    kept = MillpondEmbeddings(model=model, **settings(notice))
    expected = SentenceTransformer(model).encode(texts)
    np.testing.assert_allclose(kept.embed_documents(texts), expected, atol=2e-5)
    np.testing.assert_allclose(kept.embed_query(texts[0]), expected[0], atol=2e-5)


@pytest.mark.torch
@pytest.mark.parametrize("family", ["bert", "qwen2"])
def test_a_checkpoint_that_does_not_say_how_to_pool_is_kept_too(
    tmp_path: Path, texts: list[str], caplog: pytest.LogCaptureFixture, family: str
) -> None:
    from sentence_transformers import SentenceTransformer

    model = str(write_checkpoint(tmp_path / "model", family))
    ours = MillpondEmbeddings(model=model, dtype="float32").embed_documents(texts)
    (notice,) = notices(caplog)
    expected = SentenceTransformer(model).encode(texts)
    assert np.abs(ours - expected).max() > 1e-3
    kept = MillpondEmbeddings(model=model, **settings(notice))
    np.testing.assert_allclose(kept.embed_documents(texts), expected, atol=5e-5)


def test_an_engine_is_told_about_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = checkpoint(tmp_path / "model", prompts={"query": "q: "})
    with Engine(model, dtype="float32") as engine:
        MillpondEmbeddings(engine=engine).embed_query("a")
    (notice,) = notices(caplog)
    assert 'queries get the prompt "q: "' in notice
    assert "documents get" not in notice


@pytest.mark.parametrize(
    "options",
    [
        {"query_prompt": "", "document_prompt": ""},
        {"query_prompt": "auto", "document_prompt": "auto"},
        {"query_prompt_name": "query", "document_prompt_name": "document"},
        {"encode_kwargs": {"prompt_name": "document"}, "query_encode_kwargs": {"prompt_name": "query"}},
        {"query_instruction": "x", "embed_instruction": "y"},
    ],
    ids=["off", "auto", "names", "kwargs", "instructions"],
)
def test_who_says_what_is_wanted_is_told_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    model = checkpoint(tmp_path / "model", prompts={"query": "q: ", "document": "d: "})
    embeddings = MillpondEmbeddings(model=model, dtype="float32", **options)
    embeddings.embed_query("a")
    embeddings.embed_documents(["a"])
    assert notices(caplog) == []


def test_a_checkpoint_without_prompts_is_told_nothing_about(minilm: str, caplog: pytest.LogCaptureFixture) -> None:
    MillpondEmbeddings(model=minilm, dtype="float32").embed_query("a")
    assert notices(caplog) == []
