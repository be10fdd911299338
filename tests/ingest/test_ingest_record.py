"""Records, their database ids and content hashes."""

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import InvalidRequestError
from millpond.ingest import NAMESPACE, Record, content_hash, point_id

storable_text = st.text(st.characters(exclude_categories=["Cs"]))


def test_point_ids_never_change():
    # Changing either value would duplicate every row at the next ingest.
    assert str(NAMESPACE) == "c4e431ac-b6db-43ba-8435-74c9cee587c4"
    assert point_id("doc-1") == "248056cb-324d-5635-850e-8d1883494b48"
    assert point_id("doc-1", 1) == "e2db40ab-2006-5180-bed3-0dbf5b15a649"


def test_a_point_id_is_a_plain_uuid5():
    assert point_id("naïve/ä.md") == str(uuid.uuid5(NAMESPACE, "naïve/ä.md"))


@given(st.sets(st.tuples(storable_text.filter(lambda s: s and "\0" not in s), st.integers(0, 20)), min_size=2))
def test_no_two_chunks_share_a_point(chunks):
    assert len({point_id(record, chunk) for record, chunk in chunks}) == len(chunks)


@pytest.mark.parametrize("chunk", [-1, True, 1.0, "1", None])
def test_a_chunk_is_a_number(chunk):
    with pytest.raises(InvalidRequestError, match="chunk="):
        point_id("doc-1", chunk)


def test_content_hash_is_sha256_of_utf8():
    assert content_hash("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert content_hash("é") != content_hash("e\u0301")


def test_a_record_takes_its_fields_in_order():
    record = Record("a", "text", {"n": 1})
    assert (record.id, record.text, record.metadata) == ("a", "text", {"n": 1})
    assert Record("a", "").metadata == {}


def test_metadata_takes_every_json_value():
    Record(
        "a", "", {"s": "é😀", "b": True, "i": -(2**63), "f": 1.5, "n": None, "l": [1, ["x"]], "d": {"": {}}, "t": ()}
    )


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
        (("a", "", {"x": b""}), "of type bytes"),
        (("a", "", {"x": "\ud800"}), "lone surrogate"),
        (("a", "", {"\ud800": 1}), "lone surrogate"),
    ],
)
def test_a_record_that_no_database_can_store_is_refused_at_construction(fields, message):
    with pytest.raises(InvalidRequestError, match=message):
        Record(*fields)


def test_metadata_nested_without_end_is_refused():
    deep = {}
    for _ in range(40):
        deep = {"d": deep}
    with pytest.raises(InvalidRequestError, match="deeper than 32"):
        Record("a", "", deep)


def test_an_id_of_the_maximal_length_is_accepted():
    assert len(Record("x" * 4096, "").id) == 4096


def test_the_package_imports_its_names_lazily():
    import millpond.ingest as package

    assert all(getattr(package, name) is not None for name in package.__all__)
    assert dir(package) == sorted(package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Recrod'"):
        package.Recrod  # noqa: B018
