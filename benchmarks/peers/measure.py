"""The measurements: one function for each section of the page, which returns the content of its JSON file."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from peers.engines import COMPETITORS, REFERENCE, Competitor
from peers.environments import Environments, UnavailableError
from peers.equality import Verdict, judge
from peers.fleet import BATCH_SIZES, Fleet, Peer, PeerError, seconds
from peers.shapes import LIMITS, Shapes
from peers.texts import COUNTS, Texts, Workload

WORKLOADS = ("short", "docs", "passages", "mixed", "long")
CALL_SIZES = (1, 4, 16, 64, 256)
CALLED = 512  # texts, and the largest call
SEARCHED = 128  # texts in the search for a batch size
DOCUMENTS = 100
DOCSTRING = (45, 55)  # tokens of a docstring that is embedded alone
BLOCK = 25  # single texts per turn of an engine
SHAPES = {"bert-base": 128, "modernbert-base": 128, "qwen3-0.6b": 64}  # texts of the workload `docs`
LONG = {"modernbert-base": 8, "qwen3-0.6b": 4}  # texts of 2,048 tokens
BEST_PEERS = ("st-openvino", "vllm", "st-bf16")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Settings that all sections share.

    Attributes:
        environments: Virtual environments of the engines.
        shapes: Models.
        texts: Workloads, in tokens of the tokenizer that all shapes share.
        folder: A temporary folder.
        engines: Names of the engines to measure.
        rounds: Turns of each engine.
        scale: Share of the texts of a full run.
        sizes: Batch sizes to search.
    """

    environments: Environments
    shapes: Shapes
    texts: Texts
    folder: Path
    engines: tuple[str, ...]
    rounds: int
    scale: float = 1.0
    sizes: tuple[int, ...] = BATCH_SIZES

    def fleet(self, left_out: dict[str, str], names: Iterable[str] | None = None) -> Fleet:
        """The measured engines among ``names``; by default all of them."""
        chosen = [COMPETITORS[name] for name in self.engines if names is None or name in names]
        return Fleet(chosen, self.environments, self.folder, left_out)

    def scaled(self, count: int) -> int:
        """The number of texts in this run, for ``count`` texts in a full run."""
        return max(min(4, count), round(count * self.scale))

    def model(self, shape: str, task: str) -> Callable[[Competitor, Fleet], Path]:
        """A function that gives the folder of ``shape`` for a competitor, which exports the model first if it must."""

        def folder_of(competitor: Competitor, fleet: Fleet) -> Path:
            if competitor.backend is None:
                return self.shapes.folder(shape)

            def export(source: Path, target: Path) -> None:
                print(f"  exporting {shape} for {competitor.name}", flush=True)
                peer = fleet.start(competitor)
                try:
                    load = self.texts.workload("docs", limit=LIMITS[shape], count=300)
                    inputs = fleet.write("calibration", load.texts)
                    request = {"task": task, "model": str(source), "backend": competitor.backend, "to": str(target)}
                    peer.ask("export", **request, inputs=str(inputs))
                finally:
                    peer.close()

            return self.shapes.exported(shape, competitor.backend, export)

        return folder_of

    def load(self, fleet: Fleet, shape: str, task: str) -> None:
        """Load a shape into a fleet."""
        # vLLM compiles for lengths up to max_model_len, and no text here is longer than 2,048 tokens.
        limit = min(LIMITS[shape], 2048)
        fleet.load(task, self.model(shape, task), vllm={"max_model_len": limit})


def embed(bench: Bench, fleet: Fleet, left_out: dict[str, str]) -> dict[str, Any]:
    """Tokens per second by workload."""
    workloads = {}
    for name in WORKLOADS:
        load = bench.texts.workload(name, limit=LIMITS["minilm"], count=bench.scaled(COUNTS[name]))
        print(f"embed {name}: {len(load.texts)} texts, {load.tokens} tokens", flush=True)
        workloads[name] = timed(bench, fleet, load.name, load.texts, tokens=load.tokens) | described(load)
    return {"model": "all-MiniLM-L6-v2", "source": bench.texts.source, "workloads": workloads, "left_out": left_out}


