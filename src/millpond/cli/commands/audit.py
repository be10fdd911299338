"""``millpond audit``: which model and settings made the vectors of a collection, and which rows are not by it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from millpond.cli.arguments import options
from millpond.cli.arguments.groups import EngineOptions, SinkOptions, grouped
from millpond.cli.arguments.options import option
from millpond.cli.output.columns import aligned
from millpond.cli.output.results_table import one_line
from millpond.errors import InvalidRequestError

if TYPE_CHECKING:
    from millpond.audit.candidates import Models
    from millpond.audit.report import AuditReport
    from millpond.ingest.sinks.collection import CollectionSink


@dataclass(frozen=True, kw_only=True)
class CandidateOptions:
    """What may have made the vectors."""

    models: list[str] | None = option(
        None,
        "Hub id or local folder.",
        "MODEL",
        flags="--model -m",
        show_default="the one that the collection names",
    )
    prompts: list[str] | None = option(None, "Put this before every text.", "TEXT", flags="--prompt")
    vector: str | None = option(None, "Name of the vectors (default: the widest).", "NAME")
    text: str | None = option(
        None, "Field that holds the texts, as metadata.body (default: page_content, text, document, ...).", "FIELD"
    )


@dataclass(frozen=True, kw_only=True)
class ExtentOptions:
    """How much is looked at."""

    sample: int = option(2000, options.SAMPLE, "N", min=1)
    confidence: float = option(
        0.99,
        "Confidence of the share of rows that are off; the sample ends when it is reached.",
        "SHARE",
        min=0.5,
        max=0.9999,
    )
    every: bool = option(False, options.ALL, flags="--all")


@grouped
def audit(
    url: Annotated[str, typer.Argument(help="URL of the collection, {sinks}.", metavar="URL")],
    *,
    candidates: CandidateOptions,
    extent: ExtentOptions,
    fix: Annotated[
        bool, typer.Option("--fix", help="Embed the rows that are off again, in a collection that millpond made.")
    ] = False,
    format: Annotated[Literal["table", "json"], typer.Option(help=options.FORMAT)] = "table",
    collection: SinkOptions,
    engine: EngineOptions,
) -> None:
    """Say which model and settings made the vectors of a collection, and which rows are not by them.

    The settings are pooling, prompt, cut, width, data type and form of the text; the collection may be anybody's. Every
    row is tested without a model: missing, zero and equal vectors, NaN, lengths, rounding, hashes of texts. Some rows,
    drawn at random, are embedded again, until the share of rows that are off is known. --model is repeated for each
    model that may have made the vectors, and --prompt for each prompt beside the models' own. Exit code 1 if a row is
    off, or if none of the models fits. Nothing is written without --fix.
    """
    from millpond.audit.audit import AuditOptions
    from millpond.audit.audit import audit as look

    with ExitStack() as stack:
        sink = stack.enter_context(_opened(url, collection.settings))
        models = stack.enter_context(closing(_models(sink, candidates, engine.settings)))
        advance = _bar(stack, sink)
        report = look(
            sink,
            models,
            AuditOptions(
                vector=candidates.vector,
                text=candidates.text,
                sample=extent.sample,
                confidence=extent.confidence,
                every=extent.every,
                advance=advance,
            ),
        )
        if fix and report.findings:
            report = _fix(stack, sink, report, engine.settings)
    print(json.dumps(report.to_json(), ensure_ascii=False)) if format == "json" else _print(report, fix=fix)
    if not report.clean:
        raise typer.Exit(1)


@contextmanager
def _opened(url: str, settings: dict[str, Any]) -> Iterator[CollectionSink[Any]]:
    from millpond.ingest.sinks.collection import CollectionSink
    from millpond.ingest.sinks.database import open_sink

    with closing(open_sink(url, must_exist=True, **settings)) as sink:
        if not isinstance(sink, CollectionSink):
            raise InvalidRequestError(f"{url.partition(':')[0]!r} only writes; it has no collections to read")
        yield sink


def _models(sink: CollectionSink[Any], candidates: CandidateOptions, settings: dict[str, Any]) -> Models:
    """The models that are named, or the one that the collection names."""
    from millpond.audit.candidates import Models

    names = candidates.models
    if not names:
        from millpond.ingest.sinks.manifest import CollectionManifest
        from millpond.search.stored_model import describe_stored

        manifest = sink.answering().describe().manifest
        if not isinstance(manifest, CollectionManifest):
            raise InvalidRequestError(
                f"collection {sink.collection!r} names no model; name those that may have made it with --model"
            )
        found = describe_stored(manifest.identity, None, settings, owner="The collection", option="--model")
        names, settings = [found.spec.name], dict(found.settings)
    return Models(names, settings=settings, prompts=candidates.prompts or ())


def _fix(stack: ExitStack, sink: CollectionSink[Any], report: AuditReport, settings: dict[str, Any]) -> AuditReport:
    """Fix the rows that are off with the collection's own model, which may be none of those that were tried."""
    from millpond.audit.repair import repair
    from millpond.engine.engine import Engine
    from millpond.search.stored_model import describe_stored

    found = describe_stored(sink.open().identity, None, settings, owner="The collection", option="--model")
    return repair(sink, stack.enter_context(Engine(found.spec.name, **found.settings)), report)


def _bar(stack: ExitStack, sink: CollectionSink[Any]) -> Any:
    from millpond.support.progress import draw_bar

    bar = stack.enter_context(draw_bar(show=True, total=sink.answering().describe().rows, unit=" rows", leave=False))
    return bar.update


def _print(report: AuditReport, *, fix: bool) -> None:
    print(*aligned([(name, one_line(value)) for name, value in report.facts()]), sep="\n")
    faults = [tuple(map(one_line, row)) for row in report.faults()]
    if faults:
        print()
        print(*aligned([("rows", "fault", "what", "ids"), *faults], right={0}), sep="\n")
    for row_id, reason in report.unfixed[:10]:
        print(f"millpond: {row_id}: not fixed: {reason}", file=sys.stderr)
    if fix and report.findings:
        print(f"\n{report.fixed} of {len(report.findings)} rows were embedded again")
    if report.left:
        print(f"millpond: {report.left} more rows look strange; --all embeds them again", file=sys.stderr)
    off, bounds = len(report.findings), report.bounds
    if bounds.rows < bounds.total and bounds.low * bounds.total > off:
        print(
            f"millpond: more rows are off than these: at least {round(bounds.low * bounds.total)}; --all finds them",
            file=sys.stderr,
        )
