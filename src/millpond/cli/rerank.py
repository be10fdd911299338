"""``millpond rerank``: texts in, the best of them out, with their scores."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from millpond.cli import options
from millpond.cli.texts import read_texts
from millpond.ingest.record import Record
from millpond.tasks import ScoreMethod, Truncate

if TYPE_CHECKING:
    from millpond.outputs import RerankResult
    from millpond.spec import ModelSpec

logger = logging.getLogger(__name__)

_BAR = 20
_ID = 24
_WIDTH = 120
_EIGHTHS = " ▏▎▍▌▋▊▉"
_MEASURES = {
    "cross-encoder": "the model's own score",
    "late-interaction": "MaxSim",
    "bi-encoder": "cosine",
    "cosine": "cosine",
    "maxsim": "MaxSim",
}


def rerank(
    query: Annotated[str, typer.Argument(help="What the documents are to answer.")],
    file: Annotated[
        str, typer.Argument(help="A .jsonl or .csv, a folder of .txt and .md, any other file of lines, or - (stdin).")
    ] = "-",
    *,
    model: options.Model,
    revision: options.Revision = None,
    top_n: Annotated[int | None, typer.Option(help="Print the best only.", metavar="N", min=1)] = None,
    method: Annotated[
        ScoreMethod, typer.Option(help="auto is what the checkpoint is; cosine of vectors; maxsim of token vectors.")
    ] = "auto",
    instruction: Annotated[
        str | None, typer.Option(help="Fills an LLM reranker's template slot.", metavar="TEXT")
    ] = None,
    score_template: Annotated[
        str | None, typer.Option(help="Jinja source, or a .jinja file, that renders a pair.", metavar="PATH")
    ] = None,
    truncate: Annotated[Truncate, typer.Option(help="Which end of an over-long text is cut.")] = "end",
    max_length: Annotated[
        int | None, typer.Option(help="Most tokens read together; else the checkpoint's own limit.", metavar="N", min=1)
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="One text a line, whatever FILE looks like.")] = False,
    id_column: options.IdColumn = "id",
    text_column: options.TextColumn = "text",
    output: Annotated[
        Literal["table", "jsonl"],
        typer.Option(help="table: drawn on a terminal, else score, id and text between tabs."),
    ] = "table",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    hf_overrides: options.HfOverrides = None,
) -> None:
    """Sort documents by how well they answer QUERY, the best one first.

    A cross-encoder reads query and document together, a late-interaction checkpoint compares them token by token, and
    the score of an embedding checkpoint is the cosine of two vectors. --method maxsim compares the token vectors of an
    embedding checkpoint, too.

    Standard input that begins with { is JSONL, and any other is one text a line, with the line's number for an id.
    Blank lines are skipped. A line that holds no text is reported, and the exit code is 1 then.
    """
    if file == "-" and sys.stdin.isatty():
        raise typer.BadParameter("name a file, or pipe texts in", param_hint="FILE")
    records: list[Record] = []
    failed = 0
    for item in read_texts(file, lines=lines, id_column=id_column, text_column=text_column):
        if isinstance(item, Record):
            records.append(item)
        else:
            failed += 1
            logger.error("%s: %s", item.where, item.reason)

    from millpond.engine.engine import Engine

    with Engine(
        model,
        revision=revision,
        device=device,
        dtype=dtype,
        max_length=max_length,
        hf_overrides=hf_overrides,
        score_template=score_template,
    ) as engine:
        results = engine.rerank(
            query,
            [record.text for record in records],
            top_n=top_n,
            method=method,
            instruction=instruction,
            truncate=truncate,
            show_progress=engine.spec.score_type == "cross-encoder",  # the others are two calls
        )
        spec = engine.spec
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a text may hold what the terminal cannot show
    if output == "jsonl":
        _write_lines(results, records)
    else:
        _write_table(results, records, spec, method)
    if failed:
        raise typer.Exit(1)


def _write_lines(results: Sequence[RerankResult], records: Sequence[Record]) -> None:
    """One JSON object per document."""
    for result in results:
        record = records[result.index]
        row = {"id": record.id, "index": result.index, "relevance_score": result.relevance_score, "text": record.text}
        print(json.dumps(row, ensure_ascii=False))


def _write_table(
    results: Sequence[RerankResult], records: Sequence[Record], spec: ModelSpec, method: ScoreMethod
) -> None:
    """Columns with bars on a terminal, tab-separated values anywhere else."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        for result in results:
            record = records[result.index]
            print(f"{result.relevance_score:.6g}", _line(record.id), _line(record.text), sep="\t")
        return
    scores = [result.relevance_score for result in results]
    low, high = min([0.0, *scores]), max([1.0, *scores])
    ids = [_line(records[result.index].id) for result in results]
    wide = min(_ID, max(map(len, ids), default=0))
    numbers = [f"{score:.4f}" for score in scores]
    digits = max(map(len, numbers), default=0)
    measure = _MEASURES.get((spec.score_type or "") if method == "auto" else method, "score")
    title = f"{len(results)} of {len(records)} documents by {measure} ({spec.name})"
    console.print(Text(title, style="dim"), soft_wrap=True)
    for place, result in enumerate(results):
        line = Text.assemble(
            (f"{place + 1:>3}  ", "dim"),
            (f"{numbers[place]:>{digits}}  ", "cyan"),
            (_bar((result.relevance_score - low) / (high - low)), "green" if place == 0 else "blue"),
            "  ",
            (_fit(ids[place], wide), "bold"),
            "  ",
            _line(records[result.index].text),
        )
        line.truncate(min(console.width, _WIDTH), overflow="ellipsis")
        console.print(line, soft_wrap=True)


def _bar(share: float) -> str:
    """A share of the width, to an eighth of a character."""
    eighths = round(share * _BAR * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(_BAR)


def _fit(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else f"{text[: width - 1]}…"


def _line(text: str) -> str:
    """The text on one line, without tabs."""
    return " ".join(text.split())
