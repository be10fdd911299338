"""Charts as inline SVG, drawn by matplotlib in colours that the page's style sheet sets."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from millpond.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Numbers = npt.NDArray[np.float64]

# matplotlib writes these colours; in the SVG each becomes a variable of the style sheet, so that it follows the theme.
_VARIABLES = {
    "ink": "#010203", "soft": "#010204", "line": "#010205", "page": "#010206",
    "blue": "#010211", "orange": "#010212", "teal": "#010213", "purple": "#010214", "red": "#010215", "gray": "#010216",
}  # fmt: skip
MARKERS = ("o", "s", "D", "^", "v", "P")
_WIDE, _HIGH = 5.6, 2.9  # inches of 72 units


def check_charts() -> None:
    """Raise MissingExtraError unless charts can be drawn."""
    if find_spec("matplotlib") is None:
        raise MissingExtraError('the page is drawn by matplotlib, which comes with: pip install "millpond[report]"')


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of a trade-off."""

    x: float  # its size
    y: float  # its quality
    group: str  # the group that colours it
    name: str  # what it is, for a reader who points at it
    best: bool = False  # no other point is both smaller and better
    advised: bool = False  # whether to point it out
    label: str = ""  # text beside it, if it is one of the best


def steps(lines: Iterable[tuple[Numbers, Numbers, str]], *, title: str, x: str, y: str) -> str:
    """Lines over time (times ``[n]``, values ``[n]``, a colour), each value held until the next."""
    with _figure(title) as (figure, axes):
        for times, values, color in lines:
            axes.plot(times, values, color=_VARIABLES[color], drawstyle="steps-post", linewidth=1.4)
        axes.set_ylim(bottom=0)
        axes.margins(x=0.01)
        _label(axes, x, y)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value == round(value) else f"{value:g}")
        return _svg(figure, title)


def bars(ends: Numbers, counts: npt.NDArray[np.int64], marks: Mapping[str, float], *, title: str, x: str) -> str:
    """A histogram over a logarithmic axis: ``counts [b]`` between ``ends [b + 1]``; vertical lines at the marks."""
    from matplotlib.ticker import LogLocator, NullFormatter

    with _figure(title) as (figure, axes):
        axes.stairs(counts, ends, fill=True, color=_VARIABLES["blue"], alpha=0.85, linewidth=0)
        axes.set_xscale("log")
        axes.set_ylim(0, max(int(counts.max(initial=1)), 1) * 1.18)
        for name, value in marks.items():
            axes.axvline(value, color=_VARIABLES["ink"], linewidth=1, linestyle=(0, (3, 2)))
            _note(axes, name, (value, 1), (3, -3), xycoords=("data", "axes fraction"), va="top")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.xaxis.set_minor_formatter(NullFormatter())  # it would write 3 x 10^2 between the others
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value == round(value) else "")
        _label(axes, x, "texts")
        return _svg(figure, title)


def widths(values: Mapping[int, float], *, title: str, y: str) -> str:
    """A value from 0 to 1 at each width, written beside its point."""
    from matplotlib.ticker import MaxNLocator

    with _figure(title) as (figure, axes):
        numbers = list(values)
        axes.plot(numbers, list(values.values()), "-o", color=_VARIABLES["blue"], linewidth=1.6, markersize=5)
        for width, value in values.items():
            text = f"{value:.3f}".removeprefix("0") if value < 0.9995 else "1"
            _note(axes, text, (width, value), (-3, 6), ha="center")
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [str(width) for width in numbers])
        axes.minorticks_off()
        low, high = min(values.values(), default=0.0), max(values.values(), default=1.0)
        span = max(high - low, 0.1 * high, 1e-3)
        low = max(0.0, low - 0.15 * span)
        axes.set_yticks([tick for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= 1])
        axes.set_ylim(low, high + 0.2 * span)
        axes.margins(x=0.08)
        _label(axes, "width", y)
        return _svg(figure, title)


