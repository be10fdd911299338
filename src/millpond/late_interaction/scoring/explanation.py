"""Explanation: where each token of a query found its best match in a document, and heat maps of it."""

from __future__ import annotations

import math
import os
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidRequestError
from millpond.values.outputs import TokenSpans

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]

# Backgrounds of the 256 colours of terminals, light yellow to orange; the text on them is black.
_TERMINAL_HEAT = (230, 229, 222, 215, 208)
# Characters of a match that the table of a terminal shows.
_SHOWN_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class TokenMatch:
    """The best match of one query token in a document.

    Attributes:
        token: The query's token as the vocabulary spells it: ``"##ing"``; ``"[MASK]"`` of a query's expansion.
        score: Its highest similarity to a document token. All scores of a query add up to MaxSim.
        start: Where that token begins in the document's text, in characters (code points).
        end: Where it ends; with ``start`` 0 if it stands for no text: a special token, a marker or a prompt.
        text: The document's text from ``start`` to ``end``.
    """

    token: str
    score: float
    start: int
    end: int
    text: str


def explain(
    query: TokenSpans,
    query_rows: npt.NDArray[Any],
    document: TokenSpans,
    document_rows: npt.NDArray[Any],
    document_text: str,
    *,
    pooled: tuple[npt.NDArray[Any], IndexArray] | None = None,
) -> list[TokenMatch]:
    """The best match of each query token.

    Args:
        query: The query's tokens, from ``token_spans``.
        query_rows: ``[query tokens, d]``, normalized as they are scored.
        document: The document's tokens.
        document_rows: ``[tokens, d]``.
        document_text: The text that ``document`` has offsets in.
        pooled: If the document was pooled: ``[rows, d]``, the rows that are scored, and int64 ``[tokens]``, the one
            that each token is a part of, as :func:`~millpond.late_interaction.encoding.token_pooling.pooled_rows` gives
            them. A match is then the token of the best row that is the most similar itself.

    Returns:
        One match for each query token, in order; of equal similarities the first document token's. A document
        without tokens scores ``-inf``.

    Raises:
        InvalidRequestError: A number of rows is not that of the tokens, or the widths differ.
    """
    _check(query, query_rows, "query")
    _check(document, document_rows, "document")
    scored = document_rows if pooled is None else pooled[0]
    if not query_rows.shape[1] == document_rows.shape[1] == scored.shape[1]:
        raise InvalidRequestError(
            f"query rows are {query_rows.shape[1]} wide and document rows {document_rows.shape[1]}; "
            "both must come from one model, cut to one width"
        )
    if len(document) == 0 or len(scored) == 0:
        return [TokenMatch(token, -math.inf, 0, 0, "") for token in query.tokens]
    queries = query_rows.astype(np.float32, copy=False)
    similarities = queries @ scored.astype(np.float32, copy=False).T  # [query tokens, rows]
    best = similarities.argmax(axis=1)
    scores = similarities[np.arange(len(best)), best]
    if pooled is not None:
        similarities = queries @ document_rows.astype(np.float32, copy=False).T  # [query tokens, tokens]
        best = np.where(pooled[1] == best[:, None], similarities, -np.inf).argmax(axis=1)
    matches = []
    for token, score, (start, end) in zip(query.tokens, scores.tolist(), document.offsets[best].tolist(), strict=True):
        start, end = _trimmed(document_text, start, end)
        matches.append(TokenMatch(token, score, start, end, document_text[start:end]))
    return matches


def _check(spans: TokenSpans, rows: npt.NDArray[Any], noun: str) -> None:
    if rows.ndim != 2 or len(rows) != len(spans):
        raise InvalidRequestError(
            f"the {noun} has {len(spans)} tokens and rows of shape {list(rows.shape)}; pass what token_spans and "
            "token_embed return for the same text, role and truncation"
        )


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """A span without the spaces at its ends, which many tokenizers put into the word that follows."""
    piece = text[start:end]
    if not piece.strip():
        return start, end
    return start + len(piece) - len(piece.lstrip()), end - len(piece) + len(piece.rstrip())


