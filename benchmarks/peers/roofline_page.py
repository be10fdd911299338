"""Table of the results of `benchmarks/encoder_roofline.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]
MISSING = "-"


def table(results: Record) -> str:
    """A row for each shape and precision, and one for each of their kinds of steps."""
    lines = [
        "| one thread | us a token | share of the time | Gop/s | of the peak |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for shape, precisions in results["shapes"].items():
        for dtype, row in precisions.items():
            name = f"{shape}, {dtype}: {row['tokens_per_second'] / 1000:.1f} k tokens/s"
            lines.append(_line(name, row, row, bold=True))
            lines += [_line(step, part, row) for step, part in row["steps"].items()]
    found = ", ".join(f"{name} {value:,.0f}" for name, value in results["peaks"].items())
    peak = f"Measured peak of one core, Gop/s: {found}." if found else "The peak was not measured: no compiler."
    return "\n".join(lines) + f"\n\n{peak}"


def _line(name: str, part: Record, row: Record, *, bold: bool = False) -> str:
    cells = [
        name,
        f"{part['seconds'] / row['tokens'] * 1e6:.2f}",
        f"{part['seconds'] / row['seconds']:.0%}",
        f"{part['gops']:,.0f}" if "gops" in part else MISSING,
        f"{part['of_peak']:.0%}" if "of_peak" in part else MISSING,
    ]
    return f"| {' | '.join(f'**{cell}**' if bold else cell for cell in cells)} |"
