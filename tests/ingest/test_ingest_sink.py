"""What sinks share: batches, request sizes, marks and URLs."""

import textwrap
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import FingerprintMismatchError, InvalidDimensionsError, InvalidRequestError, MissingExtraError
from millpond.ingest import Batch, CollectionMark, Record, open_sink
from millpond.ingest.batch import record_bytes, slices, storable
from millpond.ingest.payload import check_payload
from millpond.ingest.search import check_filter, plan_search
from millpond.ingest.sink import check_widths
from millpond.outputs import EmbeddingOutput, Usage
from millpond.spec import ModelSpec

RECORDS = (Record("a", "x"), Record("b", "y"))
UNIT = np.eye(2, 4, dtype=np.float32)


def spec(name="org/model", fingerprint="f" * 64, **changes):
    fields = {
        "name": name,
        "architecture": "BertModel",
        "model_type": "bert",
        "pooling": ("mean",),
        "normalize": True,
        "dimensions": 384,
        "hidden_size": 384,
        "matryoshka": True,
        "matryoshka_dimensions": None,
        "prompts": {},
        "default_prompt_name": None,
        "labels": (),
        "max_length": 256,
        "tasks": frozenset({"embed"}),
        "digest": lambda: fingerprint,
    }
    return ModelSpec(**fields | changes)


# --------------------------------------------------------------------------------------------------------- batches


def test_a_batch_knows_its_length():
    assert len(Batch(records=RECORDS, ids=("1", "2"), vectors={4: UNIT})) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": ("1",)}, "1 ids for 2 records"),
        ({"ids": ("1", "1")}, "an id occurs twice"),
        ({"vectors": {}}, "no vectors"),
        ({"vectors": {3: UNIT}}, r"width 3 have shape \(2, 4\), not \(2, 3\)"),
        ({"vectors": {4: UNIT[:1]}}, r"shape \(1, 4\)"),
        ({"vectors": {4: UNIT * np.array([[1], [np.nan]], np.float32)}}, "record 'b': its 4 floats are not finite"),
        ({"vectors": {4: UNIT * np.array([[0], [1]], np.float32)}}, "record 'a': .* or all zero"),
    ],
)
def test_a_batch_that_no_database_should_see_cannot_be_made(changes, message):
    with pytest.raises(InvalidRequestError, match=message):
        Batch(**{"records": RECORDS, "ids": ("1", "2"), "vectors": {4: UNIT}} | changes)


def test_storable_rows():
    rows = np.array([[1, 0], [0, 0], [np.inf, 1], [np.nan, 0], [0, -1e-30]], np.float32)
    assert storable(rows).tolist() == [True, False, False, False, True]


@given(st.lists(st.integers(1, 50)), st.integers(1, 6), st.integers(1, 100))
def test_requests_hold_every_row_once_and_no_more_than_they_may(sizes, rows, size):
    parts = list(slices(sizes, max_rows=rows, max_bytes=size))
    assert [index for part in parts for index in range(len(sizes))[part]] == list(range(len(sizes)))
    for part in parts:
        taken = sizes[part]
        assert 1 <= len(taken) <= rows and (sum(taken) <= size or len(taken) == 1)
    for one, two in pairwise(parts):  # none is cut short
        assert one.stop - one.start == rows or sum(sizes[one]) + sizes[two.start] > size


def test_a_records_bytes_are_utf8():
    assert record_bytes(Record("é", "ü" * 10)) == 2 + 20 + len("{}")
    assert record_bytes(Record("a", "", {"k": "é"})) == 1 + len('{"k": "é"}'.encode())


def test_widths_are_sorted_and_each_once():
    assert check_widths([384, 128, np.int64(128)]) == (128, 384) and check_widths(None) is None


@pytest.mark.parametrize("bad", [[], 128, "128", [0], [128, -1], [True], [128.0], ["128"], {128}])
def test_what_are_no_widths(bad):
    with pytest.raises(InvalidRequestError, match="dimensions="):
        check_widths(bad)


def test_payload_forms():
    assert [check_payload(form) for form in ("plain", "langchain", "llama_index")]
    with pytest.raises(InvalidRequestError, match="choose one of plain, langchain, llama_index"):
        check_payload("haystack")


def test_filters_are_lists_of_scalars():
    wanted = {"a": "x", "b": [1, 2.5], "c": True, "d": {"y"}}
    assert check_filter(wanted) == {"a": ("x",), "b": (1, 2.5), "c": (True,), "d": ("y",)}


@pytest.mark.parametrize(
    "bad", [{1: "x"}, {"a": []}, {"a": None}, {"a": {"b": 1}}, {"a": float("nan")}, {"a": [["x"]]}, {"a": b""}]
)
def test_what_is_no_filter(bad):
    with pytest.raises(InvalidRequestError, match="filter"):
        check_filter(bad)


