"""``millpond advise``: which width, datatype and quantization keep the quality of a search."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from millpond.cli.arguments import options
from millpond.cli.arguments.groups import EngineOptions, grouped, open_cache
from millpond.cli.arguments.input_texts import has_lines, read_texts
from millpond.cli.arguments.options import option
from millpond.cli.arguments.written import writing
from millpond.cli.output.columns import aligned
from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.rows import Columns

if TYPE_CHECKING:
    from millpond.ingest.advice.advisor import Advice
    from millpond.ingest.advice.layouts import Layout


@dataclass(frozen=True, kw_only=True)
class QueryOptions:
    """What is asked, and how good answers are measured."""

    queries: options.Queries = None
    qrels: Path | None = option(None, "Judgements, of TREC or BEIR: nDCG@10 is then measured, and decides.", "FILE")
    id_column: str | None = option(
        None, "Key or column that holds the id.", "COLUMN", flags="--id", show_default="id; _id of a BEIR folder"
    )
    text_column: str | None = option(
        None,
        "Key or column that holds the text; of several, as title,text, the values are joined by a space.",
        "COLUMN,...",
        flags="--text",
        show_default="text; title,text of a BEIR folder",
    )
    template: options.Template = None

    @property
    def columns(self) -> dict[str, Any]:
        """How the records are read. Queries have the id, and of several columns the text's own."""
        text = options.read_columns(self.text_column or "text")
        return {"id_column": self.id_column or "id", "text_column": text, "template": self.template}

    @property
    def text(self) -> str:
        """What the text is made of, in words."""
        return self.template or self.text_column or "text"

    @property
    def written(self) -> list[str]:
        """The options of the columns as they are written on a command line."""
        given = {"--id": self.id_column, "--text": self.text_column, "--template": self.template}
        return [word for flag, value in given.items() if value is not None for word in (flag, value)]


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """What is measured: the arguments of :func:`millpond.ingest.advice.advisor.advise`."""

    dimensions: options.Widths = None
    database: str | None = option(None, "Only what this installed database can store (default: what any can).", "NAME")
    k: options.K = 10
    keep: float = option(0.99, "Share of the full width's nDCG, or recall, that the advice keeps.", "SHARE")
    sample: int = option(20_000, options.SAMPLE, "N", min=1)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments."""
        return {**vars(self), "dimensions": options.read_widths(self.dimensions)}


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is printed and drawn."""

    report: options.Report = None
    format: Literal["table", "json"] = option("table", options.FORMAT)
    every: bool = option(False, options.ALL, flags="--all")


@grouped
def advise(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="What millpond ingest reads, a file with one text per line, or a BEIR folder (corpus.jsonl, "
            "queries.jsonl, qrels/test.tsv).",
        ),
    ],
    *,
    model: options.Model,
    asked: QueryOptions,
    measured: MeasureOptions,
    shown: OutputOptions,
    cache: options.Cache = None,
    engine_options: EngineOptions,
) -> None:
    """Measure what each width, datatype, quantization and coarse-to-fine search keeps, on your texts and queries.

    Records and queries are embedded once, at full width. Each layout is then searched exactly, and compared with the
    full width in float32: recall@k, nDCG@10 where there are judgements, bytes in memory and stored. The smallest that
    keep the share --keep are printed as a command that ingests the source so.
    """
    name, asked, records = _source(source, asked)
    columns = Columns(id=asked.columns["id_column"], text=asked.columns["text_column"], template=asked.template)
    queries = list(read_texts(str(asked.queries), id_column=columns.id, text_column=columns.body))
    if shown.report is not None:
        from millpond.ingest.pages.charts import check_charts
        from millpond.ingest.pages.html_page import check_page_path

        check_charts()
        check_page_path(shown.report)

    from millpond.ingest.advice.advisor import advise as measure
    from millpond.ingest.advice.advisor import check_dimensions
    from millpond.ingest.advice.judgements import read_judgements

    judgements = None if asked.qrels is None else read_judgements(asked.qrels)
    check_dimensions(engine_options.describe(model), measured.arguments["dimensions"])
    with ExitStack() as stack:
        engine = stack.enter_context(engine_options.load(model, cache=open_cache(stack, cache)))
        advice = measure(records, queries=queries, engine=engine, judgements=judgements, **measured.arguments)
    if has_lines(name):
        note = f'millpond ingest reads records: write the lines of {name} as JSONL first, {{"text": ...}} for each'
        advice = replace(advice, notes=(*advice.notes, note))
    further = [*asked.written, *([] if cache is None else ["--cache", str(cache)]), *engine_options.written]
    commands = {
        one.layout: one.layout.command(name, model, database=measured.database, options=further)
        for one in (advice.smallest, advice.lightest)
    }
    if shown.format == "json":
        print(json.dumps(_values(advice, commands)))
    else:
        _print_table(advice, commands, text=asked.text, every=shown.every)
    if shown.report is not None:
        from millpond.ingest.advice.page import write_advice

        settings = {"text": asked.text, **engine_options.settings}
        with writing(shown.report):
            write_advice(shown.report, advice, source=name, model=model, commands=commands, settings=settings)


