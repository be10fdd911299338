"""Memory of an ingestion over the number of rows: a million short texts into a sink that discards, in one process.

    python benchmarks/ingest_memory.py [--smoke] [--rows 1000000] [--no-cache]

The rows are ingested twice: first they are computed and committed to a cache, then all come from the cache. The
resident memory is read after every ``--every`` rows. The result is its growth after 100,000 rows: megabytes per 100,000
rows, by a straight line, and the mean of the last tenth against that of the tenth after them.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from compare import show
from memory import MOST_WORDS, WORDS, resident, texts
from peers import curves
from peers.environments import cache_folder
from peers.shapes import Shapes
from record import RESULTS, record

from millpond import Engine
from millpond.ingest import Record, WriteBatch, ingest

SETTLED = 100_000  # rows after which the memory must stay level


class DiscardSink:
    """Counts rows."""

    dimensions = None

    def __init__(self) -> None:
        self.rows = 0

    def prepare(self, spec: Any) -> None:
        """Nothing to prepare."""

    def write(self, batch: WriteBatch) -> None:
        """Forget the rows."""
        self.rows += len(batch.ids)

    def close(self) -> None:
        """Nothing to close."""


def run(engine: Engine, *, rows: int, every: int) -> dict[str, Any]:
    """One ingestion, and the samples of the resident memory as its source was read."""
    samples = [(0, resident())]

    def records() -> Iterator[Record]:
        for number, text in enumerate(texts(rows), 1):
            yield Record(f"row {number}", text)
            if number % every == 0:
                samples.append((number, resident()))

    started = time.perf_counter()
    sink = DiscardSink()
    report = ingest(records(), engine=engine, sink=sink, show_progress=False)
    seconds = time.perf_counter() - started
    if sink.rows != rows - report.duplicates:
        raise SystemExit(f"{sink.rows} of {rows} rows were written: {report}")
    counts, sizes = (np.array(column, dtype=float) for column in zip(*samples, strict=True))
    late = counts >= min(SETTLED, rows / 2)
    tenth = max(1, int(late.sum()) // 10)
    slope = float(np.polyfit(counts[late], sizes[late], 1)[0]) if late.sum() > 1 else float("nan")
    return {
        "cached": report.cached,
        "embedded": report.embedded,
        "seconds": round(seconds, 1),
        "rows_per_second": round(rows / seconds),
        "most_bytes": int(sizes.max()),
        "last_bytes": int(sizes[-1]),
        "megabytes_per_100k_rows": round(slope * 1e5 / 1e6, 3),
        "last_tenth_over_first": round(float(sizes[late][-tenth:].mean() / sizes[late][:tenth].mean()), 3),
        "samples": [[int(done), int(size)] for done, size in samples],
    }


def measure(model: Path, folder: Path, *, rows: int, every: int, cached: bool) -> dict[str, Any]:
    """Both ingestions."""
    with Engine(model, cache=folder / "vectors.cache" if cached else None) as engine:
        longest = max(len(ids) for ids in engine.tokenizer([" ".join(WORDS[:MOST_WORDS])])["input_ids"])
        results = {
            "rows": rows,
            "most_tokens": longest,
            "vectors_bytes": 4 * engine.spec.dimensions * rows,
            "loaded_bytes": resident(),
            "runs": {"computed": run(engine, rows=rows, every=every)},
        }
        if cached:
            results["runs"]["from the cache"] = run(engine, rows=rows, every=every)
    return results


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few thousand rows, not recorded")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=10_000, help="rows between two samples")
    parser.add_argument("--no-cache", action="store_true", help="one ingestion, without a cache; not recorded")
    options = parser.parse_args()
    if options.smoke:
        options.rows, options.every = 4_000, 500
    logging.getLogger("millpond").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shapes = Shapes(folder / "models" if options.smoke else cache_folder() / "models")
        model = shapes.folder("minilm")
        results = measure(model, folder, rows=options.rows, every=options.every, cached=not options.no_cache)
        print(curves.ingest_memory_table(results), flush=True)
        if options.no_cache:
            print([[done, size >> 20] for done, size in results["runs"]["computed"]["samples"]])
            return
        target = folder / "results" if options.smoke else RESULTS
        record("ingest_memory", results, folder=target)
        show(target)


if __name__ == "__main__":
    main()
