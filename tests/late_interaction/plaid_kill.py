"""Kill a writer of an index at random moments, again and again, while other processes read; a program of its own too.

    python -m tests.late_interaction.plaid_kill --kills 200

The writer adds, replaces, deletes and compacts, and tells each change before and after it. After every kill, what was
acknowledged must be there; the change in between is there as a whole or not at all; readers must never have failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
from tests.late_interaction.plaid_data import WIDTH, maxsim

from millpond.late_interaction import PlaidIndex, Ragged

IDS = 60
READERS = 2
# Documents and the version of each.
State = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What happened.

    Attributes:
        kills: Writers that were killed.
        changes: Changes that were acknowledged.
        in_flight: Kills by the kind of change that was under way; ``""`` between two changes.
        applied: Kills whose change under way was found complete.
        orphans: Files that killed writers left, and the next opening swept.
        searches: Searches of the readers.
    """

    kills: int
    changes: int
    in_flight: dict[str, int]
    applied: int
    orphans: int
    searches: int


def rows(id: str, version: int) -> npt.NDArray[np.float32]:
    """The token rows of a version of a document."""
    random = np.random.default_rng([*id.encode(), version])
    return random.normal(size=(int(random.integers(1, 12)), WIDTH)).astype(np.float32)


def change(random: np.random.Generator, version: int) -> tuple[str, list[str], int]:
    """A change: its kind, its ids and the version that it gives them."""
    kind = str(random.choice(["add", "add", "add", "delete", "compact"]))
    count = 0 if kind == "compact" else int(random.integers(1, 25 if kind == "add" else 12))
    ids = [f"d{number}" for number in random.choice(IDS, size=count, replace=False)]
    return kind, ids, version


def applied(state: State, kind: str, ids: list[str], version: int) -> State:
    """The state after a change."""
    if kind == "add":
        return {**state, **dict.fromkeys(ids, version)}
    return {id: stored for id, stored in state.items() if kind != "delete" or id not in ids}


def write(path: Path, seed: int, version: int, pipe: int) -> None:
    """Change the index until killed."""
    random = np.random.default_rng(seed)
    index = PlaidIndex(path, None)
    while True:
        version += 1
        kind, ids, _ = change(random, version)
        os.write(pipe, (json.dumps(["begin", kind, ids, version]) + "\n").encode())
        if kind == "add":
            index.add_embeddings(
                ids,
                Ragged.from_matrices([rows(id, version) for id in ids], width=WIDTH),
                texts=[f"{id} {version}" for id in ids],
                metadata=[{"version": version} for _ in ids],
            )
        elif kind == "delete":
            index.delete(ids)
        else:
            index.compact()
        os.write(pipe, (json.dumps(["done", kind, ids, version]) + "\n").encode())


def read(path: Path, seed: int, pipe: int) -> None:
    """Search until killed, by an index that stays open and by one opened anew."""
    random = np.random.default_rng(seed)
    index = PlaidIndex(path, None)
    while True:
        if random.random() < 0.3:
            index = PlaidIndex(path, None)
        query = random.normal(size=(5, WIDTH)).astype(np.float32)
        for exact in (True, False):
            check_hits(index, query, exact=exact)
        os.write(pipe, b".")


def check_hits(index: PlaidIndex, query: npt.NDArray[np.float32], *, exact: bool) -> State:
    """Search for all documents: each hit must be one version of one document, whole."""
    hits = index.search_embeddings(Ragged.from_matrices([query], width=WIDTH), k=2 * IDS, exact=exact)[0]
    assert len({hit.id for hit in hits}) == len(hits)
    for hit in hits:
        version = hit.metadata["version"]
        assert hit.text == f"{hit.id} {version}"
        expected = maxsim(query, rows(hit.id, version))
        assert abs(hit.score - expected) < 0.08 * len(query), (hit, expected)
    return {hit.id: hit.metadata["version"] for hit in hits}


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Run ``work(pipe)`` in a child; returns its process id and the pipe to read."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    try:
        os.close(reading)
        work(writing)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def stop(child: int) -> int:
    """Kill a child; returns the signal that ended it, 0 if it had ended by itself."""
    os.kill(child, signal.SIGKILL)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def run(path: Path, *, kills: int, seed: int = 0) -> Outcome:
    """Kill ``kills`` writers.

    Raises:
        AssertionError: Something was lost, half visible or left over, or a reader or writer failed.
    """
    random = np.random.default_rng(seed)
    with PlaidIndex(path, None, "4"):
        pass
    state: State = {}
    version = changes = complete = orphans = searches = 0
    in_flight: dict[str, int] = {}
    readers = [forked(lambda pipe, seed=number: read(path, seed, pipe)) for number in range(READERS)]  # type: ignore[misc]
    try:
        for kill in range(kills):
            child, pipe = forked(lambda pipe, seed=kill, version=version: write(path, seed, version, pipe))  # type: ignore[misc]
            with os.fdopen(pipe) as lines:
                told = [json.loads(lines.readline())]  # it has opened the index
                time.sleep(float(random.exponential(0.2)))
                assert stop(child) == signal.SIGKILL, "the writer failed"
                told += [json.loads(line) for line in lines if line.endswith("\n")]
            state, possible = outcome(state, told)
            changes += sum(entry[0] == "done" for entry in told)
            version = told[-1][3]
            kind = told[-1][1] if told[-1][0] == "begin" else ""
            in_flight[kind] = in_flight.get(kind, 0) + 1

            before = files(path)
            index = PlaidIndex(path, None)
            used = index._refresh().manifest.names() | {"CURRENT", "LOCK"}
            orphans += len(before - used)
            deadline = time.monotonic() + 20
            while files(path) != used:  # a reader that opens the index now may be sweeping
                assert time.monotonic() < deadline, f"orphans were not swept: {files(path) - used}"
                PlaidIndex(path, None)
            assert index.check() == []
            found = check_hits(index, random.normal(size=(4, WIDTH)).astype(np.float32), exact=True)
            assert found == state or (possible is not None and found == possible), (found, state, possible)
            assert set(index.ids()) == set(found) and len(index) == len(found)
            complete += possible is not None and found == possible != state
            state = found
            for reader, _ in readers:
                assert os.waitpid(reader, os.WNOHANG) == (0, 0), "a reader failed"
    finally:
        for reader, pipe in readers:
            stop(reader)
            with os.fdopen(pipe, "rb") as progress:
                searches += len(progress.read())
    assert searches > 0, "no reader has read"
    return Outcome(
        kills=kills, changes=changes, in_flight=in_flight, applied=complete, orphans=orphans, searches=searches
    )


def outcome(state: State, told: list[list[Any]]) -> tuple[State, State | None]:
    """The state of what was acknowledged, and the one with the change that was under way."""
    for what, kind, ids, version in told:
        if what == "done":
            state = applied(state, kind, ids, version)
    what, kind, ids, version = told[-1]
    return state, applied(state, kind, ids, version) if what == "begin" else None


def files(path: Path) -> set[str]:
    """The names in a folder."""
    return set(os.listdir(path))


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with (
        mock.patch("millpond.late_interaction.plaid.compaction.TRAIN_TOKENS", 200),
        tempfile.TemporaryDirectory() as folder,
    ):
        print(run(Path(folder) / "index", kills=options.kills, seed=options.seed))


if __name__ == "__main__":
    main()
