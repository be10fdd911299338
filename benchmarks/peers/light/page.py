"""Tables of the results of `benchmarks/light.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]
MISSING = "-"


def summary(results: Record) -> str:
    """What is installed and how a process starts; memory, forks and the large checkpoint; notes."""
    return "\n\n".join([_starts(results), _memory(results), _notes(results)])


def _starts(results: Record) -> str:
    head = ["fresh environment", "MB", "packages", "with langchain-core, MB", "import, s", "process to first vector, s"]
    head += ["CPU seconds of it", "with what an earlier one kept", "`millpond embed`, s"]
    lines = []
    for name, row in results["rows"].items():
        fresh, kept = row["fresh"], row.get("kept", {})
        cells = [
            _megabytes(row.get("environment_bytes")),
            str(row.get("packages", MISSING)),
            _megabytes(row.get("langchain_environment_bytes")),
            _seconds(fresh["import_seconds"]),
            _seconds(fresh["seconds"]),
            _seconds(fresh["cpu_seconds"]),
            _seconds(kept.get("seconds")),
            _seconds(row.get("command_seconds")),
        ]
        lines.append([_title(name, row), *(_bold(name, cell) for cell in cells)])
    return _markdown(head, lines)


def _memory(results: Record) -> str:
    head = ["memory, MB", "peak, one process", "of it not files", "ten processes", "of each, not shared"]
    head += ["checkpoint of 1.2 GB, peak", "its first vector, s", "children of a warmed parent"]
    lines = []
    for name, row in results["rows"].items():
        one, together, large, forks = (
            row.get("kept", row["fresh"]),
            row["together"],
            row.get("checkpoint"),
            row["forks"],
        )
        cells = [
            *(_megabytes(one[key]) for key in ("peak_bytes", "anonymous_bytes")),
            *(_megabytes(together[key]) for key in ("bytes", "private_bytes")),
            _megabytes(large and large["peak_bytes"]),
            _seconds(large and large["seconds"]),
            f"{forks['children']} of {forks['children']}" if forks["ended"] is None else str(forks["ended"]),
        ]
        lines.append([_title(name, row), *(_bold(name, cell) for cell in cells)])
    return _markdown(head, lines)


def _notes(results: Record) -> str:
    lines = [
        "A static table is another class of model: it has no layers to compute, and lower quality."
        for row in results["rows"].values()
        if row["class"] != "transformer"
    ][:1]
    if results["before"]:
        lines.append(f"*millpond before* is commit {results['before']}.")
        now, before = (results["rows"][name]["speed"] for name in ("millpond", "millpond-before"))
        lines.append(
            "In turns with it, before / now: 512 texts in one call "
            f"{before['bulk_seconds'] / now['bulk_seconds']:.2f}, one text in a call "
            f"{before['call_seconds'] / now['call_seconds']:.2f} ({now['call_seconds'] * 1e3:.2f} ms)."
        )
    lines += [f"Without {name}: {reason}" for name, reason in results.get("left_out", {}).items()]
    return "\n".join(f"- {line}" for line in lines)


def _title(name: str, row: Record) -> str:
    return _bold(name, row["title"] + ("" if row["class"] == "transformer" else f" ({row['class']})"))


def _bold(name: str, text: str) -> str:
    return f"**{text}**" if name == "millpond" else text


def _megabytes(value: float | None) -> str:
    return MISSING if value is None else f"{value / 1e6:,.0f}"


def _seconds(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
