"""Latency and throughput of one engine under load up to saturation and beyond: threads and asyncio, mixed lengths.

    python benchmarks/load.py [--smoke] [--duration 8] [--rounds 5] [--only curve,callers,rerank,hostage]

Requests are single texts, most of them short, that arrive as a Poisson process. Rates are shares of the throughput of
one bulk call on the same texts. Latency is measured from the scheduled arrival, so waiting for a thread is included.
The engine's queue is short (``max_queue``); beyond saturation it refuses requests, which are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from compare import show
from peers import curves
from peers.environments import cache_folder
from peers.shapes import Shapes
from peers.texts import Texts, Workload
from record import RESULTS, record

from millpond import AsyncEngine, Engine
from millpond.errors import EngineOverloadedError
from millpond.tasks import ScoreMethod

MAX_QUEUE = 128  # texts that may wait in the engine under load
THREADS = 192  # threads that send requests: more than may wait, so that some are refused
CALLERS = 64
SHORTS = 0.8  # share of short requests; the others have 10 to 500 tokens
SHARES = (0.25, 0.5, 0.75, 0.9, 1.0, 1.25, 1.5)  # offered load, as shares of bulk throughput
HOSTAGES_PER_SECOND = 20.0
SECTIONS = ("curve", "callers", "rerank", "hostage")


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A scheduled request.

    Attributes:
        at: Seconds after the start.
        kind: ``short`` or ``long``.
        text: The text.
        tokens: Number of its tokens.
    """

    at: float
    kind: str
    text: str
    tokens: int


