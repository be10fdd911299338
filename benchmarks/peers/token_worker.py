"""One engine of late interaction in a process of its own, in the interpreter of its environment.

    python token_worker.py ENGINE --states FOLDER --set NAME [--queries 100] [--timed 25] [--budget 60]

Prints one line ``RESULT {...}``: CPU seconds of the build, bytes, and for each setting the rankings, and the CPU and
wall milliseconds of the timed queries: for each query the least of several runs, for the machine may be shared.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def least(work: Callable[[Any], object], items: Sequence[Any], *, repeats: int, budget: float) -> dict[str, Any]:
    """CPU and wall milliseconds of ``work``: per item the least of ``repeats`` runs; mean and p95 over the items.

    ``budget`` in seconds bounds the whole: then fewer items are timed, at least one, once.
    """
    cpu, wall, end = [], [], time.perf_counter() + budget
    for item in items:
        timings = []
        for _ in range(repeats):
            began, began_wall = time.process_time(), time.perf_counter()
            work(item)
            timings.append((time.process_time() - began, time.perf_counter() - began_wall))
            if time.perf_counter() > end:
                break
        cpu.append(1e3 * min(timing[0] for timing in timings))
        wall.append(1e3 * min(timing[1] for timing in timings))
        if time.perf_counter() > end:
            break
    return {
        "cpu_ms": float(np.mean(cpu)),
        "cpu_ms_p95": float(np.percentile(cpu, 95)),
        "wall_ms": float(np.mean(wall)),
        "timed_queries": len(cpu),
    }


def cpu_seconds() -> float:
    """CPU seconds of this process and its ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def measure(
    engine: Callable[[Any, Path], Any],
    states: Any,
    folder: Path,
    *,
    queries: int,
    timed: int,
    budget: float,
    more: Container[str] | None,
) -> dict[str, Any]:
    """Build the index of ``engine``, search with each of its settings, and put the questions ``more``: None is all."""
    began, began_wall = cpu_seconds(), time.perf_counter()
    built = engine(states, folder)
    result: dict[str, Any] = {
        "build_cpu_s": cpu_seconds() - began,
        "build_wall_s": time.perf_counter() - began_wall,
        "bytes_per_token": built.stored / max(1, len(states.flat)) if built.stored is not None else None,
        **built.notes,
        "settings": {},
    }
    for name, search in built.settings.items():
        search(states.queries[0])  # what is done once: pages read, threads started
        end, rankings = time.perf_counter() + budget, []
        for query in states.queries[:queries]:
            rankings.append([int(at) for at in search(query)])
            if time.perf_counter() > end:
                break
        times = least(search, states.queries[:timed], repeats=5, budget=budget)
        result["settings"][name] = {**times, "scanned_bytes": built.scanned.get(name), "rankings": rankings}
    for name, measurement in built.more.items():
        if more is None or name in more:
            result[name] = measurement()
    # Of the minute in which the further questions were put: other work makes their wall times longer.
    result["load"] = os.getloadavg()[0]
    built.close()
    return result


def main() -> None:
    """Measure the engine named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--states", type=Path, required=True)
    parser.add_argument("--set", required=True)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--timed", type=int, default=25)
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--searches-only", action="store_true", help="no further question, such as writes")
    parser.add_argument("--scratch", type=Path, default=None)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from peers.token_peers import PEERS
    from peers.token_states import load

    if options.engine in PEERS:
        engine = PEERS[options.engine][1]
    else:
        from peers.token_indexes import INDEXES  # millpond, which peers' environments lack

        engine = INDEXES[options.engine]
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        states = load(options.states, options.set)
        result = measure(
            engine,
            states,
            Path(folder),
            queries=options.queries,
            timed=options.timed,
            budget=options.budget,
            more=() if options.searches_only else None,
        )
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
