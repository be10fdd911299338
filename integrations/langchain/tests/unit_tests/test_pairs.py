"""The pairs of a cross-encoder: any sequence of two texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from langchain_millpond import MillpondCrossEncoder
from millpond.errors import InvalidRequestError

PAIRS = [("a wheel", "the pond"), ("a wheel", ""), ("Ein Teich, 池", "une étang"), ("a wheel", "the pond")]


@pytest.fixture(params=["cross_encoder", "minilm"])
def adapter(request: pytest.FixtureRequest) -> MillpondCrossEncoder:
    return MillpondCrossEncoder(model=request.getfixturevalue(request.param), dtype="float32")


@pytest.mark.parametrize(
    "kind",
    [
        list,
        lambda pairs: [list(pair) for pair in pairs],
        lambda pairs: tuple(tuple(pair) for pair in pairs),
        lambda pairs: [pairs[0], *(list(pair) for pair in pairs[1:])],
        np.array,
        lambda pairs: zip(*map(list, zip(*pairs, strict=True)), strict=True),
        lambda pairs: (pair for pair in pairs),
    ],
    ids=["tuples", "lists", "tuple", "mixed", "array", "zip", "generator"],
)
def test_pairs_may_be_any_sequences_of_two(adapter: MillpondCrossEncoder, kind: Any) -> None:
    scores = adapter.score(kind(PAIRS))
    np.testing.assert_allclose(scores, adapter.score(PAIRS), atol=1e-5)
    assert {type(score) for score in scores} == {float}
    assert scores[0] == pytest.approx(scores[3], abs=1e-5)


def test_no_pairs_no_scores(adapter: MillpondCrossEncoder) -> None:
    assert adapter.score([]) == []


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        ("ab", TypeError, r"not a str; write score\(\[\(query, document\)\]\)"),
        (b"ab", TypeError, "not a bytes"),
        ({"a": "b"}, TypeError, "not a dict"),
        (("a", "b"), InvalidRequestError, "index 0"),
        (["ab"], InvalidRequestError, "index 0"),
        ([("a", "b"), ("a", "b", "c")], InvalidRequestError, "index 1 has 3 parts; pass .query, document."),
        ([["a"]], InvalidRequestError, "index 0 has 1 parts"),
        ([("a", "b"), ["a", None]], InvalidRequestError, "document at index 1 is a NoneType"),
        ([("a", "b"), 7], InvalidRequestError, "index 1 is a int"),
        ([{"a", "b"}], InvalidRequestError, "index 0 is a set"),
        ([("a", "\ud800")], InvalidRequestError, "lone surrogate"),
    ],
    ids=["str", "bytes", "dict", "one-pair", "str-pair", "three", "one", "none", "int", "set", "surrogate"],
)
def test_what_is_no_pair_is_named(
    adapter: MillpondCrossEncoder, pairs: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        adapter.score(pairs)