@pytest.mark.parametrize("value", [0, np.nan])
def test_a_question_without_a_direction_has_no_neighbours(value):
    class Flat:
        spec = spec(dimensions=4)

        def embed(self, texts, *, role, dimensions, normalize):
            assert (texts, role, dimensions, normalize) == (["?"], "query", 4, False)
            rows = np.full((1, 4), value, np.float32)
            return EmbeddingOutput(embeddings=rows, cached=None, truncated=None, usage=Usage(prompt_tokens=1))

    with pytest.raises(InvalidRequestError, match="nothing is nearest"):
        plan_search(Flat(), "?", widths=[2, 4], k=1, funnel=True, candidates=None)


# ----------------------------------------------------------------------------------------------------------- marks


def test_a_mark_survives_its_storage():
    mark = CollectionMark.of(spec(), dimensions=(128, 384), payload="plain")
    assert CollectionMark.from_dict(mark.to_dict(), collection="docs") == mark
    assert CollectionMark.of(spec(), dimensions=None, payload="plain").dimensions == (384,)
    assert CollectionMark.of(spec(default_dimensions=64), dimensions=None, payload="plain").dimensions == (64,)


def test_a_mark_names_a_folder_without_telling_where_it_is(tmp_path):
    (tmp_path / "my-model").mkdir()
    assert CollectionMark.of(spec(f"{tmp_path}/my-model/"), dimensions=None, payload="plain").model == "my-model"
    assert CollectionMark.of(spec(), dimensions=None, payload="plain").model == "org/model"


def test_a_mark_is_only_of_widths_the_model_has():
    with pytest.raises(InvalidDimensionsError):
        CollectionMark.of(spec(matryoshka=False), dimensions=(128,), payload="plain")


@pytest.mark.parametrize(
    "data", [{}, [], "text", {"schema": 2}, {"schema": 1, "fingerprint": "f", "model": "m", "dimensions": 4}]
)
def test_a_mark_of_another_schema_is_an_error_not_a_guess(data):
    with pytest.raises(FingerprintMismatchError, match="cannot read"):
        CollectionMark.from_dict(data, collection="docs")


def test_marks_that_do_not_fit():
    mark = CollectionMark.of(spec(), dimensions=(128, 384), payload="plain")
    other = spec("org/other", "e" * 64)
    with pytest.raises(FingerprintMismatchError, match="was built by org/model .* this engine is org/other"):
        mark.check_model(other, collection="docs")
    with pytest.raises(InvalidRequestError, match=r"holds the widths \[128, 384\].* pass dimensions=\[128, 384\]"):
        mark.check_write(CollectionMark.of(spec(), dimensions=None, payload="plain"), spec(), collection="docs")
    wanted = CollectionMark.of(spec(), dimensions=(128, 384), payload="langchain")
    with pytest.raises(InvalidRequestError, match="form 'plain'.* pass payload='plain'"):
        mark.check_write(wanted, spec(), collection="docs")
    with pytest.raises(InvalidRequestError, match=r"not \[64\]; choose among \[128, 384\]"):
        mark.widths_to_search((64, 384), collection="docs")
    assert mark.widths_to_search(None, collection="docs") == (128, 384)
    assert mark.widths_to_search((128,), collection="docs") == (128,)


# ------------------------------------------------------------------------------------------------------------ URLs


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with an entry point, installed as far as importlib can tell."""
    (tmp_path / "shelf-1.0.dist-info").mkdir()
    (tmp_path / "shelf-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    (tmp_path / "shelf-1.0.dist-info" / "entry_points.txt").write_text("[millpond.sinks]\nshelf = shelf:sink\n")
    (tmp_path / "shelf.py").write_text(
        textwrap.dedent("""
            def sink(scheme, location, collection, *, dimensions, payload):
                return scheme, location, collection, dimensions, payload
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("shelf+memory:#docs", ("memory", "", "docs")),
        ("shelf+path:some/dir#docs", ("path", "some/dir", "docs")),
        ("shelf+path:a#b:c#docs", ("path", "a#b:c", "docs")),
        ("shelf+http://host:6333#docs", ("http", "//host:6333", "docs")),
        (r"shelf+file:C:\x.db#docs", ("file", r"C:\x.db", "docs")),
    ],
)
def test_a_url_is_taken_apart_for_the_package_that_knows_it(installed, url, parts):
    assert open_sink(url, dimensions=[128], payload="langchain") == (*parts, [128], "langchain")


@pytest.mark.parametrize(
    "url", ["", "docs", "shelf:x#docs", "shelf+path:x", "shelf+path:x#", "+path:x#docs", "shelf+:x#d"]
)
def test_what_is_no_url(installed, url):
    with pytest.raises(InvalidRequestError, match="no URL of a collection"):
        open_sink(url)


def test_a_refused_url_keeps_its_password():
    with pytest.raises(InvalidRequestError) as caught:
        open_sink("qdrant+https://user:hunter2@host")
    assert "hunter2" not in str(caught.value)


def test_an_unknown_kind_is_not_a_package_to_install(installed):
    with pytest.raises(InvalidRequestError, match="choose one of milvus, qdrant, shelf"):
        open_sink("drawer+path:x#docs")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("millpond.ingest.url.entry_points", lambda group: ())
    with pytest.raises(MissingExtraError, match="pip install millpond-qdrant"):
        open_sink("qdrant+memory:#docs")