def trade_off(points: Sequence[Point], colors: Mapping[str, str], least: float, *, title: str, x: str, y: str) -> str:
    """Points of size (logarithmic) and quality; those that no other beats are joined by a line and labelled.

    ``least`` is the quality to keep, a dashed line; rings are drawn around what is advised.
    """
    with _figure(title, high=3.8) as (figure, axes):
        axes.axhline(least, color=_VARIABLES["soft"], linewidth=1, linestyle=(0, (3, 2)), zorder=0)
        front = sorted((point for point in points if point.best), key=lambda point: point.x)
        line = [point.x for point in front], [point.y for point in front]
        axes.plot(*line, color=_VARIABLES["soft"], linewidth=1.2, drawstyle="steps-post", zorder=1)
        shapes = dict(zip(colors, MARKERS, strict=False))
        labelled: set[tuple[float, float]] = set()
        for point in points:
            _draw_point(axes, point, shapes[point.group], _VARIABLES[colors[point.group]])
            if point.best and (place := (point.x, point.y)) not in labelled:
                labelled.add(place)
                _note(axes, point.label, place, (0, 9), rotation=50, fontsize=9)
        axes.set_xscale("log")
        axes.margins(x=0.08, y=0.16)
        axes.xaxis.set_major_formatter(lambda value, _: bytes_text(value))
        axes.xaxis.set_minor_formatter(lambda value, _: "")
        _label(axes, x, y)
        return _svg(figure, title, titles=True)


def _draw_point(axes: Axes, point: Point, shape: str, color: str) -> None:
    size, alpha, edge, order = (8, 1, 1.2, 3) if point.best else (5, 0.45, 0, 2)
    look: dict[str, Any] = {"color": color, "markersize": size, "alpha": alpha, "markeredgewidth": edge}
    ink = _VARIABLES["ink"]
    axes.plot([point.x], [point.y], shape, markeredgecolor=ink, gid=f"point {point.name}", zorder=order, **look)
    if point.advised:
        axes.plot([point.x], [point.y], "o", color="none", markeredgecolor=ink, markersize=15, zorder=2)


def seconds_text(seconds: float) -> str:
    """A duration for a reader: ``3 µs``, ``12 ms``, ``1.5 s``, ``2 min``, ``3.1 h``."""
    if seconds != seconds:
        return "-"
    for limit, unit, factor in ((1e-3, "µs", 1e6), (1, "ms", 1e3), (120, "s", 1), (7200, "min", 1 / 60)):
        if seconds < limit * 0.9995:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"


def bytes_text(count: float) -> str:
    """A size for a reader: ``48 B``, ``1.5 kB``, ``3.07 GB`` (powers of 1,000)."""
    for unit, factor in (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if count < factor * 999.5:
            return f"{count / factor:.3g} {unit}"
    return f"{count / 1e12:.3g} TB"


@contextmanager
def _figure(title: str, *, high: float = _HIGH) -> Iterator[tuple[Figure, Axes]]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": title,  # ids that differ between the charts of a page, and never between two runs
        "font.size": 10,
        "grid.linewidth": 0.6,
        **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), _VARIABLES["line"]),
        **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), _VARIABLES["soft"]),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
        **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    }
    # No pyplot: its figures are global, and a backend with a window may be set.
    with mpl.rc_context():
        mpl.rcdefaults()  # whatever the user's matplotlibrc says
        mpl.rcParams.update(style)
        figure = Figure(figsize=(_WIDE, high), layout="constrained")
        yield figure, figure.subplots()


def _note(axes: Axes, text: str, place: tuple[float, float], offset: tuple[int, int], **style: Any) -> None:
    axes.annotate(text, place, xytext=offset, textcoords="offset points", color=_VARIABLES["ink"], **style)


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.tick_params(length=3)


def _svg(figure: Figure, title: str, *, titles: bool = False) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for name, color in _VARIABLES.items():
        text = text.replace(color, f"var(--{name})")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'^<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", text, count=1)  # the page sets its size
    text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(title, quote=True)}" ', 1)
    if titles:  # of the points: what they are, for a reader who points at them
        text = re.sub(r'<g id="point ([^"]*)">', r"<g><title>\1</title>", text)
    return text
