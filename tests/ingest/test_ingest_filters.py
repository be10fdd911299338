"""Metadata of any key, in every field layout of every database: a filter finds what Python finds, or is refused."""

import operator
import re

import pytest
from tests.tiny import write_checkpoint

from millpond import Engine
from millpond.errors import InvalidRequestError
from millpond.ingest import Record, ingest

QdrantSink = pytest.importorskip("millpond_qdrant").QdrantSink
MilvusSink = pytest.importorskip("millpond_milvus").MilvusSink
pytest.importorskip("milvus_lite")
pytestmark = pytest.mark.contract

FORMS = ["plain", "langchain", "llama_index"]
STORE = ["_node_content", "_node_type", "document_id", "doc_id", "ref_doc_id", "content_hash"]  # LlamaIndex's own
FIELDS = ["id", "pk", "text", "metadata", "page_content", "record_id", "$meta", "d8", "d48", "d384", *STORE]
NAMES = ["lang", "a_b", "_x", "__x", "COUNT", "score", "vector", "_seq", "_partition", "row_id", "x" * 300]
WORDS = ["in", "and", "NOT", "true", "null", "exists", "LIKE", "is", "iso", "json_contains", "array_length"]
ODD = [
    "", " ", "a b", "a ", "a.b", "metadata.a", "a[0]", "[]", "$", "$x", "1", "01", "-1", "1.5", "a-b", "a/b", "*", "%",
    "é", "e\u0301", "漢字", "😀", "\u200b", "a\nb", "a\tb", "a\x01b", "a'b", 'a"b', "a\\b", "a:b", "(a)",
]  # fmt: skip
KEYS = [*FIELDS, *NAMES, *WORDS, *ODD]
VALUES = [7, "x", True, 0.5, ["p", "q", 6, 5.5, 0, 3], -3, "2024-02-29", ["y", "2024-02-01T10:00:00Z"]]
CONDITIONS = [7, "x", True, "p", ["q", -3], {"gte": 0.5, "lt": 7}, {"lt": 0}, {"gt": "2024-01-31", "lte": "2024-02-29"}]

REFUSED = {
    ("qdrant", "plain"): {'a"b', "a\\b"},
    ("qdrant", "langchain"): {'a"b', "a\\b"},
    ("qdrant", "llama_index"): {'a"b', "a\\b", *STORE},
    ("milvus", "plain"): set(),
    ("milvus", "langchain"): {"pk", "text", "record_id", "content_hash", "d8", "d48"},
    ("milvus", "llama_index"): {"id", "text", "d8", "d48", *STORE},
}
# What a row cannot carry: its record is left out, and counted as failed.
UNSTORED = {
    ("milvus", "langchain"): REFUSED["milvus", "langchain"] | {"$meta", "$", "$x", "_seq", "_partition"},
    ("milvus", "llama_index"): {"$meta", "$", "$x"},
}


def records():
    return [Record(f"{n}/{m}", "a text", {key: value}) for n, key in enumerate(KEYS) for m, value in enumerate(VALUES)]


def matches(metadata, key, condition):
    """Whether a record meets a condition; a bool equals no number. Of the values, those with a digit are dates."""
    if key not in metadata:
        return False
    stored = metadata[key] if isinstance(metadata[key], list) else [metadata[key]]
    if isinstance(condition, dict):
        kind = next(iter({type(bound) for bound in condition.values()} - {float}), float)
        placed = [v for v in stored if (type(v) is str and v[0] == "2" if kind is str else type(v) in (int, float))]
        signs = {"gt": operator.gt, "gte": operator.ge, "lt": operator.lt, "lte": operator.le}
        return any(all(signs[word](value, bound) for word, bound in condition.items()) for value in placed)
    accepted = condition if isinstance(condition, list) else [condition]
    return any(a == b and isinstance(a, bool) == isinstance(b, bool) for a in stored for b in accepted)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("filters") / "model", "bert")
    with Engine(folder, dtype="float32", device="cpu", hf_overrides={"is_matryoshka": True}) as engine:
        yield engine


@pytest.fixture(scope="module", params=[(kind, form) for kind in ("qdrant", "milvus") for form in FORMS], ids="-".join)
def filled(request, engine, tmp_path_factory):
    """A sink that holds a record for each key and value, and which database and form it is."""
    kind, form = request.param
    place = ":memory:" if kind == "qdrant" else tmp_path_factory.mktemp(form) / "x.db"
    with (QdrantSink if kind == "qdrant" else MilvusSink)(place, "docs", dimensions=[8, 48], fields=form) as sink:
        report = ingest(records(), engine=engine, sink=sink, show_progress=False)
        assert report.failed == len(VALUES) * len(UNSTORED.get(request.param, ()))
        assert report.written + report.failed == len(KEYS) * len(VALUES)
        yield sink, kind, form


def test_every_key_that_is_stored_comes_back(engine, filled):
    sink, kind, form = filled
    stored = {hit.id: dict(hit.metadata) for hit in sink.search(engine, "a text", k=1000, candidates=1000)}
    lost = UNSTORED.get((kind, form), set())
    assert stored == {r.id: r.metadata for r in records() if not lost & r.metadata.keys()}


def refused(sink, engine, filter, message):
    for use in (sink.delete, lambda filter: sink.search(engine, "a text", filter=filter)):
        with pytest.raises(InvalidRequestError, match=message):
            use(filter=filter)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: ascii(key[:20]))
def test_a_filter_finds_what_python_finds_or_is_refused_by_name(engine, filled, key):
    sink, kind, form = filled
    lost = UNSTORED.get((kind, form), set())
    for condition in CONDITIONS:
        if key in REFUSED[kind, form]:
            refused(sink, engine, {key: condition}, rf"^filter key {re.escape(repr(key))} .*; rename the key")
            continue
        expected = {r.id for r in records() if not lost & r.metadata.keys() and matches(r.metadata, key, condition)}
        assert {
            hit.id for hit in sink.search(engine, "a text", k=1000, coarse_to_fine=False, filter={key: condition})
        } == expected
    assert sink.count() == len(KEYS) * len(VALUES) - len(VALUES) * len(lost)


@pytest.mark.parametrize(
    "condition",
    [None, [None], [7, None], {}, {"gte": "7"}, {"$exists": True}, float("nan"), float("-inf"), b"x", [["x"]], []],
    ids=repr,
)
def test_a_condition_that_is_no_value_is_refused_by_name(engine, filled, condition):
    sink, _, _ = filled
    refused(sink, engine, {"lang": condition}, r"^filter\['lang'\]")