def calls(bench: Bench, fleet: Fleet, left_out: dict[str, str]) -> dict[str, Any]:
    """Tokens per second by the number of texts in one call, which the engine batches as it likes."""
    whole = bench.texts.workload("docs", limit=LIMITS["minilm"], count=bench.scaled(CALLED))
    results = fleet.results(whole_path := fleet.write("calls-all", whole.texts))
    verdicts = verdicts_of(results)
    search(fleet, "calls-search", whole.texts, sizes=bench.sizes)
    sizes: dict[str, Any] = {}
    for size in (*(size for size in CALL_SIZES if size < len(whole.texts)), len(whole.texts)):
        load = whole.head(min(len(whole.texts), max(64, 16 * size)))
        print(f"calls of {size}: {len(load.texts)} texts", flush=True)
        inputs = whole_path if load.texts == whole.texts else fleet.write(f"calls-{size}", load.texts)
        times = fleet.turns(
            bench.rounds,
            lambda peer, _, inputs=inputs, size=size: peer.ask(
                "calls", inputs=inputs, size=size, batch=fleet.batches.get(peer.competitor.name)
            )["seconds"],
        )
        sizes[str(size)] = rows_of(times, verdicts, fleet, tokens=load.tokens)
    return {"workload": "docs", "texts": len(whole.texts), "sizes": sizes, "left_out": left_out}


def latency(bench: Bench, fleet: Fleet, left_out: dict[str, str]) -> dict[str, Any]:
    """Percentiles of the time of a call with one text, in milliseconds: a short one, and a docstring of 50 tokens."""
    load = bench.texts.workload("short", limit=LIMITS["minilm"], count=bench.scaled(1000))
    print("latency of short texts", flush=True)
    short = singles(bench, fleet, load, blocks=4 * bench.rounds)
    print("latency of docstrings", flush=True)
    docs = bench.texts.workload("docs", limit=LIMITS["minilm"], count=max(bench.scaled(1000), SEARCHED))
    docstring = singles(bench, fleet, docs.between(*DOCSTRING), blocks=2 * bench.rounds)
    return short | {"docstring": docstring, "left_out": left_out}


def startup(bench: Bench, left_out: dict[str, str], names: Iterable[str] | None = None) -> dict[str, Any]:
    """Wall time of a new process until its first vector, and its peak memory."""
    load = bench.texts.workload("docs", limit=LIMITS["minilm"], count=bench.scaled(1000))
    fleet = bench.fleet(left_out, names)
    one, many = fleet.write("startup-one", load.texts[:1]), fleet.write("startup-docs", load.texts)
    folder_of = bench.model("minilm", "embed")
    starts: dict[str, list[dict[str, float]]] = {c.name: [] for c in fleet.competitors if "embed" in c.tasks}
    rounds = min(bench.rounds, 3)
    for number in range(rounds + (bench.rounds > 1)):  # one warm-up round, which fills page cache and compiler caches
        for name in list(starts):
            competitor = COMPETITORS[name]
            try:
                model = folder_of(competitor, fleet)
                last = number == rounds - (bench.rounds == 1)
                measured = start_once(fleet, competitor, model, one, many if last else None)
            except (PeerError, UnavailableError) as error:
                fleet.drop(name, str(error))
                del starts[name]
                continue
            print(f"startup {name}: {measured['seconds']:.1f} s", flush=True)
            starts[name].append(measured)
    rows = {}
    for name, measured in starts.items():
        counted = measured[1:] if bench.rounds > 1 else measured
        rows[name] = {
            key: round(statistics.median(one[key] for one in counted), 3)
            for key in ("seconds", "import_seconds", "load_seconds", "first_seconds")
        } | {key: measured[-1][key] for key in ("first_bytes", "peak_bytes")}
        rows[name]["all_seconds"] = [round(one["seconds"], 3) for one in counted]
    return {"rows": rows, "texts": len(load.texts), "left_out": left_out}


