"""write_report: what a run did, as a page with charts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.ingest.pages import charts
from millpond.ingest.pages.charts import check_charts, seconds_text
from millpond.ingest.pages.environment import environment
from millpond.ingest.pages.html_page import check_page_path, figure, page, section, side_by_side, table, write_page
from millpond.ingest.pages.neighbors import plotted_widths, recall_by_width
from millpond.ingest.telemetry.report import IngestReport
from millpond.ingest.telemetry.trace import LogHistogram, RunTrace, StageSummary, TraceSample

Numbers = npt.NDArray[np.float64]

_BINS = 60  # of the charts over time
_RECALL_K = 10
_WHERE_CHARS = 60
_RATES = {"read": "gray", "embedded": "blue", "cached": "teal", "written": "orange"}
_QUEUE_COLORS = ("blue", "orange", "teal", "purple")
# Names of settings whose values are not shown, and the password of a URL.
_SECRET = re.compile(r"key|token|password|secret|credential", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(?<=://)([^/@\s:]*):[^/@\s]*@")
_URL_SECRET = re.compile(r"([?&][^=&#\s]*(?:key|token|password|secret)[^=&#\s]*=)[^&#\s]*", re.IGNORECASE)


def check_report(path: str | os.PathLike[str]) -> None:
    """Refuse a report that could not be written at the end, before the run."""
    check_charts()
    check_page_path(path)


def write_report(
    path: str | os.PathLike[str],
    report: IngestReport | None,
    trace: RunTrace,
    settings: Mapping[str, object],
    *,
    widths: Sequence[int] | None = None,
    stored: Sequence[int] = (),
    stopped: str = "",
) -> None:
    """Write a page about a run: one file that loads nothing, is printable, and follows dark or light colours.

    Args:
        path: The file; one that exists is replaced, at once.
        report: The counts; ``None`` for a run that stopped before its end, whose last sampled counts are shown.
        trace: What the run did.
        settings: Names and values to show. Passwords of URLs, and values whose name says that they are secret, are
            not shown.
        widths: Widths that the model was trained for; ``None``: powers of two.
        stored: Widths that the run wrote.
        stopped: Why the run stopped before its end; empty if it did not.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    check_charts()
    samples = trace.samples
    last = samples[-1] if samples else TraceSample(seconds=0.0, counts={}, queues={})
    counts: Mapping[str, Any] = asdict(report) if report is not None else {**last.counts, "seconds": last.seconds}
    seconds = float(counts["seconds"])
    parts = [
        side_by_side(
            _throughput(samples, counts, seconds),
            _queues(samples),
            _lengths(trace.chars),
            _recall(trace.vectors, widths, stored),
        ),
        _stages(trace.stages, seconds),
        _failures(trace.failures, counts.get("failed", 0)),
    ]
    if stopped:
        parts.insert(0, section("The run stopped before its end", stopped))
    if trace.retries:
        retries = sorted(trace.retries.items(), key=lambda item: -item[1])
        rows = [(f"{count:,}", _value(reason)) for reason, count in retries]
        parts.append(table("Writes sent again", ("times", "reason"), rows, numbers=False))
    shown = {name.replace("_", " "): count for name, count in counts.items() if count not in (None, ())}
    facts = {"Counts": shown, "Settings": settings, "Machine and versions": environment()}
    parts.append(side_by_side(*(_facts(title, named) for title, named in facts.items())))
    names = [_value(settings[name]) for name in ("source", "to", "collection", "model") if settings.get(name)]
    text = page(
        title="Ingest report",
        subtitle=" · ".join([*names, datetime.now().astimezone().isoformat(" ", "minutes")]),
        tiles=_tiles(counts, seconds),
        sections=parts,
        note="Written by millpond. This page is one file and loads nothing.",
    )
    write_page(path, text)


def _tiles(counts: Mapping[str, Any], seconds: float) -> dict[str, str]:
    vectors = counts.get("embedded", 0) + counts.get("cached", 0)
    return {
        "rows written": f"{counts.get('written', 0):,}",
        "time": seconds_text(seconds),
        "records a second": _rate(counts.get("read", 0), seconds),
        "from the cache": f"{counts.get('cached', 0) / vectors:.0%}" if vectors else "-",
        "failed": f"{counts.get('failed', 0):,}",
    }


def _throughput(samples: Sequence[TraceSample], counts: Mapping[str, Any], seconds: float) -> str:
    title = "Throughput"
    names = [name for name in _RATES if any(sample.counts.get(name) for sample in samples)]
    if len(samples) < 3 or not names:
        return figure(title, None, empty="The run was too short to draw its throughput.")
    ends, times = _bins(samples), [sample.seconds for sample in samples]
    factor, unit = _time_unit(seconds)
    lines = []
    for name in names:
        totals = np.interp(ends, times, [sample.counts.get(name, 0) for sample in samples])
        rates = np.diff(totals) / np.diff(ends)  # [bins]
        lines.append((ends / factor, np.append(rates, rates[-1:]), _RATES[name]))
    written = counts.get("written", 0)
    summary = f"{written:,} rows written in {seconds_text(seconds)}: {_rate(written, seconds)} a second on average."
    svg = charts.steps(lines, title=title, x=unit, y="a second")
    return figure(title, svg, summary=summary, keys={name: _RATES[name] for name in names})


