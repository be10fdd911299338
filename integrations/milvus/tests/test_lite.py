"""Milvus Lite: after a write that failed nothing that was acknowledged is lost, however the file is used."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pymilvus import MilvusClient

from millpond import Engine, InvalidRequestError
from millpond.errors import SinkError
from millpond.ingest import Record, WriteBatch, point_id
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
