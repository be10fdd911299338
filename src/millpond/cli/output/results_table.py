"""Hits of a search as a terminal shows them, as a pipe takes them, and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from millpond.ingest.sinks.search import Hit

_ID_WIDTH = 28
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
SCORE_NAMES = {
    "cross-encoder": "the model's own score",
    "late-interaction": "MaxSim",
    "cosine": "cosine",
    "maxsim": "MaxSim",
}
_CHUNK_KEYS = ("chunk", "chunk_start", "chunk_end")


@dataclass(frozen=True, kw_only=True)
class RankedHit:
    """A hit of the last stage.

    Attributes:
        hit: What the database found, with the score of the search.
        score: The score by which it is ranked: the reranker's, or that of the search.
        retrieval_rank: Its rank in the search, from 1.
    """

    hit: Hit
    score: float
    retrieval_rank: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The hits of one question.

    Attributes:
        query_id: Id of the question: its number, or that of a file.
        query: The question.
        hits: Best first.
        reranked: Whether there was a second stage.
        seconds: Time of all stages.
    """

    query_id: str
    query: str
    hits: Sequence[RankedHit]
    reranked: bool
    seconds: float


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


def print_table(answer: Answer, *, title: str, chunked: bool, console: Console) -> None:
    """Print two lines for each hit on a terminal, one of tab-separated values otherwise.

    Args:
        answer: The hits of one question.
        title: What a terminal shows above them.
        chunked: Whether hits are chunks of records, whose number stands behind the id.
        console: Where to.
    """
    if not console.is_terminal:
        for rank, ranked in enumerate(answer.hits, start=1):
            hit = ranked.hit
            metadata = json.dumps(dict(hit.metadata), ensure_ascii=False)
            cells = [answer.query_id, str(rank), f"{ranked.score:.6g}", hit.id, hit.text, metadata]
            print(*map(_line, cells), sep="\t")
        return
    *question, stages = title.split("\n")
    for text in question:
        console.print(Text(_line(text), style="bold"), soft_wrap=True)
    console.print(Text(_line(stages), style="dim"), soft_wrap=True)
    ids = [_shown_id(ranked.hit, chunked=chunked) for ranked in answer.hits]
    scores = [f"{ranked.score:.4f}" for ranked in answer.hits]
    id_width = min(_ID_WIDTH, max(map(cell_len, ids), default=0))
    score_width = max(map(len, scores), default=0)
    indent = " " * (3 + 2 + score_width + 2 + id_width + 2)
    for rank, (ranked, score, id) in enumerate(zip(answer.hits, scores, ids, strict=True), start=1):
        line = Text.assemble(
            (f"{rank:>3}  ", "dim"),
            (f"{score:>{score_width}}  ", "cyan"),
            (_fit(id, id_width), "bold"),
            "  ",
            _line(ranked.hit.text),
        )
        _print_cut(console, line)
        if shown := _shown_metadata(ranked.hit.metadata, chunked=chunked):
            _print_cut(console, Text(indent + shown, style="dim"))


def _print_cut(console: Console, line: Text) -> None:
    line.truncate(console.width, overflow="ellipsis")
    console.print(line, soft_wrap=True)


def _shown_id(hit: Hit, *, chunked: bool) -> str:
    chunk = hit.metadata.get("chunk") if chunked else None
    return _line(hit.id) if chunk is None else f"{_line(hit.id)} [{chunk}]"


def _shown_metadata(metadata: Mapping[str, Any], *, chunked: bool) -> str:
    """The metadata on one line; of a chunk, its characters in place of its three keys."""
    words = []
    if chunked and all(isinstance(metadata.get(key), int) for key in _CHUNK_KEYS):
        words.append(f"characters {metadata['chunk_start']} to {metadata['chunk_end']}")
        metadata = {key: value for key, value in metadata.items() if key not in _CHUNK_KEYS}
    for key, value in metadata.items():
        words.append(f"{key}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
    return _line("  ".join(words), keep_spaces=True)


def _fit(text: str, width: int) -> str:
    return set_cell_size(text, width) if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}…"


def _line(text: str, *, keep_spaces: bool = False) -> str:
    """The text on one line, without tabs and other control characters, which a terminal would obey."""
    return _CONTROL.sub("\ufffd", text if keep_spaces else " ".join(text.split()))