def terminal(matches: Sequence[TokenMatch], document_text: str, *, query: str = "", color: bool | None = None) -> str:
    """The document's text with its matches by heat, and a table of the matches, for a terminal.

    Control characters are shown as ``\ufffd``: a document cannot give orders to the terminal.

    Args:
        matches: From :func:`explain`.
        document_text: The text that they are matches in.
        query: The query's text, for the first line.
        color: Colours of the background; without them, the hotter half of the matches stands in brackets. ``None``: if
            standard output is a terminal, and ``NO_COLOR`` is not set.

    Returns:
        Lines, the last one with its line break.
    """
    color = _shows_color() if color is None else color
    parts = []
    for segment in _segments(matches, document_text):
        piece = _printable(document_text[segment.start : segment.end])
        if color and segment.heat > 0:
            background = _TERMINAL_HEAT[min(int(segment.heat * len(_TERMINAL_HEAT)), len(_TERMINAL_HEAT) - 1)]
            begin, end = f"\x1b[38;5;16;48;5;{background}m", "\x1b[0m"
            piece = "\n".join(begin + line + end if line else line for line in piece.split("\n"))
        elif segment.heat > 0.5:
            piece = f"[{piece}]"
        parts.append(piece)
    heading = [_printable(query, lines=False)] if query else []
    labels = [_printable(_label(match.token), lines=False) for match in matches]
    width = max(map(_columns, labels), default=0)
    table = []
    for label, match in zip(labels, matches, strict=True):
        where = f"{match.start}-{match.end}" if match.end else "no text"
        found = _printable(match.text, lines=False)
        found = found if len(found) <= _SHOWN_CHARACTERS else f"{found[: _SHOWN_CHARACTERS - 3]}..."
        table.append(f"{label}{' ' * (width - _columns(label))}  {match.score:7.3f}  {where:>13}  {found}".rstrip())
    return "\n".join([*heading, _summary(matches), "", "".join(parts), "", *table]) + "\n"


def html(matches: Sequence[TokenMatch], document_text: str, *, query: str = "", title: str = "Matches") -> str:
    """The document's text with its matches by heat, as a page of its own.

    The page loads nothing and runs no script; it follows the reader's dark or light colours. A query token under the
    pointer shows its match, and a match shows the query tokens that it is the best of.

    Args:
        matches: From :func:`explain`.
        document_text: The text that they are matches in.
        query: The query's text.
        title: Of the page; the document's id, for example.

    Returns:
        HTML in UTF-8.
    """
    pieces = []
    for segment in _segments(matches, document_text):
        piece = escape(_printable(document_text[segment.start : segment.end]))
        if not segment.matches:
            pieces.append(piece)
            continue
        names = "; ".join(f"{_label(matches[i].token)} {matches[i].score:.3f}" for i in segment.matches)
        classes, note = " ".join(f"m{i}" for i in segment.matches), escape(_printable(names))
        pieces.append(f'<mark class="{classes}" style="--heat:{segment.heat:.3f}" title="{note}">{piece}</mark>')
    chips, rows, rules = [], [], []
    most = max((match.score for match in matches if math.isfinite(match.score)), default=0.0)
    for i, match in enumerate(matches):
        label = escape(_printable(_label(match.token), lines=False))
        share = max(match.score, 0.0) / most if most > 0 and math.isfinite(match.score) else 0.0
        found = escape(_printable(match.text, lines=False))
        where = f"{match.start}&ndash;{match.end}" if match.end else ""
        kind = "" if match.end else ' class="blank"'
        note = f"{match.score:.3f}: {found or 'no text'}"
        chips.append(f'<li id="q{i}" tabindex="0"{kind} style="--share:{share:.3f}" title="{note}">{label}</li>')
        found = found or "<i>no text</i>"
        rows.append(f"<tr><td>{label}</td><td>{match.score:.3f}</td><td>{where}</td><td>{found}</td></tr>")
        rules.append(f"body:has(#q{i}:is(:hover,:focus)) .m{i}")
        rules.append(f"body:has(.m{i}:hover) #q{i}")
    return _PAGE.format(
        title=escape(_printable(title, lines=False)),
        rules=",".join(rules) or "none",
        query=f"<p>{escape(_printable(query, lines=False))}</p>" if query else "",
        summary=_summary(matches),
        chips="".join(chips),
        document="".join(pieces),
        rows="\n".join(rows),
    )


class _Segment(NamedTuple):
    """A part of the document's text in which the same matches lie.

    Attributes:
        start: Its first character.
        end: The character after its last one.
        matches: Indices of the matches.
        heat: The sum of their scores, as a share of the highest sum in the document.
    """

    start: int
    end: int
    matches: tuple[int, ...]
    heat: float


