"""One run of the demo: read, embed, fill the databases, search, report."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from millpond.cli.demo.questions import QUESTIONS, short_of
from millpond.cli.demo.report import DemoReport
from millpond.cli.demo.search import CANDIDATES, COARSE, FULL, AnsweredQuestion, Searchable, answer
from millpond.cli.demo.stdlib_docs import read_stdlib
from millpond.errors import SinkError
from millpond.ingest.pipeline.ingest import ingest
from millpond.ingest.record import Record
from millpond.ingest.sinks.protocol import Sink
from millpond.ingest.sinks.url import open_sink

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

MODEL = "all-MiniLM-L6-v2"
_METHOD = (
    f"Both databases find the passages nearest to a question at {COARSE} dimensions and rescore them at {FULL}; then "
    f"MaxSim over token states reranks the best {CANDIDATES}. Beside each name: its MaxSim and its rank in the search."
)
_MATRYOSHKA_NOTE = (
    f"{MODEL} was not trained for Matryoshka. The cut to {COARSE} is forced here and costs some quality; where that "
    "matters, use a model trained for it."
)


class _Database(Sink, Searchable, Protocol):
    """A sink that can also be searched."""


def run(
    model: Path,
    *,
    folder: Path,
    cache: Path,
    short: bool = False,
    ask: str | None = None,
    k: int = 3,
    device: str = "auto",
    dtype: str = "auto",
) -> None:
    """Run the demo, printing to standard output.

    Args:
        model: Folder of the checkpoint.
        folder: Folder of the databases.
        cache: Vector cache file.
        short: Search 400 passages instead of all.
        ask: Ask this question instead of the ten; databases that an earlier run filled are then used unchanged.
        k: Number of answers to show per question.
        device: ``device`` of the engine.
        dtype: ``dtype`` of the engine.

    Raises:
        MissingExtraError: A database's package is not installed.
        SinkError: Another process has the databases open.
    """
    report = DemoReport()
    report.title(f"millpond demo: asking the standard library of Python {platform.python_version()}")
    # Before the model is loaded: parsing is slower once torch's many objects are in memory.
    records = _read(report, short=short)
    with ExitStack() as stack:
        engine = stack.enter_context(_load(report, model, cache, device=device, dtype=dtype))
        # One folder per corpus and model, so that an upgrade of Python leaves no old passages in the results.
        database_folder = folder / f"{'short' if short else 'full'}-{_digest(engine, records)}"
        databases = _open(report, stack, database_folder)
        filled = database_folder / "filled"
        if ask is not None and filled.exists():
            report.timed("the databases", None, "were filled by an earlier run and are used unchanged")
        else:
            filled.unlink(missing_ok=True)
            _embed(report, engine, records)
            for name, database in databases.items():
                _fill(report, engine, records, name, database)
            filled.touch()
        questions = [question.text for question in QUESTIONS] if ask is None else [ask]
        _summarize(report, engine, _answer(report, engine, databases, questions, k=k))


def _read(report: DemoReport, *, short: bool) -> list[Record]:
    with report.stage("read the docs") as stage:
        all_records = read_stdlib()
        records = short_of(all_records) if short else all_records
        total = f" of {len(all_records):,}" if short else ""
        stage.note = f"{len(records):,}{total} docstrings of modules, classes, functions and methods"
    return records


def _load(report: DemoReport, model: Path, cache: Path, *, device: str, dtype: str) -> Engine:
    with report.stage("load the model") as stage:
        from millpond.engine.engine import Engine

        engine = Engine(model, device=device, dtype=dtype, hf_overrides={"is_matryoshka": True}, cache=cache)
        stage.note = f"{MODEL}, {FULL} wide, {engine.dtype} on {engine.device}"
    return engine


def _open(report: DemoReport, stack: ExitStack, folder: Path) -> dict[str, _Database]:
    urls = {
        "Qdrant": f"qdrant+path:{folder / 'qdrant'}#docs",
        "Milvus Lite": f"milvus+file:{folder / 'milvus.db'}#docs",
    }
    databases: dict[str, _Database] = {}
    with report.stage("open the databases") as stage:
        folder.mkdir(parents=True, exist_ok=True)
        for name, url in urls.items():
            try:
                sink = cast(_Database, open_sink(url, dimensions=[COARSE, FULL]))
            except SinkError as error:
                raise SinkError(
                    f"{error}. If another demo is running, wait for it, or give this one a folder of its own: "
                    "--state DIR"
                ) from error
            stack.callback(sink.close)
            databases[name] = sink
        stage.note = _tilde(folder)
    return databases


def _embed(report: DemoReport, engine: Engine, records: Sequence[Record]) -> None:
    """Compute all vectors into the cache, from which both databases are filled."""
    texts = [record.text for record in records]
    with report.stage("embed", bar=True) as stage:
        output = engine.embed(texts, role="document", show_progress=True)
        seconds = stage.seconds
        new = int((~output.cached).sum())
        stage.note = f"{new:,} passages embedded, {len(texts) - new:,} from the cache"
        if not new:
            stage.note += f" ({len(texts) / seconds:,.0f} a second)"
    if new:
        cached_texts = [text for text, cached in zip(texts, output.cached.tolist(), strict=True) if cached]
        tokens = output.usage.prompt_tokens - engine.embed(cached_texts, role="document").usage.prompt_tokens
        note = f"{tokens:,} tokens, {tokens / seconds:,.0f} a second"
        if truncated := int(output.truncated.sum()):
            note += f"; {truncated} passages were cut to {engine.spec.max_length} tokens"
        report.timed("", None, note)


def _fill(report: DemoReport, engine: Engine, records: Sequence[Record], name: str, database: _Database) -> None:
    with report.stage(f"fill {name}", bar=True) as stage:
        counts = ingest(records, engine=engine, sink=database)
        stage.note = (
            f"{counts.written:,} rows, {COARSE} and {FULL} wide: "
            f"{counts.embedded:,} embedded, {counts.cached:,} from the cache"
        )


def _answer(
    report: DemoReport, engine: Engine, databases: Mapping[str, _Database], questions: Sequence[str], *, k: int
) -> list[AnsweredQuestion]:
    report.title("questions and answers")
    report.text(_METHOD)
    report.text(_MATRYOSHKA_NOTE)
    engine.embed(questions, role="query")  # fills the cache, so that the search times are those of the databases
    answered = []
    for question in questions:
        answered.append(answer(engine, databases, question, k=k))
        report.answers(answered[-1])
    return answered


def _summarize(report: DemoReport, engine: Engine, answered: Sequence[AnsweredQuestion]) -> None:
    for name in answered[0].seconds:
        seconds = [one.seconds[name] for one in answered]
        report.timed(f"search {name}", sum(seconds), f"{_each(seconds)}, {COARSE} then {FULL} wide")
    seconds = [one.rerank_seconds for one in answered]
    candidates = sum(one.candidates for one in answered)
    report.timed("rerank", sum(seconds), f"{_each(seconds)}, {candidates / len(answered):.0f} passages each")
    agreement = sum(one.shared for one in answered) / candidates
    report.timed("agreement", None, f"{agreement:.1%} of these passages were found by both databases")
    if engine.cache is not None:
        stats = engine.cache.stats()
        note = f"{stats.hits:,} look-ups answered, {stats.written:,} vectors added"
        report.timed("cache", None, f"{note}; it holds {stats.rows:,} in {stats.bytes / (1 << 20):.1f} MiB")


def _each(seconds: Sequence[float]) -> str:
    if len(seconds) == 1:
        return "1 question"
    return f"{len(seconds)} questions, {sum(seconds) / len(seconds) * 1000:.0f} ms each"


def _digest(engine: Engine, records: Sequence[Record]) -> str:
    """A hash of the model and the corpus."""
    digest = blake2b(engine.spec.fingerprint.encode(), digest_size=6)
    for record in records:
        digest.update(f"{record.id}\0{record.text}\0".encode())
    return digest.hexdigest()


def _tilde(path: Path) -> str:
    """The path with ``~`` for the home folder."""
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)