def _queues(samples: Sequence[TraceSample]) -> str:
    title = "Queue depths"
    names = list(dict.fromkeys(name for sample in samples for name in sample.queues))
    if len(samples) < 3 or not names:
        return figure(title, None, empty="The run was too short to draw its queues.")
    ends, times = _bins(samples), [sample.seconds for sample in samples]
    which = np.clip(np.searchsorted(ends, times, side="right") - 1, 0, len(ends) - 2)
    numbers = np.bincount(which, minlength=len(ends) - 1)
    filled = np.flatnonzero(numbers)  # a long write leaves bins without a sample
    factor, unit = _time_unit(times[-1])
    keys = dict(zip(names, _QUEUE_COLORS * len(names), strict=False))
    lines = []
    for name, color in keys.items():
        sums = np.bincount(which, [sample.queues.get(name, 0) for sample in samples], len(ends) - 1)
        means = sums[filled] / numbers[filled]
        lines.append((np.append(ends[filled], ends[-1]) / factor, np.append(means, means[-1:]), color))
    svg = charts.steps(lines, title=title, x=unit, y="batches that wait")
    summary = "A queue that is always full waits for the stage behind it; one that is empty, for the stage before it."
    return figure(title, svg, summary=summary, keys=keys)


def _lengths(chars: LogHistogram) -> str:
    title = "Length of the texts"
    if not chars.count:
        return figure(title, None, empty="No text was embedded.")
    median, most = chars.quantile(0.5), chars.quantile(0.99)
    marks = {"median": median, "99 %": most}
    if most < median * 1.5:  # their names would cover each other
        del marks["99 %"]
    summary = (
        f"{chars.count:,} texts: median {median:,.0f}, 99 % up to {most:,.0f}, longest {chars.most:,.0f} characters."
    )
    svg = charts.bars(*chars.buckets(), marks, title=title, x="characters")
    return figure(title, svg, summary=summary)


def _recall(rows: npt.NDArray[np.float32], declared: Sequence[int] | None, stored: Sequence[int]) -> str:
    title = "Recall by width"
    if len(rows) <= _RECALL_K:
        return figure(title, None, empty=f"Fewer than {_RECALL_K + 2} vectors were sampled.")
    values = recall_by_width(rows, plotted_widths(rows.shape[1], declared, stored), k=_RECALL_K)
    summary = (
        f"How many of a vector's {_RECALL_K} nearest at full width are its nearest at a smaller one too, among "
        f"{len(rows):,} vectors of this run. A larger collection has closer neighbours and a lower recall: "
        "millpond advise measures it with your queries."
    )
    return figure(title, charts.widths(values, title=title, y=f"recall@{_RECALL_K}"), summary=summary)


def _stages(stages: Mapping[str, StageSummary], seconds: float) -> str:
    header = "stage,calls,rows,rows a call,total,of the run,rows a second,p50,p95,p99,longest".split(",")
    rows = [
        (
            name,
            f"{stage.calls:,}",
            f"{stage.rows:,}",
            f"{stage.rows_per_call:,.0f}",
            seconds_text(stage.seconds),
            f"{stage.seconds / seconds:.0%}" if seconds else "-",
            _rate(stage.rows, stage.seconds),
            *(seconds_text(value) for value in (stage.p50, stage.p95, stage.p99, stage.longest)),
        )
        for name, stage in stages.items()
    ]
    summary = "The stages run at the same time: their shares may add up to more than 100 %."
    return table("Stages", header, rows, summary=summary) if rows else ""


def _failures(failures: Sequence[tuple[str, str]], failed: int) -> str:
    if not failures:
        return ""
    more = f"The first {len(failures)} of {failed:,}." if failed > len(failures) else ""
    rows = [
        (where if len(where) <= _WHERE_CHARS else f"{where[:_WHERE_CHARS]}...", _value(reason))
        for where, reason in failures
    ]
    return table("Records that failed", ("record", "reason"), rows, summary=more, numbers=False)


def _facts(title: str, facts: Mapping[str, object]) -> str:
    rows = [(name, "not shown" if _SECRET.search(name) else _value(value)) for name, value in facts.items()]
    return table(title, (), rows, numbers=False) if rows else ""


def _value(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        hidden = {str(key): "not shown" if _SECRET.search(str(key)) else item for key, item in value.items()}
        text = json.dumps(hidden, default=str, ensure_ascii=False)
    elif isinstance(value, list | tuple | set | frozenset):
        text = ", ".join(map(str, value))
    else:
        text = f"{value:,}" if type(value) is int else f"{value:,.6g}" if isinstance(value, float) else str(value)
    return _URL_SECRET.sub(r"\1***", _URL_PASSWORD.sub(r"\1:***@", text))


def _bins(samples: Sequence[TraceSample]) -> Numbers:
    """``[bins + 1]`` ends of equal spans from the first sample to the last."""
    first, last = samples[0].seconds, samples[-1].seconds
    return np.linspace(first, max(last, first + 1e-6), min(_BINS, max(1, len(samples) // 2)) + 1)


def _time_unit(seconds: float) -> tuple[int, str]:
    """Seconds of a unit of an axis, and its name."""
    return (1, "seconds") if seconds < 300 else (60, "minutes") if seconds < 10_800 else (3600, "hours")


def _rate(count: float, seconds: float) -> str:
    if not seconds or not count:
        return "-"
    rate = count / seconds
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
