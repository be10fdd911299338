"""One run of the demo, stage by stage, told as it happens."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from millpond.cli.demo_questions import QUESTIONS, short_of
from millpond.cli.demo_report import DemoReport
from millpond.cli.demo_search import CANDIDATES, COARSE, FULL, Answered, Searchable, answer
from millpond.cli.stdlib_docs import read_stdlib
from millpond.errors import SinkError
from millpond.ingest.pipeline import ingest
from millpond.ingest.record import Record
from millpond.ingest.sink import Sink
from millpond.ingest.url import open_sink

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

MODEL = "all-MiniLM-L6-v2"
_HOW = (
    f"Each question finds its nearest passages by {COARSE} dimensions, scored by all {FULL}, in both databases; then "
    f"MaxSim over token states orders the best {CANDIDATES}. Behind each name: its MaxSim, and where the search had it."
)
_FORCED = (
    f"{MODEL} was not trained for Matryoshka. The cut to {COARSE} is forced here and costs some quality; where that "
    "matters, use a model trained for it."
)


class _Database(Sink, Searchable, Protocol):
    """A sink that can be asked, as both of the demo's can."""


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
        model: The checkpoint's folder.
        folder: Where the databases are kept.
        cache: The file where the vectors are kept.
        short: Whether to search a few hundred passages instead of all.
        ask: One question instead of the ten; databases filled by an earlier run are left as they are then.
        k: How many answers to show.
        device: As the engine takes it.
        dtype: As the engine takes it.

    Raises:
        MissingExtraError: A database's package is not installed.
        SinkError: Another run uses the databases.
    """
    report = DemoReport()
    report.title(f"millpond demo: asking the standard library of Python {platform.python_version()}")
    # Before the model is loaded, since parsing is slow beside torch's many objects.
    records = _read(report, short=short)
    with ExitStack() as stack:
        engine = stack.enter_context(_load(report, model, cache, device=device, dtype=dtype))
        # A folder per corpus and model: after an upgrade of Python no passage of the old one is left over.
        place = folder / f"{'short' if short else 'full'}-{_digest(engine, records)}"
        databases = _open(report, stack, place)
        filled = place / "filled"
        if ask is not None and filled.exists():
            report.timed("the databases", None, "were filled by an earlier run; nothing is embedded again")
        else:
            filled.unlink(missing_ok=True)
            _embed(report, engine, records)
            for name, database in databases.items():
                _fill(report, engine, records, name, database)
            filled.touch()
        questions = [question.text for question in QUESTIONS] if ask is None else [ask]
        _sum_up(report, engine, _answer(report, engine, databases, questions, k=k))


def _read(report: DemoReport, *, short: bool) -> list[Record]:
    with report.stage("read the docs") as stage:
        every = read_stdlib()
        records = short_of(every) if short else every
        of_all = f" of {len(every):,}" if short else ""
        stage.note = f"{len(records):,}{of_all} docstrings of modules, classes, functions and methods"
    return records


def _load(report: DemoReport, model: Path, cache: Path, *, device: str, dtype: str) -> Engine:
    with report.stage("load the model") as stage:
        from millpond.engine.engine import Engine

        engine = Engine(model, device=device, dtype=dtype, hf_overrides={"is_matryoshka": True}, cache=cache)
        stage.note = f"{MODEL}, {FULL} wide, {engine.dtype} on {engine.device}"
    return engine


def _open(report: DemoReport, stack: ExitStack, place: Path) -> dict[str, _Database]:
    urls = {
        "Qdrant": f"qdrant+path:{place / 'qdrant'}#docs",
        "Milvus Lite": f"milvus+file:{place / 'milvus.db'}#docs",
    }
    databases: dict[str, _Database] = {}
    with report.stage("open the databases") as stage:
        place.mkdir(parents=True, exist_ok=True)
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
        stage.note = _tilde(place)
    return databases


def _embed(report: DemoReport, engine: Engine, records: Sequence[Record]) -> None:
    """All vectors into the cache, where the filling of both databases finds them."""
    texts = [record.text for record in records]
    with report.stage("embed", bar=True) as stage:
        output = engine.embed(texts, role="document", show_progress=True)
        seconds = stage.seconds
        new = int((~output.cached).sum())
        stage.note = f"{new:,} passages embedded, {len(texts) - new:,} from the cache"
        if not new:
            stage.note += f" ({len(texts) / seconds:,.0f} a second)"
    if new:
        known = [text for text, cached in zip(texts, output.cached.tolist(), strict=True) if cached]
        tokens = output.usage.prompt_tokens - engine.embed(known, role="document").usage.prompt_tokens
        note = f"{tokens:,} tokens, {tokens / seconds:,.0f} a second"
        if cut := int(output.truncated.sum()):
            note += f"; {cut} passages were cut to {engine.spec.max_length} tokens"
        report.timed("", None, note)


def _fill(report: DemoReport, engine: Engine, records: Sequence[Record], name: str, database: _Database) -> None:
    with report.stage(f"fill {name}", bar=True) as stage:
        done = ingest(records, engine=engine, sink=database)
        stage.note = (
            f"{done.written:,} rows, {COARSE} and {FULL} wide: "
            f"{done.embedded:,} embedded, {done.cached:,} from the cache"
        )


def _answer(
    report: DemoReport, engine: Engine, databases: Mapping[str, _Database], questions: Sequence[str], *, k: int
) -> list[Answered]:
    report.title("questions and answers")
    report.text(_HOW)
    report.text(_FORCED)
    engine.embed(questions, role="query")  # into the cache: the searches are to time the databases
    answered = []
    for question in questions:
        answered.append(answer(engine, databases, question, k=k))
        report.answers(answered[-1])
    return answered


def _sum_up(report: DemoReport, engine: Engine, answered: Sequence[Answered]) -> None:
    for name in answered[0].seconds:
        seconds = [one.seconds[name] for one in answered]
        report.timed(f"search {name}", sum(seconds), f"{_each(seconds)}, {COARSE} then {FULL} wide")
    seconds = [one.rerank_seconds for one in answered]
    found = sum(one.found for one in answered)
    report.timed("rerank", sum(seconds), f"{_each(seconds)}, {found / len(answered):.0f} passages each")
    alike = sum(one.shared for one in answered) / found
    report.timed("agreement", None, f"{alike:.1%} of these passages were found by both databases")
    if engine.cache is not None:
        stats = engine.cache.stats()
        note = f"{stats.hits:,} look-ups answered, {stats.written:,} vectors added"
        report.timed("cache", None, f"{note}; it holds {stats.rows:,} in {stats.bytes / (1 << 20):.1f} MiB")


def _each(seconds: Sequence[float]) -> str:
    if len(seconds) == 1:
        return "1 question"
    return f"{len(seconds)} questions, {sum(seconds) / len(seconds) * 1000:.0f} ms each"


def _digest(engine: Engine, records: Sequence[Record]) -> str:
    """Names the model and the corpus."""
    digest = blake2b(engine.spec.fingerprint.encode(), digest_size=6)
    for record in records:
        digest.update(f"{record.id}\0{record.text}\0".encode())
    return digest.hexdigest()


def _tilde(path: Path) -> str:
    """The path as a person would write it."""
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)
