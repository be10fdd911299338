"""Arguments of an index's methods: what is taken, and what is refused before anything is encoded or stored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.late_interaction.index_contract import (
    QUERY,
    TEXTS,
    found,
    matrices,
    names,
    ragged,
)
from tests.tiny.heads import DIM, write_stanford

from millpond import Engine
from millpond.errors import InvalidRequestError
from millpond.late_interaction import Hit, MemoryIndex, Ragged


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(write_stanford(tmp_path_factory.mktemp("models")), dtype="float32", device="cpu") as engine:
        yield engine


@pytest.fixture
def index() -> MemoryIndex:
    return MemoryIndex(None)


@pytest.fixture
def texts(engine: Engine) -> MemoryIndex:
    index = MemoryIndex(engine)
    index.add(names(5), TEXTS, [{"number": number} for number in range(5)])
    return index


def test_an_id_of_numpy_is_a_str(index: MemoryIndex) -> None:
    index.add_embeddings(list(np.array(["a", "b"])), ragged(matrices(2)))
    assert {type(hit.id) for hit in index.search_embeddings(ragged(matrices(1)))[0]} == {str}
    assert set(map(type, index.ids())) == {str} and sorted(index.ids()) == ["a", "b"]


@pytest.mark.parametrize("kind", ["float16", "float64", "huge", "fortran", "read-only", "not unit"])
def test_any_floats_can_be_added_and_searched(index: MemoryIndex, kind: str) -> None:
    flat = np.concatenate(matrices(8))
    scales = np.geomspace(1e-30, 1e30, len(flat))[:, None]
    changed = {
        "float16": flat.astype(np.float16),
        "float64": flat.astype(np.float64),
        "huge": flat.astype(np.float64) * scales**9,
        "fortran": np.asfortranarray(flat),
        "read-only": flat.copy(),
        "not unit": flat * scales.astype(np.float32),
    }[kind]
    changed.flags.writeable = kind != "read-only"
    before = changed.copy()
    given, unit = (Ragged(flat=rows, offsets=ragged(matrices(8)).offsets) for rows in (changed, flat))
    index.add_embeddings(names(8), given)
    expected = MemoryIndex(None)
    expected.add_embeddings(names(8), unit)
    for hits, same in zip(index.search_embeddings(given), expected.search_embeddings(unit), strict=True):
        scores = {hit.id: hit.score for hit in same}
        assert [hit.score for hit in hits] == pytest.approx([scores[hit.id] for hit in hits], abs=0.01)
    np.testing.assert_array_equal(changed, before)


@pytest.mark.parametrize("query", ["", "  \n", "\u200b\u00a0"])
def test_a_blank_query_is_refused(texts: MemoryIndex, query: str) -> None:
    with pytest.raises(InvalidRequestError, match="query at index 1 is blank"):
        texts.search([QUERY, query])


def test_what_cannot_be_explained_is_refused(texts: MemoryIndex) -> None:
    texts.add_embeddings(["bare"], ragged(matrices(1, width=DIM), DIM))
    wrong: Any = [QUERY]
    for query, id, error, message in (
        (QUERY, "unknown", InvalidRequestError, "no document of id 'unknown'"),
        (QUERY, "bare", InvalidRequestError, "'bare' was added without its text"),
        (" ", "doc-1", InvalidRequestError, "query at index 0 is blank"),
        (wrong, "doc-1", TypeError, "one query, a str, not a list"),
        (QUERY, 1, InvalidRequestError, "the id is of type int"),
    ):
        with pytest.raises(error, match=message):
            texts.explain(query, id)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "contents", "metadata", "error", "message"),
    [
        pytest.param("a", ["x"], None, TypeError, "ids='a' is one str", id="ids a str"),
        pytest.param(["a"], "x", None, TypeError, "texts='x' is one str", id="texts a str"),
        pytest.param(["a"], b"x", None, TypeError, "texts=b'x' is one bytes", id="texts bytes"),
        pytest.param(["a", "b"], ["x"], None, InvalidRequestError, "2 ids for 1 texts", id="lengths"),
        pytest.param(["a"], ["x"], [], InvalidRequestError, "metadata must be a list of 1 map", id="too few mappings"),
        pytest.param(["a"], ["x"], {"n": 1}, InvalidRequestError, "metadata must be a list", id="metadata a dict"),
        pytest.param(["a"], ["x"], ["y"], InvalidRequestError, r"metadata\[0\] is of type str", id="no mapping"),
        pytest.param(["a"], ["x"], [{"n": np.nan}], InvalidRequestError, r"metadata\[0\]\['n'\]=nan", id="NaN"),
        pytest.param(["a"], ["x"], [{1: "y"}], InvalidRequestError, "a key of", id="a key of int"),
        pytest.param(["a"], ["x"], [{"n": object()}], InvalidRequestError, "of type object", id="an object"),
        pytest.param([1], ["x"], None, InvalidRequestError, "id at index 0 is of type int", id="an id of int"),
        pytest.param(["a", ""], ["x", "y"], None, InvalidRequestError, "id at index 1 is empty", id="an empty id"),
        pytest.param(["\ud800"], ["x"], None, InvalidRequestError, "lone surrogate", id="an id no encoding has"),
        pytest.param(["a"], ["\ud800"], None, InvalidRequestError, "lone surrogate", id="a text no encoding has"),
        pytest.param(["a", "b"], ["x", None], None, InvalidRequestError, "index 1 is missing", id="a text of None"),
        pytest.param(["a"], [3], None, InvalidRequestError, "text at index 0 is of type int", id="a text of int"),
    ],
)
def test_wrong_documents_are_refused_and_nothing_is_stored(
    texts: MemoryIndex, ids: Any, contents: Any, metadata: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        texts.add(["first", *ids] if isinstance(ids, list) and len(ids) > 2 else ids, contents, metadata)
    assert sorted(texts.ids()) == names(5)


def test_wrong_embeddings_are_refused_and_nothing_is_stored(index: MemoryIndex) -> None:
    values = matrices(2)
    index.add_embeddings(["kept"], ragged(values[:1]))
    nan, infinite = (matrix.copy() for matrix in values)
    nan[3, 4], infinite[5, 0] = np.nan, np.inf
    calls: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
        (["a", "b"], values, {}, TypeError, "embeddings are of type list; pass a Ragged"),
        (["a"], values[0], {}, TypeError, "of type ndarray"),
        (["a"], ragged(values), {}, InvalidRequestError, "1 ids for 2 embeddings"),
        ("ab", ragged(values), {}, TypeError, "ids='ab' is one str"),
        (["a", "b"], ragged([values[0], nan]), {}, InvalidRequestError, "index 1 of embeddings holds NaN"),
        (["a", "b"], ragged([infinite, values[0]]), {}, InvalidRequestError, "index 0 .* infinity"),
        (["a"], ragged(matrices(1, width=31), 31), {}, InvalidRequestError, "31 wide.*32"),
        (["a"], ragged(matrices(1, width=64), 64), {}, InvalidRequestError, "64 wide.*32"),
        (["a"], ragged([np.ones((2, 32), dtype=np.int8)]), {}, InvalidRequestError, "hold int8; pass floats"),
        (["a"], ragged([np.ones((2, 0), dtype=np.float32)], 0), {}, InvalidRequestError, "0 wide"),
        (["a", "b"], ragged(values), {"texts": "xy"}, InvalidRequestError, "texts must be a list of 2"),
        (["a", "b"], ragged(values), {"texts": ["x"]}, InvalidRequestError, "texts must be a list of 2"),
        (["a", "b"], ragged(values), {"texts": ["x", 1]}, InvalidRequestError, "text at index 1 is of type int"),
        (["a", "b"], ragged(values), {"metadata": [{}]}, InvalidRequestError, "metadata must be a list of 2"),
    ]
    for ids, embeddings, options, error, message in calls:
        with pytest.raises(error, match=message):
            index.add_embeddings(ids, embeddings, **options)
    assert index.ids() == ["kept"]
    assert found(index.search_embeddings(ragged(values[:1]))) == [["kept"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimensions": 0}, "dimensions=0"),
        ({"dimensions": True}, "dimensions=True"),
        ({"dimensions": 2.0}, r"dimensions=2\.0"),
        ({"pool_factor": 0}, "pool_factor=0"),
        ({"pool_factor": "2"}, "pool_factor='2'"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        MemoryIndex(None, **options)


def test_a_width_above_that_of_the_rows_is_refused() -> None:
    with MemoryIndex(None, dimensions=33) as index:
        with pytest.raises(InvalidRequestError, match="dimensions=33.*32"):
            index.add_embeddings(["a"], ragged(matrices(1)))
        assert len(index) == 0


def test_something_else_than_an_engine_is_refused() -> None:
    wrong: Any = "model"
    with pytest.raises(TypeError, match="engine is of type str; pass a millpond.Engine"):
        MemoryIndex(wrong)


def test_wrong_searches_are_refused(texts: MemoryIndex) -> None:
    queries = ragged(matrices(1, width=DIM), DIM)
    nan = ragged([np.full((2, DIM), np.nan, dtype=np.float32)], DIM)
    wrong: Any
    for wrong, error, message in (
        ("one query", TypeError, "queries is of type str; pass a list"),
        (b"query", TypeError, "of type bytes"),
        (None, TypeError, "of type NoneType"),
        ([None], InvalidRequestError, "query at index 0 is missing"),
        (["a", 3], InvalidRequestError, "query at index 1 is of type int"),
        (["\ud800"], InvalidRequestError, "lone surrogate"),
    ):
        with pytest.raises(error, match=message):
            texts.search(wrong)
    for wrong, error, message in (
        (matrices(1, width=DIM)[0], TypeError, "of type ndarray; pass a Ragged"),
        (nan, InvalidRequestError, "index 0 of queries holds NaN"),
        (ragged(matrices(1, width=DIM + 1), DIM + 1), InvalidRequestError, f"{DIM + 1} wide.*{DIM}"),
    ):
        with pytest.raises(error, match=message):
            texts.search_embeddings(wrong)
    options: dict[str, Any]
    for options, error, message in (
        ({"k": 0}, InvalidRequestError, "k=0 must be an int from 1"),
        ({"k": True}, InvalidRequestError, "k=True must be"),
        ({"k": 2.0}, InvalidRequestError, r"k=2\.0 must be"),
        ({"k": None}, InvalidRequestError, "k=None must be"),
        ({"candidates": 9}, InvalidRequestError, "candidates=9 must be an int from k=10"),
        ({"candidates": 10.0}, InvalidRequestError, r"candidates=10\.0"),
        ({"exact": 1}, InvalidRequestError, "exact=1 must be True or False"),
        ({"ids": "doc-1"}, TypeError, "ids='doc-1' is one str"),
        ({"ids": [1]}, InvalidRequestError, "id at index 0 is of type int"),
        ({"filter": "lang"}, InvalidRequestError, "filter is of type str"),
        ({"filter": {"a": []}}, InvalidRequestError, "is an empty list"),
        ({"filter": {"a": None}}, InvalidRequestError, r"filter\['a'\] holds None"),
        ({"filter": {"a": {"above": 1}}}, InvalidRequestError, r"filter\['a'\]"),
        ({"filter": {1: 1}}, InvalidRequestError, "filter key 1 is not a str"),
    ):
        with pytest.raises(error, match=message):
            texts.search_embeddings(queries, **options)
        with pytest.raises(error, match=message):
            texts.search([QUERY], **options)


def test_wrong_deletes_are_refused_and_nothing_is_deleted(texts: MemoryIndex) -> None:
    wrong: Any
    for wrong, error, message in (
        ({}, InvalidRequestError, "either ids or filter"),
        ({"ids": ["doc-1"], "filter": {"number": 1}}, InvalidRequestError, "either ids or filter"),
        ({"ids": "doc-1"}, TypeError, "ids='doc-1' is one str"),
        ({"ids": ["doc-1", 2]}, InvalidRequestError, "id at index 1 is of type int"),
        ({"filter": {}}, InvalidRequestError, "no condition and would delete every document"),
        ({"filter": {"number": []}}, InvalidRequestError, "is an empty list"),
        ({"filter": [1]}, InvalidRequestError, "filter is of type list"),
    ):
        with pytest.raises(error, match=message):
            texts.delete(**wrong)
    assert len(texts) == 5


def test_a_search_of_an_event_loop(texts: MemoryIndex) -> None:
    async def both() -> list[list[list[Hit]]]:
        return list(
            await asyncio.gather(texts.asearch([QUERY], k=2), texts.asearch([QUERY], filter={"number": 3}, exact=True))
        )

    first, second = asyncio.run(both())
    assert found(first) == found(texts.search([QUERY], k=2)) and found(second) == [["doc-3"]]
