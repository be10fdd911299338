"""``millpond search``: ask a collection that ``millpond ingest`` filled, in one stage or two."""

from __future__ import annotations

import io
import json
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from millpond.blank import is_blank
from millpond.cli.arguments import options
from millpond.cli.arguments.input_texts import read_texts
from millpond.cli.commands.index import engine_settings
from millpond.errors import InvalidRequestError, ModelLoadError
from millpond.ingest.record import Record, Rejected
from millpond.metadata import check_filter
from millpond.tasks import ScoreMethod

if TYPE_CHECKING:
    from millpond.cli.output.search_stages import SearchStages
    from millpond.engine.engine import Engine
    from millpond.fingerprint import ModelIdentity
    from millpond.ingest.sinks.manifest import CollectionManifest
    from millpond.spec import ModelSpec

logger = logging.getLogger(__name__)

SELF = "self"
"""The value of ``--rerank`` that names the model of the collection itself."""


def search(
    url: Annotated[
        str,
        typer.Argument(
            help="URL of the collection, as of ingest --to: {sinks}.",
            metavar="URL",
        ),
    ],
    questions: Annotated[
        list[str] | None,
        typer.Argument(help="One question or several (default: one a line on stdin).", metavar="QUESTION"),
    ] = None,
    *,
    queries: Annotated[
        str | None,
        typer.Option(
            help="Read questions from a .jsonl, .json, .csv, .tsv, .parquet or .arrow file, any other file with one a "
            "line, or - (stdin).",
            metavar="FILE",
        ),
    ] = None,
    k: Annotated[int, typer.Option("--k", "-k", help="Most records to print for a question.", metavar="N", min=1)] = 10,
    filter: Annotated[
        list[str] | None,
        typer.Option(
            help="""Metadata that must match: year=2024, lang=en, code='"07"' (a str), or a JSON object. Several values
            of a key: one of them.""",
            metavar="KEY=VALUE",
        ),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Print records of at least this score.", metavar="SCORE")
    ] = None,
    per_record: Annotated[
        bool, typer.Option("--per-record", help="Print a record of several chunks once, by its best chunk.")
    ] = False,
    dimensions: Annotated[
        str | None,
        typer.Option(help="Stored widths to search, e.g. 128,768 (default: all).", metavar="N,N"),
    ] = None,
    coarse_to_fine: Annotated[
        bool,
        typer.Option(
            "--coarse-to-fine/--no-coarse-to-fine",
            help="Find candidates by the smallest width and score them by the largest, or search that one alone.",
        ),
    ] = True,
    hybrid: Annotated[
        bool | None,
        typer.Option(
            "--hybrid/--no-hybrid",
            help="Fuse the ranking with that of sparse vectors (default: if the collection has them).",
        ),
    ] = None,
    rerank: Annotated[
        str | None,
        typer.Option(
            help="Score what is found again: by a cross-encoder, an LLM reranker or a ColBERT checkpoint, or, as "
            "'self', by the token vectors of the collection's model.",
            metavar="MODEL",
        ),
    ] = None,
    candidates: Annotated[
        int | None,
        typer.Option(
            help="Records that the stage before the last keeps (default: coarse to fine the larger of 100 and 10 k, "
            "for --rerank of 50 and 5 k).",
            metavar="N",
            min=1,
        ),
    ] = None,
    method: Annotated[
        ScoreMethod,
        typer.Option(help="How --rerank scores: cosine of vectors, maxsim of token vectors, auto by what it is."),
    ] = "auto",
    instruction: Annotated[
        str | None, typer.Option(help="Instruction for the template of an LLM reranker.", metavar="TEXT")
    ] = None,
    output: Annotated[
        Literal["table", "jsonl"],
        typer.Option(
            help="table: for a terminal; in a pipe tab-separated question, rank, score, id, text and metadata. jsonl: "
            "a JSON object for each record."
        ),
    ] = "table",
    as_json: Annotated[bool, typer.Option("--json", help="The same as --output jsonl.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Hub id or local folder (default: the hub id that filled it).", metavar="MODEL"
        ),
    ] = None,
    sparse_model: Annotated[
        str | None,
        typer.Option(
            help="Model of the question's sparse vector (default: the hub id that filled it).", metavar="MODEL"
        ),
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Read one question a line, whatever the file name or first character.")
    ] = False,
    id_column: options.IdColumn = "id",
    text_column: options.TextColumn = "text",
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds that a request to the database may take.", metavar="SECONDS", show_default="60"),
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_length: options.MaxLength = None,
    pooling: options.Pooling = None,
    quantization: options.Quantization = None,
    revision: options.Revision = None,
    hf_overrides: options.HfOverrides = None,
) -> None:
    """Print the records of a collection that answer a question best, best first.

    The collection knows its model, widths and sparse vectors; a model that was a local folder is named again. With
    several widths the smallest one finds candidates for the largest. With --rerank, a second model, or the same one
    token by token, scores what the search found. Nothing is written to the database.

    Questions of a file have their id, those of lines and of the command line their number. A question that cannot be
    read is reported, the others are answered, and the exit code is 1.
    """
    conditions = _read_filter(filter or [])
    _check(k=k, candidates=candidates, threshold=threshold, rerank=rerank, method=method, instruction=instruction)
    asked = _questions(questions, queries, lines=lines, id_column=id_column, text_column=text_column)
    widths = options.read_widths(dimensions)

    from millpond.cli.output.search_stages import SearchStages
    from millpond.ingest.sinks.collection import CollectionSink
    from millpond.ingest.sinks.url import open_sink

    settings = engine_settings(device, dtype, max_length, revision, hf_overrides)
    settings |= {"pooling": pooling, "quantization": quantization}
    with ExitStack() as stack:
        sink_options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        sink = stack.enter_context(closing(open_sink(url, dimensions=widths, must_exist=True, **sink_options)))
        if not isinstance(sink, CollectionSink):
            raise InvalidRequestError(f"{url.partition(':')[0]!r} only writes; it cannot be searched")
        manifest = sink.open()
        manifest.widths_to_search(sink.dimensions, collection=sink.collection)
        fused = sink.fusible if hybrid is None else hybrid
        # All models are checked before the weights of one are loaded, which is the slowest step.
        dense = _Model.of(_identity(manifest), model, settings, option="--model")
        manifest.check_model(dense.spec, collection=sink.collection)
        sparse = None
        if fused and manifest.sparse is not None and manifest.sparse.fingerprint != dense.spec.fingerprint:
            placed = {"device": device, "dtype": dtype}
            sparse = _Model.of(manifest.sparse, sparse_model, placed, option="--sparse-model, or leave --hybrid out")
            manifest.check_sparse(sparse.spec, collection=sink.collection)
        second = None
        if rerank is not None and rerank not in (SELF, dense.spec.name):
            second = _Model.named(rerank, {"device": device, "dtype": dtype})
        engine = stack.enter_context(dense.load())
        last = None if rerank is None else engine if second is None else stack.enter_context(second.load())
        stages = SearchStages(
            sink=sink,
            engine=engine,
            sparse_engine=None if sparse is None else stack.enter_context(sparse.load()),
            rerank_engine=last,
            hybrid=fused,
            coarse_to_fine=coarse_to_fine,
            filter=conditions,
            k=k,
            candidates=candidates,
            per_record=per_record,
            threshold=threshold,
            method=method,
            instruction=instruction,
        )
        failed = _answer_all(stages, asked, jsonl=as_json or output == "jsonl")
    if failed:
        raise typer.Exit(1)


