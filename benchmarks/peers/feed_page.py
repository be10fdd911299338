"""Table of the results of `benchmarks/feed.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
COLUMNS = (
    "tokens a text",
    "tokenizer",
    "M tokens/s",
    "M tokens/s from first to last batch",
    "device works",
    "waits before the first batch",
    "between batches",
    "after the last",
    "median gap, longest",
    "batches, tokens in each",
    "processor's us a text",
)


def page(results: Record) -> str:
    """What was simulated, and the table."""
    launches = f"{results['operators']} operators" if results["operators"] else "a graph"
    beside = "Another thread computes in Python. " if results["busy"] else ""
    return (
        f"A simulated device of {results['milliseconds']:g} ms for 32,768 tokens; a batch is launched as {launches}. "
        f"{beside}The stored tokenizer gives {results['tokenizer_rate'] / 1e6:g} M tokens/s.\n\n"
        f"{table(results['rows'])}"
    )


def table(rows: Sequence[Record]) -> str:
    """A row for each case. The four shares of a call's time are the device's: working, and waiting at three places."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + " ---: |" * len(COLUMNS)]
    for row in rows:
        shares = [row[part] / row["seconds"] for part in ("busy", "before")]
        shares += [row["gaps"]["seconds"] / row["seconds"], row["after"] / row["seconds"]]
        cells = [
            row["lengths"],
            row["tokenizer"],
            f"{row['tokens_per_second'] / 1e6:.2f}",
            f"{row['tokens_per_second_between'] / 1e6:.2f}",
            *(f"{share:.0%}" for share in shares),
            f"{row['gaps']['median'] * 1e3:.1f} ms, {row['gaps']['longest'] * 1e3:.1f} ms",
            f"{row['batches']}, {row['tokens_per_batch']:,}",
            f"{row['processor_seconds'] / row['texts'] * 1e6:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
