"""Ranked texts as a terminal shows them, as a pipe takes them, and as JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from millpond.search.stages import Answer
    from millpond.values.spec import ModelSpec

_ID_WIDTH = 28
_LINE_WIDTH = 120
_BAR_WIDTH = 20
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CHUNK_KEYS = ("chunk", "chunk_start", "chunk_end")
_SCORES = {
    "cross-encoder": "the model's own score",
    "listwise": "the model's own score, among these",
    "late-interaction": "MaxSim",
    "cosine": "cosine",
    "dot": "dot product",
    "euclidean": "Euclidean distance, negative",
    "manhattan": "Manhattan distance, negative",
    "maxsim": "MaxSim",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A text with its score; ``detail`` is a second line on a terminal."""

    score: float  # NaN: it has none
    id: str
    text: str
    detail: str = ""


def score_name(spec: ModelSpec, method: str) -> str:
    """What a reranker's score is, for people."""
    return _SCORES.get((spec.rerank_type or "") if method == "auto" else method, "score")


def one_line(text: str, *, keep_spaces: bool = False) -> str:
    """The text on one line, without tabs and other control characters, which a terminal would obey."""
    return _CONTROL.sub("\ufffd", text if keep_spaces else " ".join(text.split()))


def print_rows(rows: Sequence[Row], *, title: str = "", bars: bool = False, console: Console | None = None) -> None:
    """Print a line for each row on a terminal, else tab-separated score, id and text."""
    from rich.bar import Bar
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console(highlight=False)
    if not console.is_terminal:
        for row in rows:
            print(_number(row.score, ".6g"), one_line(row.id), one_line(row.text), sep="\t")
        return
    *above, last = title.split("\n")
    for line in above:
        console.print(Text(one_line(line), style="bold"), soft_wrap=True)
    if last:
        console.print(Text(one_line(last), style="dim"), soft_wrap=True)
    scores = [row.score for row in rows if not math.isnan(row.score)]
    low, high = min([0.0, *scores]), max([1.0, *scores])
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(justify="right", style="dim", min_width=3)
    table.add_column(justify="right", style="cyan")
    if bars:
        table.add_column(width=_BAR_WIDTH)
    table.add_column(style="bold", max_width=_ID_WIDTH, no_wrap=True, overflow="ellipsis")
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for rank, row in enumerate(rows, start=1):
        color = "green" if rank == 1 else "blue"
        length = 0 if math.isnan(row.score) else row.score - low
        bar = [Bar(high - low, 0, length, width=_BAR_WIDTH, color=color)] if bars else []
        table.add_row(str(rank), _number(row.score, ".4f"), *bar, Text(one_line(row.id)), Text(one_line(row.text)))
        if row.detail:
            table.add_row("", "", *[""] * bars, "", Text(row.detail, style="dim"))
    console.print(table, width=min(console.width, _LINE_WIDTH))


def _number(score: float, form: str) -> str:
    return "-" if math.isnan(score) else format(score, form)


def print_json(answer: Answer) -> None:
    """Print one JSON object for each hit."""
    for rank, ranked in enumerate(answer.hits, start=1):
        retrieval = {"retrieval_rank": ranked.retrieval_rank, "retrieval_score": ranked.hit.score}
        row = {
            "query_id": answer.query_id,
            "query": answer.query,
            "rank": rank,
            "id": ranked.hit.id,
            "score": None if math.isnan(ranked.score) else ranked.score,
            **(retrieval if answer.reranked else {}),
            "text": ranked.hit.text,
            "metadata": dict(ranked.hit.metadata),
        }
        print(json.dumps(row, ensure_ascii=False))


def print_answer(answer: Answer, *, title: str, chunked: bool, console: Console) -> None:
    """Print two lines for each hit on a terminal, one of tab-separated values otherwise."""
    if console.is_terminal:
        rows = []
        for ranked in answer.hits:
            hit, chunk = ranked.hit, ranked.hit.metadata.get("chunk") if chunked else None
            id = hit.id if chunk is None else f"{hit.id} [{chunk}]"
            detail = _shown_metadata(hit.metadata, chunked=chunked)
            rows.append(Row(score=ranked.score, id=id, text=hit.text, detail=detail))
        return print_rows(rows, title=title, console=console)
    for rank, ranked in enumerate(answer.hits, start=1):
        hit = ranked.hit
        metadata = json.dumps(dict(hit.metadata), ensure_ascii=False)
        cells = [answer.query_id, str(rank), _number(ranked.score, ".6g"), hit.id, hit.text, metadata]
        print(*map(one_line, cells), sep="\t")


def _shown_metadata(metadata: Mapping[str, Any], *, chunked: bool) -> str:
    """The metadata on one line; of a chunk, its characters in place of its three keys."""
    words = []
    if chunked and all(isinstance(metadata.get(key), int) for key in _CHUNK_KEYS):
        words.append(f"characters {metadata['chunk_start']} to {metadata['chunk_end']}")
        metadata = {key: value for key, value in metadata.items() if key not in _CHUNK_KEYS}
    for key, value in metadata.items():
        words.append(f"{key}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
    return one_line("  ".join(words), keep_spaces=True)
