"""One run of the demo: read, embed, fill the databases, search, rerank, report."""

from __future__ import annotations

import platform
import shutil
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import typer

from millpond import Engine, SinkError
from millpond.cli.demo.questions import QUESTIONS, short_of
from millpond.cli.demo.stdlib_docs import read_stdlib
from millpond.ingest import Hit, Record, ingest, open_sink

MODEL = "all-MiniLM-L6-v2"
CANDIDATES = 30
"""Number of passages that each database passes to the rerank."""
COARSE, FULL = 128, 384
ANSWERS = 3  # shown for each question
WIDTH = 100

_METHOD = (
    f"Both databases hold each passage at {COARSE} and {FULL} dimensions. Inside this process they compare a question "
    f"with every passage, so they search at {FULL} alone; a server finds candidates at {COARSE} first. Then MaxSim "
    f"over token states reranks the best {CANDIDATES}. Beside each name: its MaxSim and its rank in the search. "
    f"{MODEL} was not trained for Matryoshka, so a search at {COARSE} would cost some quality; there, use a model "
    "trained for it."
)


def run(model: str, folder: Path, *, short: bool, ask: str | None) -> None:
    """Run the demo, printing to standard output."""
    _heading(f"millpond demo: asking the standard library of Python {platform.python_version()}")
    with _stage("read the docs") as note:  # before the model is loaded: torch's many objects slow parsing down
        every = read_stdlib()
        records = short_of(every) if short else every
        note.append(f"{len(records):,} of {len(every):,} docstrings of modules, classes, functions and methods")
    with ExitStack() as stack:
        with _stage("load the model") as note:
            cache = folder / "vectors.sqlite"
            engine = stack.enter_context(Engine(model, hf_overrides={"is_matryoshka": True}, cache=cache))
            note.append(f"{MODEL}, {FULL} wide, {engine.dtype} on {engine.device}")
        # One folder per corpus and model, so that an upgrade of Python leaves no old passages in the results.
        folder /= f"{'short' if short else 'full'}-{_digest(engine, records)}"
        databases = _open(stack, folder)
        filled = folder / "filled"
        _embed(engine, records)
        if filled.exists():
            _row("the databases", "were filled by an earlier run and are used unchanged")
        else:
            for name, database in databases.items():
                with _stage(f"fill {name}") as note:
                    counts = ingest(records, engine=engine, sink=database)
                    note.append(f"{counts.written:,} rows, {COARSE} and {FULL} wide: ")
                    note.append(f"{counts.embedded:,} embedded, {counts.cached:,} from the cache")
            filled.touch()
        _answer(engine, databases, list(QUESTIONS) if ask is None else [ask])


def _open(stack: ExitStack, folder: Path) -> dict[str, Any]:
    """The sinks by the names of their databases."""
    urls = {"Qdrant": f"qdrant+path:{folder}/qdrant#docs", "Milvus Lite": f"milvus+file:{folder}/milvus.db#docs"}
    databases: dict[str, Any] = {}
    with _stage("open the databases") as note:
        folder.mkdir(parents=True, exist_ok=True)
        for name, url in urls.items():
            try:
                databases[name] = open_sink(url, dimensions=[COARSE, FULL])
            except SinkError as error:
                raise SinkError(
                    f"{error}. If another demo is running, wait for it, or give this one a folder of its own: --state"
                ) from error
            stack.callback(databases[name].close)
        note.append(str(folder))
    return databases


def _embed(engine: Engine, records: Sequence[Record]) -> None:
    """Compute all vectors into the cache, where an earlier run has not."""
    with _stage("embed") as note:
        start = time.perf_counter()
        output = engine.embed([record.text for record in records], role="document", show_progress=True)
        rate = len(records) / (time.perf_counter() - start)
        new = int((~output.cached).sum())
        note.append(f"{new:,} passages embedded, {len(records) - new:,} from the cache ")
        note.append(f"({rate:,.0f} a second, {output.usage.prompt_tokens:,} tokens; ")
        note.append(f"{int(output.truncated.sum())} were cut to {engine.spec.max_length})")


def _answer(engine: Engine, databases: Mapping[str, Any], questions: Sequence[str]) -> None:
    _heading("questions and answers")
    typer.secho(textwrap.fill(_METHOD, _width()) + "\n", dim=True)
    engine.embed(questions, role="query")  # fills the cache, so that the search times are those of the databases
    seconds = dict.fromkeys([*(f"search {name}" for name in databases), "rerank"], 0.0)
    found = shared = 0
    for question in questions:
        hits: dict[str, tuple[int, Hit]] = {}  # id: (rank in the search, hit)
        both = None
        for name, database in databases.items():
            start = time.perf_counter()
            ranked: list[Hit] = database.search(engine, question, k=CANDIDATES)
            seconds[f"search {name}"] += time.perf_counter() - start
            ids = {hit.id for hit in ranked}
            both = ids if both is None else both & ids
            hits = dict(zip([hit.id for hit in ranked], enumerate(ranked, start=1), strict=True)) | hits
        found, shared = found + len(hits), shared + len(both or ())
        start, ranks = time.perf_counter(), list(hits.values())
        results = engine.rerank(question, [hit.text for _, hit in ranks], top_n=ANSWERS, method="maxsim")
        seconds["rerank"] += time.perf_counter() - start
        _heading(question)
        for rank, result in enumerate(results, start=1):
            search_rank, hit = ranks[result.index]
            name = _fit(hit.id, 36)
            cells = f"{rank:>3}  {name:<36}{result.relevance_score:>6.2f}  {f'#{search_rank}':>3}  "
            summary = _fit(str(hit.metadata["summary"]), max(1, _width() - len(cells)))
            typer.echo(typer.style(cells, fg="green" if rank == 1 else None) + summary)
    _heading("times")
    for name, spent in seconds.items():
        _row(name, f"{len(questions)} questions, {1000 * spent / len(questions):.0f} ms each", spent)
    _row("agreement", f"{shared / found:.1%} of the passages were found by both databases")
    if engine.cache is not None:
        stats = engine.cache.stats()
        note = f"{stats.hits:,} look-ups answered, {stats.written:,} vectors added"
        _row("cache", f"{note}; it holds {stats.rows:,} in {stats.bytes / (1 << 20):.1f} MiB")


def _digest(engine: Engine, records: Sequence[Record]) -> str:
    """A hash of the model and the corpus."""
    digest = blake2b(engine.spec.fingerprint.encode(), digest_size=6)
    for record in records:
        digest.update(f"{record.id}\0{record.text}\0".encode())
    return digest.hexdigest()


@contextmanager
def _stage(name: str) -> Iterator[list[str]]:
    """Time the block, then print a line of the table of stages, with what the block has noted."""
    note: list[str] = []
    start = time.perf_counter()
    yield note
    _row(name, "".join(note), time.perf_counter() - start)


def _row(name: str, note: str, seconds: float | None = None) -> None:
    column = "" if seconds is None else f"{seconds:.2f} s"
    typer.echo(f"{name:<18}" + typer.style(f"{column:>9}  ", fg="cyan") + note)


def _heading(text: str) -> None:
    typer.secho(f"\n{text}\n", bold=True)


def _width() -> int:
    return min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH)


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