@dataclass(kw_only=True)
class Tally:
    """Outcomes of the requests; many threads append to its lists."""

    start: float = field(default_factory=time.perf_counter)
    served: list[tuple[Arrival, float]] = field(default_factory=list)  # with the seconds since the scheduled arrival
    refused: list[Arrival] = field(default_factory=list)

    @contextmanager
    def timing(self, arrival: Arrival) -> Iterator[None]:
        """Time one request."""
        try:
            yield
        except EngineOverloadedError:
            self.refused.append(arrival)
        else:
            self.served.append((arrival, time.perf_counter() - self.start - arrival.at))

    def row(self) -> dict[str, Any]:
        """The figures as a row of the results."""
        seconds = max((arrival.at + took for arrival, took in self.served), default=0.0) or 1.0
        row: dict[str, Any] = {
            "achieved_per_second": round(len(self.served) / seconds, 1),
            "tokens_per_second": round(sum(arrival.tokens for arrival, _ in self.served) / seconds),
            "refused": len(self.refused),
        }
        for kind in ("short", "long"):
            times = [took for arrival, took in self.served if arrival.kind == kind]
            if times:
                row[kind] = {"requests": len(times), **percentiles(times)}
        return row


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 in milliseconds."""
    return {f"p{p}_ms": round(1000 * float(np.percentile(seconds, p)), 2) for p in (50, 95, 99)}


def arrivals(rate: float, seconds: float, mix: dict[str, Workload], *, seed: str) -> list[Arrival]:
    """A Poisson process of ``rate`` requests per second; the texts of each kind are used in turn."""
    chance = random.Random(seed)
    pools = {kind: itertools.cycle(zip(load.texts, load.lengths, strict=True)) for kind, load in mix.items()}
    scheduled, at = [], 0.0
    while (at := at + chance.expovariate(rate)) < seconds:
        kind = "short" if len(mix) == 1 or chance.random() < SHORTS else "long"
        text, tokens = next(pools[kind])
        scheduled.append(Arrival(at=at, kind=kind, text=text, tokens=tokens))
    return scheduled


def by_threads(engine: Engine, load: Sequence[Arrival], *, threads: int = THREADS) -> Tally:
    """Each thread takes the next arrival, waits for its time, and embeds it."""
    remaining, lock = iter(load), threading.Lock()
    tally = Tally()

    def work() -> None:
        while True:
            with lock:
                arrival = next(remaining, None)
            if arrival is None:
                return
            if (early := tally.start + arrival.at - time.perf_counter()) > 0:
                time.sleep(early)
            with tally.timing(arrival):
                engine.embed([arrival.text])

    in_threads(work, min(threads, len(load)))
    return tally


def by_tasks(engine: Engine, load: Sequence[Arrival]) -> Tally:
    """One task for each arrival, started when it is due."""
    front = AsyncEngine(engine)
    tally = Tally()

    async def one(arrival: Arrival) -> None:
        with tally.timing(arrival):
            await front.embed([arrival.text])

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for arrival in load:
                await asyncio.sleep(max(0.0, tally.start + arrival.at - time.perf_counter()))
                tasks.create_task(one(arrival))

    asyncio.run(main())
    return tally


def in_threads(work: Callable[[], None], count: int) -> None:
    """Run ``work`` in ``count`` threads and wait for all."""
    workers = [threading.Thread(target=work) for _ in range(count)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()


def singles_by_threads(engine: Engine, texts: Sequence[str]) -> None:
    """``CALLERS`` threads embed the texts one by one, as fast as possible."""
    remaining, lock = iter(texts), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                text = next(remaining, None)
            if text is None:
                return
            engine.embed([text])

    in_threads(work, CALLERS)


def singles_by_tasks(engine: Engine, texts: Sequence[str]) -> None:
    """``CALLERS`` tasks of one event loop embed the texts one by one."""
    front, remaining = AsyncEngine(engine), iter(texts)

    async def work() -> None:
        for text in remaining:  # one thread, so no two tasks advance the iterator at once
            await front.embed([text])

    async def main() -> None:
        tasks: list[Awaitable[None]] = [work() for _ in range(CALLERS)]
        await asyncio.gather(*tasks)

    asyncio.run(main())


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Bench:
    """The model, the texts, and the durations of the measurements."""

    def __init__(self, options: argparse.Namespace, shapes: Shapes) -> None:
        self.shapes = shapes
        self.model = shapes.folder("minilm")
        self.texts = Texts(self.model / "tokenizer.json", data=Path(options.data) if options.data else None)
        self.duration: float = 0.5 if options.smoke else options.duration
        self.rounds: int = 1 if options.smoke else options.rounds
        self.scale: float = 0.05 if options.smoke else 1.0
        self.shares = (0.5, 1.5) if options.smoke else SHARES

    def load(self, name: str, count: int) -> Workload:
        """``count`` texts of a workload, fewer in a smoke run."""
        return self.texts.workload(name, limit=512, count=max(8, int(count * self.scale)))

    def median(self, work: Callable[[], object]) -> float:
        """Median seconds of ``work``."""
        return statistics.median(timed(work) for _ in range(self.rounds))

    def curve(self) -> dict[str, Any]:
        """Percentiles and throughput at each offered rate, for threads and asyncio."""
        mix = {"short": self.load("short", 1600), "long": self.load("mixed", 400)}
        both = [text for load in mix.values() for text in load.texts]
        tokens = sum(load.tokens for load in mix.values())
        with Engine(self.model) as engine:
            engine.embed(both)
            bulk = self.median(lambda: engine.embed(both))
        rate, rows = len(both) / bulk, []
        with Engine(self.model, max_queue=MAX_QUEUE) as engine:
            for share in self.shares:
                load = arrivals(share * rate, self.duration, mix, seed=str(share))
                for front, drive in (("threads", by_threads), ("asyncio", by_tasks)):
                    row = {"front": front, "share_of_bulk": share, "offered_per_second": round(share * rate, 1)}
                    rows.append(row | drive(engine, load).row())
        return {
            "bulk_per_second": round(rate, 1),
            "bulk_tokens_per_second": round(tokens / bulk),
            "mean_tokens": round(tokens / len(both), 1),
            "max_queue": MAX_QUEUE,
            "rows": rows,
        }

    def callers(self) -> dict[str, Any]:
        """One bulk call and many callers of single texts, measured in turns."""
        results = {}
        with Engine(self.model) as engine:
            for name, count in (("docs", 1000), ("short", 3000)):
                load = self.load(name, count)
                texts = list(load.texts)
                ways: dict[str, Callable[[], object]] = {
                    "bulk": lambda texts=texts: engine.embed(texts),
                    "threads": lambda texts=texts: singles_by_threads(engine, texts),
                    "asyncio": lambda texts=texts: singles_by_tasks(engine, texts),
                }
                ways["bulk"]()
                seconds: dict[str, list[float]] = {way: [] for way in ways}
                for _ in range(self.rounds):
                    for way, work in ways.items():
                        seconds[way].append(timed(work))
                medians = {way: statistics.median(times) for way, times in seconds.items()}
                results[name] = {
                    "texts": len(texts),
                    "mean_tokens": round(load.tokens / len(texts), 1),
                    "callers": CALLERS,
                    "texts_per_second": {way: round(len(texts) / median, 1) for way, median in medians.items()},
                    "share_of_bulk": {way: round(medians["bulk"] / median, 3) for way, median in medians.items()},
                }
        return results

    def rerank(self) -> dict[str, Any]:
        """One query and 100 passages, by a bi-encoder's cosine and by a cross-encoder of the same backbone."""
        passages = list(self.load("mixed", 100).texts)
        results = {}
        ways: tuple[tuple[str, str, ScoreMethod], ...] = (
            ("bi-encoder", "minilm", "cosine"),
            ("cross-encoder", "cross-encoder", "auto"),
        )
        for kind, shape, method in ways:
            with Engine(self.shapes.folder(shape)) as engine:
                rank = partial(engine.rerank, "What does it return?", passages, method=method)
                rank()
                times = [timed(rank) for _ in range(2 * self.rounds)]
            results[kind] = {"passages": len(passages), **percentiles(times)}
        return results

    def hostage(self) -> dict[str, Any]:
        """Short texts at a low rate, alone and while another caller embeds 2,000 long texts."""
        shorts = {"short": self.load("short", 1600)}
        long = list(self.load("mixed", 2000).texts)
        load = arrivals(HOSTAGES_PER_SECOND, self.duration, shorts, seed="hostage")
        results: dict[str, Any] = {"per_second": HOSTAGES_PER_SECOND, "long_texts": len(long)}
        with Engine(self.model) as engine:
            by_threads(engine, load[:20])
            results["alone"] = by_threads(engine, load).row().get("short")
            over = threading.Event()

            def hold() -> None:
                while not over.is_set():
                    engine.submit("embed", long).result()

            holder = threading.Thread(target=hold)
            holder.start()
            try:
                results["beside"] = by_threads(engine, load).row().get("short")
            finally:
                over.set()
                holder.join()
        return results


def main() -> None:
    """Measure the requested sections, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few texts for half a second each, not recorded")
    parser.add_argument("--duration", type=float, default=8.0, help="seconds for each rate and front")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SECTIONS), metavar="SECTION,...")
    parser.add_argument("--data", type=Path, default=os.environ.get("MILLPOND_DATA"), help="folder with longdocs/*.txt")
    options = parser.parse_args()
    if unknown := set(options.only) - set(SECTIONS):
        parser.error(f"--only has no {', '.join(sorted(unknown))}; choose of {', '.join(SECTIONS)}")
    logging.getLogger("millpond").setLevel(logging.ERROR)  # no warnings about truncated texts
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Shapes(Path(folder) / "models" if options.smoke else cache_folder() / "models"))
        results = {name: getattr(bench, name)() for name in SECTIONS if name in options.only}
        print(curves.load_table(results))
        if set(options.only) == set(SECTIONS):  # a part would replace the whole file
            target = Path(folder) / "results" if options.smoke else RESULTS
            record("load", results, folder=target)
            show(target)


if __name__ == "__main__":
    main()
