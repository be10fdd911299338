"""What an index does beside answering one caller: two threads, many callers, writes, opening in a new process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millpond import Ragged
from peers.token_states import FloatArray, TokenStates

CALLERS = 64
_OPENED = """
import json, sys
import numpy as np
import millpond.late_interaction
from millpond.late_interaction import PlaidIndex
from millpond.vectors.ragged import Ragged

def resident():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon", "RssFile")}

path, codec, query = sys.argv[1:]
query = np.load(query)
import torch
import time
before = resident()
began, wall = time.process_time(), time.perf_counter()
index = PlaidIndex(path, None, codec=codec)
seconds, wall = time.process_time() - began, time.perf_counter() - wall
opened = resident()
index.search_embeddings(Ragged(flat=query, offsets=np.array([0, len(query)])), k=10)
searched = resident()
found = {"before": before, "opened": opened, "searched": searched}
print(json.dumps(found | {"cpu_ms": 1e3 * seconds, "wall_ms": 1e3 * wall}))
"""


def threads(search: Callable[[FloatArray], Any], queries: Sequence[FloatArray], *, repeats: int = 7) -> dict[str, Any]:
    """Wall milliseconds of a query with one and with two threads: the mean of each query's least time."""
    import torch

    asked, before = queries[:8], torch.get_num_threads()
    wall: dict[int, list[float]] = {1: [np.inf] * len(asked), 2: [np.inf] * len(asked)}
    try:
        for _ in range(repeats):
            for count, least in wall.items():  # in turns, for the machine may be shared
                torch.set_num_threads(count)
                for at, query in enumerate(asked):
                    began = time.perf_counter()
                    search(query)
                    least[at] = min(least[at], 1e3 * (time.perf_counter() - began))
    finally:
        torch.set_num_threads(before)
    one, two = float(np.mean(wall[1])), float(np.mean(wall[2]))
    return {"wall_ms_1": one, "wall_ms_2": two, "speedup": one / two}


def callers(
    search: Callable[[FloatArray], Any], queries: Sequence[FloatArray], *, count: int = CALLERS, seconds: float = 4.0
) -> dict[str, Any]:
    """``count`` threads that search at once for ``seconds``, after one caller has: throughput, latencies, fairness."""
    alone = _run(search, queries, count=1, seconds=seconds / 2)
    together = _run(search, queries, count=count, seconds=seconds)
    latencies = np.concatenate(together)
    finished = np.array([len(one) for one in together])
    return {
        "callers": count,
        "queries_per_second_alone": len(alone[0]) / (seconds / 2),
        "queries_per_second": len(latencies) / seconds,
        "p50_ms": float(np.percentile(latencies, 50)),
        "p99_ms": float(np.percentile(latencies, 99)),
        "longest_ms": float(latencies.max()),
        "fewest_by_a_caller": int(finished.min()),
        "most_by_a_caller": int(finished.max()),
    }


def _run(
    search: Callable[[FloatArray], Any], queries: Sequence[FloatArray], *, count: int, seconds: float
) -> list[list[float]]:
    """For each caller, the milliseconds of its searches that began within ``seconds``."""
    latencies: list[list[float]] = [[] for _ in range(count)]
    start = threading.Barrier(count)

    def call(caller: int) -> None:
        start.wait()
        end, at = time.perf_counter() + seconds, caller
        while (began := time.perf_counter()) < end:
            search(queries[at % len(queries)])
            latencies[caller].append(1e3 * (time.perf_counter() - began))
            at += 1

    running = [threading.Thread(target=call, args=(caller,)) for caller in range(count)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return latencies


def writes(index: Any, states: TokenStates, *, repeats: int = 5, added: int = 100) -> dict[str, Any]:
    """Milliseconds to delete one document, and to add ``added`` whose token states are given: the least of several."""
    added = min(added, len(states))
    matrices = [np.asarray(states.flat[states.offsets[i] : states.offsets[i + 1]], np.float32) for i in range(added)]
    documents = Ragged.from_matrices(matrices, width=states.flat.shape[1])
    timings: dict[str, list[tuple[float, float]]] = {"delete": [], "add": []}
    for repeat in range(min(repeats, len(states))):
        began, wall = time.process_time(), time.perf_counter()
        index.delete([str(len(states) - 1 - repeat)])
        timings["delete"].append((time.process_time() - began, time.perf_counter() - wall))
        began, wall = time.process_time(), time.perf_counter()
        index.add_embeddings([f"new-{repeat}-{i}" for i in range(added)], documents)
        timings["add"].append((time.process_time() - began, time.perf_counter() - wall))
    result: dict[str, Any] = {"added": added}
    for name, values in timings.items():
        result[f"{name}_cpu_ms"], result[f"{name}_wall_ms"] = (1e3 * least for least in np.min(values, axis=0))
    return result


def opened(path: Path, codec: str, query: FloatArray) -> dict[str, Any]:
    """Resident memory of a new process before it opens an index, after it, and after one search."""
    saved = path.parent / "query.npy"
    np.save(saved, query)
    command = [sys.executable, "-c", _OPENED, str(path), codec, str(saved)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"opening the index in a new process failed: {run.stderr.strip()[-1000:]}")
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result
