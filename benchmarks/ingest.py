"""Ingestion: how busy the engine is, what resuming costs, and rows per second from the cache and into each database.

    python benchmarks/ingest.py [--smoke] [--rows 2000] [--resumed 200000] [--stored 5000] [--searched 5700]

The model is all-MiniLM-L6-v2. Busy is the share of the time between the first and the last forward in which one runs:
in the rest the engine waits for the source, the cache or the database. Resuming: half of ``--resumed`` rows of at most
8 tokens are written with a journal, and the run that passes over them is timed against that. From the cache: all rows
are in the engine's cache. Searched: the time of a question whose vector is in the cache, in each database of this
process filled as ``millpond demo`` fills it, at 128 and 384 dimensions; right after the run, and opened again. The CPU
time of the process is given beside the wall time, since it hardly depends on what
else the machine does.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ingest_memory import DiscardSink
from memory import resident, texts
from peers.environments import cache_folder
from peers.shapes import Shapes
from record import RESULTS, record

from millpond import Engine
from millpond.engine.execute.runner import Runner
from millpond.ingest import IngestReport, Record, ingest, open_sink

WORDS = 40  # of a text whose embedding is timed: a paragraph
DATABASES = {"Qdrant path": "qdrant+path:{}/qdrant#docs", "Milvus Lite": "milvus+file:{}/milvus.db#docs"}


class Forwards:
    """The times of an engine's forwards, while the block runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.spans: list[tuple[float, float]] = []

    def __enter__(self) -> Forwards:
        self._run = run = Runner.run

        def timed(runner: Runner, requests: Any) -> Any:
            start = time.perf_counter()
            try:
                return run(runner, requests)
            finally:
                with self._lock:
                    self.spans.append((start, time.perf_counter()))

        Runner.run = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        Runner.run = self._run  # type: ignore[method-assign]

    @property
    def busy(self) -> float:
        """Share of the time from the first to the last forward in which at least one ran."""
        spans = sorted(self.spans)
        covered, reached = 0.0, spans[0][0]
        for start, stop in spans:
            covered += max(0.0, stop - max(start, reached))
            reached = max(reached, stop)
        return covered / (reached - spans[0][0])


class Timer:
    """Wall and CPU seconds of the block, and rows per second."""

    def __enter__(self) -> Timer:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.wall, self.cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu

    def figures(self, rows: int) -> dict[str, float]:
        """The times as results."""
        return {
            "rows": rows,
            "seconds": round(self.wall, 3),
            "cpu_seconds": round(self.cpu, 3),
            "rows_per_second": round(rows / self.wall),
            "rows_per_cpu_second": round(rows / self.cpu),
            "resident_bytes": resident(),
        }


def paragraphs(rows: int) -> Iterator[Record]:
    """Records of paragraphs, each another."""
    words = "the mill stands by a pond whose water drives its wheel and grain is ground between two stones".split()
    for number in range(rows):
        text = " ".join(words[(number * 7 + place * (1 + number % 5)) % len(words)] for place in range(WORDS))
        yield Record(f"row {number}", f"{number} {text}", {"n": number})


def short(rows: int) -> Iterator[Record]:
    """Records of at most 8 tokens."""
    for number, text in enumerate(texts(rows)):
        yield Record(f"row {number}", text)


def run(records: Iterable[Record], engine: Engine, sink: Any, **options: Any) -> IngestReport:
    """One ingestion without a bar."""
    return ingest(records, engine=engine, sink=sink, show_progress=False, **options)


def busy(model: Path, folder: Path, rows: int) -> dict[str, Any]:
    """The share of time in which the engine computes, without and with a cache."""
    results: dict[str, Any] = {}
    for name, cache in (("without a cache", None), ("with a cache", folder / "busy.cache")):
        with Engine(model, cache=cache) as engine, Forwards() as forwards, Timer() as timer:
            run(paragraphs(rows), engine, DiscardSink(), journal=folder / f"busy.{name}.journal")
        results[name] = {"busy": round(forwards.busy, 4), **timer.figures(rows)}
    return results


def resumed(model: Path, folder: Path, rows: int) -> dict[str, Any]:
    """The time of half a run, and the time in which the next run passes over that half."""
    half, journal = rows // 2, folder / "resumed.journal"
    with Engine(model) as engine:
        with Timer() as first:
            run(short(half), engine, DiscardSink(), journal=journal)
        with Timer() as again:
            report = run(short(half), engine, DiscardSink(), journal=journal)
    if report.unchanged != half - report.duplicates:
        raise SystemExit(f"{report.unchanged} of {half} rows were skipped")
    return {
        "first": first.figures(half),
        "skipped": again.figures(half),
        "share": round(again.wall / first.wall, 4),
        "cpu_share": round(again.cpu / first.cpu, 4),
    }


