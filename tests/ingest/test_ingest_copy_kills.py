"""kill -9 at random moments of a copy: after the last one every row is there, once and as it was."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ingest.copied import address, fill, same

from millpond.ingest import open_sink
from millpond.testing import WordEngine

CHILD = Path(__file__).with_name("copy_child.py")
ROWS = 1500  # fifteen writes
TARGETS = ["qdrant", "milvus", "lancedb", "pgvector"]

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The URL of 1,500 rows in a folder of LanceDB, from which several processes may read."""
    pytest.importorskip("millpond_lancedb")
    url = f"lancedb+path:{tmp_path_factory.mktemp('source')}/l#docs"
    fill(url, ROWS, spec=WordEngine().spec).close()
    return url


def run(source, target, write, seed):
    """The child's exit status, and what it printed."""
    command = [sys.executable, str(CHILD), source, target, str(write), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode, done.stdout.split()


def torture(source, target, kills, chance):
    """Copy to one target until so many copies were killed, or one was not in time."""
    killed = 0
    while killed < kills:
        code, _ = run(source, target, chance.randrange(4), chance.randrange(10**9))
        if code == 0:
            break
        killed += 1
    code, (written, unchanged, good) = run(source, target, -1, 0)
    assert code == 0 and good == "True" and int(written) + int(unchanged) == ROWS
    sinks = [open_sink(url) for url in (source, target)]
    assert [sink.count() for sink in sinks] == [ROWS, ROWS]
    same(*sinks)
    for sink in sinks:
        sink.close()
    return killed, int(unchanged)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no SIGKILL on this system")
@pytest.mark.parametrize("name", TARGETS)
def test_a_kill_loses_and_doubles_nothing(request, tmp_path, source, name):
    killed, unchanged = torture(source, address(request, name, tmp_path), 1, random.Random(1))
    assert killed == 1 and unchanged > 0  # what was written before was left out


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TARGETS)
def test_fifty_kills_lose_and_double_nothing(request, tmp_path, source, name):
    chance, killed, number = random.Random(2), 0, 0
    while killed < 50:
        (folder := tmp_path / str(number)).mkdir()
        killed += torture(source, address(request, name, folder), min(chance.randrange(1, 6), 50 - killed), chance)[0]
        number += 1
