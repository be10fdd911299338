"""The methods of the tasks: one signature and one documentation for both engines, and what a call gives back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from tests.tiny import TEXTS

from millpond import AsyncEngine, Engine, Timings
from millpond.errors import InvalidRequestError

METHODS = "classify embed encode rerank reward score sparse_embed token_classify token_embed".split()


@pytest.fixture
def engine(engine_of: Callable[..., Engine]) -> Engine:
    return engine_of("bert")


def test_both_engines_have_the_same_methods():
    for name in METHODS:
        plain, awaited = getattr(Engine, name), getattr(AsyncEngine, name)
        assert inspect.signature(plain) == inspect.signature(awaited)
        assert inspect.getdoc(plain) == inspect.getdoc(awaited)
        assert inspect.iscoroutinefunction(awaited) and not inspect.iscoroutinefunction(plain)


def test_embed_and_embed_iter_take_the_same_options(engine: Engine):
    _, _, *options = inspect.signature(Engine.embed).parameters.values()
    assert next(engine.embed_iter(["a"], **{each.name: each.default for each in options})).shape == (48,)
    for name in ("aggregation", "use_activation", "task", "dimension"):
        with pytest.raises((TypeError, InvalidRequestError), match=name):
            engine.embed_iter(["a"], **{name: "embed_all"})


def test_a_submitted_call_is_a_future_that_knows_its_timings(engine: Engine):
    future = engine.submit("embed", TEXTS)
    assert isinstance(future, Future)
    assert future.result().embeddings.shape[0] == len(TEXTS)
    assert isinstance(future.timings, Timings)


def test_an_observer_is_any_function_of_a_batch(engine: Engine):
    sizes: list[int] = []
    unregister = engine.observe(lambda batch: sizes.append(batch.texts))
    engine.embed(["a", "b", "a"])
    assert sum(sizes) == 2  # equal texts run once
    unregister()
    engine.embed(["c"])
    assert sum(sizes) == 2
