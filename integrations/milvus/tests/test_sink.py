"""Milvus only: limits, names, filters, and servers that do not answer. The rest is in the contract tests."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from pymilvus import DataType, MilvusClient

from millpond import Engine, FingerprintMismatchError, InvalidRequestError, MissingExtraError
from millpond.ingest import IngestReport, Record, SinkError, ingest, open_sink
from millpond_milvus import MilvusSink, sink_from_url

pytestmark = pytest.mark.contract


def fill(engine: Engine, sink: MilvusSink, records: list[Record]) -> IngestReport:
    return ingest(records, engine=engine, sink=sink, show_progress=False)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "x.db")


def test_fields_are_named_by_width_and_the_collection_marked(engine: Engine, records: list[Record], uri: str) -> None:
    with MilvusSink(uri, "docs", dimensions=[384, 128]) as sink:
        fill(engine, sink, records)
        described = sink.client.describe_collection("docs")
        fields = {field["name"]: field for field in described["fields"]}
        assert sorted(fields) == ["content_hash", "d128", "d384", "id", "metadata", "pk", "text"]
        assert fields["pk"]["is_primary"] and fields["d128"]["params"]["dim"] == 128
        assert fields["metadata"]["type"] == DataType.JSON
        assert engine.spec.fingerprint in described["properties"]["millpond"]
        index = sink.client.describe_index("docs", "d128")
        assert (index["index_type"], index["metric_type"]) == ("FLAT", "COSINE")


@pytest.mark.parametrize("form", ["plain", "langchain", "llama_index"])
def test_a_text_too_long_for_a_field_does_not_fail_its_batch(
    engine: Engine, uri: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    longest = "ä" * 32_767 + "x"  # 65,535 bytes of UTF-8
    records = [Record("a", "short"), Record("b", longest), Record("c", longest + "x"), Record("d", "short too")]
    with MilvusSink(uri, "docs", fields=form) as sink:
        report = fill(engine, sink, records)
        assert (report.read, report.failed, report.written, sink.count()) == (4, 1, 3, 3)
        assert "left out record 'c': its text has 65536 bytes; Milvus stores at most 65535" in caplog.text
        assert {hit.id: hit.text for hit in sink.search(engine, "x")}["b"] == longest


@pytest.mark.parametrize("form", ["plain", "langchain", "llama_index"])
def test_metadata_that_is_too_large_is_left_out(
    engine: Engine, uri: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    with MilvusSink(uri, "docs", fields=form) as sink:
        report = fill(engine, sink, [Record("a", "x", {"k": "x" * 70_000}), Record("b", "x", {"k": "x" * 30_000})])
        assert (report.failed, report.written) == (1, 1)
    assert "bytes as JSON; Milvus stores at most 65536" in caplog.text


@pytest.mark.parametrize("key", ["pk", "text", "record_id", "content_hash", "d384", "$meta", "_seq", "_partition"])
def test_langchains_layout_refuses_metadata_named_like_its_fields(
    engine: Engine, uri: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    with MilvusSink(uri, "docs", fields="langchain") as sink:
        report = fill(engine, sink, [Record("a", "x", {key: "mine"}), Record("b", "x", {"other": 1})])
    assert (report.failed, report.written) == (1, 1)
    assert "rename the key" in caplog.text or "keeps for itself" in caplog.text


def test_the_other_layouts_take_any_key(engine: Engine, uri: str) -> None:
    metadata = {"pk": 1, "text": 2, "record_id": 3, "content_hash": 4, "d384": 5, "id": 6, "_node_content": 7}
    for form in ("plain", "llama_index"):
        with MilvusSink(uri, form, fields=form) as sink:
            fill(engine, sink, [Record("a", "x", metadata)])
            (hit,) = sink.search(engine, "x")
            assert (hit.id, hit.text, hit.metadata) == ("a", "x", metadata)


@pytest.mark.parametrize("options", [{"k": 16_385}, {"candidates": 16_385}])
def test_no_search_exceeds_the_limit_of_the_server(
    engine: Engine, records: list[Record], uri: str, options: dict[str, int]
) -> None:
    with MilvusSink(uri, "docs", dimensions=[64, 384]) as sink:
        fill(engine, sink, records)
        with pytest.raises(InvalidRequestError, match="16385 is more than Milvus hands out"):
            sink.search(engine, "anything", **options)
        assert len(sink.search(engine, "anything", k=2000)) == 12  # where candidates would default to 20,000


def test_a_native_expression_is_passed_on(engine: Engine, records: list[Record], uri: str) -> None:
    with MilvusSink(uri, "docs", dimensions=[64, 384]) as sink:
        fill(engine, sink, records)
        hits = sink.search(engine, "anything", filter='metadata["n"] < 3')
        assert {hit.id for hit in hits} == {"doc-0", "doc-1", "doc-2"}
        with pytest.raises(SinkError, match="refused a search"):
            sink.search(engine, "anything", filter="this is (no expression")


def test_filters_of_lists_negative_numbers_words_and_fields(engine: Engine, uri: str) -> None:
    records = [Record("a", "x", {"n": [-1, 2], "in": "word"}), Record("b", "x", {"n": -1, "k": 'a"\\\n'})]
    for form in ("plain", "llama_index"):
        with MilvusSink(uri, form, fields=form) as sink:
            fill(engine, sink, records)
            for filter, wanted in (({"n": -1}, "ab"), ({"n": 2}, "a"), ({"in": "word"}, "a"), ({"k": 'a"\\\n'}, "b")):
                assert "".join(sorted(hit.id for hit in sink.search(engine, "x", filter=filter))) == wanted
            for key in ("doc_id", "d384") if form == "llama_index" else ():
                with pytest.raises(InvalidRequestError, match=f"'{key}' is a field of the collection.* rename the key"):
                    sink.search(engine, "x", filter={key: "x"})


def test_a_foreign_row_that_cannot_be_read_is_not_blamed_on_the_database(engine: Engine, uri: str) -> None:
    with MilvusSink(uri, "docs", dimensions=[384], fields="llama_index") as sink:
        sink.prepare(engine.spec)
        row = engine.embed(["x"], role="document", normalize=True).embeddings[0]
        foreign = {"id": "p", "doc_id": "d", "text": "x", "d384": row, "_node_content": "{broken"}
        sink.client.insert("docs", [foreign])
        with pytest.raises(SinkError, match="'docs' holds the row 'p', whose fields do not have the layout") as caught:
            sink.search(engine, "x", k=1)
        assert "Milvus at" not in str(caught.value) and isinstance(caught.value.__cause__, ValueError)


def test_a_foreign_collection_is_left_alone_whatever_its_widths(
    engine: Engine, uri: str, records: list[Record]
) -> None:
    client = MilvusClient(uri)
    client.create_collection("docs", dimension=384)
    sink = MilvusSink(client, "docs")
    with pytest.raises(FingerprintMismatchError, match="was not made by millpond"):
        fill(engine, sink, records)
    with pytest.raises(FingerprintMismatchError, match="was not made by millpond"):
        sink.search(engine, "anything")
    assert sink.count() == 0
    client.close()


def test_a_collection_left_half_made_is_finished(engine: Engine, uri: str, records: list[Record]) -> None:
    with MilvusSink(uri, "docs", dimensions=[64, 384]) as sink:
        sink.prepare(engine.spec)
        sink.client.release_collection("docs")
        sink.client.drop_index("docs", "d64")
        again = MilvusSink(sink.client, "docs", dimensions=[64, 384])
        fill(engine, again, records)
        assert len(again.search(engine, "anything")) == 10


def test_a_collection_that_was_released_is_loaded_again(engine: Engine, uri: str, records: list[Record]) -> None:
    with MilvusSink(uri, "docs", dimensions=[64]) as sink:
        fill(engine, sink, records)
        for use in (
            lambda other: other.prepare(engine.spec),
            lambda other: other.search(engine, "anything"),
            lambda other: other.count(),
            lambda other: other.delete(["nobody"]),
        ):
            sink.client.release_collection("docs")
            use(MilvusSink(sink.client, "docs", dimensions=[64]))
            assert len(sink.search(engine, "anything")) == 10


@pytest.mark.parametrize("stored", ["not json", "[]", "{}"])
def test_an_unreadable_manifest_is_an_error(engine: Engine, uri: str, stored: str) -> None:
    with MilvusSink(uri, "docs") as sink:
        sink.prepare(engine.spec)
        sink.client.alter_collection_properties("docs", properties={"millpond": stored})
        with pytest.raises(FingerprintMismatchError, match="cannot read"):
            MilvusSink(sink.client, "docs").prepare(engine.spec)


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "http://host:99999", "https://[::1"])
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="is no URL of a Milvus .*; write http://host:19530"):
        MilvusSink(url, "docs", timeout=1)


@pytest.mark.parametrize("place", ["localhost", "milvus:19530", "user:hunter2@host:19530"])
def test_an_address_is_not_taken_for_a_file(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for opened in (lambda: MilvusSink(place, "docs"), lambda: open_sink(f"milvus+file:{place}#docs")):
        with pytest.raises(
            InvalidRequestError, match="looks like the address of a server.*http://host:19530"
        ) as caught:
            opened()
        assert "hunter2" not in str(caught.value) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["~nobody-of-that-name/x.db", "a\0b.db", "x.sqlite"])
def test_invalid_places_are_refused(place: str) -> None:
    with pytest.raises(InvalidRequestError, match="is no place for Milvus"):
        MilvusSink(place, "docs")


@pytest.mark.parametrize("name", ["", "1docs", "my-docs", "ä", "x" * 256, "../docs"])
def test_names_milvus_would_refuse(uri: str, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="is no name for Milvus"):
        MilvusSink(uri, name)


def test_milvus_lite_missing(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "milvus_lite", None)
    with pytest.raises(MissingExtraError, match="pip install milvus-lite"):
        MilvusSink(uri, "docs")


def test_runs_from_threads_share_a_file(engine: Engine, uri: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    errors: list[BaseException] = []
    start = threading.Barrier(6)

    def run(n: int) -> None:
        start.wait()
        try:
            with MilvusSink(tmp_path / "link" / "x.db" if n % 3 else uri, f"c{n % 2}", dimensions=[16, 384]) as sink:
                for _ in range(2):
                    fill(engine, sink, [Record(f"{n}-{i}", f"text {i}", {"of": n}) for i in range(20)])
                assert len(sink.search(engine, "text 3", k=60, filter={"of": n})) == 20
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for collection in ("c0", "c1"):
        with MilvusSink(uri, collection) as sink:
            assert sink.count() == 60


def test_a_sink_that_is_closed_leaves_the_others_of_its_file_open(
    engine: Engine, uri: str, records: list[Record]
) -> None:
    with MilvusSink(uri, "docs") as sink:
        fill(engine, sink, records)
        other = MilvusSink(uri, "docs")
        other.close()
        with pytest.raises(SinkError, match="did not get a look for the collection: this sink is closed"):
            other.count()
        assert sink.count() == 12


@pytest.mark.parametrize(("scheme", "location"), [("file", ""), ("http", "host"), ("path", "x.db"), ("memory", "")])
def test_urls_of_other_schemes_are_refused(scheme: str, location: str) -> None:
    with pytest.raises(InvalidRequestError, match="does not name a Milvus"):
        sink_from_url(scheme, location, "docs")
