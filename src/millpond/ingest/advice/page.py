"""The page of an advice: what each layout takes and keeps, drawn."""

from __future__ import annotations

import os
from collections.abc import Mapping

from millpond.ingest.advice.advisor import Advice, Measurement
from millpond.ingest.advice.layouts import QUANTIZATIONS, Layout
from millpond.ingest.pages import charts
from millpond.ingest.pages.charts import Point, bytes_text, check_charts
from millpond.ingest.pages.environment import environment
from millpond.ingest.pages.html_page import figure, page, section, side_by_side, table, write_page

_COLORS = dict(
    zip(("vectors", *QUANTIZATIONS, "coarse_to_fine"), ("blue", "teal", "purple", "orange", "red"), strict=True)
)
_MILLION = 1_000_000
_NOTE = (
    "Written by millpond. Every layout was searched exactly: what the index of a database misses comes on top, and so "
    "does its own storage."
)


def write_advice(
    path: str | os.PathLike[str],
    advice: Advice,
    *,
    source: str,
    model: str,
    commands: Mapping[Layout, str],
    settings: Mapping[str, object] | None = None,
) -> None:
    """Write the page: one file that loads nothing, is printable, and follows dark or light colours."""
    check_charts()
    metric = metric_name(advice)
    facts = {
        "source": source,
        "model": model,
        "records searched": f"{advice.rows:,} of {advice.read:,}",
        "queries": f"{advice.queries:,}",
        "candidates that are rescored": f"{advice.candidates:,}",
        **{name: str(value) for name, value in (settings or {}).items() if value is not None},
    }
    text = page(
        title="How to store these vectors",
        subtitle=f"{source} · {model}",
        tiles={
            f"{metric} at full width": f"{advice.full.quality:.4f}",
            "full width": f"{bytes_text(advice.full.stored_bytes)} a row",
            "smallest that keeps it": f"{bytes_text(advice.smallest.stored_bytes)} a row",
            "least memory that keeps it": f"{bytes_text(advice.lightest.scanned_bytes)} a row",
        },
        sections=[
            *(
                section(title, describe(one, advice), code=commands.get(one.layout, ""))
                for title, one in recommendations(advice)
            ),
            section("Read this with it", *advice.notes) if advice.notes else "",
            side_by_side(
                _trade_off("Memory", "scanned_bytes", advice, metric),
                _trade_off("Storage", "stored_bytes", advice, metric),
                _by_width(advice),
            ),
            _table(advice),
            side_by_side(
                table("Settings", (), list(facts.items()), numbers=False),
                table("Machine and versions", (), list(environment().items()), numbers=False),
            ),
        ],
        note=_NOTE,
    )
    write_page(path, text)


def recommendations(advice: Advice) -> list[tuple[str, Measurement]]:
    """The advised layouts with their headings; one, if the smallest needs the least memory too."""
    if advice.smallest == advice.lightest:
        return [("The smallest that keeps it", advice.smallest)]
    return [("The least storage that keeps it", advice.smallest), ("The least memory that keeps it", advice.lightest)]


def describe(one: Measurement, advice: Advice) -> str:
    """What an advised layout takes and keeps, in a sentence."""
    full = advice.full
    kept = f"{metric_name(advice)} {one.quality:.4f}, {one.quality / (full.quality or 1):.1%} of the full width's"
    if advice.judged:
        kept += f" (recall@{advice.k} {one.recall:.3f})"
    memory = "" if one.scanned_bytes == one.stored_bytes else f", {bytes_text(one.scanned_bytes)} of it in memory"
    databases = ", ".join(one.layout.databases)
    searched = f" Searched with oversampling={advice.candidates / advice.k:g}." if one.layout.rescore else ""
    return f"{one.layout.name}: {bytes_text(one.stored_bytes)} a row{memory}; {kept}. Stored by {databases}.{searched}"


def metric_name(advice: Advice) -> str:
    """What decides."""
    return "nDCG@10" if advice.judged else f"recall@{advice.k}"


def cells(one: Measurement, full: Measurement, *, judged: bool) -> list[str]:
    """The columns of :func:`header` for a layout."""
    return [
        one.layout.name,
        f"{one.recall:.4f}",
        *([f"{one.ndcg:.4f}"] if judged and one.ndcg is not None else []),
        f"{one.stored_bytes:,.0f}",
        bytes_text(one.stored_bytes * _MILLION),
        bytes_text(one.scanned_bytes * _MILLION),
        f"{one.read_bytes / full.read_bytes:.1%}",
        f"{one.seconds * 1e6:,.0f}",
        ", ".join(one.layout.databases) or "-",
    ]


def header(advice: Advice) -> list[str]:
    """The names of the columns."""
    quality_names = [f"recall@{advice.k}", *(["nDCG@10"] if advice.judged else [])]
    return ["layout", *quality_names, "bytes a row", "1 M rows", "in memory", "read a query", "numpy µs", "stored by"]


def _trade_off(title: str, attribute: str, advice: Advice, metric: str) -> str:
    advised = {one.layout for _, one in recommendations(advice)}
    points: list[Point] = []
    highest = -1.0
    for one in sorted(advice.measurements, key=lambda one: (getattr(one, attribute), -one.quality)):
        size = float(getattr(one, attribute))
        best = one.layout.storable and one.quality > highest
        highest = one.quality if best else highest
        points.append(
            Point(
                x=size,
                y=one.quality,
                group=one.layout.kind,
                name=f"{one.layout.name}: {bytes_text(size)} a row, {metric} {one.quality:.4f}",
                best=best,
                advised=one.layout in advised,
                label=one.layout.widths,
            )
        )
    kinds = [kind for kind in _COLORS if any(point.group == kind for point in points)]
    summary = (
        "On the line: nothing smaller that a database stores is as good. Ringed: advised. "
        f"Dashed: {100 * advice.keep:.4g} % of the full width."
    )
    least = advice.keep * advice.full.quality
    svg = charts.trade_off(points, _COLORS, least, title=title, x="bytes a row", y=metric)
    return figure(f"{title} and {metric}", svg, summary=summary, keys={kind: _COLORS[kind] for kind in kinds})


def _by_width(advice: Advice) -> str:
    values = {
        one.layout.width: one.quality for one in advice.measurements if one.layout == Layout(width=one.layout.width)
    }
    if len(values) < 2:
        return ""
    title = f"{metric_name(advice)} by width"
    svg = charts.widths(values, title=title, y=metric_name(advice))
    return figure(title, svg, summary="Vectors in float32, cut to each width.")


def _table(advice: Advice) -> str:
    rows = [cells(one, advice.full, judged=advice.judged) for one in advice.measurements]
    summary = (
        "Stressed: no other layout that a database stores is as small, in memory and stored, and as good. Read a "
        "query: bytes that an exact search of a million rows reads, as a share of float32 at full width. The time is "
        "that of numpy here."
    )
    return table("All layouts", header(advice), rows, summary=summary, marked=[one.best for one in advice.measurements])
