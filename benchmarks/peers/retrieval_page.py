"""Table and plot of the late-interaction benchmark: CPU milliseconds, recall, nDCG and bytes of every engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Record = Mapping[str, Any]
# name: title, colour; millpond's in warm colours
ENGINES = {
    "exact-int8": ("millpond exact int8", "#c2410c"),
    "exact-bfloat16": ("millpond exact bfloat16", "#b45309"),
    "memory-int8": ("millpond MemoryIndex int8", "#e11d48"),
    "plaid-int8": ("millpond PlaidIndex int8", "#d97706"),
    "plaid-4": ("millpond PlaidIndex 4 bits", "#ea580c"),
    "plaid-2": ("millpond PlaidIndex 2 bits", "#e8a27c"),
    "torch-bfloat16": ("torch bfloat16", "#64748b"),
    "maxsim-cpu": ("maxsim-cpu", "#0369a1"),
    "qdrant-edge": ("qdrant-edge", "#4d7c0f"),
    "fast-plaid": ("fast-plaid", "#7e22ce"),
    "colsearch": ("colsearch", "#0f766e"),
}
SETS = {"cranfield": "cranfield", "docs5k": "5 k passages", "docs99k": "99 k passages"}
MISSING = "-"


def table(results: Record) -> str:
    """For each processor a table of each set, and the further figures below it."""
    parts = []
    for processor, machine in results["processors"].items():
        parts.append(f"### {processor}")
        searched = {
            name: sections["search"]["documents"] for name, sections in machine["sets"].items() if "search" in sections
        }
        largest = max(searched, key=lambda name: searched[name], default=None)
        for name, sections in machine["sets"].items():
            if "search" in sections:
                parts.append(
                    search_table(name, sections["search"], bandwidth=machine["bandwidth"], more=name == largest)
                )
            if "quality" in sections:
                parts.append(quality_table(name, sections["quality"]))
            if "muvera" in sections:
                parts.append(muvera_lines(name, sections["muvera"]))
    return "\n\n".join(parts)


def search_table(name: str, section: Record, *, bandwidth: float, more: bool) -> str:
    """Every engine and setting on one set; with ``more``, also two threads, callers, writes and opening."""
    origin = section["origin"]
    rows = []
    for engine, setting, row, result in settings(section):
        title, _ = ENGINES[engine]
        ours = title.startswith("millpond")
        per_token = result["bytes_per_token"]
        share = MISSING
        if row["scanned_bytes"]:
            share = f"{row['scanned_bytes'] / (row['cpu_ms'] / 1e3) / bandwidth:.0%}"
        cells = [
            f"{title}{', ' if setting else ''}{setting}",
            f"{row['cpu_ms']:.2f}",
            f"{row['recall@10']:.3f}",
            f"{row['ndcg@10'] - row['ndcg@10 exact']:+.4f}",
            share,
            MISSING if per_token is None else f"{per_token:.0f}",
            f"{result['build_cpu_s']:.1f}",
        ]
        rows.append([f"**{cell}**" if ours else cell for cell in cells])
    head = [
        f"{SETS[name]}: {section['documents']:,} documents, {section['tokens'] / 1e6:.2f} M tokens",
        "CPU ms",
        "recall@10",
        "nDCG@10 against exact",
        "of read bandwidth",
        "B/token",
        "build CPU s",
    ]
    lines = ["| " + " | ".join(line) + " |" for line in [head, ["---", *["---:"] * (len(head) - 1)], *rows]]
    notes = [
        f"nDCG@10 of float32 MaxSim: {section['ndcg@10 exact']:.4f}; {section['query_tokens']:.1f} tokens a query in "
        f"the mean; one core reads {bandwidth / 1e9:.1f} GB/s.",
        *(f"Without {engine}: {reason}." for engine, reason in section["left_out"].items()),
        *(
            line
            for engine, result in (section["engines"].items() if more else ())
            for line in further(ENGINES[engine][0], result)
        ),
        f"*{origin['when'][:10]}, commit {(origin['commit'] or 'none')[:10]}, load {origin['load']:.1f} at the end of "
        "the run.*",
    ]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)])


def further(title: str, result: Record) -> Iterator[str]:
    """A line for each further question that was put to an engine."""
    load = f" (at a load of {result['load']:.0f})" if result.get("load", 0) >= 3 else ""
    for name in ("threads", "threads, exact"):
        if threads := result.get(name):
            yield (
                f"{title}{name.removeprefix('threads')}: two threads {threads['speedup']:.2f} times as fast as one "
                f"({threads['wall_ms_1']:.1f} and {threads['wall_ms_2']:.1f} ms){load}."
            )
    if callers := result.get("callers"):
        yield (
            f"{title}, {callers['callers']} callers at once: {callers['queries_per_second']:.0f} queries/s (one "
            f"caller: {callers['queries_per_second_alone']:.0f}), p50 {callers['p50_ms']:.0f}, p99 "
            f"{callers['p99_ms']:.0f} ms; "
            f"a caller finished {callers['fewest_by_a_caller']} to {callers['most_by_a_caller']} queries{load}."
        )
    if writes := result.get("writes"):
        yield (
            f"{title}: delete one document {writes['delete_wall_ms']:.2f} ms ({writes['delete_cpu_ms']:.2f} CPU), add "
            f"{writes['added']} {writes['add_wall_ms']:.1f} ms ({writes['add_cpu_ms']:.1f} CPU) without encoding{load}."
        )
    if opened := result.get("opened"):
        before = opened["before"]
        memory = {
            when: tuple((opened[when][kind] - before[kind]) / 2**20 for kind in ("RssAnon", "RssFile"))
            for when in ("opened", "searched")
        }
        yield (
            f"{title}: a new process opens it in {opened['wall_ms']:.0f} ms and takes {memory['opened'][0]:.0f} MiB of "
            f"its own and {memory['opened'][1]:.0f} MiB of mapped files; after one search "
            f"{memory['searched'][0]:.0f} and {memory['searched'][1]:.0f} MiB."
        )


def quality_table(name: str, section: Record) -> str:
    """NDCG@10 of each encoding."""
    rows = [
        [what, f"{row['ndcg@10']:.4f}", f"{row['recall@10']:.3f}" if "recall@10" in row else MISSING]
        for what, row in section.items()
        if what != "origin"
    ]
    head = [f"{SETS[name]}, whole queries", "nDCG@10", "recall@10 of exact"]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---", "---:", "---:"], *rows])


def muvera_lines(name: str, section: Record) -> str:
    """What MUVERA encodings find."""
    shares = ", ".join(
        f"{what.rpartition(' ')[2]} {value:.3f}"
        for what, value in section.items()
        if what.startswith("int8: share of the exact ten")
    )
    rescored = next(what for what in section if what.startswith("int8: ndcg@10"))
    found = next(what for what in section if what.startswith("int8: recall@10"))
    return (
        f"MUVERA on {SETS[name]}, {section['dimensions']:,} dimensions in int8: share of the exact ten among the best "
        f"{shares}; {rescored.removeprefix('int8: ndcg@10 of ')}: nDCG@10 {section[rescored]:.4f} (exact "
        f"{section['ndcg@10 exact']:.4f}), recall@10 {section[found]:.3f}; {section['cpu_ms_document']:.2f} CPU ms a "
        "document."
    )


def plot(results: Record) -> Any:
    """Recall over CPU milliseconds: a panel for each set, a line for each engine's settings; the first processor's.

    None if nothing was searched.
    """
    import matplotlib.pyplot as plt

    machine = next(iter(results["processors"].values()))
    panels = [(name, machine["sets"][name]["search"]) for name in SETS if "search" in machine["sets"].get(name, {})]
    if not panels:
        return None
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 4.6), squeeze=False, sharey=True)
    handles: dict[str, Any] = {}
    for panel, (name, section) in zip(axes[0], panels, strict=True):
        points: dict[str, list[tuple[float, float]]] = {}
        for engine, _, row, _ in settings(section):
            points.setdefault(engine, []).append((row["cpu_ms"], row["recall@10"]))
        for engine, listed in points.items():
            title, color = ENGINES[engine]
            ours = title.startswith("millpond")
            (handles[title],) = panel.plot(
                *zip(*sorted(listed), strict=True),
                "-o" if ours else "--s",
                color=color,
                linewidth=1.8 if ours else 1.2,
                markersize=6 if ours else 5,
                label=title,
                zorder=3,
            )
        panel.set_xscale("log")
        panel.set_title(f"{SETS[name]}, {section['tokens'] / 1e6:.1f} M tokens")
        panel.set_xlabel("CPU milliseconds of a query, one thread")
        panel.grid(color="#e5e7eb")
        panel.set_axisbelow(True)
    axes[0][0].set_ylabel("recall@10 of exact MaxSim")
    shown = [title for title, _ in ENGINES.values() if title in handles]
    figure.legend(
        [handles[title] for title in shown],
        shown,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=4,
        frameon=False,
    )
    figure.tight_layout()
    return figure


def settings(section: Record) -> Iterator[tuple[str, str, Record, Record]]:
    """Engine, setting, its row and the engine's result, in the order of ``ENGINES``."""
    for engine in ENGINES:
        if result := section["engines"].get(engine):
            for setting, row in result["settings"].items():
                yield engine, setting, row, result
