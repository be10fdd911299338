"""The parts that sinks share: batches, request sizes, manifests and URLs."""

import json
import sys
import textwrap
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ingest.memory_sink import MemoryConnection, MemorySink

from millpond import EmbeddingOutput, ModelSpec, Usage
from millpond.errors import FingerprintMismatchError, InvalidRequestError, SinkError, SinkUnavailableError
from millpond.ingest import CollectionManifest, Record, WriteBatch, open_sink
from millpond.ingest.sinks.batch import record_bytes, slices
from millpond.ingest.sinks.client import is_address
from millpond.ingest.sinks.manifest import MANIFEST_KEY
from millpond.ingest.sinks.search import plan_search

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


def test_a_part_of_a_batch_has_the_rows_of_its_slice():
    part = WriteBatch(records=RECORDS, ids=("1", "2"), vectors={4: UNIT}).part(slice(1, 2))
    assert (list(part.records), list(part.ids), part.vectors[4].tolist()) == ([RECORDS[1]], ["2"], [UNIT[1].tolist()])


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
def test_an_invalid_batch_cannot_be_made(changes, message):
    with pytest.raises(InvalidRequestError, match=message):
        WriteBatch(**{"records": RECORDS, "ids": ("1", "2"), "vectors": {4: UNIT}} | changes)


@given(st.lists(st.integers(1, 50)), st.integers(1, 6), st.integers(1, 100))
def test_requests_hold_every_row_once_within_the_limits(sizes, rows, size):
    parts = list(slices(sizes, max_rows=rows, max_bytes=size))
    assert [index for part in parts for index in range(len(sizes))[part]] == list(range(len(sizes)))
    for part in parts:
        taken = sizes[part]
        assert 1 <= len(taken) <= rows and (sum(taken) <= size or len(taken) == 1)
    for one, two in pairwise(parts):  # every part but the last is full
        assert one.stop - one.start == rows or sum(sizes[one]) + sizes[two.start] > size


def test_a_records_bytes_are_utf8():
    assert record_bytes(Record("é", "ü" * 10)) == 2 + 20 + len("{}")
    assert record_bytes(Record("a", "", {"k": "é"})) == 1 + len('{"k": "é"}'.encode())


@pytest.mark.parametrize("bad", [[], 128, "128", [128, 0], [True], [128.0]])
def test_invalid_widths_are_refused(bad):
    with pytest.raises(InvalidRequestError, match="dimensions="):
        MemorySink(":memory:", "docs", dimensions=bad)
    assert MemorySink(":memory:", "docs", dimensions=[384, 128, np.int64(128)]).dimensions == (128, 384)


@pytest.mark.parametrize("value", [0, np.nan])
def test_a_question_whose_vector_is_zero_or_nan_is_refused(value):
    class Flat:
        spec = spec(dimensions=4)

        def embed(self, texts, *, role, dimensions, normalize):
            assert (texts, role, dimensions, normalize) == (["?"], "query", 4, False)
            rows = np.full((1, 4), value, np.float32)
            return EmbeddingOutput(embeddings=rows, cached=None, truncated=None, usage=Usage(prompt_tokens=1))

    with pytest.raises(InvalidRequestError, match="nothing is nearest"):
        plan_search(Flat(), "?", widths=[2, 4], k=1, coarse_to_fine=True, candidates=None)


def test_without_dimensions_a_collection_has_the_width_that_embed_returns():
    assert CollectionManifest.of(spec(), dimensions=None, fields="plain").dimensions == (384,)
    assert CollectionManifest.of(spec(default_dimensions=64), dimensions=None, fields="plain").dimensions == (64,)


def test_a_manifest_without_settings_is_stored_as_these_five_fields():
    # Collections on disk hold this: a change needs another schema number, and a reader of this one.
    stored = {
        "schema": 1,
        "fingerprint": "f" * 64,
        "model": "org/model",
        "dimensions": [128, 384],
        "payload": "langchain",
    }
    manifest = CollectionManifest(fingerprint="f" * 64, model="org/model", dimensions=(128, 384), fields="langchain")
    assert MANIFEST_KEY == "millpond"
    assert manifest.to_dict() == stored
    assert json.dumps(manifest.to_dict()) == json.dumps(stored)  # the order too, as Milvus stores a string
    assert CollectionManifest.from_dict(stored, collection="docs") == manifest
    for field in stored:
        with pytest.raises(FingerprintMismatchError, match="cannot read"):
            CollectionManifest.from_dict({k: v for k, v in stored.items() if k != field}, collection="docs")