def _check(
    *,
    k: int,
    candidates: int | None,
    threshold: float | None,
    rerank: str | None,
    method: ScoreMethod,
    instruction: str | None,
) -> None:
    """Refuse options that contradict each other, before anything is opened."""
    if candidates is not None and candidates < k:
        raise typer.BadParameter(f"{candidates} is less than --k {k}", param_hint="--candidates")
    if threshold is not None and not math.isfinite(threshold):
        raise typer.BadParameter(f"{threshold} is no score", param_hint="--threshold")
    if rerank is not None and not rerank.strip():
        raise typer.BadParameter("it is blank; name a model, or write self", param_hint="--rerank")
    if rerank is None:
        for option, given in (("--method", method != "auto"), ("--instruction", instruction is not None)):
            if given:
                raise typer.BadParameter("it is an option of the second stage; name --rerank, too", param_hint=option)


def _read_filter(words: Iterable[str]) -> dict[str, Any] | None:
    """Conditions from ``KEY=VALUE`` and JSON objects; a repeated key has one of its values."""
    conditions: dict[str, list[Any]] = {}
    for word in words:
        if word.lstrip().startswith("{"):
            pairs = options.read_object(word)
        else:
            key, equals, text = word.partition("=")
            if not equals or not key:
                raise typer.BadParameter(f"{word!r} is no KEY=VALUE, like year=2024", param_hint="--filter")
            pairs = {key: _read_value(text)}
        for key, value in pairs.items():
            conditions.setdefault(key, []).extend(value if isinstance(value, list) else [value])
    flat = {key: values[0] if len(values) == 1 else values for key, values in conditions.items()}
    check_filter(flat)
    return flat or None


