"""Where a text matches the tokens of a query: by heat on a terminal, and on a page of HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from millpond.cli.output.results_table import one_line
from millpond.ingest.pages import html_page
from millpond.late_interaction import TokenMatch

# Backgrounds of the 256 colours of terminals, light yellow to orange; the text on them is black.
_HEAT = (230, 229, 222, 215, 208)
# Characters of a match that the table of a terminal shows.
_SHOWN_CHARACTERS = 40


class _Piece(NamedTuple):
    """A part of the text in which the same matches lie; its heat is the sum of their scores, as a share of the most."""

    text: str
    matches: tuple[TokenMatch, ...]
    heat: float


def print_heat_map(matches: Sequence[TokenMatch], text: str, *, query: str, console: Console | None = None) -> None:
    """Print a text with its matches by heat, and a line for each; without colours the hotter half is in brackets."""
    console = console or Console(highlight=False)
    drawn = Text()
    for piece in _pieces(matches, text):
        if console.color_system is None or console.no_color:
            drawn.append(f"[{piece.text}]" if piece.heat > 0.5 else piece.text)
        else:
            color = _HEAT[min(int(piece.heat * len(_HEAT)), len(_HEAT) - 1)]
            drawn.append(piece.text, f"color(16) on color({color})" if piece.heat > 0 else None)
    labels = [_label(match) for match in matches]
    width = max(map(cell_len, labels), default=0)
    total = sum(match.score for match in matches)
    lines = [one_line(query), f"MaxSim {total:.3f} over {len(matches)} query tokens", "", drawn, ""]
    for label, match in zip(labels, matches, strict=True):
        where = f"{match.start}-{match.end}" if match.end else "no text"
        found = one_line(match.text)
        found = found if len(found) <= _SHOWN_CHARACTERS else f"{found[: _SHOWN_CHARACTERS - 3]}..."
        lines.append(f"{set_cell_size(label, width)}  {match.score:7.3f}  {where:>13}  {found}".rstrip())
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def page(matches: Sequence[TokenMatch], text: str, *, query: str, title: str) -> str:
    """The same as a page of HTML that loads nothing and runs no script."""
    marked = []
    for piece in _pieces(matches, text):
        note = "; ".join(f"{_label(match)} {match.score:.3f}" for match in piece.matches)
        heat = f"color:inherit;background:rgb(245 158 11/{0.12 + 0.68 * piece.heat:.3f})"
        shown = escape(piece.text)
        marked.append(f'<mark style="{heat}" title="{escape(note)}">{shown}</mark>' if piece.matches else shown)
    rows = [
        (_label(match), f"{match.score:.3f}", f"{match.start}-{match.end}" if match.end else "", one_line(match.text))
        for match in matches
    ]
    article = f'<article style="white-space:pre-wrap;overflow-wrap:anywhere">{"".join(marked)}</article>'
    header = ("Query token", "Score", "Characters", "Match")
    return html_page.page(
        title=one_line(title),
        subtitle=one_line(query),
        tiles={"MaxSim": f"{sum(match.score for match in matches):.3f}", "Query tokens": str(len(matches))},
        sections=[article, html_page.table("All matches", header, rows, numbers=False)],
        note="The warmer a word, the more of the score it gives; it names its query tokens under the pointer.",
    )


def _pieces(matches: Sequence[TokenMatch], text: str) -> list[_Piece]:
    """The whole text in order."""
    edges = sorted({0, len(text), *(edge for match in matches for edge in (match.start, match.end))})
    spans = list(pairwise(edges))
    covering = [
        tuple(match for match in matches if match.start <= start and stop <= match.end) for start, stop in spans
    ]
    sums = [sum(max(match.score, 0.0) for match in some) for some in covering]
    most = max(sums, default=0.0) or 1.0
    return [
        _Piece(_shown(text[start:stop]), some, total / most)
        for (start, stop), some, total in zip(spans, covering, sums, strict=True)
    ]


def _shown(text: str) -> str:
    """The text in its lines, without control characters."""
    return "\n".join(one_line(line.replace("\t", " "), keep_spaces=True) for line in text.split("\n"))


def _label(match: TokenMatch) -> str:
    """A token without the marks that vocabularies put before words and their parts."""
    return one_line(match.token.removeprefix("##").lstrip("\u2581\u0120")) or "\u2423"
