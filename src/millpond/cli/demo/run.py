"""One run of the demo: read, embed, fill the databases, search, rerank, report."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Any

from millpond import Engine, SinkError
from millpond.cli.demo import report
from millpond.cli.demo.questions import QUESTIONS, short_of
from millpond.cli.demo.stdlib_docs import read_stdlib
from millpond.ingest import Hit, Record, ingest, open_sink

MODEL = "all-MiniLM-L6-v2"
CANDIDATES = 30
"""Number of passages that each database passes to the rerank."""
COARSE, FULL = 128, 384

_METHOD = (
    f"Both databases find the passages nearest to a question at {COARSE} dimensions and rescore them at {FULL}; then "
    f"MaxSim over token states reranks the best {CANDIDATES}. Beside each name: its MaxSim and its rank in the search. "
    f"{MODEL} was not trained for Matryoshka. The cut to {COARSE} is forced here and costs some quality; where that "
    "matters, use a model trained for it."
)


def run(model: Path, folder: Path, *, short: bool, ask: str | None, k: int, settings: Mapping[str, Any]) -> None:
    """Run the demo, printing to standard output."""
    report.heading(f"millpond demo: asking the standard library of Python {platform.python_version()}")
    with report.stage("read the docs") as stage:  # before the model is loaded: torch's many objects slow parsing down
        every = read_stdlib()
        records = short_of(every) if short else every
        stage.note = f"{len(records):,} of {len(every):,} docstrings of modules, classes, functions and methods"
    with ExitStack() as stack:
        with report.stage("load the model") as stage:
            forced: dict[str, Any] = {"hf_overrides": {"is_matryoshka": True}, "cache": folder / "vectors.sqlite"}
            engine = stack.enter_context(Engine(model, **{**forced, **settings}))
            stage.note = f"{MODEL}, {FULL} wide, {engine.dtype} on {engine.device}"
        # One folder per corpus and model, so that an upgrade of Python leaves no old passages in the results.
        folder /= f"{'short' if short else 'full'}-{_digest(engine, records)}"
        databases = _open(stack, folder)
        filled = folder / "filled"
        _embed(engine, records)
        if filled.exists():
            report.row("the databases", "were filled by an earlier run and are used unchanged")
        else:
            _fill(engine, records, databases)
            filled.touch()
        _answer(engine, databases, list(QUESTIONS) if ask is None else [ask], k=k)


def _open(stack: ExitStack, folder: Path) -> dict[str, Any]:
    """The sinks by the names of their databases."""
    urls = {"Qdrant": f"qdrant+path:{folder}/qdrant#docs", "Milvus Lite": f"milvus+file:{folder}/milvus.db#docs"}
    databases: dict[str, Any] = {}
    with report.stage("open the databases") as stage:
        folder.mkdir(parents=True, exist_ok=True)
        for name, url in urls.items():
            try:
                databases[name] = open_sink(url, dimensions=[COARSE, FULL])
            except SinkError as error:
                raise SinkError(
                    f"{error}. If another demo is running, wait for it, or give this one a folder of its own: --state"
                ) from error
            stack.callback(databases[name].close)
        stage.note = str(folder)
    return databases


def _embed(engine: Engine, records: Sequence[Record]) -> None:
    """Compute all vectors into the cache, where an earlier run has not."""
    with report.stage("embed") as stage:
        output = engine.embed([record.text for record in records], role="document", show_progress=True)
        new = int((~output.cached).sum())
        stage.note = f"{new:,} passages embedded, {len(records) - new:,} from the cache "
        stage.note += f"({len(records) / stage.seconds:,.0f} a second, {output.usage.prompt_tokens:,} tokens; "
        stage.note += f"{int(output.truncated.sum())} were cut to {engine.spec.max_length})"


def _fill(engine: Engine, records: Sequence[Record], databases: Mapping[str, Any]) -> None:
    """Fill each database from the cache."""
    for name, database in databases.items():
        with report.stage(f"fill {name}") as stage:
            counts = ingest(records, engine=engine, sink=database)
            stage.note = f"{counts.written:,} rows, {COARSE} and {FULL} wide: "
            stage.note += f"{counts.embedded:,} embedded, {counts.cached:,} from the cache"


def _answer(engine: Engine, databases: Mapping[str, Any], questions: Sequence[str], *, k: int) -> None:
    report.heading("questions and answers")
    report.paragraph(_METHOD)
    engine.embed(questions, role="query")  # fills the cache, so that the search times are those of the databases
    seconds = dict.fromkeys([*(f"search {name}" for name in databases), "rerank"], 0.0)
    found = shared = 0
    for question in questions:
        hits: dict[str, tuple[int, Hit]] = {}  # id: (rank in the search, hit)
        both = None
        for name, database in databases.items():
            timed = report.Stage()
            ranked: list[Hit] = database.search(engine, question, k=CANDIDATES)
            seconds[f"search {name}"] += timed.seconds
            ids = {hit.id for hit in ranked}
            both = ids if both is None else both & ids
            hits = dict(zip([hit.id for hit in ranked], enumerate(ranked, start=1), strict=True)) | hits
        found, shared = found + len(hits), shared + len(both or ())
        timed, ranks = report.Stage(), list(hits.values())
        results = engine.rerank(question, [hit.text for _, hit in ranks], top_n=k, method="maxsim")
        seconds["rerank"] += timed.seconds
        report.heading(question)
        for rank, result in enumerate(results, start=1):
            search_rank, hit = ranks[result.index]
            report.answer(rank, hit.id, result.relevance_score, search_rank, str(hit.metadata["summary"]))
    report.heading("times")
    for name, spent in seconds.items():
        report.row(name, f"{len(questions)} questions, {1000 * spent / len(questions):.0f} ms each", spent)
    report.row("agreement", f"{shared / found:.1%} of the passages were found by both databases")
    if engine.cache is not None:
        stats = engine.cache.stats()
        note = f"{stats.hits:,} look-ups answered, {stats.written:,} vectors added"
        report.row("cache", f"{note}; it holds {stats.rows:,} in {stats.bytes / (1 << 20):.1f} MiB")


def _digest(engine: Engine, records: Sequence[Record]) -> str:
    """A hash of the model and the corpus."""
    digest = blake2b(engine.spec.fingerprint.encode(), digest_size=6)
    for record in records:
        digest.update(f"{record.id}\0{record.text}\0".encode())
    return digest.hexdigest()
