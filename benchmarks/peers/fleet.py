"""The engines' processes, which are measured in turns."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from peers.engines import Competitor
from peers.environments import Environments, UnavailableError

PROCESS = Path(__file__).with_name("process.py")
BATCH_SIZES = (8, 16, 32, 64, 128, 256)


class PeerError(Exception):
    """A request failed, or the engine's process ended."""


class Peer:
    """One engine's process."""

    def __init__(self, competitor: Competitor, python: str, log: Path) -> None:
        self.competitor = competitor
        self.began = time.perf_counter()
        self.log = log
        with log.open("a", encoding="utf-8") as errors:
            # -P: the modules beside process.py must not shadow the engine's imports.
            self.process = subprocess.Popen(
                [python, "-P", str(PROCESS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true", **competitor.environ},
            )

    def send(self, do: str, **arguments: Any) -> None:
        """Send a request."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise PeerError(self._last_words()) from error

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to the oldest unanswered request."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise PeerError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        self.send(do, **arguments)
        return self.answer()

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):  # the process may have ended
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"its process ended with {self.process.wait()}: {lines[-1][:300] if lines else 'nothing was said'}"


class Fleet:
    """Engines with a model loaded for one task. An engine that fails is left out, with the reason.

    Args:
        competitors: The engines.
        environments: Their virtual environments.
        folder: A folder for inputs, results and logs.
        left_out: Collects the reasons, by engine name.
    """

    def __init__(
        self,
        competitors: Iterable[Competitor],
        environments: Environments,
        folder: Path,
        left_out: dict[str, str],
    ) -> None:
        self.environments = environments
        self.folder = folder
        self.left_out = left_out
        self.competitors = list(competitors)
        self.peers: dict[str, Peer] = {}
        self.batches: dict[str, int | None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self.peers.values():
            peer.close()
        self.peers.clear()

    def start(self, competitor: Competitor) -> Peer:
        """Start a new process, which does not join the fleet.

        Raises:
            UnavailableError: Its environment cannot be created.
        """
        python = self.environments.python(competitor.environment)
        return Peer(competitor, python, self.folder / f"{competitor.name}.log")

    def load(self, task: str, folder_of: Callable[[Competitor, Fleet], Path], **options: Any) -> None:
        """Load a model for ``task`` into every engine, one after the other, because loading uses all cores.

        ``folder_of`` returns the model's folder for a competitor; ``options`` are additional load options by family.
        """
        for competitor in self.competitors:
            if task not in competitor.tasks:
                continue
            try:
                model = folder_of(competitor, self)
                peer = self.peers.get(competitor.name) or self.start(competitor)
                self.peers[competitor.name] = peer
                loaded = peer.ask(
                    "load",
                    family=competitor.family,
                    task=task,
                    model=str(model),
                    options={**competitor.options, **options.get(competitor.family, {})},
                )
                took = loaded["import_seconds"] + loaded["load_seconds"]
                print(f"  {competitor.name} loaded in {took:.1f} s", flush=True)
            except (PeerError, UnavailableError) as error:
                self.drop(competitor.name, str(error))
        for name in [name for name, peer in self.peers.items() if task not in peer.competitor.tasks]:
            self.peers.pop(name).close()

    def drop(self, name: str, reason: str) -> None:
        """Leave an engine out from now on, and record the reason."""
        print(f"  without {name}: {reason}", flush=True)
        self.left_out[name] = reason
        if name in self.peers:
            self.peers.pop(name).close()

    def each(self, request: Callable[[Peer], Any]) -> dict[str, Any]:
        """Send the request to every engine, one after the other; their answers by name."""
        answers = {}
        for name, peer in list(self.peers.items()):
            try:
                answers[name] = request(peer)
            except PeerError as error:
                self.drop(name, str(error))
        return answers

    def turns(self, rounds: int, request: Callable[[Peer, int], Any]) -> dict[str, list[Any]]:
        """``rounds`` answers of every engine, in turns; the order of the engines is shuffled in each round."""
        answers: dict[str, list[Any]] = {name: [] for name in self.peers}
        for number in range(rounds):
            names = list(self.peers)
            random.Random(number).shuffle(names)
            for name in names:
                try:
                    answers[name].append(request(self.peers[name], number))
                except PeerError as error:
                    self.drop(name, str(error))
                    del answers[name]
        return answers

    def search_batches(self, inputs: str, *, sizes: Sequence[int] = BATCH_SIZES) -> None:
        """Find the fastest batch size of each engine that takes one."""
        for name, peer in list(self.peers.items()):
            self.batches[name] = None
            if not peer.competitor.searches:
                continue
            if len(sizes) == 1:
                self.batches[name] = sizes[0]
                continue
            try:
                peer.ask("run", inputs=inputs, batch=sizes[-1])  # warm-up
                timed = {size: self._best(peer, inputs, size) for size in sizes}
            except PeerError as error:
                self.drop(name, str(error))
                continue
            self.batches[name] = min(timed, key=lambda size: timed[size])

    def _best(self, peer: Peer, inputs: str, size: int) -> float:
        """The shortest of three passes; fewer passes if they take a second."""
        times: list[float] = []
        while len(times) < 3 and sum(times) < 1:
            times.append(peer.ask("run", inputs=inputs, batch=size)["seconds"])
        return min(times)

    def results(self, inputs: str) -> dict[str, dict[str, Any]]:
        """Each engine's result arrays for ``inputs``. The pass also warms it up."""
        results = {}
        for name in self.each(
            lambda peer: peer.ask("run", inputs=inputs, batch=self.batches.get(peer.competitor.name))
        ):
            path = self.folder / f"{name}.npz"
            self.peers[name].ask("save", path=str(path))
            with np.load(path) as arrays:
                results[name] = {key: arrays[key] for key in arrays.files}
        return results

    def write(self, name: str, inputs: Any) -> str:
        """Write a file of inputs for requests; its path."""
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(inputs), encoding="utf-8")
        return str(path)


def seconds(answers: Iterable[Mapping[str, float]]) -> list[float]:
    """The measured seconds of each answer."""
    return [answer["seconds"] for answer in answers]