def cached(model: Path, folder: Path, rows: int) -> dict[str, Any]:
    """Rows per second if every vector is in the cache."""
    with Engine(model, cache=folder / "vectors.cache") as engine:
        run(short(rows), engine, DiscardSink())
        records = list(short(rows))
        gc.freeze()  # a source that is read has no such list for the garbage collector to go through
        with Timer() as timer:
            report = run(records, engine, DiscardSink())
        gc.unfreeze()
    if report.cached + report.duplicates != rows:
        raise SystemExit(f"{report.cached} of {rows} rows came from the cache")
    return timer.figures(rows)


def stored(model: Path, folder: Path, rows: int) -> dict[str, Any]:
    """Rows per second into each database, with every vector from the cache and a journal."""
    results = {}
    with Engine(model, cache=folder / "stored.cache") as engine:
        run(short(rows), engine, DiscardSink())
        with Timer() as timer:
            run(short(rows), engine, DiscardSink(), journal=folder / "stored.journal")
        results["discard"] = timer.figures(rows)
        for name, url in DATABASES.items():
            with closing(open_sink(url.format(folder), dimensions=None)) as sink, Timer() as timer:
                run(short(rows), engine, sink, journal=folder / "stored.journal")
            results[name] = timer.figures(rows)
    return results


def searched(model: Path, folder: Path, rows: int) -> dict[str, Any]:
    """Milliseconds of a question in each database, by its default and in two stages."""
    results: dict[str, Any] = {}
    questions = [record.text for record in short(32)]
    with Engine(model, cache=folder / "searched.cache", hf_overrides={"is_matryoshka": True}) as engine:
        engine.embed(questions, role="query")
        for name, url in DATABASES.items():
            for state in ("filled", "opened again"):
                with closing(open_sink(url.format(folder / "searched"), dimensions=[128, 384])) as sink:
                    if state == "filled":
                        run(short(rows), engine, sink)
                    first = _milliseconds(sink, engine, questions[:1])
                    results[f"{name}, {state}"] = {
                        "first": first[0],
                        **_spread("", _milliseconds(sink, engine, questions)),
                        **_spread("coarse_to_fine ", _milliseconds(sink, engine, questions, coarse_to_fine=True)),
                    }
    return results


def _milliseconds(sink: Any, engine: Engine, questions: Sequence[str], **options: Any) -> list[float]:
    times = []
    for question in questions:
        start = time.perf_counter()
        if len(sink.search(engine, question, k=30, **options)) != 30:
            raise SystemExit(f"{question!r} has fewer than 30 hits")
        times.append(round(1000 * (time.perf_counter() - start), 2))
    return times


def _spread(name: str, times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {f"{name}{at}": ordered[int(share * (len(ordered) - 1))] for at, share in (("p50", 0.5), ("p90", 0.9))}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few rows, not recorded")
    parser.add_argument("--rows", type=int, default=2_000, help="paragraphs, for the busy share")
    parser.add_argument("--resumed", type=int, default=200_000, help="short rows, of which half is done")
    parser.add_argument("--cached", type=int, default=100_000, help="short rows that come from the cache")
    parser.add_argument("--stored", type=int, default=5_000, help="short rows for each database")
    parser.add_argument("--searched", type=int, default=5_700, help="short rows of each database that is searched")
    parser.add_argument("--only", help="measure only these, separated by commas; not recorded", metavar="NAME,...")
    options = parser.parse_args()
    if options.smoke:
        options.rows, options.resumed, options.cached, options.stored = 40, 400, 400, 200
        options.searched = 400
    logging.getLogger("millpond").setLevel(logging.ERROR)
    parts = {
        name: getattr(options, "rows" if name == "busy" else name)
        for name in ("busy", "resumed", "cached", "stored", "searched")
    }
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = Shapes(folder / "models" if options.smoke else cache_folder() / "models").folder("minilm")
        for part, rows in parts.items():
            if options.only is None or part in options.only.split(","):
                results[part] = globals()[part](model, folder, rows)
                print(json.dumps({part: results[part]}, indent=2), flush=True)
        if options.only is None:
            record("ingest", results, folder=folder / "results" if options.smoke else RESULTS)


if __name__ == "__main__":
    main()
