"""``millpond rerank``: sort texts by their score for a query."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from millpond.cli.arguments import options
from millpond.cli.arguments.groups import EngineOptions, TextOptions, grouped
from millpond.cli.arguments.input_texts import check_piped
from millpond.cli.arguments.options import option
from millpond.ingest.record import Record
from millpond.support.blank import is_blank
from millpond.tasks import Truncate

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """How the documents are scored, and which are printed."""

    k: options.MaybeK = None
    budget_ms: options.BudgetMs = None
    method: options.Method = "auto"
    instruction: options.Instruction = None
    truncate: Truncate = option(
        "auto", "Which end of a text that is too long is cut (auto: the checkpoint's); error refuses it."
    )


@grouped
def rerank(
    query: options.Query,
    source: options.TextSource = "-",
    *,
    model: options.Model,
    ranking: RankOptions,
    texts: TextOptions,
    format: Annotated[Literal["table", "jsonl"], typer.Option(help=options.FORMAT)] = "table",
    engine_options: EngineOptions,
) -> None:
    """Sort documents by their score for QUERY, best first.

    A cross-encoder scores query and document together; late-interaction and embedding checkpoints compare them token
    by token (MaxSim). With --method cosine, an embedding checkpoint compares one vector of each.

    With --budget-ms the documents are scored in the order in which they are read, until the --k best can no longer
    change or the time is over (loading the model not included); the others follow in that order, without a score.

    Standard input is read as JSONL if it begins with {, else as one text per line with the line number as id; blank
    lines only separate texts. A blank text of another source is left out and counted. An invalid
    line is reported, the others are ranked, and the exit code is 1. In a pipe, a line of the table has score, id and
    text between tabs.
    """
    if is_blank(query):
        raise typer.BadParameter("it is blank; write what the documents are to be ranked for", param_hint="QUERY")
    check_piped(source, "SOURCE")
    records, failed = _read(texts, source)
    # Special tokens alone have vectors too, which would rank an empty text above some real ones.
    blank = {index for index, record in enumerate(records) if is_blank(record.text)}
    if blank:
        count, verb = len(blank), "is" if len(blank) == 1 else "are"
        logger.warning("%d of %d texts %s blank and left out", count, len(records), verb)
    with engine_options.load(model) as engine:
        # The blank ones too, and left out below: so an index is that of the text in an error and in a warning as well.
        scoring = {name: value for name, value in vars(ranking).items() if name != "k"}
        # With --k the stop rule can end it; blank texts, which are left out below, must not take their places.
        top_n = None if ranking.budget_ms is None or ranking.k is None else ranking.k + len(blank)
        results = engine.rerank(query, [record.text for record in records], top_n=top_n, **scoring, show_progress=True)
        spec = engine.spec
    best = [result for result in results if result.index not in blank][: ranking.k]
    if format == "jsonl":
        for one in best:
            record = records[one.index]
            row = {"id": record.id, "index": one.index, "relevance_score": one.score_or_none}
            print(json.dumps({**row, "method": results.method, "text": record.text}, ensure_ascii=False))
    else:
        from millpond.cli.output.results_table import Row, print_rows, score_name

        rows = [Row(score=one.relevance_score, id=records[one.index].id, text=one.document) for one in best]
        title = f"{len(best)} of {len(records)} documents by {score_name(spec, ranking.method)} ({spec.name})"
        if ranking.budget_ms is not None:
            title += f", {int(results.scored.sum())} of them scored in {results.elapsed_ms:.0f} ms ({results.stopped})"
        print_rows(rows, title=title, bars=True)
    if failed:
        raise typer.Exit(1)


def _read(texts: TextOptions, source: str) -> tuple[list[Record], int]:
    """The records of a source, and how many could not be read."""
    items = list(texts.read(source))
    records = [item for item in items if isinstance(item, Record)]
    for item in items:
        if not isinstance(item, Record):
            logger.error("%s: %s", item.where, item.reason)
    return records, len(items) - len(records)