SETTINGS = {
    "revision": None,
    "max_length": 256,
    "pooling": "mean",
    "include_prompt": True,
    "quantization": None,
    "convert": "auto",
    "default_prompt_name": None,
    "prompts": {"query": "query: ", "long": "x" * 500},
    "hf_overrides": {},
}


def test_settings_are_stored_beside_the_five_fields_and_an_earlier_version_ignores_them():
    manifest = CollectionManifest.of(spec(settings=SETTINGS), dimensions=None, fields="plain")
    stored = manifest.to_dict()
    assert stored["schema"] == 1 and list(stored)[-1] == "settings"
    assert {**stored["settings"], "prompts": None} == {**SETTINGS, "prompts": None}
    assert stored["settings"]["prompts"]["query"] == "query: "
    assert stored["settings"]["prompts"]["long"].startswith("x" * 200 + "... (sha256 ")
    assert CollectionManifest.from_dict(json.loads(json.dumps(stored)), collection="docs") == manifest
    hash(manifest)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"max_length": 64}, ["256 (", "max_length=64 (", "engine with max_length=256,"]),
        (
            {"pooling": "cls"},
            ["pooling='mean' (", "pooling='cls' (", "Open the engine with pooling='mean', or another"],
        ),
        ({"max_length": 64, "hf_overrides": {"x": 1}}, ["engine with max_length=256, hf_overrides={}, or"]),
        ({"prompts": {"query": "Q: "}}, ["prompts['query']='query: '", "prompts['query']='Q: '", "Use the checkpoint"]),
        ({"prompts": {"query": "Q: "}}, ["prompts['long']='xxx", "prompts['long']=None"]),
        ({"default_prompt_name": "q"}, ["default_prompt_name=None", "default_prompt_name='q'", "Use the checkpoint"]),
        ({}, ["their files differ (weights, tokenizer or configuration)", "Use the files that it was built from"]),
    ],
)
def test_the_settings_that_differ_are_named_with_both_values_and_the_way_out(changes, parts):
    manifest = CollectionManifest.of(spec(settings=SETTINGS), dimensions=None, fields="plain")
    other = spec(fingerprint="e" * 64, settings=SETTINGS | changes)
    with pytest.raises(FingerprintMismatchError, match="vectors of two models do not compare") as caught:
        manifest.check_model(other, collection="docs")
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_manifest_of_an_earlier_version_says_that_it_does_not_name_settings():
    stored = CollectionManifest.of(spec(), dimensions=None, fields="plain").to_dict()
    assert "settings" not in stored
    manifest = CollectionManifest.from_dict(stored, collection="docs")
    with pytest.raises(FingerprintMismatchError, match="or settings, which the collection of an older"):
        manifest.check_model(spec(fingerprint="e" * 64, settings=SETTINGS), collection="docs")
    for settings in (None, "text", [], {"max_length": 256}, {"later": 1}):
        manifest = CollectionManifest.from_dict({**stored, "settings": settings}, collection="docs")
        with pytest.raises(FingerprintMismatchError):
            manifest.check_model(spec(fingerprint="e" * 64, settings=SETTINGS), collection="docs")


def test_a_manifest_names_a_folder_without_its_path(tmp_path):
    (tmp_path / "my-model").mkdir()
    assert CollectionManifest.of(spec(f"{tmp_path}/my-model/"), dimensions=None, fields="plain").model == "my-model"
    assert CollectionManifest.of(spec(), dimensions=None, fields="plain").model == "org/model"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with an entry point, which importlib finds as installed."""
    (tmp_path / "shelf-1.0.dist-info").mkdir()
    (tmp_path / "shelf-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    (tmp_path / "shelf-1.0.dist-info" / "entry_points.txt").write_text("[millpond.sinks]\nshelf = shelf:sink\n")
    (tmp_path / "shelf.py").write_text(
        textwrap.dedent("""
            def sink(scheme, location, collection, *, dimensions, fields):
                return scheme, location, collection, dimensions, fields
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("shelf", None)
    yield
    sys.modules.pop("shelf", None)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("shelf+memory:#docs", ("memory", "", "docs")),
        ("shelf+path:some/dir#docs", ("path", "some/dir", "docs")),
        ("shelf+path:a#b:c#docs", ("path", "a#b:c", "docs")),
        ("shelf+http://host:6333#docs", ("http", "//host:6333", "docs")),
        (r"shelf+file:C:\x.db#docs", ("file", r"C:\x.db", "docs")),
        ("SHELF+HTTP://Host:6333#Docs", ("http", "//Host:6333", "Docs")),
    ],
)
def test_a_url_is_split_for_the_package_of_its_kind(installed, url, parts):
    assert open_sink(url, dimensions=[128], fields="langchain") == (*parts, [128], "langchain")


