"""The plots as SVG, one for each result: throughput, latency of one text, load, memory, soak test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from record import recorded

from peers import curves, page, retrieval_page, soaking
from peers.engines import COMPETITORS

Record = Mapping[str, Any]
OURS, OURS_TOO, THEIRS = "#c2410c", "#e8a27c", ("#334155", "#0369a1", "#4d7c0f", "#7e22ce", "#64748b", "#0f766e")
GRID = "#e5e7eb"
# Lines of the plots; the tables have all settings.
SHOWN = (
    "millpond",
    "millpond-compile",
    "st-openvino",
    "vllm",
    "st-bf16",
    "transformers",
    "st-onnx",
    "fastembed",
    "st-fp32",
)


def draw(results: Path, images: Path, *, suffix: str = "svg") -> list[Path]:
    """Draw the plot of every existing result; the paths of the images."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams.update(
        {
            "svg.fonttype": "none",  # text stays text: small files, and a reader can search in them
            "svg.hashsalt": "millpond",
            "font.family": "sans-serif",
            "font.sans-serif": ["DejaVu Sans"],
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": "#94a3b8",
            "axes.titlelocation": "left",
            "axes.titlesize": 12,
            "axes.titleweight": "bold",
            "figure.dpi": 100,
        }
    )
    drawn = []
    contents = recorded(results)
    for name, plot in PLOTS.items():
        for content in contents.get(name, ()):
            figure = plot(content["results"])
            if figure is None:  # a result without anything to draw
                continue
            images.mkdir(parents=True, exist_ok=True)
            target = images / page.image(content, suffix)
            # Without a date, the same figures give the same file.
            figure.savefig(target, bbox_inches="tight", metadata={"Date": None} if suffix == "svg" else None)
            mpl.pyplot.close(figure)
            drawn.append(target)
    return drawn


def by_length(results: Record) -> Any:
    """A line for each engine over the mean length of the workloads."""
    loads = sorted(results["workloads"].items(), key=lambda item: item[1]["mean_tokens"])
    series = _series([load["rows"] for _, load in loads])
    figure, axes = _lines(series, [f"{name}\n{load['mean_tokens']:.0f}" for name, load in loads])
    axes.set_title("Embedding throughput by length of the texts")
    axes.set_xlabel("workload, and the mean tokens of its texts")
    return figure


def by_calls(results: Record) -> Any:
    """A line for each engine over the number of texts in a call."""
    sizes = {int(size): rows for size, rows in results["sizes"].items()}
    figure, axes = _lines(_series(list(sizes.values())), [f"{size:,}" for size in sizes])
    axes.set_title("Embedding throughput by texts in one call")
    axes.set_xlabel("texts in one call, 50 tokens each in the mean")
    return figure


def percentiles(results: Record) -> Any:
    """A bar from the median to the 99th percentile for each engine, the fastest on top."""
    import matplotlib.pyplot as plt

    measured = {name: row for name, row in results["rows"].items() if "p50_ms" in row}
    names = sorted(measured, key=lambda name: -measured[name]["p50_ms"])
    figure, axes = plt.subplots(figsize=(8, 0.45 * len(names) + 1.4))
    for height, name in enumerate(names):
        row, color = measured[name], OURS if COMPETITORS[name].ours else THEIRS[0]
        axes.plot([row["p50_ms"], row["p99_ms"]], [height, height], color=color, linewidth=2, alpha=0.45, zorder=2)
        axes.plot(row["p50_ms"], height, "o", color=color, markersize=8, zorder=3)
        axes.plot(row["p95_ms"], height, "|", color=color, markersize=11, markeredgewidth=2, zorder=3)
        axes.plot(row["p99_ms"], height, "|", color=color, markersize=7, markeredgewidth=1.5, zorder=3)
        axes.annotate(
            f"{row['p50_ms']:.1f}",
            (row["p50_ms"], height),
            (0, 8),
            textcoords="offset points",
            ha="center",
            color=color,
        )
    axes.set_yticks(range(len(names)), [COMPETITORS[name].title for name in names])
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        if COMPETITORS[name].ours:
            label.set(color=OURS, fontweight="bold")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.6, len(names) - 0.25)
    axes.set_xlim(0, 1.05 * max(row["p99_ms"] for row in measured.values()))
    axes.grid(axis="x", color=GRID)
    axes.set_axisbelow(True)
    axes.set_title(f"One text of about {results['tokens']:.0f} tokens, alone")
    axes.set_xlabel("milliseconds: dot and figure p50, tick p95, short tick p99")
    return figure


PLOTS: dict[str, Callable[[Record], Any]] = {
    "embed": by_length,
    "calls": by_calls,
    "latency": percentiles,
    "load": curves.load_plot,
    "ingest_memory": curves.ingest_memory_plot,
    "late_interaction": retrieval_page.plot,
    "memory": curves.memory_plot,
    "soak": soaking.plot,
}


def _series(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Thousands of tokens per second by engine; None where an engine has no time."""
    names = [name for name in SHOWN if any("tokens_per_second" in column.get(name, {}) for column in columns)]
    return {
        name: [
            row["tokens_per_second"] / 1000 if "tokens_per_second" in (row := column.get(name, {})) else None
            for column in columns
        ]
        for name in names
    }


def _lines(series: Mapping[str, Sequence[float | None]], labels: Sequence[str]) -> Any:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.6))
    theirs = iter(THEIRS * 2)
    ends = []
    for name, values in series.items():
        ours = COMPETITORS[name].ours
        color = (OURS if name == "millpond" else OURS_TOO) if ours else next(theirs)
        points = [(column, value) for column, value in enumerate(values) if value is not None]
        axes.plot(*zip(*points, strict=True), "-o", color=color, linewidth=2.8 if ours else 1.4, markersize=4, zorder=3)
        ends.append((points[-1], COMPETITORS[name].title, color, ours))
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("thousand tokens per second")
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    top = axes.get_ylim()[1]
    heights = _apart([height for (_, height), *_ in ends], gap=top * 0.052)
    for ((column, height), text, color, ours), label_height in zip(ends, heights, strict=True):
        axes.annotate(
            text,
            (column, height),
            (len(labels) - 0.9, label_height),
            color=color,
            fontweight="bold" if ours else "normal",
            va="center",
            annotation_clip=False,
        )
    return figure, axes


def _apart(heights: Sequence[float], *, gap: float) -> list[float]:
    """The heights, moved up or down until no two are closer than ``gap``; their order is kept."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    groups: list[list[float]] = []  # each: centre, count
    for index in order:
        groups.append([heights[index], 1])
        while len(groups) > 1 and groups[-1][0] - groups[-2][0] < gap * (groups[-1][1] + groups[-2][1]) / 2:
            centre, count = groups.pop()
            before, others = groups.pop()
            groups.append([(centre * count + before * others) / (count + others), count + others])
    placed = [centre + gap * (i - (count - 1) / 2) for centre, count in groups for i in range(int(count))]
    result = [0.0] * len(heights)
    for index, height in zip(order, placed, strict=True):
        result[index] = height
    return result
