"""VectorCache: hits, misses and stored rows per second, and bytes per row.

    python benchmarks/cache.py [--smoke] [--rows N] [--width 384] [--directory DIR]

The time of a hit includes all that ``get`` does: the query, the checksum of every row, and building the ``[n, width]``
matrix. Keys are requested in random order, in groups of ``--group`` (as ingestion requests them). The file was just
written, so the system has it in memory; the speed of the disk is not measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from record import record

from millpond import VectorCache

COMMIT_GROUP = 256  # rows per put, as the engine commits them


def rate(count: int, work: Callable[[], object], *, repeat: int) -> dict[str, float]:
    """Median and best of ``count`` per second over ``repeat`` runs."""
    rates = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        rates.append(count / (time.perf_counter() - start))
    return {"median": round(statistics.median(rates)), "best": round(max(rates))}


def fill(cache: VectorCache, keys: Sequence[bytes], rows: np.ndarray[Any, Any]) -> None:
    """Put all keys in commit groups; the vectors of ``rows`` are used in turn."""
    for start in range(0, len(keys), COMMIT_GROUP):
        group = keys[start : start + COMMIT_GROUP]
        indices = np.arange(start, start + len(group)) % len(rows)
        cache.put(group, rows[indices], tokens=np.full(len(group), 50), truncated=np.zeros(len(group), dtype=bool))


def look_up(cache: VectorCache, keys: Sequence[bytes], *, width: int, group: int, found: bool) -> None:
    """Get all keys in groups.

    Raises:
        AssertionError: A key was found, or not, against ``found``: the figures would be meaningless.
    """
    for start in range(0, len(keys), group):
        hits = cache.get(keys[start : start + group], width=width)
        if not (hits.found == found).all():
            raise AssertionError(f"expected found={found} for every key")


def measure(path: Path, *, rows: int, width: int, group: int, repeat: int) -> dict[str, Any]:
    """All figures of a new cache at ``path``."""
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((min(rows, 16_384), width), dtype=np.float32)
    texts = [f"passage {index} of the benchmark, about as long as a question is" for index in range(rows)]
    results: dict[str, Any] = {"rows": rows, "width": width, "group": group, "commit_group": COMMIT_GROUP}
    results["keys_per_second"] = rate(rows, lambda: VectorCache.keys("benchmark", texts), repeat=repeat)
    keys = VectorCache.keys("benchmark", texts)
    absent = VectorCache.keys("absent", texts)
    shuffled = [keys[index] for index in generator.permutation(rows)]
    requested = shuffled[: min(rows, 100_000)]
    with VectorCache(path) as cache:
        results["put_rows_per_second"] = rate(rows, lambda: fill(cache, keys, vectors), repeat=1)
        results["bytes_per_row"] = round(cache.stats().bytes / rows)
        results["hits_per_second"] = rate(
            len(requested), lambda: look_up(cache, requested, width=width, group=group, found=True), repeat=repeat
        )
        results["misses_per_second"] = rate(
            len(requested),
            lambda: look_up(cache, absent[: len(requested)], width=width, group=group, found=False),
            repeat=repeat,
        )
        in_order = keys[: len(requested)]
        results["hits_per_second_in_stored_order"] = rate(
            len(in_order), lambda: look_up(cache, in_order, width=width, group=group, found=True), repeat=repeat
        )
        singles = requested[:5_000]
        results["single_hits_per_second"] = rate(
            len(singles), lambda: look_up(cache, singles, width=width, group=1, found=True), repeat=repeat
        )
        size = cache.stats().bytes
    with VectorCache(path, max_bytes=size) as cache:  # full: every new row evicts one, and every hit is recorded
        fresh = absent[: min(rows // 2, 50_000)]
        results["put_rows_per_second_evicting"] = rate(len(fresh), lambda: fill(cache, fresh, vectors), repeat=1)
        results["hits_per_second_noted"] = rate(
            len(fresh), lambda: look_up(cache, fresh, width=width, group=group, found=True), repeat=repeat
        )
    return results


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few thousand rows once, to see that it runs")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--group", type=int, default=2_048, help="keys per get")
    parser.add_argument("--directory", type=Path, default=None, help="folder of the file (default: a temporary one)")
    options = parser.parse_args()
    rows, repeat = (min(options.rows, 4_000), 1) if options.smoke else (options.rows, 5)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        results = measure(
            Path(directory) / "cache.db", rows=rows, width=options.width, group=options.group, repeat=repeat
        )
    print(json.dumps(results, indent=2))
    if not options.smoke:
        print(record("cache" if options.width == 384 else f"cache-{options.width}", results))


if __name__ == "__main__":
    main()
