"""A program that makes writes to a file of Milvus Lite fail, and prints as JSON what became of them.

It runs in a process of its own: the limit on the size of files is one of the process, and it ends without closing
anything, as a process that is killed does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from millpond import Engine, ModelSpec
from millpond.errors import MillpondError
from millpond.ingest import Record, WriteBatch, point_id
from millpond.testing.matrices import matrices, names, ragged
from millpond_milvus import MilvusIndex, MilvusSink

ROWS = 512


def batch(number: int) -> WriteBatch:
    records = [Record(f"{number}-{n}", "text " * 20) for n in range(ROWS)]
    vectors = np.random.default_rng(number).standard_normal((ROWS, 64), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return WriteBatch(records=records, ids=[point_id(record.id) for record in records], vectors={64: vectors})


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[None]:
    """No file may grow beyond a size: the write that would is cut off, as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except MillpondError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def upsert(uri: str, spec: ModelSpec) -> dict[str, Any]:
    """A write fails; other objects of the file are asked to write; then it is opened again, and everything written."""
    sink, other = MilvusSink(uri, "docs", dimensions=[64]), MilvusSink(uri, "docs", dimensions=[64])
    index = MilvusIndex(uri, "tokens", None)
    index.add_embeddings(names(3), ragged(matrices(3)))
    for each in (sink, other):
        each.prepare(spec)
    acknowledged = 0
    with small_disk(1 << 20):
        for number in range(20):
            if failure := error_of(lambda number=number: sink.write(batch(number))):  # type: ignore[misc]
                break
            acknowledged += ROWS
    result: dict[str, Any] = {"failure": failure, "acknowledged": acknowledged}
    # The disk has room again.
    late = WriteBatch(records=[Record("late", "")], ids=[point_id("late")], vectors={64: np.ones((1, 64), np.float32)})
    result["refusals"] = [
        error_of(lambda: sink.write(late)),
        error_of(lambda: other.write(late)),
        error_of(lambda: sink.delete(["0-0"])),
        error_of(lambda: other.delete(["0-0"])),
        error_of(lambda: index.add_embeddings(["x"], ragged(matrices(1)))),
        error_of(lambda: index.delete(["doc-0"])),
    ]
    sink.close()
    index.close()
    with MilvusSink(uri, "docs", dimensions=[64]) as again:
        again.prepare(spec)
        result["reopened"] = again.count()
        result["refusals"].append(error_of(lambda: other.write(late)))  # it has the file as it was before
        for number in range(20):
            again.write(batch(number))
        result["written"] = again.count()
        with MilvusIndex(uri, "tokens", None) as tokens:
            tokens.add_embeddings(["more"], ragged(matrices(1)))
            result["documents"] = len(tokens)
    return result


def flush(uri: str, spec: ModelSpec) -> dict[str, Any]:
    """Lite's own flush of its memory to a file fails inside a write."""
    sink = MilvusSink(uri, "docs", dimensions=[64])
    sink.prepare(spec)
    sink.write(batch(0))
    (collection,) = Path(uri).glob("collections/docs")
    obstacle = collection / "partitions"
    obstacle.write_bytes(b"")  # where Lite makes a folder for what it flushes
    acknowledged = ROWS
    for number in range(1, 20):
        if failure := error_of(lambda number=number: sink.write(batch(number))):  # type: ignore[misc]
            break
        acknowledged += ROWS
    obstacle.unlink()
    refusal = error_of(lambda: sink.write(batch(19)))
    sink.close()
    with MilvusSink(uri, "docs", dimensions=[64]) as again:
        again.prepare(spec)
        reopened = again.count()
        for number in range(20):
            again.write(batch(number))
        written = again.count()
    return {
        "failure": failure,
        "acknowledged": acknowledged,
        "refusals": [refusal],
        "reopened": reopened,
        "written": written,
    }


def lose(uri: str, spec: ModelSpec) -> dict[str, Any]:
    """Rows that were acknowledged are not there when the file is opened again."""
    sink = MilvusSink(uri, "docs", dimensions=[64])
    sink.prepare(spec)
    sink.write(batch(0))
    with small_disk(100):
        failure = error_of(lambda: sink.write(batch(1)))
    sink.client.delete("docs", filter='id == "0-0"')  # not through millpond
    sink.close()
    again = MilvusSink(uri, "docs", dimensions=[64])
    first = error_of(lambda: again.prepare(spec))
    again.prepare(spec)
    for number in range(20):
        again.write(batch(number))
    return {
        "failure": failure,
        "acknowledged": ROWS,
        "refusals": [first],
        "reopened": ROWS,
        "written": again.count(),
    }


def killed(uri: str, spec: ModelSpec) -> dict[str, Any]:
    """Rows are in Lite's log and memory when the process ends."""
    sink = MilvusSink(uri, "docs", dimensions=[64])
    sink.prepare(spec)
    sink.write(batch(0))
    return {"acknowledged": ROWS}


def main(scenario: str, uri: str, model: str) -> None:
    logging.disable(logging.CRITICAL)
    with Engine(model, dtype="float32", device="cpu", hf_overrides={"is_matryoshka": True}) as engine:
        result = globals()[scenario](uri, engine.spec)
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(9)  # Lite closes nothing


if __name__ == "__main__":
    main(*sys.argv[1:])