def start_once(fleet: Fleet, competitor: Competitor, model: Path, one: str, many: str | None) -> dict[str, float]:
    """Measure one new process; with ``many``, also its memory before and after embedding these texts."""
    peer = fleet.start(competitor)
    try:
        options = {**competitor.options, **({"max_model_len": 512} if competitor.family == "vllm" else {})}
        loaded = peer.ask("load", family=competitor.family, task="embed", model=str(model), options=options)
        first = peer.ask("run", inputs=one)
        wall = time.perf_counter() - peer.began
        measured = {**loaded, "first_seconds": first["seconds"], "seconds": wall}
        if many is not None:
            measured["first_bytes"] = peer.ask("memory")["bytes"]
            peer.ask("run", inputs=many)
            measured["peak_bytes"] = peer.ask("memory")["bytes"]
        return measured
    finally:
        peer.close()


def rerank(bench: Bench, fleet: Fleet, left_out: dict[str, str]) -> dict[str, Any]:
    """One query with 100 documents of mixed length through a cross-encoder."""
    documents = bench.texts.workload("mixed", limit=480, count=min(DOCUMENTS, bench.scaled(DOCUMENTS * 4)))
    query = bench.texts.workload("short", limit=16, count=8).texts[0]
    print(f"rerank {len(documents.texts)} documents, {documents.tokens} tokens", flush=True)
    inputs = {"query": query, "documents": documents.texts}
    measured = timed(bench, fleet, "rerank", inputs, tokens=documents.tokens)
    return measured | described(documents) | {"model": "cross-encoder of MiniLM's shape", "left_out": left_out}


def tokens(bench: Bench, fleet: Fleet, left_out: dict[str, str]) -> dict[str, Any]:
    """Token vectors: a ColBERT checkpoint over passages."""
    load = bench.texts.workload("passages", limit=480, count=bench.scaled(250))
    print(f"tokens: {len(load.texts)} passages, {load.tokens} tokens", flush=True)
    measured = timed(bench, fleet, "tokens", load.texts, tokens=load.tokens)
    return measured | described(load) | {"model": "ColBERT of MiniLM's shape", "left_out": left_out}


