"""Milvus Lite: after a write that failed nothing that was acknowledged is lost, however the file is used."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pymilvus import MilvusClient

from millpond import Engine, InvalidRequestError
from millpond.errors import SinkError
from millpond.ingest import Record, WriteBatch, ingest, point_id
from millpond_milvus import MilvusSink

PROGRAM = Path(__file__).with_name("lite_failures.py")
ROOT = PROGRAM.parents[3]
SMALL_MEMORY = {"MILVUS_LITE_MEMTABLE_MEMORY_LIMIT_BYTES": str(1 << 20)}

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(sys.platform == "win32", reason="there is no Milvus Lite on Windows"),
]


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "x.db")


def rows(count: int, *, first: int = 0, width: int = 64) -> WriteBatch:
    records = [Record(f"r{n}", f"text {n}") for n in range(first, first + count)]
    vectors = {width: np.full((count, width), width**-0.5, np.float32)}
    return WriteBatch(records=records, ids=[point_id(record.id) for record in records], vectors=vectors)


@pytest.mark.parametrize(
    ("scenario", "refusal"),
    [
        pytest.param("upsert", "takes no more writes", marks=pytest.mark.slow),
        ("flush", "takes no more writes"),
        ("lose", "holds 511 rows, and 512 before the write that failed; write its records again"),
    ],
)
def test_nothing_is_lost_after_a_write_that_failed(scenario: str, refusal: str, uri: str, minilm: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), scenario, uri, minilm],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment | (SMALL_MEMORY if scenario == "flush" else {}),
    )
    assert done.returncode == 9, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failure"].startswith("SinkError: Milvus at ") and "refused a" in result["failure"]
    gone = "nothing listens"  # what a sink finds of a file that was opened anew
    assert all(refusal in each or gone in each for each in result["refusals"]), result["refusals"]
    # Of the write that failed, all rows may be there: Lite had logged them when its flush failed.
    assert 0 < result["acknowledged"] <= result["reopened"] <= result["acknowledged"] + 512
    assert result["written"] == 20 * 512
    if scenario == "upsert":
        assert result["documents"] == 4
    client = MilvusClient(uri)  # what a process finds that starts after the other one was killed
    client.load_collection("docs")
    found = client.query("docs", filter="", output_fields=["count(*)"])[0]["count(*)"]
    assert found == 20 * 512
    client.close()


def test_a_log_that_ends_in_a_torn_record_is_named_when_it_is_opened(
    uri: str, minilm: str, caplog: pytest.LogCaptureFixture
) -> None:
    program = (
        "import os, sys, numpy as np\n"
        "from pymilvus import MilvusClient, DataType\n"
        "client = MilvusClient(sys.argv[1])\n"
        "client.create_collection('docs', dimension=64)\n"
        "for start in (0, 100, 200):\n"
        "    rows = [{'id': start + n, 'vector': np.ones(64, np.float32)} for n in range(100)]\n"
        "    client.insert('docs', rows)\n"
        "os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", program, uri], capture_output=True, timeout=120)
    (log,) = Path(uri).glob("**/wal/wal_data_*.arrow")
    with caplog.at_level(logging.WARNING, "millpond_milvus"):
        sink = MilvusSink(uri, "docs")
        assert caplog.text == ""  # a whole log is no reason to complain
        sink.close()
    _stop(uri)
    subprocess.run([sys.executable, "-c", program, str(Path(uri).with_name("y.db"))], capture_output=True, timeout=120)
    (log,) = Path(uri).with_name("y.db").glob("**/wal/wal_data_*.arrow")
    os.truncate(log, log.stat().st_size - 1000)
    with caplog.at_level(logging.WARNING, "millpond_milvus"):
        MilvusSink(str(Path(uri).with_name("y.db")), "docs").close()
    assert f"log {log} is torn after 2 writes: its last " in caplog.text
    assert "write its records again" in caplog.text


def _stop(uri: str) -> None:
    from milvus_lite.server_manager import server_manager_instance

    server_manager_instance.release_server(os.path.realpath(uri))


def test_a_client_that_was_passed_in_shares_the_file_of_its_path(engine: Engine, uri: str) -> None:
    with MilvusSink(uri, "docs", dimensions=[64]) as sink:
        sink.prepare(engine.spec)
        with MilvusSink(sink.client, "docs", dimensions=[64]) as other:
            assert other.embedded
            other.prepare(engine.spec)
            sink._connection.file.failure = "the disk was full"  # type: ignore[attr-defined]
            with pytest.raises(SinkError, match="takes no more writes, since one failed in this process .the disk was"):
                other.write(rows(1))


def test_more_rows_than_lite_is_for_are_said_once(
    engine: Engine, uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("millpond_milvus.sink._LITE_ROWS", 200)
    for _ in range(2):
        with MilvusSink(uri, "docs", dimensions=[64]) as sink:
            sink.prepare(engine.spec)
            for _ in range(5):
                sink.write(rows(150))  # the same rows again
            assert "holds more than" not in caplog.text or sink.count() > 200
            sink.write(rows(51, first=150))
            sink.write(rows(50, first=300))
    warnings = [record.getMessage() for record in caplog.records if "holds more than 200 rows" in record.getMessage()]
    assert len(warnings) == 1
    assert "--to milvus+http://localhost:19530#docs" in warnings[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"datatype": "float16"}, "datatype='float16': Milvus Lite stores float32"),
        (
            {"index_quantization": "scalar"},
            "index_quantization='scalar': Milvus Lite stores float32 and searches it exactly",
        ),
        ({"index_type": "HNSW"}, "index_type='HNSW': Milvus Lite stores float32 and searches it exactly"),
    ],
)
def test_what_only_a_server_has_is_refused_before_anything_is_written(
    uri: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        MilvusSink(uri, "docs", **options)  # type: ignore[arg-type]
    with MilvusSink(uri, "docs") as sink:
        assert sink.count() == 0


def batch_of(vectors: np.ndarray, *, first: int = 0) -> WriteBatch:
    records = [Record(f"r{n}", f"text {n}") for n in range(first, first + len(vectors))]
    return WriteBatch(records=records, ids=[point_id(record.id) for record in records], vectors={64: vectors})


def unit(count: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, 64), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def in_memory(uri: str) -> int:
    """Rows that Milvus Lite holds in memory, as it counts them itself."""
    from milvus_lite.server_manager import server_manager_instance

    _, database, _ = server_manager_instance._servers[os.path.realpath(uri)]
    return int(database.get_collection("docs")._memtable.size())


def test_many_rows_are_sealed_before_a_search_and_few_are_not(engine: Engine, uri: str) -> None:
    vectors = unit(500, seed=1)
    question = engine.embed(["tides"], role="query", dimensions=64).embeddings[0]
    with MilvusSink(uri, "docs", dimensions=[64]) as sink:
        sink.prepare(engine.spec)
        sink.write(batch_of(vectors[:200]))
        before = sink.search(engine, "tides", k=5)
        assert in_memory(uri) == 200  # copying so few costs less than a file
        sink.write(batch_of(vectors[200:], first=200))
        hits = sink.search(engine, "tides", k=5)
        assert in_memory(uri) == 0
        scores = vectors @ question
        assert [hit.id for hit in hits] == [f"r{n}" for n in np.argsort(-scores)[:5]]
        assert [hit.id for hit in before] == [f"r{n}" for n in np.argsort(-scores[:200])[:5]]
        sink.write(batch_of(vectors[:1]))  # replaces a row that is sealed
        sink.delete([hits[1].id])
        again = [hit.id for hit in sink.search(engine, "tides", k=5)]
        assert hits[1].id not in again and again[0] == hits[0].id and sink.count() == 499


def test_the_end_of_a_run_seals_its_rows(engine: Engine, uri: str) -> None:
    with MilvusSink(uri, "docs", dimensions=[64]) as sink:
        ingest([Record(f"r{n}", f"text {n}") for n in range(300)], engine=engine, sink=sink, show_progress=False)
        assert in_memory(uri) == 0 and sink.count() == 300


def test_rows_that_others_wrote_are_sealed_too(engine: Engine, uri: str) -> None:
    with MilvusSink(uri, "docs", dimensions=[64]) as sink:
        sink.prepare(engine.spec)
        sink.write(batch_of(unit(300, seed=2)))
        client = MilvusClient(uri)  # as langchain_milvus has one
        (row,) = client.query("docs", filter="id == 'r7'", output_fields=["*"])
        client.insert("docs", [{**row, "pk": f"other {n}", "id": f"other {n}"} for n in range(300)])
        assert in_memory(uri) == 600
        assert len(sink.search(engine, "tides", k=600)) == 600
        assert in_memory(uri) == 0
        client.close()


def test_what_a_killed_process_left_in_the_log_is_sealed(engine: Engine, uri: str, minilm: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "killed", uri, minilm], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 9, done.stderr[-3000:]
    with MilvusSink(uri, "docs", dimensions=[64]) as sink:
        sink.open()
        assert in_memory(uri) == 512
        assert len(sink.search(engine, "tides", k=512)) == 512
        assert in_memory(uri) == 0


def test_rows_are_not_sealed_while_something_is_read(engine: Engine, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request looks at the files first and at the memory then; rows that go from one to the other would be missed."""
    from milvus_lite.engine.collection import Collection

    snapshot, looked = Collection._read_snapshot, threading.Event()

    def pausing(self: Collection) -> Any:
        found = snapshot(self)
        if not looked.is_set():
            looked.set()
            end = time.monotonic() + 0.5  # in which they would be sealed
            while in_memory(uri) and time.monotonic() < end:
                time.sleep(0.001)
        return found

    with MilvusSink(uri, "docs", dimensions=[64]) as sink, ThreadPoolExecutor(1) as pool:
        sink.prepare(engine.spec)
        sink.write(batch_of(unit(300, seed=3)))
        monkeypatch.setattr(Collection, "_read_snapshot", pausing)
        read = pool.submit(sink.fetch, [point_id(f"r{n}") for n in range(300)])
        assert looked.wait(60)
        assert len(sink.search(engine, "tides", k=300)) == 300
        assert len(read.result()) == 300
        assert in_memory(uri) == 0


# Lite does not close the log of what it could not write to a file.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_rows_that_cannot_be_sealed_are_an_error_and_not_missing(engine: Engine, uri: str) -> None:
    with MilvusSink(uri, "docs", dimensions=[64]) as sink:
        sink.prepare(engine.spec)
        sink.write(batch_of(unit(300, seed=4)))
        (collection,) = Path(uri).glob("collections/docs")
        obstacle = collection / "partitions"
        obstacle.write_bytes(b"")  # where Lite makes a folder for what it seals
        for _ in range(2):
            with pytest.raises(SinkError, match=r"could not write rows of collection 'docs' from its memory to a file"):
                sink.search(engine, "tides", k=5)
        with pytest.raises(SinkError, match="takes no more writes"):
            sink.write(batch_of(unit(1, seed=5)))
        obstacle.unlink()
    with MilvusSink(uri, "docs", dimensions=[64]) as sink:
        assert len(sink.search(engine, "tides", k=300)) == 300
