"""``millpond rerank``: sort texts by their score for a query."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from millpond.blank import is_blank
from millpond.cli.arguments import options
from millpond.cli.arguments.input_texts import read_texts
from millpond.cli.output.results_table import SCORE_NAMES
from millpond.ingest.record import Record
from millpond.tasks import ScoreMethod, Truncate

if TYPE_CHECKING:
    from millpond.outputs import RerankResult
    from millpond.spec import ModelSpec

logger = logging.getLogger(__name__)

_BAR_WIDTH = 20
_ID_WIDTH = 24
_LINE_WIDTH = 120
_EIGHTHS = " ▏▎▍▌▋▊▉"


def rerank(
    query: Annotated[str, typer.Argument(help="Query that the documents are scored for.")],
    file: Annotated[
        str,
        typer.Argument(
            help="A .jsonl, .json, .csv, .tsv, .parquet or .arrow file, a folder of .txt and .md, any other file with "
            "one text per line, or - (stdin)."
        ),
    ] = "-",
    *,
    model: options.Model,
    revision: options.Revision = None,
    top_n: Annotated[int | None, typer.Option(help="Print the N best documents only.", metavar="N", min=1)] = None,
    method: Annotated[
        ScoreMethod,
        typer.Option(
            help="cosine of vectors; maxsim of token vectors; auto: a reranker's own score, or maxsim of an embedder."
        ),
    ] = "auto",
    instruction: Annotated[
        str | None, typer.Option(help="Instruction for the template of an LLM reranker.", metavar="TEXT")
    ] = None,
    score_template: Annotated[
        str | None,
        typer.Option(help="Jinja template of a query and a document: its source, or a .jinja file.", metavar="PATH"),
    ] = None,
    truncate: Annotated[
        Truncate, typer.Option(help="Which end of a text that is too long is cut; error refuses it.")
    ] = "end",
    max_length: Annotated[
        int | None, typer.Option(help="Maximum number of tokens (default: the checkpoint's limit).", metavar="N", min=1)
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Read one text per line, whatever the file name or first character.")
    ] = False,
    id_column: options.IdColumn = "id",
    text_column: options.TextColumn = "text",
    keep_empty: Annotated[
        bool, typer.Option("--keep-empty", help="Rank empty and blank texts too, instead of leaving them out.")
    ] = False,
    output: Annotated[
        Literal["table", "jsonl"],
        typer.Option(help="table: bars on a terminal, tab-separated score, id and text in a pipe."),
    ] = "table",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    hf_overrides: options.HfOverrides = None,
) -> None:
    """Sort documents by their score for QUERY, best first.

    A cross-encoder scores query and document together; late-interaction and embedding checkpoints compare them token
    by token (MaxSim). With --method cosine, an embedding checkpoint compares one vector of each.

    Standard input is read as JSONL if it begins with {, else as one text per line with the line number as id; blank
    lines only separate texts. An empty or blank text of another source is left out and counted, unless --keep-empty.
    An invalid line is reported, the others are ranked, and the exit code is 1.
    """
    if is_blank(query):
        raise typer.BadParameter("it is blank; write what the documents are to be ranked for", param_hint="QUERY")
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
    # Special tokens alone have vectors too, which would rank an empty text above some real ones.
    blank = {index for index, record in enumerate(records) if not keep_empty and is_blank(record.text)}
    if left_out := len(blank):
        logger.warning(
            "%d of %d texts %s empty or blank and left out; --keep-empty ranks them too",
            left_out,
            len(records),
            "is" if left_out == 1 else "are",
        )

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
        # The blank ones too, and left out below: so an index is that of the text in an error and in a warning as well.
        results = engine.rerank(
            query,
            [record.text for record in records],
            method=method,
            instruction=instruction,
            truncate=truncate,
            show_progress=True,
        )
        spec = engine.spec
    best = [result for result in results if result.index not in blank][:top_n]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not encode every text
    if output == "jsonl":
        _write_lines(best, records)
    else:
        _write_table(best, records, spec, method)
    if failed:
        raise typer.Exit(1)


def _write_lines(results: Sequence[RerankResult], records: Sequence[Record]) -> None:
    """Print one JSON object per document."""
    for result in results:
        record = records[result.index]
        row = {"id": record.id, "index": result.index, "relevance_score": result.relevance_score, "text": record.text}
        print(json.dumps(row, ensure_ascii=False))


def _write_table(
    results: Sequence[RerankResult], records: Sequence[Record], spec: ModelSpec, method: ScoreMethod
) -> None:
    """Print columns with bars on a terminal, tab-separated values otherwise."""
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
    id_width = min(_ID_WIDTH, max(map(len, ids), default=0))
    scores_text = [f"{score:.4f}" for score in scores]
    score_width = max(map(len, scores_text), default=0)
    score_name = SCORE_NAMES.get((spec.rerank_type or "") if method == "auto" else method, "score")
    title = f"{len(results)} of {len(records)} documents by {score_name} ({spec.name})"
    console.print(Text(title, style="dim"), soft_wrap=True)
    for rank, result in enumerate(results):
        line = Text.assemble(
            (f"{rank + 1:>3}  ", "dim"),
            (f"{scores_text[rank]:>{score_width}}  ", "cyan"),
            (_bar((result.relevance_score - low) / (high - low)), "green" if rank == 0 else "blue"),
            "  ",
            (_fit(ids[rank], id_width), "bold"),
            "  ",
            _line(records[result.index].text),
        )
        line.truncate(min(console.width, _LINE_WIDTH), overflow="ellipsis")
        console.print(line, soft_wrap=True)


def _bar(share: float) -> str:
    """A bar of ``share`` of the full width, to an eighth of a character."""
    eighths = round(share * _BAR_WIDTH * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(_BAR_WIDTH)


def _fit(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else f"{text[: width - 1]}…"


def _line(text: str) -> str:
    """The text on one line, without tabs."""
    return " ".join(text.split())