def _read_value(text: str) -> Any:
    """A value as JSON, if it is a number, true, false, a str in quotes or a list; else the text itself."""
    try:
        value = json.loads(text, parse_constant=str)  # NaN and Infinity are words
    except (ValueError, RecursionError):
        return text
    plain = isinstance(value, bool | int | str | list) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else text


def _questions(
    words: list[str] | None, file: str | None, *, lines: bool, id_column: str, text_column: str
) -> Iterable[Record | Rejected]:
    """The questions of the command line, or of a file."""
    if words and file is not None:
        raise typer.BadParameter("name questions or --queries, not both", param_hint="QUESTION")
    if words:
        for word in words:
            if is_blank(word):
                raise typer.BadParameter("it is blank; write what the records are to answer", param_hint="QUESTION")
        return [Record(str(number), word) for number, word in enumerate(words, start=1)]
    # Without standard input (closed by the caller), sys.stdin is None.
    if file in (None, "-") and (sys.stdin is None or sys.stdin.isatty()):
        raise typer.BadParameter("write a question, or pipe questions in", param_hint="QUESTION")
    return read_texts(file or "-", lines=lines, id_column=id_column, text_column=text_column)


@dataclass(frozen=True, kw_only=True)
class _Model:
    """A model that is checked and not loaded."""

    settings: Mapping[str, Any]
    spec: ModelSpec

    @classmethod
    def named(cls, name: str, settings: Mapping[str, Any]) -> _Model:
        from millpond.config import EngineConfig
        from millpond.engine.loading import describe

        return cls(settings=settings, spec=describe(EngineConfig(model=name, **settings)))

    @classmethod
    def of(cls, identity: ModelIdentity, name: str | None, settings: Mapping[str, Any], *, option: str) -> _Model:
        """The model that filled a collection, with the settings of then where the command names none."""
        from millpond.fingerprint import differences

        try:
            model = cls.named(name or identity.model, settings)
            stored = {
                each.name: identity.settings[each.name]
                for each in differences(identity.settings, model.spec)
                if each.is_option and settings.get(each.name) is None
            }
            return cls.named(name or identity.model, {**settings, **stored}) if stored else model
        except ModelLoadError as error:
            if name is None:
                error.add_note(
                    f"The collection was filled by {identity.model!r}. If that was a folder, name it with {option}."
                )
            raise

    def load(self) -> Engine:
        from millpond.engine.engine import Engine

        return Engine(self.spec.name, **self.settings)


def _identity(manifest: CollectionManifest) -> ModelIdentity:
    from millpond.fingerprint import ModelIdentity

    return ModelIdentity(fingerprint=manifest.fingerprint, model=manifest.model, settings=manifest.settings)


def _answer_all(stages: SearchStages, questions: Iterable[Record | Rejected], *, jsonl: bool) -> int:
    """Answer and print one question after the other, and return how many failed."""
    from rich.console import Console

    from millpond.cli.output.results_table import print_json, print_table

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not encode every text
    console = Console(highlight=False)
    chunked = stages.sink.open().chunked
    single = isinstance(questions, list) and len(questions) == 1
    failed = answered = 0
    refused = None
    for question in _readable(questions):
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
        if jsonl:
            print_json(answer)
        else:
            title = f"{len(answer.hits)} records {stages.title}, {1000 * answer.seconds:.0f} ms"
            if console.is_terminal and not single:
                title = f"{answer.query}\n{title}"
            print_table(answer, title=title, chunked=chunked, console=console)
        print(end="", flush=True)  # sys.stdout is None if the caller closed it
    if not answered + failed:
        raise InvalidRequestError("there is no question; write one, or pipe one a line in")
    return failed


def _readable(questions: Iterable[Record | Rejected]) -> Iterator[Record | Rejected]:
    """The questions, with blank ones rejected."""
    for question in questions:
        if isinstance(question, Record) and is_blank(question.text):
            yield Rejected(where=f"question {question.id}", reason="it is blank")
        else:
            yield question
