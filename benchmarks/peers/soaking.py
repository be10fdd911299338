"""Table and plot of the results of `benchmarks/soak.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]
GRID = "#e5e7eb"
POINTS = 400  # of the curve


def table(results: Record) -> str:
    """Requests, responses, latencies, and the server's memory, threads and files."""
    held, end = results["held"], results["end"]
    quiet, peak = held["mib_when_quiet"], held["mib_at_most"]
    counts = ", ".join(f"{count:,} of {status}" for status, count in results["by_status"].items())
    rows = [
        ("minutes, clients", f"{results['minutes']:g}, {results['clients']}"),
        ("requests answered", f"{results['requests']:,}: {counts}"),
        ("clients that left before their answer", f"{results['left_early']:,}"),
        (
            "texts and pairs compared with the engine's own, and wrong",
            f"{results['items_compared']:,}, {results['wrong']}",
        ),
        ("answers that clients and `/metrics` count differently", str(results["metrics"]["unexplained"])),
        ("answers, p50 and p99 ms", _milliseconds(results["seconds"])),
        ("`/health` meanwhile, p50 and p99 ms", _milliseconds(results["health_seconds"])),
        ("memory when idle, MiB: after the warm-up, at the end", f"{quiet[0]:,.0f}, {quiet[1]:,.0f}"),
        ("peak memory, MiB; growth in the second half, MiB per hour", _growth(peak, held)),
        ("threads and open files when idle: after the warm-up, at the end", _counts(held)),
        ("requests running at SIGTERM, and lost", f"{end['running']}, {end['lost']}"),
        ("problems", "; ".join(results["problems"]) or "none"),
    ]
    lines = ["| soak | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join(lines)


def plot(results: Record) -> Any:
    """Resident memory over time, and threads and open files below it."""
    import matplotlib.pyplot as plt

    minutes, mib, threads, files = zip(*results["curve"], strict=True)
    figure, (memory, counts) = plt.subplots(2, 1, figsize=(9, 4.6), sharex=True, height_ratios=(2, 1))
    memory.plot(minutes, mib, color="#c2410c", label="resident memory")
    memory.axvline(results["warm_minutes"], color="#64748b", linestyle=":", label="end of the warm-up")
    memory.set_ylabel("MiB")
    memory.set_title("The server under a long load")
    counts.plot(minutes, threads, color="#0369a1", label="threads")
    counts.plot(minutes, files, color="#94a3b8", linewidth=0.8, label="open files and sockets")
    counts.set_xlabel("minutes")
    for axes in (memory, counts):
        axes.set_ylim(bottom=0)
        axes.grid(color=GRID)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    return figure


def _milliseconds(spread: Mapping[str, float]) -> str:
    return ", ".join(f"{1000 * spread[key]:,.1f}" for key in ("p50", "p99")) if spread else "-"


def _growth(peak: float, held: Record) -> str:
    return f"{peak:,.0f}; {held['mib_per_hour_in_the_second_half']:+,.1f}"


def _counts(held: Record) -> str:
    before, after = zip(held["threads_when_quiet"], held["files_when_quiet"], strict=True)
    return "; ".join(f"{threads} and {files}" for threads, files in (before, after))
