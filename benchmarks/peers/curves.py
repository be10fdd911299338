"""Tables and plots of the results of `benchmarks/load.py`, `memory.py` and `ingest_memory.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
GRID = "#e5e7eb"
FRONTS = {"threads": "#c2410c", "asyncio": "#0369a1"}
SHARES = ("p50_ms", "p95_ms", "p99_ms")


def load_table(results: Record) -> str:
    """One table for each measured section of the load benchmark."""
    parts = {"curve": _curve_table, "callers": _callers_table, "rerank": _rerank_table, "hostage": _hostage_table}
    return "\n\n".join(part(results[name]) for name, part in parts.items() if name in results)


def _curve_table(curve: Record) -> str:
    head = ["offered, texts/s (share of bulk)", "front", "served/s", "tokens/s", "refused"]
    head += [f"{kind} {share[:3]}, ms" for kind in ("short", "long") for share in SHARES]
    rows = [
        [
            f"{row['offered_per_second']:,.0f} ({row['share_of_bulk']:.0%})",
            row["front"],
            f"{row['achieved_per_second']:,.0f}",
            f"{row['tokens_per_second'] / 1000:.1f} k",
            str(row["refused"]),
            *(f"{row[kind][share]:.1f}" if kind in row else "-" for kind in ("short", "long") for share in SHARES),
        ]
        for row in curve["rows"]
    ]
    note = (
        f"One bulk call with the same texts (mean {curve['mean_tokens']:.0f} tokens): "
        f"{curve['bulk_per_second']:,.0f} texts/s, {curve['bulk_tokens_per_second'] / 1000:.1f} k tokens/s; "
        f"the queue holds at most {curve['max_queue']} texts."
    )
    return f"{_markdown(head, rows, words=2)}\n\n{note}"


def _callers_table(callers: Record) -> str:
    rows = [
        [
            f"{name}, mean {measured['mean_tokens']:.0f} tokens",
            f"{measured['texts_per_second']['bulk']:,.0f}",
            *(
                f"{measured['texts_per_second'][front]:,.0f} ({measured['share_of_bulk'][front]:.0%})"
                for front in ("threads", "asyncio")
            ),
        ]
        for name, measured in callers.items()
    ]
    count = next(iter(callers.values()))["callers"]
    return _markdown(["texts/s (share of bulk)", "one call", f"{count} threads", f"{count} tasks"], rows)


def _rerank_table(rerank: Record) -> str:
    rows = [[kind, *(f"{latency[share]:.0f}" for share in SHARES)] for kind, latency in rerank.items()]
    count = next(iter(rerank.values()))["passages"]
    return _markdown([f"rerank of {count} passages, ms", "p50", "p95", "p99"], rows)


def _hostage_table(hostage: Record) -> str:
    titles = {"alone": "alone", "beside": f"beside a caller with {hostage['long_texts']:,} long texts"}
    rows = [
        [title, *(f"{hostage[name][share]:.1f}" for share in SHARES)] for name, title in titles.items() if hostage[name]
    ]
    return _markdown([f"short texts, {hostage['per_second']:.0f}/s, ms", "p50", "p95", "p99"], rows)


def memory_table(results: Record) -> str:
    """Memory at the start, at its peak and at the end, with its growth."""
    megabytes = [f"{results[key] / 1e6:,.0f}" for key in ("loaded_bytes", "most_bytes", "last_bytes", "vectors_bytes")]
    row = [f"{results['texts']:,}", *megabytes, f"{results['megabytes_per_100k_texts']:+.2f}"]
    head = [
        f"texts of at most {results['most_tokens']} tokens",
        "MB after loading",
        "peak MB",
        "MB at the end",
        "MB of all vectors",
        "growth, MB per 100,000 texts",
    ]
    return _markdown(head, [row])


def ingest_memory_table(results: Record) -> str:
    """Rows per second, and memory at its peak, at the end and in growth, for each ingestion."""
    rows = [
        [
            name,
            f"{run['rows_per_second']:,}",
            *(f"{run[key] / 1e6:,.0f}" for key in ("most_bytes", "last_bytes")),
            f"{run['megabytes_per_100k_rows']:+.2f}",
            f"{run['last_tenth_over_first']:.2f}",
        ]
        for name, run in results["runs"].items()
    ]
    head = [
        f"{results['rows']:,} rows of at most {results['most_tokens']} tokens",
        "rows/s",
        "peak MB",
        "MB at the end",
        "growth after 100,000 rows, MB per 100,000",
        "last tenth over the first after them",
    ]
    loaded, vectors = results["loaded_bytes"] / 1e6, results["vectors_bytes"] / 1e6
    note = f"{loaded:,.0f} MB after loading; all vectors are {vectors:,.0f} MB."
    return f"{_markdown(head, rows)}\n\n{note}"


def load_plot(results: Record) -> Any:
    """Two plots over the offered load: latency percentiles, and the served throughput."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    curve = results["curve"]
    figure, (times, served) = plt.subplots(1, 2, figsize=(10, 4.2))
    for front, color in FRONTS.items():
        rows = [row for row in curve["rows"] if row["front"] == front and "short" in row]
        shares = [100 * row["share_of_bulk"] for row in rows]
        for percentile, style in (("p50_ms", "-"), ("p99_ms", "--")):
            times.plot(
                shares,
                [row["short"][percentile] for row in rows],
                style,
                marker="o",
                markersize=3,
                color=color,
                label=f"{front}, short texts, {percentile[:3]}",
            )
        served.plot(shares, [row["achieved_per_second"] for row in rows], "-o", markersize=3, color=color, label=front)
    served.axhline(curve["bulk_per_second"], color="#64748b", linewidth=1, linestyle=":", label="bulk")
    times.set_yscale("log")
    times.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    times.yaxis.set_major_formatter("{x:g}")  # 200 instead of 2 x 10^2
    times.yaxis.set_minor_formatter(NullFormatter())
    times.set_title("Latency under load")
    times.set_ylabel("milliseconds (log scale)")
    served.set_title("Throughput under load")
    served.set_ylabel("texts per second")
    served.set_ylim(bottom=0)
    _finished(figure, (times, served), "offered load, % of one caller's bulk throughput")
    return figure


