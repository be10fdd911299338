"""A real Milvus 2.3.5: what it lacks, collections that are not loaded, and servers that are killed in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from integrations.milvus.tests.server.running import RunningMilvus

from millpond import Engine, InvalidRequestError
from millpond.errors import SinkUnavailableError
from millpond.ingest import Record, RetryPolicy, WriteBatch, ingest, point_id
from millpond.testing import WordEngine
from millpond_milvus import MilvusIndex, MilvusSink

pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]

# A server takes half a minute to load its collections after it was killed.
PATIENT = RetryPolicy(give_up_after=300, longest_wait=2)


def records(count: int) -> list[Record]:
    return [Record(f"r{n}", f"text {n % 97} of {n}", {"n": n, "lang": "de" if n % 2 else "en"}) for n in range(count)]


@pytest.fixture
def engine(engine_of: Callable[..., Engine]) -> Engine:
    return engine_of("bert")


@pytest.fixture
def url(server: RunningMilvus, tmp_path: Path) -> Iterator[str]:
    with server.database(tmp_path.name) as address:
        yield address


class KilledSink(MilvusSink):
    """A sink whose server is killed before the fifth batch, and perhaps started again."""

    server: RunningMilvus
    again: bool
    batches = 0

    def write(self, batch: WriteBatch) -> None:
        self.batches += 1
        if self.batches == 5:
            self.server.kill()
            if self.again:
                self.server.start()
        super().write(batch)


def killed_sink(server: RunningMilvus, url: str, *, again: bool) -> KilledSink:
    sink = KilledSink(url, "docs", timeout=60 if again else 20)
    sink.server, sink.again = server, again
    return sink


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimensions": [64, 384]}, r"dimensions=\[64, 384\] needs 2.4 .*store one width, as dimensions=\[384\]"),
        ({"hybrid": "bm25"}, "hybrid='bm25' needs 2.5"),
        ({"datatype": "float16"}, "datatype='float16' needs 2.4"),
        ({"datatype": "int8"}, "datatype='int8' needs 2.6"),
        ({"index_quantization": "scalar"}, "index_quantization='scalar' needs 2.5 .*pass index_type='IVF' with it"),
        ({"index_quantization": "binary"}, "index_quantization='binary' needs 2.6"),
    ],
)
def test_what_the_server_lacks_is_named_before_a_collection_is_made(
    url: str, options: dict[str, Any], message: str
) -> None:
    with MilvusSink(url, "docs", **options) as sink:
        with pytest.raises(InvalidRequestError, match=f"Milvus at {url} has version 2.3.5, and {message}"):
            sink.prepare(WordEngine().spec)
        assert sink.client.list_collections() == []


@pytest.mark.parametrize(
    "options",
    [
        {"index_type": "FLAT"},
        {"index_type": "HNSW"},
        {"index_type": "IVF", "index_quantization": "scalar"},
        {"index_type": "IVF", "index_quantization": "product"},
        {"partition_key": "lang", "partitions": 4},
    ],
    ids=str,
)
def test_what_the_server_has_works(url: str, engine: Engine, options: dict[str, Any]) -> None:
    with MilvusSink(url, "docs", **options) as sink:
        assert ingest(records(50), engine=engine, sink=sink, show_progress=False).written == 50
        hits = sink.search(engine, "text 7 of 7", k=3, filter={"lang": "de"})
        assert [hit.metadata["lang"] for hit in hits] == ["de"] * 3


def test_an_index_of_token_rows_names_the_version_that_it_needs(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="version 2.3.5, and MilvusIndex needs 2.6.4 .*Milvus Lite"):
        MilvusIndex(url, "passages", None)


@pytest.mark.parametrize(
    "read",
    [
        lambda sink, engine: len(sink.search(engine, "text 7", k=20)),
        lambda sink, engine: len(sink.fetch([point_id(f"r{n}") for n in range(20)])),
        lambda sink, engine: len(list(sink.scan())),
        lambda sink, engine: sink.count(),
    ],
    ids=["search", "fetch", "scan", "count"],
)
def test_a_collection_that_is_not_loaded_is_loaded_by_what_reads_it(
    url: str, engine: Engine, read: Callable[[MilvusSink, Engine], int]
) -> None:
    with MilvusSink(url, "docs") as sink:
        ingest(records(20), engine=engine, sink=sink, show_progress=False)
        sink.client.release_collection("docs")
        assert read(sink, engine) == 20


def test_a_run_waits_for_a_server_that_is_killed_and_verifies_every_row(
    server: RunningMilvus, url: str, engine: Engine
) -> None:
    with killed_sink(server, url, again=True) as sink:
        report = ingest(records(6000), engine=engine, sink=sink, verify=True, retry=PATIENT, show_progress=False)
        assert (report.written, report.failed) == (6000, 0)
        verification = report.verification
        assert verification is not None and (verification.rows, verification.missing) == (6000, 0)
    with MilvusSink(url, "docs") as again:
        assert sorted(again.scan()) == sorted((point_id(f"r{n}"), f"r{n}") for n in range(6000))


def test_what_a_killed_server_acknowledged_is_there_and_the_journal_writes_the_rest(
    server: RunningMilvus, url: str, engine: Engine, tmp_path: Path
) -> None:
    journal, impatient = tmp_path / "journal", RetryPolicy(give_up_after=0)
    with killed_sink(server, url, again=False) as sink, pytest.raises(SinkUnavailableError):
        ingest(records(6000), engine=engine, sink=sink, journal=journal, retry=impatient, show_progress=False)
    server.wait()  # not for the collection to be loaded
    with MilvusSink(url, "docs") as sink:
        report = ingest(records(6000), engine=engine, sink=sink, journal=journal, verify=True, show_progress=False)
        assert report.unchanged > 0 and report.unchanged + report.written == 6000
        verification = report.verification
        assert verification is not None and (verification.rows, verification.missing) == (6000, 0)
        ingest(records(5000), engine=engine, sink=sink, journal=journal, sync=True, show_progress=False)
        assert sink.count() == 5000
