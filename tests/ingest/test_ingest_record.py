"""Records, their database ids and content hashes."""

import json
import uuid
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, StrEnum
from fractions import Fraction
from pathlib import PurePosixPath
from types import MappingProxyType
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import InvalidRequestError
from millpond.ingest import Record, content_hash, point_id

NAMESPACE = uuid.UUID("c4e431ac-b6db-43ba-8435-74c9cee587c4")
storable_text = st.text(st.characters(exclude_categories=["Cs"]))


def test_point_ids_never_change():
    # Changing the namespace or the name would duplicate every row at the next ingest.
    assert point_id("doc-1") == "248056cb-324d-5635-850e-8d1883494b48"
    assert point_id("doc-1", 1) == "e2db40ab-2006-5180-bed3-0dbf5b15a649"


@given(storable_text, st.integers(0, 2**40))
def test_every_point_id_is_that_of_the_uuid_module(record_id, chunk):
    name = record_id if chunk == 0 else f"{record_id}\0{chunk}"
    assert point_id(record_id, chunk) == str(uuid.uuid5(NAMESPACE, name))


def test_content_hash_is_sha256_of_utf8():
    assert content_hash("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert content_hash("é") != content_hash("e\u0301")


def test_a_chunk_of_a_record_has_its_number():
    record = Record("a", "piece", {"chunk": 2}, chunk=2)
    assert (record.id, record.chunk) == ("a", 2)
    assert Record("a", "text").chunk == 0 and Record("a", "piece", chunk=1) != Record("a", "piece")
    for chunk in (-1, True, False, 1.0, "1", None):
        with pytest.raises(InvalidRequestError, match="chunk="):
            Record("a", "", chunk=chunk)


class Colour(Enum):
    RED = "red"


class Name(StrEnum):
    ANNA = "anna"


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (datetime(2024, 5, 31, 12, 0, 0, 5), "2024-05-31T12:00:00.000005"),
        (datetime(2024, 5, 31, tzinfo=timezone(timedelta(hours=2))), "2024-05-31T00:00:00+02:00"),
        (date(2024, 5, 31), "2024-05-31"),
        (time(9, 30), "09:30:00"),
        (timedelta(minutes=1, milliseconds=500), 60.5),
        (Decimal("9.99"), 9.99),
        (Decimal("5"), 5),
        (Decimal("5.00"), 5.0),
        (Decimal("1E3"), 1000),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Name.ANNA, "anna"),
        (np.int64(-5), -5),
        (np.float32(0.1), 0.10000000149011612),
        (np.float64(0.5), 0.5),
        (np.bool_(False), False),
        (np.str_("é"), "é"),
        (np.datetime64("2024-05-31"), "2024-05-31"),
        (np.datetime64("2024-05-31T12:00:00.000000005"), "2024-05-31T12:00:00.000000005"),
        (np.array(7), 7),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array(["2024-01-01"], dtype="datetime64[D]"), ["2024-01-01"]),
        (np.array([date(2024, 1, 1), None], dtype=object), ["2024-01-01", None]),
        ((1, (2, [3])), [1, [2, [3]]]),
        ({"a": {"b": [date(2024, 1, 1), {"c": Decimal("0.5")}]}}, {"a": {"b": ["2024-01-01", {"c": 0.5}]}}),
        (MappingProxyType({Name.ANNA: 1, np.str_("x"): 2}), {"anna": 1, "x": 2}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_python_are_stored_as_json_has_them(value, stored):
    record = Record("a", "t", {"x": value})
    assert record.metadata == {"x": stored}
    assert json.loads(json.dumps(record.metadata)) == record.metadata
    assert all(type(key) is str for key in record.metadata)
    assert type(record.metadata["x"]) is type(stored)
    assert Record("a", "t", record.metadata) == record


class NotATime(datetime):
    """As pandas.NaT: a datetime that does not equal itself."""

    __hash__ = None

    def __eq__(self, other):
        return False

    def __ne__(self, other):
        return True


WAYS_OUT = {
    set: "store sorted(value)",
    bytes: "store base64 as a str",
    PurePosixPath: "store str(value)",
    np.float32: "a finite number or None",
    NotATime: "store None",
}


@pytest.mark.parametrize(
    "value",
    [
        float("inf"),
        np.float32("nan"),
        np.array([1.0, np.inf]),
        Decimal("NaN"),
        Decimal("1E400"),
        Decimal(2**63),
        np.uint64(2**64 - 1),
        np.datetime64("NaT"),
        np.timedelta64("NaT"),
        np.timedelta64(2, "Y"),
        NotATime(2024, 1, 1),
        1j,
        {"a"},
        range(3),
        Fraction(1, 4),
        PurePosixPath("a/b"),
        Colour.RED,
        b"x",
        object(),
        iter(()),
        {1: 2},
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_json_cannot_hold_are_refused_by_name(value):
    with pytest.raises(InvalidRequestError, match=r"metadata\['x'\]\['y'\]") as caught:
        Record("a", "t", {"x": {"y": value}})
    assert WAYS_OUT.get(type(value), "") in str(caught.value)


def test_a_list_that_holds_itself_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(InvalidRequestError, match="deeper than 32"):
        Record("a", "t", {"x": endless})


def test_a_record_has_a_copy_of_its_metadata():
    tags, metadata = ["a"], {}
    metadata["tags"] = tags
    record = Record("a", "t", metadata)
    tags.append("b")
    metadata["later"] = 1
    assert record.metadata == {"tags": ["a"]}


def test_strings_of_numpy_become_pythons():
    record = Record(np.str_("a"), np.str_("t"))
    assert type(record.id) is type(record.text) is str


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("", "text"), "id is empty"),
        ((None, "text"), "id is missing"),
        ((5, "text"), "id is of type int"),
        (("a\0b", "text"), "NUL"),
        (("\ud800", "text"), "id holds a lone surrogate at character 0"),
        (("é" * 2049, "text"), "4098 bytes; at most 4096"),
        (("a", None), "text is missing"),
        (("a", b"text"), "text is of type bytes"),
        (("a", "ab\udfff"), "text holds a lone surrogate at character 2"),
        (("a", "", None), "metadata is a NoneType"),
        (("a", "", [1]), "metadata is a list"),
        (("a", "", {1: 2}), "a key of metadata is of type int"),
        (("a", "", {"x": {"y": [0, float("nan")]}}), r"metadata\['x'\]\['y'\]\[1\]=nan"),
        (("a", "", {"x": 2**63}), "does not fit 64 bits"),
        (("a", "", {"x": "\ud800"}), "lone surrogate"),
        (("a", "", {"\ud800": 1}), "lone surrogate"),
    ],
)
def test_a_record_that_no_database_can_store_is_refused_at_construction(fields, message):
    with pytest.raises(InvalidRequestError, match=message):
        Record(*fields)


def test_the_package_imports_its_names_lazily():
    import millpond.ingest as package

    assert all(getattr(package, name) is not None for name in package.__all__)
    assert dir(package) == sorted(package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Recrod'"):
        package.Recrod  # noqa: B018