def memory_plot(results: Record) -> Any:
    """Resident memory over the number of texts, beside the size of all vectors."""
    import matplotlib.pyplot as plt

    counts, sizes = zip(*results["samples"], strict=True)
    thousands = [count / 1000 for count in counts]
    figure, axes = plt.subplots(figsize=(8, 3.8))
    axes.plot(thousands, [size / 1e6 for size in sizes], color=FRONTS["threads"], label="resident memory")
    loaded = results["loaded_bytes"]
    vector_bytes = results["vectors_bytes"] / results["texts"]
    axes.plot(
        thousands,
        [(loaded + vector_bytes * count) / 1e6 for count in counts],
        color="#64748b",
        linestyle=":",
        label="if every vector stayed",
    )
    axes.set_ylim(bottom=0)
    axes.set_title("Memory of embed_iter")
    axes.set_ylabel("megabytes")
    _finished(figure, (axes,), f"thousand texts of at most {results['most_tokens']} tokens")
    return figure


def ingest_memory_plot(results: Record) -> Any:
    """Resident memory over the number of rows, for each ingestion."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.8))
    for (name, run), color in zip(results["runs"].items(), FRONTS.values(), strict=False):
        counts, sizes = zip(*run["samples"], strict=True)
        axes.plot([count / 1000 for count in counts], [size / 1e6 for size in sizes], color=color, label=name)
    axes.set_ylim(bottom=0)
    axes.set_title("Memory of an ingestion")
    axes.set_ylabel("megabytes")
    _finished(figure, (axes,), f"thousand rows of at most {results['most_tokens']} tokens")
    return figure


def _finished(figure: Any, all_axes: Sequence[Any], label: str) -> None:
    for axes in all_axes:
        axes.set_xlabel(label)
        axes.grid(color=GRID)
        axes.set_axisbelow(True)
        axes.legend(frameon=False)
    figure.tight_layout()


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """A Markdown table; all columns but the first ``words`` are right-aligned."""
    lines = [head, ["---"] * words + ["---:"] * (len(head) - words), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
