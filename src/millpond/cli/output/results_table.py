"""Ranked texts as a terminal shows them, as a pipe takes them, and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from millpond.ingest.sinks.search import Hit

if TYPE_CHECKING:
    from millpond.values.spec import ModelSpec

_ID_WIDTH = 28
_LINE_WIDTH = 120
_BAR_WIDTH = 20
_EIGHTHS = " ▏▎▍▌▋▊▉"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CHUNK_KEYS = ("chunk", "chunk_start", "chunk_end")
_SCORES = {
    "cross-encoder": "the model's own score",
    "late-interaction": "MaxSim",
    "cosine": "cosine",
    "maxsim": "MaxSim",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A text with its score; ``detail`` is a second line on a terminal."""

    score: float
    id: str
    text: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class RankedHit:
    """A hit of the last stage."""

    hit: Hit  # what the database found, with the score of the search
    score: float  # the score by which it is ranked: the reranker's, or that of the search
    retrieval_rank: int  # its rank in the search, from 1


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The hits of one question."""

    query_id: str  # id of the question: its number, or that of a file
    query: str  # the question
    hits: Sequence[RankedHit]  # best first
    reranked: bool  # whether there was a second stage
    seconds: float  # time of all stages


def score_name(spec: ModelSpec, method: str) -> str:
    """What a reranker's score is, for people."""
    return _SCORES.get((spec.rerank_type or "") if method == "auto" else method, "score")


def one_line(text: str, *, keep_spaces: bool = False) -> str:
    """The text on one line, without tabs and other control characters, which a terminal would obey."""
    return _CONTROL.sub("\ufffd", text if keep_spaces else " ".join(text.split()))


def print_rows(rows: Sequence[Row], *, title: str = "", bars: bool = False, console: Console | None = None) -> None:
    """Print a line for each row on a terminal, else tab-separated score, id and text."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        for row in rows:
            print(f"{row.score:.6g}", one_line(row.id), one_line(row.text), sep="\t")
        return
    *above, last = title.split("\n")
    for line in above:
        console.print(Text(one_line(line), style="bold"), soft_wrap=True)
    if last:
        console.print(Text(one_line(last), style="dim"), soft_wrap=True)
    ids, scores = [one_line(row.id) for row in rows], [f"{row.score:.4f}" for row in rows]
    id_width = min(_ID_WIDTH, max(map(cell_len, ids), default=0))
    score_width = max(map(len, scores), default=0)
    low, high = min([0.0, *(row.score for row in rows)]), max([1.0, *(row.score for row in rows)])
    for rank, (row, id, score) in enumerate(zip(rows, ids, scores, strict=True)):
        bar = (f"{_bar((row.score - low) / (high - low))}  ", "green" if rank == 0 else "blue") if bars else ""
        head = Text.assemble((f"{rank + 1:>3}  ", "dim"), (f"{score:>{score_width}}  ", "cyan"), bar)
        indent = " " * (head.cell_len + id_width + 2)
        _print_cut(console, Text.assemble(head, (_fit(id, id_width), "bold"), "  ", one_line(row.text)))
        if row.detail:
            _print_cut(console, Text(indent + row.detail, style="dim"))


def print_json(answer: Answer) -> None:
    """Print one JSON object for each hit."""
    for rank, ranked in enumerate(answer.hits, start=1):
        retrieval = {"retrieval_rank": ranked.retrieval_rank, "retrieval_score": ranked.hit.score}
        row = {
            "query_id": answer.query_id,
            "query": answer.query,
            "rank": rank,
            "id": ranked.hit.id,
            "score": ranked.score,
            **(retrieval if answer.reranked else {}),
            "text": ranked.hit.text,
            "metadata": dict(ranked.hit.metadata),
        }
        print(json.dumps(row, ensure_ascii=False))


def print_answer(answer: Answer, *, title: str, chunked: bool, console: Console) -> None:
    """Print two lines for each hit on a terminal, one of tab-separated values otherwise."""
    if console.is_terminal:
        rows = [
            Row(
                score=ranked.score,
                id=_shown_id(ranked.hit, chunked=chunked),
                text=ranked.hit.text,
                detail=_shown_metadata(ranked.hit.metadata, chunked=chunked),
            )
            for ranked in answer.hits
        ]
        print_rows(rows, title=title, console=console)
        return
    for rank, ranked in enumerate(answer.hits, start=1):
        hit = ranked.hit
        metadata = json.dumps(dict(hit.metadata), ensure_ascii=False)
        cells = [answer.query_id, str(rank), f"{ranked.score:.6g}", hit.id, hit.text, metadata]
        print(*map(one_line, cells), sep="\t")


def _shown_id(hit: Hit, *, chunked: bool) -> str:
    chunk = hit.metadata.get("chunk") if chunked else None
    return hit.id if chunk is None else f"{hit.id} [{chunk}]"


def _shown_metadata(metadata: Mapping[str, Any], *, chunked: bool) -> str:
    """The metadata on one line; of a chunk, its characters in place of its three keys."""
    words = []
    if chunked and all(isinstance(metadata.get(key), int) for key in _CHUNK_KEYS):
        words.append(f"characters {metadata['chunk_start']} to {metadata['chunk_end']}")
        metadata = {key: value for key, value in metadata.items() if key not in _CHUNK_KEYS}
    for key, value in metadata.items():
        words.append(f"{key}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
    return one_line("  ".join(words), keep_spaces=True)


def _print_cut(console: Console, line: Text) -> None:
    line.truncate(min(console.width, _LINE_WIDTH), overflow="ellipsis")
    console.print(line, soft_wrap=True)


def _bar(share: float) -> str:
    """A bar of ``share`` of the full width, to an eighth of a character."""
    whole, rest = divmod(round(share * _BAR_WIDTH * 8), 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(_BAR_WIDTH)


def _fit(text: str, width: int) -> str:
    return set_cell_size(text, width) if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}…"
