"""The exception tree is as drawn, and errors can be caught as the builtins that callers know."""

import builtins
import copy
import pickle
import re

import pytest

from millpond import errors
from millpond.errors import EngineOverloadedError, MillpondError

DRAWN = re.findall(r"^    ([│ ]*(?:[├└]── )?)(\w+Error)(?: \((\w+)\))?$", errors.__doc__, re.MULTILINE)


def test_the_drawing_has_every_error():
    classes = {name for name, value in vars(errors).items() if getattr(value, "__module__", None) == errors.__name__}
    assert {name for _, name, _ in DRAWN} == classes


@pytest.mark.parametrize(("indent", "name", "builtin"), DRAWN, ids=[name for _, name, _ in DRAWN])
def test_each_error_has_the_bases_that_are_drawn(indent: str, name: str, builtin: str):
    index = [other for _, other, _ in DRAWN].index(name)
    # The parent is the nearest error above with a smaller indent.
    parent = next((other for i, other, _ in reversed(DRAWN[:index]) if len(i) < len(indent)), "Exception")
    expected = [getattr(errors, parent, Exception), *([getattr(builtins, builtin)] if builtin else [])]
    assert list(getattr(errors, name).__bases__) == expected


@pytest.mark.parametrize("name", [name for _, name, _ in DRAWN if name != "EngineOverloadedError"])
def test_one_except_clause_catches_every_error(name: str):
    with pytest.raises(MillpondError, match="^what, limit, way out$"):
        raise getattr(errors, name)("what, limit, way out")


def test_an_overload_says_when_to_retry():
    with pytest.raises(MillpondError, match="full") as caught:
        raise EngineOverloadedError("full", retry_after=1.5)
    assert isinstance(caught.value, EngineOverloadedError)
    assert caught.value.retry_after == 1.5


def test_an_unknown_model_is_a_lookup_error():
    with pytest.raises(LookupError, match="bert"):
        raise errors.UnknownModelError("no model 'bert' here")


OPTIONS = {
    "DeviceLostError": {"device": "cuda:1", "reason": "CUDA error: unspecified launch failure"},
    "EngineOverloadedError": {"retry_after": 1.5},
    "InvalidDimensionsError": {"dimensions": 3, "native": 48, "declared": (8, 16), "smallest": 1, "trained": True},
    "SinkUnavailableError": {"retry_after": 3.0},
    "InputTooLongError": {"index": 2, "tokens": 70, "limit": 64, "at_least": True},
}


@pytest.mark.parametrize("name", ["InvalidDimensionsError", "InputTooLongError"])
def test_details_are_optional(name: str):
    assert vars(getattr(errors, name)("no")) == dict.fromkeys(OPTIONS[name])


@pytest.mark.parametrize("name", [name for _, name, _ in DRAWN])
def test_each_error_survives_pickling_and_copying(name: str):
    """A process pool that cannot unpickle an error breaks, and reports that instead."""
    options = OPTIONS.get(name, {})
    error = getattr(errors, name)("what, limit, way out", **options)
    error.add_note("seen in worker 3")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error) and str(again) == "what, limit, way out"
        assert vars(again) == vars(error) == options | {"__notes__": ["seen in worker 3"]}
