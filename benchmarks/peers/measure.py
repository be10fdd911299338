"""What is measured, one function for each section of the page; each gives what its JSON has."""

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
SEARCHED = 128  # texts of the search for a batch size
DOCUMENTS = 100
BLOCK = 25  # single texts of an engine before the next one's turn
SHAPES = {"bert-base": 128, "modernbert-base": 128, "qwen3-0.6b": 64}  # texts of the workload `docs`
LONG = {"modernbert-base": 8, "qwen3-0.6b": 4}  # texts of 2,048 tokens
BEST_PEERS = ("st-openvino", "vllm", "st-bf16")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all sections share.

    Attributes:
        environments: Interpreters.
        shapes: Models.
        texts: Workloads, in the tokens that all shapes have.
        folder: A temporary folder.
        engines: Names of those that take part.
        rounds: Turns of each engine.
        scale: Share of the texts of a full run.
        sizes: Batch sizes that peers may choose from.
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
        """Those of ``names`` that take part; by default all."""
        chosen = [COMPETITORS[name] for name in self.engines if names is None or name in names]
        return Fleet(chosen, self.environments, self.folder, left_out)

    def scaled(self, count: int) -> int:
        """A number of texts of a full run, as this run has it."""
        return max(min(4, count), round(count * self.scale))

    def model(self, shape: str, task: str) -> Callable[[Competitor, Fleet], Path]:
        """The folder of ``shape`` that a competitor loads; exported by the competitor itself where it has to be."""

        def folder_of(competitor: Competitor, fleet: Fleet) -> Path:
            if competitor.backend is None:
                return self.shapes.folder(shape)

            def export(source: Path, target: Path) -> None:
                print(f"  exporting {shape} for {competitor.name}", flush=True)
                peer = fleet.start(competitor)
                try:
                    peer.ask("export", task=task, model=str(source), backend=competitor.backend, to=str(target))
                finally:
                    peer.close()

            return self.shapes.exported(shape, competitor.backend, export)

        return folder_of

    def load(self, fleet: Fleet, shape: str, task: str) -> None:
        """Have a fleet load a shape."""
        # vLLM compiles for shapes it is told of; it reads no more than this of a text anyway.
        limit = min(LIMITS[shape], 2048)
        fleet.load(task, self.model(shape, task), vllm={"max_model_len": limit})


def embed(bench: Bench, fleet: Fleet, left_out: dict[str, str]) -> dict[str, Any]:
    """Tokens per second by workload."""
    found = {}
    for name in WORKLOADS:
        load = bench.texts.workload(name, limit=LIMITS["minilm"], count=bench.scaled(COUNTS[name]))
        print(f"embed {name}: {len(load.texts)} texts, {load.tokens} tokens", flush=True)
        found[name] = timed(bench, fleet, load.name, load.texts, tokens=load.tokens) | described(load)
    return {"model": "all-MiniLM-L6-v2", "source": bench.texts.source, "workloads": found, "left_out": left_out}


def calls(bench: Bench, fleet: Fleet, left_out: dict[str, str]) -> dict[str, Any]:
    """Tokens per second by the number of texts that one call brings; a call's batches are the engine's own affair."""
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
    """Percentiles of the time of one short text alone, in milliseconds."""
    load = bench.texts.workload("short", limit=LIMITS["minilm"], count=bench.scaled(1000))
    print("latency", flush=True)
    return singles(bench, fleet, load, blocks=4 * bench.rounds) | {"left_out": left_out}


def startup(bench: Bench, left_out: dict[str, str], names: Iterable[str] | None = None) -> dict[str, Any]:
    """A fresh process up to its first vector, as whoever waits for it sees it; and the most memory it ever held."""
    load = bench.texts.workload("docs", limit=LIMITS["minilm"], count=bench.scaled(1000))
    fleet = bench.fleet(left_out, names)
    one, many = fleet.write("startup-one", load.texts[:1]), fleet.write("startup-docs", load.texts)
    folder_of = bench.model("minilm", "embed")
    seen: dict[str, list[dict[str, float]]] = {c.name: [] for c in fleet.competitors if "embed" in c.tasks}
    rounds = min(bench.rounds, 3)
    for number in range(rounds + (bench.rounds > 1)):  # one more, which fills the disk's cache and the compilers'
        for name in list(seen):
            competitor = COMPETITORS[name]
            try:
                model = folder_of(competitor, fleet)
                last = number == rounds - (bench.rounds == 1)
                measured = start_once(fleet, competitor, model, one, many if last else None)
            except (PeerError, UnavailableError) as error:
                fleet.drop(name, str(error))
                del seen[name]
                continue
            print(f"startup {name}: {measured['seconds']:.1f} s", flush=True)
            seen[name].append(measured)
    rows = {}
    for name, measured in seen.items():
        counted = measured[1:] if bench.rounds > 1 else measured
        rows[name] = {
            key: round(statistics.median(one[key] for one in counted), 3)
            for key in ("seconds", "import_seconds", "load_seconds", "first_seconds")
        } | {key: measured[-1][key] for key in ("first_bytes", "peak_bytes")}
        rows[name]["all_seconds"] = [round(one["seconds"], 3) for one in counted]
    return {"rows": rows, "texts": len(load.texts), "left_out": left_out}


