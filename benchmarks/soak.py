"""A server under mixed load for a long time: no answer lost or wrong, and no memory that grows.

    python benchmarks/soak.py [--smoke] [--minutes 30] [--processes 3] [--clients 6] [--threads 2]

`millpond serve` runs with two models. Client processes request vectors, rankings, scores and classes of texts of any
length, send invalid requests, disconnect early, and sometimes send more than may wait. Every answer is compared with
the engine's own, and the clients' counts with /metrics. Memory, threads and open files of the server are read under
load and when idle. At the end the server is stopped while requests run. The script exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from compare import show
from peers import servers, soaking
from peers.callers import BUSY, RANKS, VECTORS, Reference, RequestFactory, Tally, run_clients
from peers.environments import cache_folder
from peers.servers import Server
from peers.shapes import Shapes
from peers.texts import Texts
from prometheus_client.parser import text_string_to_metric_families
from record import RESULTS, record

from millpond import Engine

TIMEOUT = 1200.0  # seconds; whatever takes longer hangs
MAX_QUEUE = 256  # texts that may wait; a burst sends five times as many
QUERIES = 8
WARM = 0.2  # share of the time after which the server's memory, threads and files must stay level
GROWTH = 0.05  # share by which the server's memory may grow in the second half
MORE = 4  # threads and open files that the server may gain
EVERY = 1.0  # seconds between two samples
LAST = 12  # requests that run when the server is stopped


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Memory, threads and files of a process at one time.

    Attributes:
        at: Time in seconds.
        rss: Resident bytes.
        threads: Number of threads.
        files: Number of open files and sockets.
    """

    at: float
    rss: int
    threads: int
    files: int

    @classmethod
    def of_process(cls, pid: int) -> Sample:
        """Sample a process of this machine, which must run Linux."""
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return cls(
            at=time.monotonic(),
            rss=int(fields["VmRSS"].split()[0]) * 1024,
            threads=int(fields["Threads"]),
            files=len(os.listdir(f"/proc/{pid}/fd")),
        )


class Watch:
    """Samples a server every second, and requests ``/health``."""

    def __init__(self, server: Server) -> None:
        self.samples: list[Sample] = []
        self.health: list[float] = []
        self.failures: list[str] = []
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    @contextmanager
    def on(self) -> Iterator[Watch]:
        """Watch while the block runs."""
        self._thread.start()
        try:
            yield self
        finally:
            self._over.set()
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(EVERY):
            began = time.perf_counter()
            try:
                get(self._server, "/health")
            except OSError as error:
                self.failures.append(repr(error))
            self.health.append(time.perf_counter() - began)
            self.samples.append(Sample.of_process(self._server.process.pid))