def _source(source: str, asked: QueryOptions) -> tuple[str, QueryOptions, Iterable[Record | Rejected]]:
    """The name of the source, the options with what a BEIR folder says, and the records."""
    from millpond.ingest.advice.judgements import ID_COLUMN, TEXT_COLUMNS, beir_folder

    folder = None if source == "-" else beir_folder(source)
    if folder is not None:
        asked = replace(
            asked,
            queries=asked.queries or (None if folder.queries is None else str(folder.queries)),
            qrels=asked.qrels or folder.judgements,
            id_column=asked.id_column or ID_COLUMN,
            text_column=asked.text_column or (",".join(TEXT_COLUMNS) if asked.template is None else None),
        )
    if asked.queries is None:
        raise InvalidRequestError(
            "name the queries that users ask: --queries queries.jsonl, or a text file with one per line"
        )
    if source == asked.queries == "-":
        raise InvalidRequestError("SOURCE and --queries are both standard input; name a file for one of them")
    name = source if folder is None else str(folder.corpus)
    return name, asked, read_texts(name, **asked.columns)


def _values(advice: Advice, commands: Mapping[Layout, str]) -> dict[str, Any]:
    """Everything, as JSON holds it."""
    measurements = [{"name": one.layout.name, **asdict(one)} for one in advice.measurements]
    advised = {
        key: {"name": one.layout.name, "command": commands[one.layout]}
        for key, one in (("smallest", advice.smallest), ("lightest", advice.lightest))
    }
    return {**vars(advice), **advised, "measurements": measurements}


def _print_table(advice: Advice, commands: Mapping[Layout, str], *, text: str, every: bool) -> None:
    from millpond.ingest.advice.page import cells, describe, header, metric_name, recommendations

    sample = "" if advice.rows == advice.read else f" of {advice.read:,}"
    measured = f"{len(advice.measurements)} layouts measured on {text}"
    print(f"{advice.rows:,}{sample} records, {advice.queries:,} queries; {measured}")
    shown = [one for one in advice.measurements if every or one.best or one == advice.full]
    rows = [
        [f"{'*' if one.best else ' '} {'=' if one.keeps else ' '}", *cells(one, advice.full, judged=advice.judged)]
        for one in shown
    ]
    print()
    table = [["", *header(advice)], *rows]
    print(*aligned(table, right=range(2, len(table[0]) - 1)), sep="\n")
    print("\n* no other layout that a database stores is as small, in memory and stored, and as good")
    print(f"= keeps {100 * advice.keep:.4g} % of the full width's {metric_name(advice)}")
    for note in advice.notes:
        print(f"! {note}")
    for title, one in recommendations(advice):
        print(f"\n{title}: {describe(one, advice)}\n  {commands[one.layout]}")