def start_once(fleet: Fleet, competitor: Competitor, model: Path, one: str, many: str | None) -> dict[str, float]:
    """One fresh process; with ``many``, it goes on to embed them."""
    peer = fleet.start(competitor)
    try:
        options = {**competitor.options, **({"max_model_len": 512} if competitor.family == "vllm" else {})}
        loaded = peer.ask("load", family=competitor.family, task="embed", model=str(model), options=options)
        first = peer.ask("run", inputs=one)
        wall = time.perf_counter() - peer.began
        found = {**loaded, "first_seconds": first["seconds"], "seconds": wall}
        if many is not None:
            found["first_bytes"] = peer.ask("memory")["bytes"]
            peer.ask("run", inputs=many)
            found["peak_bytes"] = peer.ask("memory")["bytes"]
        return found
    finally:
        peer.close()


def rerank(bench: Bench, fleet: Fleet, left_out: dict[str, str]) -> dict[str, Any]:
    """A query and 100 documents of mixed length, through a cross-encoder."""
    documents = bench.texts.workload("mixed", limit=480, count=min(DOCUMENTS, bench.scaled(DOCUMENTS * 4)))
    query = bench.texts.workload("short", limit=16, count=8).texts[0]
    print(f"rerank {len(documents.texts)} documents, {documents.tokens} tokens", flush=True)
    given = {"query": query, "documents": documents.texts}
    found = timed(bench, fleet, "rerank", given, tokens=documents.tokens)
    return found | described(documents) | {"model": "cross-encoder of MiniLM's shape", "left_out": left_out}


def tokens(bench: Bench, fleet: Fleet, left_out: dict[str, str]) -> dict[str, Any]:
    """A row for each token: a ColBERT checkpoint over passages."""
    load = bench.texts.workload("passages", limit=480, count=bench.scaled(250))
    print(f"tokens: {len(load.texts)} passages, {load.tokens} tokens", flush=True)
    found = timed(bench, fleet, "tokens", load.texts, tokens=load.tokens)
    return found | described(load) | {"model": "ColBERT of MiniLM's shape", "left_out": left_out}


def shapes(bench: Bench, chosen: Iterable[str], names: Iterable[str], left_out: dict[str, str]) -> dict[str, Any]:
    """Other shapes: throughput over docs, and over long texts where they read any, and one short text alone."""
    found: dict[str, Any] = {}
    for shape, count in ((shape, SHAPES[shape]) for shape in chosen):
        missing: dict[str, str] = {}
        with bench.fleet(missing, {"millpond", REFERENCE, *names}) as fleet:
            print(f"shape {shape}", flush=True)
            bench.load(fleet, shape, "embed")
            docs = bench.texts.workload("docs", limit=LIMITS[shape], count=bench.scaled(count))
            found[shape] = {
                "docs": timed(bench, fleet, "docs", docs.texts, tokens=docs.tokens, sizes=(8, 16, 32)) | described(docs)
            }
            short = bench.texts.workload("short", limit=LIMITS[shape], count=bench.scaled(400))
            found[shape]["single"] = singles(bench, fleet, short, blocks=max(bench.rounds // 2, 1), block=10)
            if shape in LONG:
                load = bench.texts.workload("long", limit=2048, count=min(LONG[shape], bench.scaled(LONG[shape])))
                few = min(bench.rounds, 3)
                found[shape]["long"] = timed(
                    bench, fleet, "long", load.texts, tokens=load.tokens, rounds=few, sizes=(1, 4)
                ) | described(load)
        left_out |= {f"{name} ({shape})": reason for name, reason in missing.items()}
    return {"shapes": found, "left_out": left_out}


def timed(
    bench: Bench,
    fleet: Fleet,
    name: str,
    given: Any,
    *,
    tokens: int,
    rounds: int | None = None,
    sizes: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Batch sizes, equality, then the time of ``given`` in turns."""
    inputs = fleet.write(name, given)
    search(fleet, f"{name}-search", given, sizes=sizes or bench.sizes)
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


def search(fleet: Fleet, name: str, given: Any, *, sizes: tuple[int, ...]) -> None:
    """Find batch sizes on the first texts of ``given``."""
    few = given if isinstance(given, dict) else given[:SEARCHED]
    fleet.search_batches(fleet.write(name, few), sizes=sizes)


def singles(bench: Bench, fleet: Fleet, load: Workload, *, blocks: int, block: int = BLOCK) -> dict[str, Any]:
    """Percentiles of single texts, in milliseconds, in turns of ``block`` texts."""
    inputs = fleet.write("singles", load.texts)
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
    """Every engine's results against the reference's; without the reference there is nothing to measure."""
    if REFERENCE not in results:
        raise SystemExit(f"{REFERENCE} is what results are compared with, and it is not there; nothing was measured")
    return {name: judge(result, results[REFERENCE], COMPETITORS[name].precision) for name, result in results.items()}


def rows_of(
    times: Mapping[str, list[float]], verdicts: Mapping[str, Verdict], fleet: Fleet, *, tokens: int
) -> dict[str, Any]:
    """Medians and ratios to the reference; an engine that did not compute the same has no time."""
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
    """Names of the engines that anywhere in ``results`` did not compute the same."""
    if isinstance(results, Mapping):
        for name, value in results.items():
            if isinstance(value, Mapping) and value.get("equal") is False:
                yield name
            yield from unequal(value)


def described(load: Workload) -> dict[str, Any]:
    """A workload in figures."""
    return {
        "texts": len(load.texts),
        "tokens": load.tokens,
        "mean_tokens": round(load.tokens / len(load.texts), 1),
        "longest": max(load.lengths),
    }
