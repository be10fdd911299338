"""``millpond advise``: which width, datatype and quantization keep the quality of a search."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from millpond.cli.arguments import options
from millpond.errors import InvalidRequestError

if TYPE_CHECKING:
    from millpond.ingest.advice.advisor import Advice, Measurement
    from millpond.ingest.advice.layouts import Layout


def advise(
    source: Annotated[
        str,
        typer.Argument(
            help="What millpond ingest reads, a file with one text per line, or a BEIR folder (corpus.jsonl, "
            "queries.jsonl, qrels/test.tsv)."
        ),
    ],
    *,
    model: options.Model,
    queries: Annotated[
        str | None,
        typer.Option(help="Queries, in any of these files (default: the queries of a BEIR folder).", metavar="SOURCE"),
    ] = None,
    qrels: Annotated[
        Path | None,
        typer.Option(help="Judgements, of TREC or BEIR: nDCG@10 is then measured, and decides.", metavar="FILE"),
    ] = None,
    widths: Annotated[
        str | None,
        typer.Option(help="Matryoshka widths to measure, e.g. 64,128 (default: the model's own).", metavar="N,N"),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(help="Only what this installed database can store (default: what any can).", metavar="NAME"),
    ] = None,
    k: Annotated[int, typer.Option("--k", "-k", help="Rows to find.", metavar="N", min=1)] = 10,
    keep: Annotated[
        float, typer.Option(help="Share of the full width's nDCG, or recall, that the advice keeps.", metavar="SHARE")
    ] = 0.99,
    sample: Annotated[
        int, typer.Option(help="Most records to embed; they are chosen at random.", metavar="N", min=1)
    ] = 20_000,
    out: Annotated[
        Path | None, typer.Option(help="Write a page with charts too; needs millpond[report].", metavar="FILE.html")
    ] = None,
    output: Annotated[
        Literal["table", "json"], typer.Option(help="table: the best trade-offs and the advice; json: everything.")
    ] = "table",
    every: Annotated[
        bool, typer.Option("--all", help="All layouts in the table, not only the best trade-offs.")
    ] = False,
    id_column: Annotated[
        str | None,
        typer.Option(
            "--id", help="Key or column of the ids of records and queries (default: id; _id of BEIR).", metavar="COLUMN"
        ),
    ] = None,
    text_column: options.TextColumn = "text",
    cache: options.Cache = None,
    revision: options.Revision = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_length: options.MaxLength = None,
    pooling: options.Pooling = None,
    quantization: options.Quantization = None,
    hf_overrides: options.HfOverrides = None,
) -> None:
    """Measure what each width, datatype, quantization and coarse-to-fine search keeps, on your texts and queries.

    Records and queries are embedded once, at full width. Each layout is then searched exactly, and compared with the
    full width in float32: recall@k, nDCG@10 where there are judgements, bytes in memory and stored. The smallest that
    keep the share --keep are printed as a command that ingests the source so.
    """
    from millpond.cli.arguments.input_texts import read_texts
    from millpond.ingest.advice.beir import ID_COLUMN, beir_folder
    from millpond.ingest.advice.judgements import read_judgements

    folder = None if source == "-" else beir_folder(source)
    if folder is not None:
        queries = queries or (None if folder.queries is None else str(folder.queries))
        qrels = qrels or folder.judgements
        id_column = id_column or ID_COLUMN
    if queries is None:
        raise InvalidRequestError(
            "name the queries that users ask: --queries queries.jsonl, or a text file with one per line"
        )
    if source == queries == "-":
        raise InvalidRequestError("SOURCE and --queries are both standard input; name a file for one of them")
    columns = {"id_column": id_column or "id", "text_column": text_column}
    records = read_texts(source, lines=False, **columns) if folder is None else folder.documents()
    asked = list(read_texts(queries, lines=False, **columns))
    judgements = None if qrels is None else read_judgements(qrels)
    if out is not None:
        from millpond.ingest.pages.charts import check_charts
        from millpond.ingest.pages.html_page import check_page_path

        check_charts()
        check_page_path(out)

    from millpond.config import EngineConfig
    from millpond.engine.engine import Engine
    from millpond.engine.loading import describe
    from millpond.ingest.advice.advisor import advise as measure
    from millpond.ingest.advice.advisor import check_advice_widths

    settings: dict[str, Any] = {
        "revision": revision,
        "device": device,
        "dtype": dtype,
        "max_length": max_length,
        "pooling": pooling,
        "quantization": quantization,
        "hf_overrides": hf_overrides,
    }
    chosen = options.read_widths(widths)
    check_advice_widths(describe(EngineConfig(model=model, **settings)), chosen)
    with Engine(model, cache=cache, **settings) as engine:
        advice = measure(
            records,
            queries=asked,
            engine=engine,
            judgements=judgements,
            widths=chosen,
            database=database,
            k=k,
            keep=keep,
            sample=sample,
        )
    name = source if folder is None else str(folder.corpus)
    given = {
        "--id": id_column,
        "--text": None if text_column == "text" else text_column,
        "--cache": cache,
        "--revision": revision,
        "--dtype": None if dtype == "auto" else dtype,
        "--max-length": max_length,
        "--pooling": pooling,
        "--hf-overrides": None if hf_overrides is None else json.dumps(hf_overrides),
    }
    further = [part for option, value in given.items() if value is not None for part in (option, str(value))]
    commands = {
        one.layout: one.layout.command(name, model, database=database, options=further)
        for one in (advice.smallest, advice.lightest)
    }
    if output == "json":
        print(json.dumps(_values(advice, commands)))
    else:
        _print_table(advice, commands, every=every)
    if out is not None:
        from millpond.ingest.advice.page import write_advice

        write_advice(out, advice, source=name, model=model, commands=commands, settings=settings)


def _values(advice: Advice, commands: Mapping[Layout, str]) -> dict[str, Any]:
    """Everything, as JSON holds it."""

    def value(one: Measurement) -> dict[str, Any]:
        return {"name": one.layout.name, **asdict(one)}

    def advised(one: Measurement) -> dict[str, str]:
        return {"name": one.layout.name, "command": commands[one.layout]}

    values = {**vars(advice), "smallest": advised(advice.smallest), "lightest": advised(advice.lightest)}
    values["measurements"] = [value(one) for one in advice.measurements]
    return values


def _print_table(advice: Advice, commands: Mapping[Layout, str], *, every: bool) -> None:
    from millpond.ingest.advice.page import cells, describe, header, metric_name, recommendations

    sample = "" if advice.rows == advice.read else f" of {advice.read:,}"
    print(f"{advice.rows:,}{sample} records, {advice.queries:,} queries; {len(advice.measurements)} layouts measured")
    shown = [one for one in advice.measurements if every or one.best or one == advice.full]
    rows = [
        ["*" if one.best else "", "=" if one.keeps else "", *cells(one, advice.full, judged=advice.judged)]
        for one in shown
    ]
    print()
    _print_columns([["", "", *header(advice)], *rows])
    print("\n* no other layout that a database stores is as small, in memory and stored, and as good")
    print(f"= keeps {100 * advice.keep:.4g} % of the full width's {metric_name(advice)}")
    for note in advice.notes:
        print(f"! {note}")
    for title, one in recommendations(advice):
        print(f"\n{title}: {describe(one, advice)}\n  {commands[one.layout]}")


def _print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Columns of equal width: two marks, words, numbers to the right, words."""
    spans = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(span) if 2 < index < len(row) - 1 else cell.ljust(span)
            for index, (cell, span) in enumerate(zip(row, spans, strict=True))
        ]
        print(" ".join(cells[:2]), "  ".join(cells[2:]).rstrip())
