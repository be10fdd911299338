"""The server compared with its own engine and with `vllm serve`: throughput, single texts, overload.

    python benchmarks/serve.py [--smoke] [--only throughput,singles,overload,routes] [--rounds 5] [--duration 6]
                               [--alone] [--texts 1024]
                               [--environments FOLDER] [--python vllm=PATH]

The engine without a server, `millpond serve`, `vllm serve` and this process, which sends the load of
`benchmarks/load_server.py` over the loopback device, share the cores. They take turns within each round; compare
ratios of one run only. `MILLPOND_VLLM_PYTHON` may name an interpreter with vLLM; without it an environment is made
and kept, as `compare.py` does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from compare import show
from load_generator.connection import Connections
from load_generator.drive import drive, run
from load_generator.plan import LoadPlan
from load_generator.target import Target
from peers import servers
from peers.engines import COMPETITORS
from peers.environments import HERE, Environments, UnavailableError, cache_folder
from peers.fleet import Peer
from peers.servers import NAME, Server
from peers.serving import table
from peers.shapes import Shapes
from peers.texts import Texts, Workload
from record import RESULTS, record

SECTIONS = ("throughput", "singles", "overload")
ROUTES = "routes"  # a section with a file of its own, asked for by --only
APIS = {
    "/v1/embeddings": ("embeddings", "float"),
    "/api/embed (Ollama)": ("ollama", None),
    "/embed (TEI)": ("tei-embed", None),
}
SIZE = 32  # texts of a request
CALLERS = (1, 8)  # threads of the engine, connections of a server
ENCODINGS = ("float", "base64")  # HTTP's default, and what OpenAI's client requests
RATES = (25.0, 100.0)  # single texts per second
OVERLOAD = 3.0  # offered load, as a multiple of what the server achieved
MAX_QUEUE = 512  # texts that may wait in our server: twice those of the callers in the other sections
HEALTH_EVERY = 0.02  # seconds
EQUAL = 0.999  # least mean cosine to the engine's vectors


class Bench:
    """The engine, the servers, and the texts that all of them get."""

    def __init__(self, options: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        self.rounds: int = 1 if options.smoke else options.rounds
        self.duration: float = 0.5 if options.smoke else options.duration
        self.offered: float = 10.0 if options.smoke else OVERLOAD  # half a second must be enough for refusals
        self.queue: int = 256 if options.smoke else MAX_QUEUE
        self.rates = RATES[-1:] if options.smoke else RATES
        self.smoke: bool = options.smoke
        self.left_out: dict[str, str] = {}
        self.folder = folder
        root = options.environments or cache_folder()
        self.model = Shapes(folder / "models" if options.smoke else root / "models").folder("minilm")
        texts = Texts(self.model / "tokenizer.json", data=Path(options.data) if options.data else None)
        self.docs = texts.workload("docs", limit=512, count=64 if options.smoke else options.texts)
        self.shorts = texts.workload("short", limit=512, count=64 if options.smoke else 2048)
        self.environments = Environments(
            root / "environments", interpreters=options.python, torch_args=options.torch_args
        )
        self.servers: dict[str, Server] = {}
        # Our two processes start at once; vLLM would use every core, so it starts after them.
        queue = ("--max-queue", str(self.queue))
        self.servers["millpond"] = stack.enter_context(servers.millpond(self.model, folder, *queue))
        self.engine = Peer(COMPETITORS["millpond"], self.environments.python(HERE), folder / "engine.log")
        stack.callback(self.engine.close)
        self.engine.ask("load", family="millpond", task="embed", model=str(self.model), options={})
        self.servers["millpond"].wait()
        if not (options.smoke or options.alone):
            self._start_vllm(stack)
        self.inputs = {load.name: self._written(load) for load in (self.docs, self.shorts)}
        self.engine.ask("run", inputs=self.inputs["docs"])
        self.equal = {name: self._cosine(server) for name, server in self.servers.items()}

    def _start_vllm(self, stack: ExitStack) -> None:
        try:
            server = servers.vllm(self.environments.python("vllm"), self.model, self.folder)
            stack.callback(server.close)
            print(f"  vllm is ready after {server.wait():.0f} s", flush=True)
            self.servers["vllm"] = server
        except UnavailableError as error:
            print(f"  without vllm: {error}", flush=True)
            self.left_out["vllm"] = str(error)

    def _written(self, load: Workload) -> str:
        path = self.folder / f"{load.name}.json"
        path.write_text(json.dumps(load.texts), encoding="utf-8")
        return str(path)

    def _cosine(self, server: Server) -> float:
        """Mean cosine of a server's vectors to the engine's.

        Raises:
            SystemExit: They differ, so the figures would be meaningless.
        """
        body = json.dumps({"model": NAME, "input": self.docs.texts[:64]}).encode()
        request = urllib.request.Request(
            f"{server.url}/v1/embeddings", data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            served = np.array([row["embedding"] for row in json.load(answer)["data"]])
        self.engine.ask("save", path=str(self.folder / "vectors.npz"))
        with np.load(self.folder / "vectors.npz") as arrays:
            expected = arrays["vectors"][: len(served)]
        norms = np.linalg.norm(served, axis=1) * np.linalg.norm(expected, axis=1)
        cosine = float(np.mean(np.sum(served * expected, axis=1) / norms))
        if cosine < EQUAL:
            raise SystemExit(f"{server.name} returns other vectors than the engine: a mean cosine of {cosine:.4f}")
        return round(cosine, 6)

    def turns(self, ways: Mapping[str, Callable[[], Any]]) -> dict[str, list[Any]]:
        """``rounds`` results of each way, in turns after a warm-up round; each round begins with another way."""
        results: dict[str, list[Any]] = {name: [] for name in ways}
        for number in range(-1, self.rounds):
            names = list(ways)
            shift = number % len(names)
            for name in [*names[shift:], *names[:shift]]:
                result = ways[name]()
                if number >= 0 or self.smoke:
                    results[name].append(result)
            if self.smoke:
                break
        return results

    # The sections

    def throughput(self) -> dict[str, Any]:
        """Texts per second with 32 texts per request, of the engine and of the servers."""
        texts = len(self.docs.texts)
        ways: dict[str, Callable[[], float]] = {"engine, one call": lambda: texts / self._engine("run")}
        for callers in CALLERS:
            ways[f"engine, {callers}"] = lambda n=callers: texts / self._engine("crowd", size=SIZE, callers=n)
            for server in self.servers.values():
                for encoding in ENCODINGS:
                    plan = LoadPlan(
                        texts_per_request=SIZE,
                        connections=callers,
                        requests=texts // SIZE,
                        duration=None,
                        warm_up=0,
                    )
                    target = self._target(server, encoding)
                    ways[f"{server.name} {encoding}, {callers}"] = lambda t=target, p=plan: self._per_second(t, p)
        rates = {name: statistics.median(times) for name, times in self.turns(ways).items()}
        return {
            "texts": texts,
            "mean_tokens": round(self.docs.tokens / texts, 1),
            "texts_per_request": SIZE,
            "callers": list(CALLERS),
            "texts_per_second": {name: round(rate, 1) for name, rate in rates.items()},
            "share_of_engine": {
                name: round(rate / rates[f"engine, {name.rpartition(', ')[2]}"], 3)
                for name, rate in rates.items()
                if not name.startswith("engine")
            },
            "share_of_one_call": {name: round(rate / rates["engine, one call"], 3) for name, rate in rates.items()},
        }

    def singles(self) -> dict[str, Any]:
        """Latencies of single short texts: one after the other, and at fixed rates."""
        count = 20 if self.smoke else 200
        ways: dict[str, Callable[[], dict[str, Any]]] = {"engine, one after the other": lambda: self._calls(count)}
        for server in self.servers.values():
            target = self._target(server, "float")
            base = LoadPlan(texts_per_request=1, connections=1, requests=count, duration=None, warm_up=0)
            ways[f"{server.name}, one after the other"] = lambda t=target, p=base: self._latency(t, p)
            for rate in self.rates:
                plan = replace(base, rate=rate, connections=256, requests=max(20, int(rate * self.duration)))
                ways[f"{server.name}, {rate:g} a second"] = lambda t=target, p=plan: self._latency(t, p)
        latencies = self.turns(ways)
        return {
            "mean_tokens": round(self.shorts.tokens / len(self.shorts.texts), 1),
            "milliseconds": {
                name: {key: round(statistics.median(row[key] for row in rows), 3) for key in rows[0]}
                for name, rows in latencies.items()
            },
        }

    def overload(self) -> dict[str, Any]:
        """Several times the load that can be served: refusals, throughput, and the latency of ``/health`` meanwhile."""
        return {
            "offered": self.offered,
            "max_queue": self.queue,
            "texts_per_request": SIZE,
            "rows": {name: asyncio.run(self._overloaded(server)) for name, server in self.servers.items()},
        }

    def routes(self) -> dict[str, Any]:
        """Requests per second of our server by each route for vectors, with 1 and with 32 texts a request."""
        ways: dict[str, Callable[[], float]] = {}
        for size, load in ((1, self.shorts), (SIZE, self.docs)):
            for route, (api, encoding) in APIS.items():
                target = Target(url=self.servers["millpond"].url, api=api, model=NAME, encoding_format=encoding)
                plan = LoadPlan(
                    texts_per_request=size, connections=8, duration=self.duration, warm_up=self.duration / 6
                )
                ways[f"{route}, {size}"] = lambda t=target, p=plan, w=load: self._requests(t, p, w)
        rates = {name: statistics.median(times) for name, times in self.turns(ways).items()}
        return {
            "connections": 8,
            "mean_tokens": {
                1: round(self.shorts.tokens / len(self.shorts.texts), 1),
                SIZE: round(self.docs.tokens / len(self.docs.texts), 1),
            },
            "requests_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        }

    # Parts of the sections

    def _engine(self, do: str, **arguments: Any) -> float:
        return float(self.engine.ask(do, inputs=self.inputs["docs"], **arguments)["seconds"])

    def _calls(self, count: int) -> dict[str, Any]:
        seconds = self.engine.ask("singles", inputs=self.inputs["short"], start=0, count=count, discard=0)["seconds"]
        return {f"p{percent}": 1000 * float(np.percentile(seconds, percent)) for percent in (50, 95, 99)}

    def _target(self, server: Server, encoding: str) -> Target:
        return Target(url=server.url, model=NAME, encoding_format=encoding)

    def _per_second(self, target: Target, plan: LoadPlan) -> float:
        report = run(target, plan, self.docs.texts)
        if report.failed:
            raise SystemExit(f"{target.endpoint}: {report.messages}")
        return float(report.as_dict()["texts_per_second"])

    def _requests(self, target: Target, plan: LoadPlan, load: Workload) -> float:
        report = run(target, plan, load.texts)
        if report.failed:
            raise SystemExit(f"{target.endpoint}: {report.messages}")
        return float(report.as_dict()["requests_per_second"])

    def _latency(self, target: Target, plan: LoadPlan) -> dict[str, Any]:
        report = run(target, plan, self.shorts.texts)
        if report.failed:
            raise SystemExit(f"{target.endpoint}: {report.messages}")
        times = report.as_dict()["latency_ms"]
        return {key: times[key] for key in ("p50", "p95", "p99")}

    async def _overloaded(self, server: Server) -> dict[str, Any]:
        target = self._target(server, "base64")
        full = LoadPlan(texts_per_request=SIZE, connections=8, duration=self.duration, warm_up=self.duration / 4)
        alone = await _beside(target, lambda: asyncio.sleep(self.duration))
        saturated = await _beside(target, lambda: drive(target, full, self.docs.texts))
        achieved = saturated["load"].as_dict()["requests_per_second"]
        excess = LoadPlan(
            texts_per_request=SIZE,
            rate=self.offered * achieved,
            connections=512,
            duration=self.duration,
            warm_up=0,
            timeout=120,
        )
        over = await _beside(target, lambda: drive(target, excess, self.docs.texts))
        report = over["load"].as_dict()
        return {
            "served_per_second_at_most": achieved,
            "offered_per_second": round(self.offered * achieved, 1),
            "requests": report["requests"],
            "served_per_second": report["requests_per_second"],
            "statuses": report["statuses"],
            "generator": report["generator"],
            "health_ms": {
                "alone": alone["health"],
                "at_full_load": saturated["health"],
                "overloaded": over["health"],
            },
        }


async def _beside(target: Target, work: Callable[[], Any]) -> dict[str, Any]:
    """The result of ``work``, and the latencies of ``/health`` while it ran."""
    times: list[tuple[float, float]] = []
    message = target.get("/health")
    async with Connections(target, limit=1, timeout=60) as connections:

        async def poll() -> None:
            while True:
                due = time.perf_counter()
                answer = await connections.send(message)
                if answer.status != 200:
                    raise SystemExit(f"{target.url}/health answers {answer.status}")
                times.append((due, time.perf_counter()))
                await asyncio.sleep(HEALTH_EVERY)

        polling = asyncio.create_task(poll())
        load = await work()
        if polling.done():
            polling.result()
        polling.cancel()
    return {"load": load, "health": {"asked": len(times), **_spread(times)}}


def _spread(times: list[tuple[float, float]]) -> dict[str, float]:
    seconds = [end - begin for begin, end in times]
    return {f"p{p}": round(1000 * float(np.percentile(seconds, p)), 2) for p in (50, 99, 100)} if seconds else {}


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few texts, without vLLM, not recorded")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SECTIONS), metavar="SECTION,...")
    parser.add_argument("--alone", action="store_true", help="without vLLM")
    parser.add_argument("--texts", type=int, default=1024, help="number of docstrings for the throughput")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--duration", type=float, default=6.0, help="seconds of each load without a number of requests")
    parser.add_argument("--environments", type=Path, default=None, help=f"folder (default: {cache_folder()})")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="an interpreter for vllm")
    parser.add_argument("--data", type=Path, default=os.environ.get("MILLPOND_DATA"), help="folder with longdocs/*.txt")
    parser.add_argument(
        "--torch-args", default=os.environ.get("TORCH_ARGS", ""), help="further arguments of pip when it installs torch"
    )
    options = parser.parse_args()
    if unknown := set(options.only) - {*SECTIONS, ROUTES}:
        parser.error(f"--only has no {', '.join(sorted(unknown))}; choose of {', '.join(SECTIONS)}, {ROUTES}")
    vllm = os.environ.get("MILLPOND_VLLM_PYTHON")
    options.python = {**({"vllm": vllm} if vllm else {}), **dict(pair.split("=", 1) for pair in options.python)}
    return options


def main() -> None:
    """Measure the requested sections, print and record."""
    options = arguments()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        bench = Bench(options, folder, stack)
        results: dict[str, Any] = {
            section: getattr(bench, section)() for section in (*SECTIONS, ROUTES) if section in options.only
        }
        results |= {
            "mean_cosine_to_engine": bench.equal,
            "left_out": bench.left_out,
            "rounds": bench.rounds,
            "environments": bench.environments.versions(),
        }
        print(table(results))
        target = folder / "results" if options.smoke else RESULTS
        if options.only == [ROUTES]:
            record("serve_routes", results, folder=target)
            show(target)
        if set(options.only) == set(SECTIONS):  # a part would replace the whole file
            record("serve", results, folder=target)
            show(target)


if __name__ == "__main__":
    main()
