"""A storm: a server of every kind of model in its own process, several clients with invalid requests, and its figures.

``make fuzz`` runs it with the other fuzzers; MILLPOND_STORM is the number of requests.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml
from tests.server.mutations import BODIES, MODELS, Mutant, mutants

PATIENCE = 300.0  # seconds; whatever takes longer hangs
REQUESTS = int(os.environ.get("MILLPOND_STORM", "40000"))
CLIENTS = 4
STAGES = 8  # after each of which the memory is read
# Not those that change an index: they take a key, and more documents take more memory.
PATHS = [path for path in BODIES if "/drafts/" not in path]
# 501 is vLLM's word for a model that does not serve the route.
ANSWERS = {"200", "400", "404", "413", "415", "501"}
# From the middle to the end. The allocator keeps what the largest requests took, in one arena here, so that no thread
# adds one of its own; a leak of 4 KiB a request would be more.
GROWTH = 64.0  # MiB


@dataclass(kw_only=True)
class Figures:
    """The answers."""

    statuses: Counter[str] = field(default_factory=Counter)
    longest: tuple[float, str] = (0.0, "")
    odd: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, status: str, seconds: float, told: str) -> None:
        with self.lock:
            self.statuses[status] += 1
            self.longest = max(self.longest, (seconds, told))
            if status not in ANSWERS:
                self.odd.append(f"{status}: {told}")


@pytest.fixture(scope="module")
def process(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """The server, its address and its log."""
    folder = tmp_path_factory.mktemp("storm")
    models = {name: {"model": str(request.getfixturevalue(name))} for name in MODELS}
    settings = {"dtype": "float32", "models": models, "index": list(request.getfixturevalue("indexes"))}
    (folder / "server.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    words = ["serve", "--config", str(folder / "server.yaml"), "--port", "0", "--disable-log-requests"]
    log = folder / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "millpond", *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        )
    assert process.stdout is not None
    try:
        description = list(itertools.takewhile(lambda line: not line.startswith("every route"), process.stdout))
        assert description and process.poll() is None, log.read_text()
        yield process, description[0].split()[2], log
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)


def resident(process: subprocess.Popen[str]) -> float:
    """MiB of memory."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def numbers(address: str) -> list[np.ndarray]:
    """All numbers and base64 strings in the answers to valid requests."""
    values = []
    with httpx.Client(base_url=address, timeout=PATIENCE, trust_env=False) as client:
        for path in PATHS:
            for body in BODIES[path]:
                answer = client.post(path, json=body)
                assert answer.status_code == 200, (path, body, answer.text)
                if "json" in answer.headers["content-type"]:
                    values.append(np.array(list(_floats(answer.json()))))
    return values


def _floats(value: object) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _floats(part)


def send(client: httpx.Client, mutant: Mutant) -> str:
    headers = [(name.encode(), value.encode()) for name, value in mutant.headers.items()]
    return str(client.post(mutant.path, content=mutant.body, headers=headers).status_code)


def storm(address: str, figures: Figures, *, seed: int, count: int) -> None:
    """``count`` requests of one client, over all routes."""
    sent = [mutants(path, -(-count // len(PATHS)), seed=seed) for path in PATHS]
    with httpx.Client(base_url=address, timeout=PATIENCE, trust_env=False) as client:
        for number in range(count):
            mutant = next(sent[number % len(PATHS)])
            begun = time.perf_counter()
            try:
                status = send(client, mutant)
            except Exception as error:  # figures.odd has it, and the test fails by that
                status = repr(error)
            figures.note(status, time.perf_counter() - begun, f"{mutant.path} {mutant.body[:300]!r}")


def together(*works: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_storm(process: tuple[subprocess.Popen[str], str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    server, address, log = process
    before = numbers(address)
    figures, health, over = Figures(), [0.0], threading.Event()
    memory = [resident(server)]

    def look() -> None:
        with httpx.Client(base_url=address, timeout=PATIENCE, trust_env=False) as client:
            while not over.wait(0.05):
                begun = time.perf_counter()
                assert client.get("/health").status_code == 200
                health.append(time.perf_counter() - begun)

    watch = threading.Thread(target=look)
    watch.start()
    begun = time.perf_counter()
    for stage in range(STAGES):
        share = REQUESTS // STAGES // CLIENTS
        seeds = range(stage * CLIENTS, (stage + 1) * CLIENTS)
        together(*(partial(storm, address, figures, seed=seed, count=share) for seed in seeds))
        memory.append(resident(server))
    seconds = time.perf_counter() - begun
    over.set()
    watch.join()
    with capsys.disabled():
        print(
            f"\n{sum(figures.statuses.values())} requests: {dict(figures.statuses.most_common())}"
            f"\n{seconds:.0f} s; the longest answer {figures.longest[0]:.2f} s ({figures.longest[1][:120]})"
            f"\n/health meanwhile: {len(health)} times, median {statistics.median(health) * 1e3:.1f} ms, "
            f"longest {max(health) * 1e3:.0f} ms"
            f"\nmemory before and after each eighth: {', '.join(f'{each:.0f}' for each in memory)} MiB"
        )
    assert figures.odd == []
    assert figures.statuses["200"] > REQUESTS / 5 and figures.statuses["400"] > REQUESTS / 5
    after = numbers(address)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    written = log.read_text()
    assert "ERROR" not in written and "Traceback" not in written, written[-5000:]
    assert memory[-1] - memory[STAGES // 2] < GROWTH, memory