class Soak:
    """A server, the reference for its answers, and the load."""

    def __init__(self, options: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        self.options = options
        self.folder = folder
        self.problems: list[str] = []
        self.tally = Tally()
        self.shapes = Shapes((folder if options.smoke else cache_folder()) / "models")
        self.server = stack.enter_context(self._start())
        self.reference = self._reference()
        self.reference.save(folder)

    def run(self) -> dict[str, Any]:
        """Load, idle, load, idle, and the stop; returns the figures."""
        minutes = 0.03 if self.options.smoke else self.options.minutes
        self.server.wait()
        watch = Watch(self.server)
        with watch.on():
            began = time.monotonic()
            self.load(60 * minutes * WARM, seed=1)
            before = self.quiet()
            self.load(60 * minutes * (1 - WARM), seed=2)
        after = self.quiet()
        counted = self.balance()
        end = self.stop()
        held = self.held(before, after, [sample for sample in watch.samples if sample.at > before.at])
        if watch.failures:
            self.problems.append(f"/health: {watch.failures[:3]}")
        self.problems += [f"{self.tally.wrong} wrong answers: {self.tally.complaints[:5]}"] if self.tally.wrong else []
        self._read_log()
        seconds = np.array(self.tally.seconds)
        return {
            "minutes": minutes,
            "processes": self.options.processes,
            "clients": self.options.processes * (self.options.clients + self.options.threads),
            "requests": sum(self.tally.answers.values()),
            "by_status": dict(sorted(_by_status(self.tally.answers).items())),
            "left_early": sum(self.tally.left.values()),
            "sent_again": sum(self.tally.again.values()),
            "items_compared": self.tally.items,
            "wrong": self.tally.wrong,
            "seconds": {f"p{p}": round(float(np.percentile(seconds, p)), 4) for p in (50, 99, 100)},
            "health_seconds": {f"p{p}": round(float(np.percentile(watch.health, p)), 4) for p in (50, 99, 100)}
            if watch.health
            else {},
            "held": held,
            "warm_minutes": round((before.at - began) / 60, 3),
            "curve": curve(watch.samples, began),
            "metrics": counted,
            "end": end,
            "problems": self.problems,
        }

    # The steps

    def load(self, seconds: float, *, seed: int) -> None:
        """Run the clients of all processes for ``seconds``."""
        context = multiprocessing.get_context("spawn")
        tallies: Any = context.Queue()
        clients = [
            context.Process(
                target=run_clients,
                args=(
                    self.server.url,
                    str(self.folder),
                    100 * seed + number,
                    seconds,
                    self.options.clients,
                    self.options.threads,
                    tallies,
                ),
            )
            for number in range(self.options.processes)
        ]
        for process in clients:
            process.start()
        for _ in clients:
            self.tally.add(tallies.get(timeout=seconds + TIMEOUT))  # raises if a client hangs
        for process in clients:
            process.join(TIMEOUT)

    def quiet(self) -> Sample:
        """Wait until the server is idle, and sample it."""
        until = time.monotonic() + TIMEOUT
        while json.loads(get(self.server, "/load"))["server_load"] or self._in_flight() > 1:
            if time.monotonic() > until:
                raise SystemExit("the server is still at work, though no client sends requests")
            time.sleep(0.1)
        time.sleep(0.5)  # until closed connections are gone
        return Sample.of_process(self.server.process.pid)

    def balance(self) -> dict[str, Any]:
        """Compare the clients' counts of answers with the server's."""
        served: Counter[str] = Counter()
        for name, labels, value in self._samples():
            if name == "millpond_requests_total" and labels["route"] not in ("/health", "/load", "/metrics"):
                path = "/nowhere" if labels["route"] == "other" else labels["route"]
                served[f"{path} {labels['status']}"] += int(value)
        received = self.tally.answers
        more = {key: served[key] - received[key] for key in sorted(served | received) if served[key] != received[key]}
        unseen = sum(self.tally.left.values()) + sum(self.tally.again.values())
        if any(count < 0 for count in more.values()):
            self.problems.append(f"answers that the server did not count: {more}")
        if sum(more.values()) > unseen:
            self.problems.append(f"more requests than were sent: {more}, where {unseen} were not waited for")
        if not received[f"/v1/embeddings {BUSY}"]:
            self.problems.append("no burst met a full queue")
        unexplained = max(0, sum(more.values()) - unseen) - sum(count for count in more.values() if count < 0)
        return {"beyond_what_clients_counted": more, "not_waited_for": unseen, "unexplained": unexplained}

    def stop(self) -> dict[str, Any]:
        """SIGTERM while requests run: each must be answered in full, and the process must exit with 0."""
        factory, tally = RequestFactory(self.reference, random.Random(3)), Tally()
        requests = [factory.texts(MAX_QUEUE // LAST // 2) for _ in range(LAST)]
        lost: list[str] = []

        def send(number: int) -> None:
            request = urllib.request.Request(
                self.server.url + requests[number].path,
                data=requests[number].body,
                headers={"Content-Type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                    requests[number].judge(answer.status, answer.headers, answer.read(), tally, 0.0)
            except urllib.error.HTTPError as error:
                with error:
                    tally.answers[f"{requests[number].path} {error.code}"] += 1
                    if error.code != 503:
                        lost.append(f"{error.code}: {error.read()[:200]!r}")
            except OSError as error:
                lost.append(repr(error))

        with ThreadPoolExecutor(LAST) as threads:
            running = [threads.submit(send, number) for number in range(LAST)]
            while self._in_flight() - 1 + sum(each.done() for each in running) < LAST:
                time.sleep(0.01)
            waiting = sum(not each.done() for each in running)
            began = time.perf_counter()
            self.server.process.send_signal(signal.SIGTERM)
            for each in running:
                each.result()
        code = self.server.process.wait(TIMEOUT)
        if lost or code != 0 or tally.wrong:
            self.problems.append(f"at the end: exit code {code}, lost {lost}, {tally.complaints}")
        return {
            "running": waiting,
            "by_status": dict(_by_status(tally.answers)),
            "lost": len(lost),
            "exit_code": code,
            "seconds": round(time.perf_counter() - began, 2),
        }

    def held(self, before: Sample, after: Sample, samples: list[Sample]) -> dict[str, Any]:
        """Memory, threads and files: when idle, and their course under load."""
        half = samples[len(samples) // 2 :]
        slope = 0.0
        if len(half) > 2:
            slope = float(np.polyfit([each.at for each in half], [each.rss for each in half], 1)[0])
            gained = slope * (half[-1].at - half[0].at) / np.mean([each.rss for each in half])
            if gained > GROWTH and not self.options.smoke:
                self.problems.append(f"memory grew by {gained:.1%} in the second half")
        # Thread pools fill up to their limits under load; after that there must be no more threads.
        early = max((each.threads for each in samples[: len(samples) - len(half)]), default=before.threads)
        late = max((each.threads for each in half), default=after.threads)
        for name, was, now in (("threads", early, late), ("files", before.files, after.files)):
            if now > was + MORE and not self.options.smoke:
                self.problems.append(f"{name}: {was}, later {now}")
        return {
            "mib_when_quiet": [round(each.rss / 2**20, 1) for each in (before, after)],
            "mib_at_most": round(max((each.rss for each in samples), default=after.rss) / 2**20, 1),
            "mib_per_hour_in_the_second_half": round(3600 * slope / 2**20, 1),
            "threads_when_quiet": [before.threads, after.threads],
            "threads_at_most": [early, late],
            "files_when_quiet": [before.files, after.files],
            "files_at_most": max((each.files for each in samples), default=after.files),
            "looks": len(samples),
        }

    # Parts of the steps

    def _reference(self) -> Reference:
        counts = {"short": 24} if self.options.smoke else {"short": 280, "docs": 100, "mixed": 20}
        texts = Texts(self.shapes.folder("minilm") / "tokenizer.json", data=None)
        loads = [texts.workload(name, limit=500, count=count) for name, count in counts.items()]
        pieces = [text for load in loads for text in load.texts]
        queries = loads[0].texts[:QUERIES]
        with Engine(str(self.shapes.folder("minilm")), dtype="float32") as engine:
            vectors = engine.embed(pieces).embeddings
        with Engine(str(self.shapes.folder("cross-encoder")), dtype="float32") as engine:
            scores = [engine.score(query, pieces).scores for query in queries]
            classes = engine.classify(pieces).probs
        return Reference(texts=pieces, queries=queries, vectors=vectors, scores=np.stack(scores), classes=classes)

    def _start(self) -> Server:
        path = self.folder / "server.yaml"
        models = {
            name: {"model": str(self.shapes.folder(shape))}
            for name, shape in ((VECTORS, "minilm"), (RANKS, "cross-encoder"))
        }
        shared = {"dtype": "float32", "max_queue": MAX_QUEUE, "log_requests": False, "log_level": "warning"}
        path.write_text(json.dumps({**shared, "models": models}), encoding="utf-8")  # JSON is YAML
        return servers.configured(path, self.folder)

    def _samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        for family in text_string_to_metric_families(get(self.server, "/metrics")):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value

    def _in_flight(self) -> int:
        """Requests in flight, this one included."""
        return next(int(value) for name, _, value in self._samples() if name == "millpond_requests_in_flight")

    def _read_log(self) -> None:
        log = self.server.log.read_text(encoding="utf-8", errors="replace")
        if "Traceback" in log:
            self.problems.append(f"the log has an exception: {log[log.index('Traceback') :][:2000]}")


def get(server: Server, path: str) -> str:
    """Body of a GET request."""
    with urllib.request.urlopen(server.url + path, timeout=TIMEOUT) as answer:
        return str(answer.read().decode())


def curve(samples: list[Sample], began: float) -> list[tuple[float, float, int, int]]:
    """Minutes, MiB, threads and open files for a plot: the sample with most memory of each group of neighbours."""
    step = -(-len(samples) // soaking.POINTS) or 1
    highest = [max(samples[i : i + step], key=lambda sample: sample.rss) for i in range(0, len(samples), step)]
    return [
        (round((each.at - began) / 60, 3), round(each.rss / 2**20, 1), each.threads, each.files) for each in highest
    ]


def _by_status(answers: Counter[str]) -> Counter[str]:
    statuses: Counter[str] = Counter()
    for key, count in answers.items():
        statuses[key.rpartition(" ")[2]] += count
    return statuses


def main() -> None:
    """Run the soak test, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two seconds, not recorded")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--processes", type=int, default=None, help="client processes (3; in a smoke run 1)")
    parser.add_argument("--clients", type=int, default=6, help="asyncio clients in each process")
    parser.add_argument("--threads", type=int, default=2, help="threaded clients in each process")
    options = parser.parse_args()
    if not Path("/proc/self/status").exists():
        parser.error("the server's memory is read from /proc, which this system does not have")
    if options.processes is None:
        options.processes = 1 if options.smoke else 3
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        results = Soak(options, Path(name), stack).run()
        print(json.dumps({key: value for key, value in results.items() if key != "curve"}, indent=2))
        print(soaking.table(results))
        target = Path(name) / "results" if options.smoke else RESULTS
        record("soak", results, folder=target)
        show(target)
        if results["problems"]:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
