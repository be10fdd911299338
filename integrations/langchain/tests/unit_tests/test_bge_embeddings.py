"""MillpondBgeEmbeddings gives the vectors of langchain_community's HuggingFaceBgeEmbeddings, from its arguments."""

from __future__ import annotations

import asyncio
import logging
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tests.tiny import Layout, Normalize, Pooling, write_checkpoint

from langchain_millpond import MillpondBgeEmbeddings, MillpondEmbeddings
from millpond import Engine
from millpond.compat import notices

QUESTION = "What makes\ndough rise?"
TEXTS = ["Tides follow\nthe moon.", "Bread rises because of yeast."]
ZH = "为这个句子生成表示以用于检索相关文章："  # noqa: RUF001


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """``folder_of("bge-small-en-v1.5", default="d: ")``: CLS and Normalize, as in BGE."""
    root = tmp_path_factory.mktemp("bge")

    def folder(name: str, default: str | None = None) -> str:
        path = root / str(default) / name
        if not path.exists():
            prompts = {} if default is None else {"prompts": {"own": default}, "default_prompt_name": "own"}
            layout = Layout(modules=(Pooling(modes=("cls",)), Normalize()), **prompts)  # type: ignore[arg-type]
            write_checkpoint(path, "bert", sentence_transformers=layout, lowercase=True)
        return str(path)

    return folder


@pytest.fixture
def old_class() -> Iterator[Any]:
    community = pytest.importorskip("langchain_community.embeddings")
    pytest.importorskip("sentence_transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the class is deprecated
        yield community.HuggingFaceBgeEmbeddings


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "default", "options"),
    [
        ("bge-small-en-v1.5", None, {}),
        (
            "bge-small-en-v1.5",
            None,
            {"encode_kwargs": {"normalize_embeddings": True}, "model_kwargs": {"device": "cpu"}},
        ),
        ("bge-small-en-v1.5", None, {"query_instruction": "ask: ", "embed_instruction": "say: "}),
        ("bge-small-en-v1.5", None, {"embed_instruction": "say: "}),
        ("bge-small-en-v1.5", None, {"query_instruction": ""}),
        ("bge-small-en-v1.5", "own: ", {}),
        ("bge-small-en-v1.5", "own: ", {"query_instruction": "ask: "}),
        ("bge-small-zh-v1.5", None, {}),
        ("another-model", None, {}),
    ],
)
def test_the_vectors_are_those_of_the_replaced_class(
    old_class: Any, folder_of: Callable[..., str], name: str, default: str | None, options: dict[str, Any]
) -> None:
    folder = folder_of(name, default)
    arguments = {"model_name": folder, **options}
    old = old_class(**{key: dict(value) if isinstance(value, dict) else value for key, value in arguments.items()})
    new = MillpondBgeEmbeddings(**arguments, dtype="float32")
    np.testing.assert_allclose(new.embed_query(QUESTION), old.embed_query(QUESTION), atol=1e-5)
    np.testing.assert_allclose(new.embed_documents(TEXTS), old.embed_documents(TEXTS), atol=1e-5)
    np.testing.assert_allclose(asyncio.run(new.aembed_query(QUESTION)), old.embed_query(QUESTION), atol=1e-5)
    # Another instruction gives other vectors, so the comparison above can fail.
    other = MillpondBgeEmbeddings(model=folder, dtype="float32", query_prompt="Another one: ")
    assert np.abs(np.subtract(other.embed_query(QUESTION), old.embed_query(QUESTION))).max() > 1e-3


def test_it_says_nothing_and_survives_pickling(
    folder_of: Callable[..., str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_logged", {})
    embeddings = MillpondBgeEmbeddings(model=folder_of("bge-small-en-v1.5"), dtype="float32")
    with caplog.at_level(logging.WARNING, logger="millpond"):
        vector = embeddings.embed_query(QUESTION)
    assert caplog.records == []
    np.testing.assert_allclose(pickle.loads(pickle.dumps(embeddings)).embed_query(QUESTION), vector, atol=1e-6)


def test_an_instruction_that_the_class_ignored_is_refused(folder_of: Callable[..., str]) -> None:
    folder = folder_of("bge-small-zh-v1.5")
    assert MillpondBgeEmbeddings(model=folder, query_instruction=ZH).query_prompt == ZH
    for options in ({"query_instruction": "ask: "}, {"encode_kwargs": {"prompt": "x: "}}):
        with pytest.raises(ValidationError, match="docs/migrate/index"):
            MillpondBgeEmbeddings(model=folder, **options)  # type: ignore[arg-type]


def test_a_bare_text_is_refused_as_everywhere(folder_of: Callable[..., str]) -> None:
    with pytest.raises(TypeError, match="takes a list of texts"):
        MillpondBgeEmbeddings(model=folder_of("bge-small-en-v1.5")).embed_documents("a text")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "replaced"),
    [("bge-small-en-v1.5", "HuggingFaceBgeEmbeddings"), ("instructor-base", "HuggingFaceInstructEmbeddings")],
)
def test_the_other_class_says_which_vectors_it_does_not_give(
    folder_of: Callable[..., str],
    name: str,
    replaced: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notices, "_logged", {})
    folder = folder_of(name)
    embeddings = MillpondEmbeddings(model=folder, dtype="float32")
    with caplog.at_level(logging.WARNING, logger="millpond"):
        for _ in range(2):
            embeddings.embed_query(QUESTION)
    (record,) = caplog.records
    told = record.getMessage()
    assert f"queries get no prompt ({replaced}: the prompt " in told
    assert ("To keep its vectors: MillpondBgeEmbeddings, or" in told) is (replaced == "HuggingFaceBgeEmbeddings")
    caplog.clear()
    monkeypatch.setattr(notices, "_logged", {})
    MillpondEmbeddings(model=folder, dtype="float32", query_prompt="", document_prompt="").embed_query(QUESTION)
    assert caplog.records == []


def test_an_engine_of_the_callers(folder_of: Callable[..., str]) -> None:
    folder = folder_of("bge-small-en-v1.5")
    with Engine(Path(folder), dtype="float32") as engine:
        given = MillpondBgeEmbeddings(engine=engine).embed_query(QUESTION)
    np.testing.assert_allclose(
        given, MillpondBgeEmbeddings(model=folder, dtype="float32").embed_query(QUESTION), atol=1e-6
    )