def _segments(matches: Sequence[TokenMatch], text: str) -> list[_Segment]:
    """The whole text in order."""
    for match in matches:
        if not 0 <= match.start <= match.end <= len(text):
            raise InvalidRequestError(
                f"a match lies at {match.start} to {match.end} of a text of {len(text)} characters; pass the text that "
                "was explained"
            )
    covering: dict[tuple[int, int], list[int]] = {}
    for i, match in enumerate(matches):
        if match.start < match.end:
            covering.setdefault((match.start, match.end), []).append(i)
    edges = sorted({0, len(text), *(edge for span in covering for edge in span)})
    place_of = {edge: place for place, edge in enumerate(edges)}
    inside: list[list[int]] = [[] for _ in edges]
    for (start, end), indices in covering.items():
        for place in range(place_of[start], place_of[end]):
            inside[place] += indices
    sums = [sum(max(matches[i].score, 0.0) for i in indices) for indices in inside]
    most = max(sums, default=0.0)
    return [
        _Segment(start, end, tuple(sorted(indices)), total / most if most > 0 else 0.0)
        for start, end, indices, total in zip(edges, edges[1:], inside, sums, strict=False)
    ]


def _summary(matches: Sequence[TokenMatch]) -> str:
    return f"MaxSim {sum(match.score for match in matches):.3f} over {len(matches)} query tokens"


def _shows_color() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _printable(text: str, *, lines: bool = True) -> str:
    """``text`` without control characters, and without line breaks and tabs unless ``lines``."""
    kept = "\n\t" if lines else ""
    text = text.replace("\r\n", "\n").replace("\r", "\n") if lines else " ".join(text.split())
    return "".join(
        "\ufffd" if unicodedata.category(letter) in ("Cc", "Cs") and letter not in kept else letter for letter in text
    )


def _columns(text: str) -> int:
    """Columns of a terminal that ``text`` takes."""
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


def _label(token: str) -> str:
    """A token of a vocabulary as a reader would write it, without the marks of words and bytes."""
    if len(token) > 2 and token.startswith("##"):
        return token[2:]
    plain = token.replace("\u2581", " ").strip()
    if plain and all(letter in _letter_bytes() for letter in token) and not token.isascii():
        plain = bytes(_letter_bytes()[letter] for letter in token).decode("utf-8", "replace").strip()
    return plain or "\u2423"


@cache
def _letter_bytes() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes as (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --page: #fff; --ink: #1c1e21; --soft: #5f6670; --line: #dfe2e6; --warm: 245 158 11;
  --most: .8; }}
@media (prefers-color-scheme: dark) {{ :root {{ --page: #16181b; --ink: #eceef0; --soft: #9aa2ab; --line: #33383e;
  --warm: 217 119 6; --most: .75; }} }}
body {{ background: var(--page); color: var(--ink); font: 16px/1.65 system-ui, sans-serif; max-width: 46rem;
  margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.25rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }}
p {{ margin: .25rem 0; }} .soft {{ color: var(--soft); font-size: .875rem; }}
ul {{ list-style: none; padding: 0; margin: 1rem 0; display: flex; flex-wrap: wrap; gap: .35rem; }}
li {{ border: 1px solid var(--line); border-radius: .4rem; padding: 0 .45rem; font-size: .875rem; cursor: default;
  max-width: 100%; overflow-wrap: anywhere;
  background: linear-gradient(rgb(var(--warm)) 0 0) left bottom / calc(100% * var(--share)) 3px no-repeat; }}
li.blank {{ color: var(--soft); border-style: dashed; }}
article {{ white-space: pre-wrap; overflow-wrap: anywhere; border-top: 1px solid var(--line); padding-top: 1rem; }}
mark {{ color: inherit; background: rgb(var(--warm) / calc(.12 + (var(--most) - .12) * var(--heat)));
  border-radius: .2rem; }}
{rules} {{ outline: 2px solid currentColor; outline-offset: 1px; }}
details {{ margin-top: 1.5rem; border-top: 1px solid var(--line); padding-top: .75rem; }}
summary {{ cursor: pointer; color: var(--soft); font-size: .875rem; }}
table {{ border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; width: 100%; }}
td, th {{ text-align: left; padding: .15rem .75rem .15rem 0; vertical-align: top; overflow-wrap: anywhere; }}
</style>
</head>
<body>
<h1>{title}</h1>
{query}
<p class="soft">{summary}. The warmer a word, the more of the score it gives; point at a token to see its match.</p>
<ul>{chips}</ul>
<article>{document}</article>
<details><summary>All matches</summary>
<table><thead><tr><th>Query token</th><th>Score</th><th>Characters</th><th>Match</th></tr></thead>
<tbody>
{rows}
</tbody></table></details>
</body>
</html>
"""
