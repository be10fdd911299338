"""Errors about unknown arguments and attributes say what to write instead."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millpond import LLM, AsyncEngine, Engine
from millpond.values.replacements import METHODS, OPTIONS, names_replacements


@pytest.fixture(scope="module")
def engine(engine_of: Callable[..., Engine]) -> Engine:
    return engine_of("bert")


CALLS: list[tuple[str, Callable[[Any], Any], str]] = [
    ("encode without a task", lambda e: e.encode(["x"]), r"'task'; write embed\(texts\) for vectors"),
    ("encode of others", lambda e: e.encode(["x"], batch_size=8), r"batch_size=: leave it out.*write embed\(texts\)"),
    ("batches", lambda e: e.embed(["x"], batch_size=8), "batch_size=: leave it out"),
    ("a bar", lambda e: e.embed(["x"], show_progress_bar=True), "show_progress_bar=: write show_progress=True"),
    ("arrays", lambda e: e.embed(["x"], convert_to_numpy=True), "convert_to_numpy=: leave it out"),
    ("tensors", lambda e: e.embed(["x"], convert_to_tensor=True), r"torch\.from_numpy"),
    ("lengths", lambda e: e.embed(["x"], normalize_embeddings=True), "write normalize=True"),
    ("widths", lambda e: e.embed(["x"], truncate_dim=8), "truncate_dim=: write dimensions="),
    (
        "two",
        lambda e: e.embed(["x"], batch_size=8, truncate_dim=8),
        "batch_size=.*; no truncate_dim=: write dimensions=",
    ),
    ("a slip", lambda e: e.embed(["x"], rol="query"), r"no rol=: did you mean role=\?"),
    ("nothing known", lambda e: e.embed(["x"], zzzz=1), "embed\\(\\) has no zzzz=: leave it out"),
    ("a stream", lambda e: e.embed_iter(["x"], batch_size=8), r"embed_iter\(\) has no batch_size=: leave it out"),
    ("best", lambda e: e.rerank("x", ["y"], top_k=1), "top_k=: write top_n= for rerank"),
    ("pairs", lambda e: e.score([("a", "b")]), r"write score\(queries, documents\)"),
    ("a model", lambda e: Engine(model_name_or_path="x"), "model_name_or_path=: write the hub id or folder first"),
    ("devices", lambda e: Engine("x", device_map="auto"), r"Engine\(\) has no device_map=: write device="),
    (
        "precision",
        lambda e: Engine("x", torch_dtype="float16", use_fp16=True),
        "torch_dtype=: .*dtype=.*use_fp16=: .*dtype=",
    ),
    ("nested", lambda e: Engine("x", model_kwargs={}), "model_kwargs=: write its entries"),
    ("limits", lambda e: Engine("x", max_seq_length=8), "max_seq_length=: write max_length="),
    ("an event loop", lambda e: asyncio.run(AsyncEngine(e).embed(["x"], batch_size=8)), "batch_size=: leave it out"),
    ("vLLM's class", lambda e: LLM("x", model_kwargs={}), "model_kwargs=?'?[;:] write its entries"),
]


@pytest.mark.parametrize(("call", "message"), [pytest.param(*row[1:], id=row[0]) for row in CALLS])
def test_an_unknown_argument_is_a_type_error_with_the_replacement(
    engine: Engine, call: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        call(engine)


def test_vllms_methods_say_it_too(checkpoint_of: Callable[..., Path]) -> None:
    llm = LLM(checkpoint_of("bert"), dtype="float32", device="cpu")
    try:
        with pytest.raises(TypeError, match="batch_size=: leave it out"):
            llm.embed("x", batch_size=8)  # type: ignore[call-arg]
        with pytest.raises(AttributeError, match="generates no text"):
            llm.generate("x")  # type: ignore[attr-defined]
    finally:
        llm.close()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_an_unknown_method_is_an_attribute_error_with_the_replacement(engine: Engine, name: str) -> None:
    for owner in (engine, AsyncEngine(engine)):
        with pytest.raises(AttributeError) as raised:
            getattr(owner, name)
        assert METHODS[name] in str(raised.value)
    assert not hasattr(engine, "nothing_of_the_sort")


def test_no_replacement_has_the_name_of_what_there_is(engine: Engine) -> None:
    """Otherwise a sentence would never be read, or contradict the signature."""
    assert [name for name in METHODS if name in dir(Engine)] == []
    embed = inspect.signature(Engine.embed).parameters
    assert [name for name in OPTIONS if name in embed] == []


def test_an_error_from_inside_a_call_stays_as_it_is(engine: Engine) -> None:
    with pytest.raises(TypeError, match=r"^embed takes a list of texts, not a str; write embed\(\[text\]\)$"):
        engine.embed("text")

    @names_replacements
    class Own:
        def call(self, value: Any) -> None:
            raise TypeError("from inside")

    with pytest.raises(TypeError, match="^from inside$"):
        Own().call(1)