def test_a_host_with_a_port_is_no_path():
    for location in ("localhost", "LOCALHOST/x", "host:6333", "Host:1/prefix", "[::1]:6333", "a:b@c:99"):
        assert is_address(location), location
        assert not any(is_address(f"{before}{location}") for before in ("./", "../", "/", "~/", "C:\\"))
    paths = ["db", "x.db", "a.b.c", "1.2", "C:/x", "c:\\x", "~/localhost:1", "a/localhost:1", "..", "x:y"]
    assert [path for path in paths if is_address(path)] == []


@pytest.mark.parametrize(
    "url", ["", "docs", "shelf:x#docs", "shelf+path:x", "shelf+path:x#", "+path:x#docs", "shelf+:x#d"]
)
def test_invalid_urls_are_refused(installed, url):
    with pytest.raises(InvalidRequestError, match="no URL of a collection"):
        open_sink(url)


def test_the_error_of_a_refused_url_hides_its_password():
    with pytest.raises(InvalidRequestError) as caught:
        open_sink("qdrant+https://user:hunter2@host")
    assert "hunter2" not in str(caught.value)


def test_a_kind_without_a_package_is_refused(installed):
    with pytest.raises(
        InvalidRequestError, match="no installed package writes to 'drawer' .*, shelf.*; correct the URL"
    ):
        open_sink("drawer+path:x#docs")


def test_a_database_describes_its_options(installed, tmp_path):
    (tmp_path / "shelf.py").write_text(
        "from millpond.ingest.sinks.database import database\n"
        "sink = database(options=['dimensions', 'fields', 'boards'])(lambda *place, **options: options)\n"
    )
    given = {"must_exist": True, "boards": 2}
    assert open_sink("shelf+path:x#docs", **given) == {**given, "dimensions": None}
    with pytest.raises(InvalidRequestError, match="colour='red' is no option .* takes boards, dimensions, fields"):
        open_sink("shelf+path:x#docs", colour="red")


class Waiting(MemoryConnection):
    """A database that answers when a test says so."""

    def __init__(self):
        super().__init__(":memory:", "docs")
        self.timeout, self.answer, self.hung_up = 0.05, threading.Event(), threading.Event()

    def hang_up(self):
        self.hung_up.set()


def test_a_request_that_hangs_is_given_up():
    connection = Waiting()
    with pytest.raises(SinkUnavailableError, match="did not answer a search within 0.05 s; pass a larger timeout"):
        connection.request("a search", connection.answer.wait)
    assert connection.hung_up.is_set()
    connection.answer.set()


def test_a_request_in_time_has_its_result_or_its_own_error():
    connection = Waiting()
    connection.timeout = 60
    assert connection.request("a search", lambda: 5) == 5
    assert threading.current_thread() is connection.request("an index", threading.current_thread, limited=False)

    def fails():
        raise TimeoutError("of the client")

    with pytest.raises(SinkError, match=r"cannot read \(TimeoutError\('of the client'\)"):
        connection.request("a search", fails)
    assert not connection.hung_up.is_set()


def test_a_collection_created_meanwhile_by_another_process_is_used_and_one_that_is_not_there_is_an_error(monkeypatch):
    sink = MemorySink(":memory:", "docs", dimensions=[64])
    sink.prepare(spec())
    late = MemorySink(sink.client, "docs", dimensions=[64])
    answers = iter([False, True])  # missing at the first look, present at the second
    monkeypatch.setattr(late._connection, "exists", lambda: next(answers, True))
    monkeypatch.setattr(late._driver, "create", lambda manifest: {}["exists already"])
    late.prepare(spec())
    assert late.count() == 0
    never = MemorySink(sink.client, "others", dimensions=[64])
    monkeypatch.setattr(never._driver, "create", lambda manifest: {}["no room"])
    with pytest.raises(SinkError, match="refused creating the collection: KeyError"):
        never.prepare(spec())
