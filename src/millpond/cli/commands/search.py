"""``millpond search``: ask a collection that ``millpond ingest`` filled, in one stage or two."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from millpond.cli.arguments import options
from millpond.cli.arguments.filters import Filter, read_filter
from millpond.cli.arguments.groups import EngineOptions, SinkOptions, TextOptions, grouped
from millpond.cli.output.search_stages import StageOptions, title_of, why_none
from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, Rejected
from millpond.search.stages import SearchStages
from millpond.support.blank import is_blank

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class QuestionOptions(TextOptions):
    """Where questions are read from, if not from the command line."""

    queries: options.Queries = None

    def questions(self, words: list[str] | None) -> Iterable[Record | Rejected]:
        """The questions of the command line, or of a file."""
        if words and self.queries is not None:
            raise typer.BadParameter("write queries or --queries, not both", param_hint="QUERY")
        if words:
            for word in words:
                if is_blank(word):
                    raise typer.BadParameter("it is blank; write what the records are to answer", param_hint="QUERY")
            return [Record(str(number), word) for number, word in enumerate(words, start=1)]
        # Without standard input (closed by the caller), sys.stdin is None.
        if self.queries in (None, "-") and (sys.stdin is None or sys.stdin.isatty()):
            raise typer.BadParameter("write a question, or pipe questions in", param_hint="QUERY")
        return self.read(self.queries or "-")


@dataclass(frozen=True, kw_only=True)
class CollectionOptions(SinkOptions):
    """How the collection is opened."""

    dimensions: options.StoredWidths = None


@grouped
def search(
    url: Annotated[str, typer.Argument(help="URL of the collection, as of ingest --to: {sinks}.", metavar="URL")],
    words: Annotated[
        list[str] | None,
        typer.Argument(help="One query or several (default: one a line on stdin).", metavar="QUERY"),
    ] = None,
    *,
    source: QuestionOptions,
    filter: Filter = None,
    stages: StageOptions,
    collection: CollectionOptions,
    format: Annotated[Literal["table", "jsonl"], typer.Option(help=options.FORMAT)] = "table",
    engine: EngineOptions,
) -> None:
    """Print the records of a collection that answer a question best, best first.

    The collection knows its model, widths and sparse vectors; a model in a local folder is named again if that was
    moved. With several widths, candidates are found by the smallest and scored by the largest. With --rerank, a second
    model, or the same one token by token, scores what the search found. Nothing is written to the database.

    Questions of a file have their id, those of lines and of the command line their number. A question that cannot be
    read is reported, the others are answered, and the exit code is 1. In a pipe, a line of the table has the query's
    id, rank, score, id, text and metadata between tabs.
    """
    conditions = read_filter(filter)
    stages.check()
    asked = source.questions(words)
    widths = options.read_widths(collection.dimensions)

    from millpond.engine.engine import Engine
    from millpond.ingest.sinks.collection import CollectionSink
    from millpond.ingest.sinks.database import open_sink

    with ExitStack() as stack:
        sink = stack.enter_context(closing(open_sink(url, dimensions=widths, must_exist=True, **collection.settings)))
        if not isinstance(sink, CollectionSink):
            raise InvalidRequestError(f"{url.partition(':')[0]!r} only writes; it cannot be searched")
        opened = SearchStages.open(
            sink,
            plan=stages,
            settings=engine.settings,
            load=lambda model: stack.enter_context(Engine(model.spec.name, **model.settings)),
            filter=conditions,
        )
        failed = _answer_all(opened, asked, jsonl=format == "jsonl")
    if failed:
        raise typer.Exit(1)


def _answer_all(stages: SearchStages, questions: Iterable[Record | Rejected], *, jsonl: bool) -> int:
    """Answer and print one question after the other, and return how many failed."""
    from rich.console import Console

    from millpond.cli.output.results_table import print_answer, print_json

    console = Console(highlight=False)
    chunked = stages.sink.open().chunked
    single = isinstance(questions, list) and len(questions) == 1
    failed = answered = 0
    refused = None
    for question in questions:
        if isinstance(question, Record) and is_blank(question.text):
            question = Rejected(where=f"question {question.id}", reason="it is blank")
        if isinstance(question, Rejected):
            failed += 1
            logger.error("%s: %s", question.where, question.reason)
            continue
        try:
            answer = stages.answer(question)
        except InvalidRequestError as error:
            if not answered and (single or str(error) == refused):  # it is about an option, and not the question
                raise
            failed, refused = failed + 1, str(error)
            logger.error("question %s: %s", question.id, error)
            continue
        answered += 1
        if not answer.hits:
            logger.warning("%s", why_none(stages, answer))
        if jsonl:
            print_json(answer)
        else:
            title = f"{len(answer.hits)} records {title_of(stages)}, {1000 * answer.seconds:.0f} ms"
            print_answer(
                answer, title=title if single else f"{answer.query}\n{title}", chunked=chunked, console=console
            )
        print(end="", flush=True)  # sys.stdout is None if the caller closed it
    if not answered + failed:
        raise InvalidRequestError("there is no question; write one, or pipe one a line in")
    return failed
