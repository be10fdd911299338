"""Chroma only: what is stored, what its own clients see, folders, servers, a full disk and kill -9."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import chromadb
import numpy as np
import pytest
from tests.ingest.batches import rows

from millpond import Engine, FingerprintMismatchError, InvalidRequestError
from millpond.errors import SinkRejectedError, SinkUnavailableError
from millpond.ingest import IngestReport, Record, SinkError, content_hash, ingest, open_sink, point_id
from millpond.testing import WordEngine
from millpond.testing import sink as contract
from millpond_chroma import ChromaSink, MillpondEmbeddingFunction, sink_from_url

pytestmark = pytest.mark.door


def fill(engine: Engine, sink: ChromaSink, records: list[Record]) -> IngestReport:
    return ingest(records, engine=engine, sink=sink, show_progress=False)


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "vectors")


def test_what_is_stored_is_chromas_own(engine: Engine, minilm: str, records: list[Record], place: str) -> None:
    with ChromaSink(place, "docs", dimensions=[64, 384]) as sink:
        assert fill(engine, sink, records).written == 12
        assert sink.collections() == ["docs"]
    client = chromadb.PersistentClient(place)
    assert sorted(each.name for each in client.list_collections()) == ["docs", "docs.d64"]
    docs = client.get_collection("docs", embedding_function=MillpondEmbeddingFunction(minilm, dtype="float32"))
    row = docs.get(ids=[point_id("doc-4")], include=["metadatas", "documents", "embeddings"])
    assert row["documents"] == [records[4].text]
    assert row["metadatas"] == [
        {
            "millpond:id": "doc-4",
            "millpond:content_hash": content_hash(records[4].text),
            "n": 4,
            "lang": "en",
            "tags": ["a"],
        }
    ]
    (vector,) = engine.embed([records[4].text], role="document", normalize=True).embeddings
    np.testing.assert_allclose(row["embeddings"][0], vector, atol=1e-6)
    found = docs.query(query_texts=["what moves blood?"], n_results=1, where={"tags": {"$contains": "a"}})
    assert found["ids"] == [[point_id("doc-4")]]
    narrow = client.get_collection("docs.d64", embedding_function=None).get(
        ids=[point_id("doc-4")], include=["metadatas", "documents", "embeddings"]
    )
    np.testing.assert_allclose(narrow["embeddings"][0], vector[:64] / np.linalg.norm(vector[:64]), atol=1e-6)
    assert narrow["documents"] == [None] and "millpond:content_hash" not in narrow["metadatas"][0]
    client.close()


def test_metadata_that_is_gone_is_gone(engine: Engine, place: str) -> None:
    old = {"a": 1, "b": "x", "c": {"deep": [1]}, "tags": ["p"], "day": "2024-01-31"}
    with ChromaSink(place, "docs", dimensions=[16, 384]) as sink:
        fill(engine, sink, [Record("one", "a mill", old)])
        fill(engine, sink, [Record("one", "a mill", {"b": "y"})])
        (hit,) = sink.search(engine, "mill")
        assert (hit.id, hit.metadata) == ("one", {"b": "y"})
        for condition in ({"a": 1}, {"b": "x"}, {"tags": "p"}, {"day": "2024-01-31"}, {"day": {"gt": "2000-01-01"}}):
            assert sink.search(engine, "mill", filter=condition) == []
        assert len(sink.search(engine, "mill", filter={"b": "y"})) == sink.count() == 1


NUMBERS = [1, 1.5, 2, -1, -0.5, 2**53, 2**53 + 1, float(2**53), 1e300, -(2**63), 2**63 - 1, True, "1", [1.5, 7], None]


@pytest.mark.parametrize("bound", [1, 1.5, -0.5, 2**53, 2**53 + 1, 1e300, -1e300, 2**63 - 1])
def test_numbers_are_compared_as_numbers(engine: Engine, place: str, bound: float) -> None:
    """Chroma compares an int with a float by cutting the fraction: ``{"$lt": 1.5}`` does not match 1."""

    def of(kept: Any) -> set[str]:
        values = {str(n): value if isinstance(value, list) else [value] for n, value in enumerate(NUMBERS)}
        numbers = {n: [v for v in each if type(v) in (int, float)] for n, each in values.items()}
        return {n for n, each in numbers.items() if any(map(kept, each))}

    records = [Record(str(n), f"mill {n}", {"v": value}) for n, value in enumerate(NUMBERS)]
    with ChromaSink(place, "docs") as sink:
        fill(engine, sink, records)
        for condition, kept in (
            (bound, lambda value: value == bound),
            ({"gt": bound}, lambda value: value > bound),
            ({"gte": bound}, lambda value: value >= bound),
            ({"lt": bound}, lambda value: value < bound),
            ({"lte": bound}, lambda value: value <= bound),
        ):
            assert {hit.id for hit in sink.search(engine, "mill", k=20, filter={"v": condition})} == of(kept), condition


def test_a_where_of_chroma_is_passed_on(engine: Engine, records: list[Record], place: str) -> None:
    with ChromaSink(place, "docs", dimensions=[64, 384]) as sink:
        fill(engine, sink, records)
        where = json.dumps({"$and": [{"n": {"$lt": 3}}, {"lang": {"$ne": "de"}}]})
        assert {hit.id for hit in sink.search(engine, "anything", filter=where)} == {"doc-0", "doc-1", "doc-2"}
        with pytest.raises(SinkError, match="Chroma at .* refused a search: .*where"):
            sink.search(engine, "anything", filter='{"n": {"$is": 3}}')
        for wrong in ("n < 3", "[1]", "3"):
            with pytest.raises(InvalidRequestError, match="is no JSON object"):
                sink.search(engine, "anything", filter=wrong)
        with pytest.raises(InvalidRequestError, match="has no condition"):
            sink.delete(filter="{}")
        sink.delete(filter=where)
        assert sink.count() == sink._driver.connection.of("docs.d64").count() == 9


def test_a_scan_goes_on_while_rows_are_deleted(engine: Engine, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond_chroma.connection.ChromaConnection.max_rows", 7)
    with ChromaSink(place, "docs", dimensions=[32]) as sink:
        sink.prepare(engine.spec)
        sink.write(rows(50, 32))
        seen = []
        for row_id, record_id in sink.scan():
            seen.append(record_id)
            sink.delete_rows([row_id])
        assert sorted(seen) == sorted(f"r{i}" for i in range(50)) and sink.count() == 0


def test_a_larger_collection_is_searched_by_its_graph(place: str) -> None:
    engine = WordEngine()
    texts = [f"word{n % 97} word{n % 89} word{n % 83}" for n in range(3000)]
    with ChromaSink(place, "docs", dimensions=[64, 384]) as sink:
        contract.fill(sink, engine, [Record(f"r{n}", text) for n, text in enumerate(texts)], (64, 384))
        assert sink.count() == 3000
    vectors = engine.embed(texts, dimensions=384, normalize=True).embeddings
    with ChromaSink(place, "docs") as sink:
        found = 0
        for n in range(0, 3000, 300):
            expected = {f"r{place}" for place in np.argsort(-(vectors @ vectors[n]))[:10]}
            found += len(expected & {hit.id for hit in sink.search(engine, texts[n], k=10, candidates=300)})
        assert found >= 90  # of 100: the graph of Chroma is approximate
        assert len(sink.search(engine, texts[0], k=2500)) == 2500


def test_a_foreign_or_renamed_collection_is_left_alone(engine: Engine, records: list[Record], place: str) -> None:
    client = chromadb.PersistentClient(place)
    client.create_collection("docs", embedding_function=None).add(ids=["a"], embeddings=[[1.0, 2.0]])
    with ChromaSink(place, "docs") as sink, pytest.raises(FingerprintMismatchError, match="was not made by millpond"):
        fill(engine, sink, records)
    assert client.get_collection("docs").count() == 1
    with ChromaSink(client, "mine", dimensions=[64, 384]) as sink:
        fill(engine, sink, records)
    client.get_collection("mine").modify(name="renamed")
    with (
        ChromaSink(client, "renamed", dimensions=[64, 384]) as sink,
        pytest.raises(SinkError, match="'renamed' of Chroma has lost 'renamed.d64'.*rename that one, too"),
    ):
        fill(engine, sink, records)
    client.get_collection("mine.d64", embedding_function=None).modify(name="renamed.d64")
    with ChromaSink(client, "renamed") as sink:
        assert sink.search(engine, "what moves blood around the body?", k=1)[0].id == "doc-4"
    client.delete_collection("renamed")  # and not that of its narrow vectors
    with ChromaSink(client, "renamed", dimensions=[64, 384]) as sink:
        fill(engine, sink, records[:3])
        assert sink.count() == sink._driver.connection.of("renamed.d64").count() == 3
    client.close()


def test_an_unreadable_manifest_is_an_error(engine: Engine, place: str) -> None:
    client = chromadb.PersistentClient(place)
    for name, text in (("one", "not json"), ("two", "[]"), ("three", "{}")):
        client.create_collection(name, metadata={"millpond": text}, embedding_function=None)
        with pytest.raises(FingerprintMismatchError, match="cannot read"):
            ChromaSink(client, name).prepare(engine.spec)
    client.close()


FULL = """
import os, resource, sys
from tests.ingest.batches import rows
from millpond.errors import SinkError
from millpond_chroma import ChromaSink
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
for n in range(6):
    sink = ChromaSink(sys.argv[1], "docs")
    sink.manifest = sink.open()
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(sys.argv[1] + "/chroma.sqlite3"), most))
    for n in range(2):
        try:
            sink.write(rows(400, 32, 50))
        except SinkError as error:
            print(type(error).__name__, error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert sink.count() == len(dict(sink.scan())) == 100
    sink.close()
with ChromaSink(sys.argv[1], "docs") as again:
    again.manifest = again.open()
    again.write(rows(400, 32, 50))
    print(again.count())
"""


def test_after_a_write_that_failed_nothing_is_written_until_it_is_opened_again(engine: Engine, place: str) -> None:
    """A file that cannot grow is what a full disk is. Chroma's next request may wait forever then: so in a process."""
    with ChromaSink(place, "docs", dimensions=[32]) as sink:
        assert sink.embedded
        sink.prepare(engine.spec)
        sink.write(rows(100, 32))
    run = subprocess.run([sys.executable, "-c", FULL, place], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    *told, count = run.stdout.splitlines()
    for failed, refused in zip(told[::2], told[1::2], strict=True):
        assert failed.startswith("SinkUnavailableError Chroma at ") and "refused an upsert of 400 records: " in failed
        assert "disk I/O error" in failed
        assert refused.startswith("SinkError") and "takes no more writes from this sink" in refused
    assert len(told) == 12 and count == "450"


WRITER = """
import sys
import numpy as np
from millpond.ingest import Record, WriteBatch, point_id
from millpond_chroma import ChromaSink
sink = ChromaSink(sys.argv[1], "docs", dimensions=[16, 32])
sink.manifest = sink.open()
random = np.random.default_rng(0)
for n in range(int(sys.argv[2]), 10**9, 50):
    records = [Record(f"r{i}", f"text {i}") for i in range(n, n + 50)]
    vectors = {d: random.normal(size=(50, d)).astype(np.float32) for d in (16, 32)}
    sink.write(WriteBatch(records=records, ids=[point_id(record.id) for record in records], vectors=vectors))
    print(n + 50, flush=True)
"""


@pytest.mark.slow
def test_a_killed_writer_loses_no_row_that_was_acknowledged(engine: Engine, place: str) -> None:
    with ChromaSink(place, "docs", dimensions=[16, 32]) as sink:
        sink.prepare(engine.spec)
    done, random = 0, np.random.default_rng(0)
    for _ in range(20):
        with subprocess.Popen([sys.executable, "-c", WRITER, place, str(done)], stdout=-1, text=True) as writer:
            assert writer.stdout is not None
            done = int(writer.stdout.readline())
            time.sleep(float(random.uniform(0, 0.3)))
            writer.send_signal(signal.SIGKILL)
            for line in writer.stdout:
                done = int(line)
        with ChromaSink(place, "docs") as sink:
            stored = {record_id for _, record_id in sink.scan()}
            assert len(stored) == sink.count() and stored >= {f"r{i}" for i in range(done)}
            assert len(stored) <= done + 50
            narrow = sink._driver.connection.of("docs.d16")
            assert narrow.count() >= len(stored)  # it is written first
            assert len(sink.search(engine, "anything", k=len(stored), candidates=narrow.count())) == len(stored)


@pytest.mark.parametrize("where", ["", "s3://bucket/x", "localhost:8000", "chroma"])
def test_what_is_neither_folder_nor_url_is_refused(where: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chroma").touch()
    with pytest.raises(InvalidRequestError, match="is neither a folder nor a URL|is a file"):
        ChromaSink(where, "docs")
    assert [each.name for each in tmp_path.iterdir()] == ["chroma"]


@pytest.mark.parametrize("url", ["http://user:key@host", "http://host/path", "http://host?key=1", "http://"])
def test_urls_with_more_than_a_host_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="more than a host and a port.*CHROMA_CLIENT_AUTH") as caught:
        ChromaSink(url, "docs")
    assert "key" not in str(caught.value).replace("A key comes", "")


@pytest.mark.parametrize("name", ["", "ab", ".docs", "docs-", "ä" * 4, "a/b/c", "../docs", "x" * 503, "a b c"])
def test_names_that_are_refused(place: str, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="is no name for Chroma; use 3 to 502"):
        ChromaSink(place, name)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point is known, whether or not the package is installed."""
    point = EntryPoint("chroma", "millpond_chroma:sink_from_url", "millpond.sinks")
    monkeypatch.setattr("millpond.ingest.sinks.database.entry_points", lambda group: [point])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": "langchain"}, "fields='langchain': .* pass fields='plain'"),
        ({"hybrid": True}, "this sink has no option 'hybrid'; it takes dimensions, fields, timeout"),
        ({"timeout": 0}, "timeout=0 must be"),
        ({"must_exist": True}, "there is no database of Chroma"),
    ],
)
@pytest.mark.usefixtures("registered")
def test_options_that_it_does_not_have_are_refused(place: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        open_sink(f"chroma+path:{place}#docs", **options)
    assert not Path(place).exists()


@pytest.mark.usefixtures("registered")
def test_a_url_opens_a_folder(engine: Engine, records: list[Record], place: str) -> None:
    sink = open_sink(f"chroma+path:{place}#docs", dimensions=[64, 384])
    assert isinstance(sink, ChromaSink)
    with sink:
        assert repr(sink) == f"ChromaSink({place!r}, 'docs', dimensions=(64, 384), fields=None)"
        fill(engine, sink, records)
        assert sink.search(engine, "what moves blood around the body?", k=1)[0].id == "doc-4"
    with open_sink(f"chroma+path:{place}#docs", must_exist=True) as again:  # type: ignore[attr-defined]
        assert again.count() == 12


@pytest.mark.parametrize(("scheme", "location"), [("path", ""), ("http", "host"), ("memory", "")])
def test_urls_of_other_schemes_are_refused(scheme: str, location: str) -> None:
    with pytest.raises(InvalidRequestError, match="does not name a Chroma; write chroma.path:DIR#docs"):
        sink_from_url(scheme, location, "docs")


SERVER = "import sys; from chromadb.cli.cli import app; sys.argv[0] = 'chroma'; app()"


@contextmanager
def serving(folder: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The URL of a server of Chroma over a folder, and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["run", "--path", folder, "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen([sys.executable, "-c", SERVER, *words], stdout=subprocess.DEVNULL, stderr=-3) as server:
        try:
            deadline = time.monotonic() + 60
            while True:
                with socket.socket() as asked:
                    if asked.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}", server
        finally:
            server.send_signal(signal.SIGCONT)
            server.kill()


def test_a_server_is_written_and_searched_and_its_absence_is_an_error(
    engine: Engine, records: list[Record], place: str
) -> None:
    with serving(place) as (url, server):
        with ChromaSink(url, "docs", dimensions=[64, 384]) as sink:
            assert fill(engine, sink, records).written == 12
            assert sink.target == f"Chroma {url} docs" and sink.collections() == ["docs"]
            hits = sink.search(engine, "what moves blood around the body?", k=2, filter={"n": {"gte": 2, "lt": 9}})
            assert hits[0].id == "doc-4" and hits[0].metadata == records[4].metadata
            fill(engine, sink, [Record("doc-4", "another text", {"x": 1})])
            assert sink.read_rows([point_id("doc-4")])[point_id("doc-4")].metadata == {"x": 1}
            sink.delete(filter={"n": {"lt": 3}})
            assert sink.count() == 9
            with pytest.raises(SinkRejectedError, match="refused an upsert of 1 record"):
                sink._driver.connection.request(
                    "an upsert of 1 record", lambda: sink._driver.connection.table().upsert(["a"], [[1.0, 2.0]])
                )
        with ChromaSink(url, "docs", timeout=0.5) as sink:
            server.send_signal(signal.SIGSTOP)
            with pytest.raises(SinkUnavailableError, match="did not answer a search within 0.5 s|a look for the coll"):
                sink.search(engine, "anything")
            server.send_signal(signal.SIGCONT)
            server.kill()
            server.wait()
            with pytest.raises(SinkUnavailableError, match="nothing listens at http://127.0.0.1"):
                sink.count()
    with pytest.raises(SinkUnavailableError, match="Could not connect to a Chroma server"):
        ChromaSink(url, "docs")
