"""One run of the demo, stage by stage, told as it happens."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, cast

from millpond.cli.demo_questions import QUESTIONS, short_of
from millpond.cli.demo_report import DemoReport
from millpond.cli.demo_search import CANDIDATES, COARSE, FULL, Answered, Searchable, answer
from millpond.cli.stdlib_docs import read_stdlib
from millpond.ingest.pipeline import ingest
from millpond.ingest.sink import Sink, SinkError
from millpond.ingest.url import open_sink

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


class DemoRun:
    """The stages, in the order in which they are called: ``read``, ``load``, ``fill``, ``answer``.

    Args:
        folder: Where the databases are kept.
        cache: The file where the vectors are kept.
        short: Whether to search a few hundred passages instead of all.
    """

    def __init__(self, folder: Path, *, cache: Path, short: bool) -> None:
        self._folder = folder
        self._cache = cache
        self._short = short
        self._report = DemoReport()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def read(self) -> None:
        """Read the documentation; before the model, since parsing is slow beside torch's many objects."""
        self._report.title(f"millpond demo: asking the standard library of Python {platform.python_version()}")
        with self._report.stage("read the docs") as stage:
            records = read_stdlib()
            self._records = short_of(records) if self._short else records
            of_all = f" of {len(records):,}" if self._short else ""
            stage.note = f"{len(self._records):,}{of_all} docstrings of modules, classes, functions and methods"

    def load(self, model: Path, *, device: str, dtype: str) -> None:
        """Load the model and open the databases.

        Raises:
            MissingExtraError: A database's package is not installed.
            SinkError: Another run uses the databases.
        """
        with self._report.stage("load the model") as stage:
            from millpond.engine.engine import Engine

            overrides = {"is_matryoshka": True}
            self._engine = Engine(model, device=device, dtype=dtype, hf_overrides=overrides, cache=self._cache)
            self._open.callback(self._engine.close)
            stage.note = f"{MODEL}, {FULL} wide, {self._engine.dtype} on {self._engine.device}"
        with self._report.stage("open the databases") as stage:
            # A folder per corpus and model: after an upgrade of Python no passage of the old one is left over.
            self._place = self._folder / f"{'short' if self._short else 'full'}-{self._digest()}"
            self._place.mkdir(parents=True, exist_ok=True)
            self._databases: Mapping[str, _Database] = {
                "Qdrant": self._database(f"qdrant+path:{self._place / 'qdrant'}#docs"),
                "Milvus Lite": self._database(f"milvus+file:{self._place / 'milvus.db'}#docs"),
            }
            stage.note = _tilde(self._place)

    def fill(self, *, again: bool) -> None:
        """Embed the passages and write them to both databases.

        Args:
            again: Whether to do so where an earlier run has done it already.
        """
        filled = self._place / "filled"
        if filled.exists() and not again:
            return
        filled.unlink(missing_ok=True)
        self._embed()
        for name, database in self._databases.items():
            with self._report.stage(f"fill {name}", bar=True) as stage:
                report = ingest(self._records, engine=self._engine, sink=database)
                stage.note = (
                    f"{report.written:,} rows, {COARSE} and {FULL} wide: "
                    f"{report.embedded:,} embedded, {report.cached:,} from the cache"
                )
        filled.touch()

    def answer(self, ask: str | None, *, k: int) -> None:
        """Answer one question, or the ten, and sum up.

        Args:
            ask: The question, or None for the ten.
            k: How many answers to show.
        """
        questions = [question.text for question in QUESTIONS] if ask is None else [ask]
        self._report.title("questions and answers")
        self._report.text(_HOW)
        self._report.text(_FORCED)
        self._engine.embed(questions, role="query")  # into the cache: the searches are to time the databases
        answered = []
        for question in questions:
            answered.append(answer(self._engine, self._databases, question, k=k))
            self._report.answers(answered[-1])
        self._sum_up(answered)

    def _embed(self) -> None:
        """All vectors into the cache, where the filling of both databases finds them."""
        texts = [record.text for record in self._records]
        with self._report.stage("embed", bar=True) as stage:
            output = self._engine.embed(texts, role="document", show_progress=True)
            seconds = stage.seconds
            new = int((~output.cached).sum())
            stage.note = f"{new:,} passages embedded, {len(texts) - new:,} from the cache"
            if not new:
                stage.note += f" ({len(texts) / seconds:,.0f} a second)"
        if new:
            known = [text for text, cached in zip(texts, output.cached.tolist(), strict=True) if cached]
            tokens = output.usage.prompt_tokens - self._engine.embed(known, role="document").usage.prompt_tokens
            note = f"{tokens:,} tokens, {tokens / seconds:,.0f} a second"
            if cut := int(output.truncated.sum()):
                note += f"; {cut} passages were cut to {self._engine.spec.max_length} tokens"
            self._report.timed("", None, note)

    def _sum_up(self, answered: Sequence[Answered]) -> None:
        count = len(answered)
        for name in self._databases:
            seconds = sum(one.seconds[name] for one in answered)
            self._report.timed(f"search {name}", seconds, f"{_each(seconds, count)}, {COARSE} then {FULL} wide")
        seconds = sum(one.rerank_seconds for one in answered)
        passages = sum(one.found for one in answered) / count
        self._report.timed("rerank", seconds, f"{_each(seconds, count)} with {passages:.0f} passages")
        alike = sum(one.shared for one in answered) / sum(one.found for one in answered)
        self._report.timed("agreement", None, f"{alike:.1%} of the passages were found in both databases")
        cache = self._engine.cache
        if cache is not None:
            stats = cache.stats()
            self._report.timed(
                "cache",
                None,
                f"{stats.hits:,} look-ups answered, {stats.written:,} vectors added; it holds {stats.rows:,} in "
                f"{stats.bytes / (1 << 20):.1f} MiB",
            )

    def _database(self, url: str) -> _Database:
        try:
            sink = cast(_Database, open_sink(url, dimensions=[COARSE, FULL]))
        except SinkError as error:
            raise SinkError(
                f"another demo seems to be running: {error}. Wait for it, or give this one a folder with --state DIR"
            ) from error
        self._open.callback(sink.close)
        return sink

    def _digest(self) -> str:
        """Names the corpus and the model."""
        digest = blake2b(self._engine.spec.fingerprint.encode(), digest_size=6)
        for record in self._records:
            digest.update(f"{record.id}\0{record.text}\0".encode())
        return digest.hexdigest()


def _each(seconds: float, count: int) -> str:
    return "1 question" if count == 1 else f"{count} questions, {seconds / count * 1000:.0f} ms each"


def _tilde(path: Path) -> str:
    """The path as a person would write it."""
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)