def shapes(bench: Bench, chosen: Iterable[str], names: Iterable[str], left_out: dict[str, str]) -> dict[str, Any]:
    """Other shapes: throughput of docs and, for shapes in ``LONG``, of long texts; latency of one short text."""
    measured: dict[str, Any] = {}
    for shape, count in ((shape, SHAPES[shape]) for shape in chosen):
        missing: dict[str, str] = {}
        with bench.fleet(missing, {"millpond", REFERENCE, *names}) as fleet:
            print(f"shape {shape}", flush=True)
            bench.load(fleet, shape, "embed")
            docs = bench.texts.workload("docs", limit=LIMITS[shape], count=bench.scaled(count))
            measured[shape] = {
                "docs": timed(bench, fleet, "docs", docs.texts, tokens=docs.tokens, sizes=(8, 16, 32)) | described(docs)
            }
            short = bench.texts.workload("short", limit=LIMITS[shape], count=bench.scaled(400))
            measured[shape]["single"] = singles(bench, fleet, short, blocks=max(bench.rounds // 2, 1), block=10)
            if shape in LONG:
                load = bench.texts.workload("long", limit=2048, count=min(LONG[shape], bench.scaled(LONG[shape])))
                few = min(bench.rounds, 3)
                measured[shape]["long"] = timed(
                    bench, fleet, "long", load.texts, tokens=load.tokens, rounds=few, sizes=(1, 4)
                ) | described(load)
        left_out |= {f"{name} ({shape})": reason for name, reason in missing.items()}
    return {"shapes": measured, "left_out": left_out}


def timed(
    bench: Bench,
    fleet: Fleet,
    name: str,
    texts: Any,
    *,
    tokens: int,
    rounds: int | None = None,
    sizes: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Search batch sizes, check equality, then time passes over ``texts`` (or a query and documents) in turns."""
    inputs = fleet.write(name, texts)
    search(fleet, f"{name}-search", texts, sizes=sizes or bench.sizes)
    verdicts = verdicts_of(fleet.results(inputs))
    for engine, verdict in verdicts.items():
        if not verdict.equal:
            print(f"  {engine} is not equal: {dict(verdict.figures)}", flush=True)
    times = fleet.turns(
        bench.rounds if rounds is None else rounds,
        lambda peer, _: seconds([peer.ask("run", inputs=inputs, batch=fleet.batches[peer.competitor.name])])[0],
    )
    rows = rows_of(times, verdicts, fleet, tokens=tokens)
    for engine, row in rows.items():
        print(f"  {engine:18} {row.get('tokens_per_second', '-'):>8} tokens/s  x{row.get('ratio', '-')}", flush=True)
    return {"rows": rows}


def search(fleet: Fleet, name: str, texts: Any, *, sizes: tuple[int, ...]) -> None:
    """Search batch sizes on the first texts, or on a query with its documents."""
    few = texts if isinstance(texts, dict) else texts[:SEARCHED]
    fleet.search_batches(fleet.write(name, few), sizes=sizes)


def singles(bench: Bench, fleet: Fleet, load: Workload, *, blocks: int, block: int = BLOCK) -> dict[str, Any]:
    """Percentiles of calls with one text, in milliseconds, measured in turns of ``block`` texts."""
    inputs = fleet.write(f"singles-{load.name}", load.texts)  # a process reads a path once
    verdicts = verdicts_of(fleet.results(inputs))

    def ask(peer: Peer, number: int) -> list[float]:
        answer: list[float] = peer.ask("singles", inputs=inputs, start=number * block, count=block, discard=5)[
            "seconds"
        ]
        return answer

    rows: dict[str, Any] = {}
    for name, answers in fleet.turns(blocks, ask).items():
        rows[name] = {"equal": verdicts[name].equal, **verdicts[name].figures}
        if verdicts[name].equal:
            times = 1000 * np.concatenate(answers)
            rows[name] |= {f"p{share}_ms": round(float(np.percentile(times, share)), 3) for share in (50, 95, 99)}
            rows[name]["count"] = len(times)
    return {"rows": rows, "tokens": round(load.tokens / len(load.texts), 1)}


def verdicts_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Verdict]:
    """Compare every engine's results with the reference's."""
    if REFERENCE not in results:
        raise SystemExit(f"results are compared with {REFERENCE}, which did not run; nothing was measured")
    return {name: judge(result, results[REFERENCE], COMPETITORS[name].precision) for name, result in results.items()}


def rows_of(
    times: Mapping[str, list[float]], verdicts: Mapping[str, Verdict], fleet: Fleet, *, tokens: int
) -> dict[str, Any]:
    """Medians, and ratios to the reference; an engine with other results has no time."""
    rows: dict[str, Any] = {}
    reference = statistics.median(times[REFERENCE])
    for name, taken in times.items():
        rows[name] = {"equal": verdicts[name].equal, **verdicts[name].figures}
        if fleet.batches.get(name) is not None:
            rows[name]["batch"] = fleet.batches[name]
        if verdicts[name].equal:
            middle = statistics.median(taken)
            rows[name] |= {
                "tokens_per_second": round(tokens / middle),
                "ratio": round(reference / middle, 2),
                "median_seconds": round(middle, 4),
                "seconds": [round(one, 4) for one in taken],
            }
    return rows


def unequal(results: Any) -> Iterator[str]:
    """Names of the engines with ``equal: false`` at any depth of ``results``."""
    if isinstance(results, Mapping):
        for name, value in results.items():
            if isinstance(value, Mapping) and value.get("equal") is False:
                yield name
            yield from unequal(value)


def described(load: Workload) -> dict[str, Any]:
    """Number of texts and token counts of a workload."""
    return {
        "texts": len(load.texts),
        "tokens": load.tokens,
        "mean_tokens": round(load.tokens / len(load.texts), 1),
        "longest": max(load.lengths),
    }
