"""Milvus Lite: rows in its memory are written to a file before a search, which would copy them one by one."""

from __future__ import annotations

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

from millpond import Engine
from millpond.errors import SinkError
from millpond.ingest import Record, WriteBatch, ingest, point_id
from millpond_milvus import MilvusSink

PROGRAM = Path(__file__).with_name("lite_failures.py")
ROOT = PROGRAM.parents[3]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no Milvus Lite on Windows")


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "x.db")


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


@pytest.mark.contract
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
