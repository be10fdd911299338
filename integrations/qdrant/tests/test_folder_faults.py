"""A folder on a disk that is full, or fails to sync: what was acknowledged is there, and nothing more is accepted."""

from __future__ import annotations

import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from millpond import Engine
from millpond.errors import SinkError
from millpond.ingest import Record, WriteBatch, point_id
from millpond.testing.matrices import ragged
from millpond_qdrant import QdrantIndex, QdrantSink

pytestmark = pytest.mark.contract

WIDTH = 64


def batch(start: int, rows: int = 20) -> WriteBatch:
    records = [Record(f"r{row}", "text " * 200, {"n": row}) for row in range(start, start + rows)]
    vectors = np.random.default_rng(start).standard_normal((rows, WIDTH)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return WriteBatch(records=records, ids=[point_id(record.id) for record in records], vectors={WIDTH: vectors})


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """No file grows beyond a size, which the system reports as EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_until_full(sink: QdrantSink, acknowledged: set[str]) -> SinkError:
    for start in range(0, 4000, 20):
        rows = batch(start)
        try:
            sink.write(rows)
        except SinkError as error:
            return error
        acknowledged |= set(rows.ids)
    raise AssertionError("the disk was never full")


@pytest.mark.parametrize("size", [100_000, 300_000, 777_777])
def test_a_full_disk_loses_no_acknowledged_row(engine: Engine, tmp_path: Path, size: int) -> None:
    acknowledged: set[str] = set()
    with QdrantSink(tmp_path, "docs", dimensions=[WIDTH]) as sink:
        sink.prepare(engine.spec)
        with full_at(size):
            error = write_until_full(sink, acknowledged)
            assert type(error) is SinkError  # which stops the run
            with pytest.raises(SinkError, match="takes no more writes"):
                sink.write(batch(5000, rows=1))
        with pytest.raises(SinkError, match="takes no more writes.*close it, open it again and verify"):
            sink.write(batch(5000, rows=1))  # even when there is room again
    with QdrantSink(tmp_path, "docs", dimensions=[WIDTH]) as sink:
        sink.prepare(engine.spec)
        stored = dict(sink.scan())
        assert acknowledged <= stored.keys() and point_id("r5000") not in stored
        sink.write(batch(0, rows=len(stored) + 100))
        assert sink.count() == len(stored) + 100
    (file,) = tmp_path.rglob("*.sqlite")
    database = sqlite3.connect(file)
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert database.execute("SELECT count(*) FROM points").fetchone() == (len(stored) + 100,)
    database.close()


def test_the_other_sinks_and_indexes_of_the_folder_stop_too(engine: Engine, tmp_path: Path) -> None:
    first, second = (QdrantSink(tmp_path, name, dimensions=[WIDTH]) for name in ("one", "two"))
    index = QdrantIndex(tmp_path, "tokens", None)
    first.prepare(engine.spec)
    second.prepare(engine.spec)
    index.add_embeddings(["a"], ragged([np.eye(2, 4, dtype=np.float32)]))
    with full_at(200_000):
        write_until_full(first, set())
    for change in (
        lambda: second.write(batch(0)),
        lambda: second.delete(["r1"]),
        lambda: index.add_embeddings(["b"], ragged([np.eye(2, 4, dtype=np.float32)])),
        lambda: index.delete(["a"]),
    ):
        with pytest.raises(SinkError, match="close every sink and index of the folder, open it again and verify"):
            change()
    first.close()
    with pytest.raises(SinkError, match="a change of the folder .* failed .*; close every sink and index of it"):
        QdrantSink(tmp_path, "one")  # would read what the failed one has in memory
    second.close()
    index.close()
    with QdrantSink(tmp_path, "two", dimensions=[WIDTH]) as again:
        again.prepare(engine.spec)
        again.write(batch(0))
        assert again.count() == 20


def test_a_collection_that_could_not_be_made_takes_no_rows(engine: Engine, tmp_path: Path) -> None:
    with QdrantSink(tmp_path, "docs", dimensions=[WIDTH]) as sink:
        with full_at(100), pytest.raises(SinkError):
            sink.prepare(engine.spec)
        with pytest.raises(SinkError, match="takes no more writes"):
            sink.prepare(engine.spec)
    with QdrantSink(tmp_path, "docs", dimensions=[WIDTH]) as sink:
        sink.prepare(engine.spec)
        sink.write(batch(0))
    with QdrantSink(tmp_path, "docs", dimensions=[WIDTH]) as sink:
        assert sink.count() == 20


def test_a_disk_that_fails_to_sync_acknowledges_nothing(engine: Engine, tmp_path: Path) -> None:
    class FailingSync:
        """SQLite, of which a checkpoint fails as on a disk that does not sync."""

        def execute(self, statement: str) -> None:
            raise sqlite3.OperationalError("disk I/O error")

    with QdrantSink(tmp_path, "docs", dimensions=[WIDTH]) as sink:
        sink.prepare(engine.spec)
        sink.write(batch(0))
        sink._connection._log = FailingSync()  # type: ignore[attr-defined]
        with pytest.raises(SinkError, match="disk I/O error"):
            sink.write(batch(20))
        with pytest.raises(SinkError, match="takes no more writes"):
            sink.write(batch(40))
    with QdrantSink(tmp_path, "docs", dimensions=[WIDTH]) as sink:
        stored = dict(sink.scan()).keys()
        assert {point_id(f"r{row}") for row in range(20)} <= stored
        assert not {point_id(f"r{row}") for row in range(40, 60)} & stored
