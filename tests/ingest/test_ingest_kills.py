"""kill -9, SIGTERM and SIGINT at random moments of ``millpond ingest``: nothing is lost, nothing is doubled."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.tiny import write_checkpoint

from millpond import Engine
from millpond.ingest import open_sink, point_id

ROWS = 5000
ZYGOTE = Path(__file__).with_name("zygote.py")
DATABASES = {
    "qdrant": ("millpond_qdrant", "qdrant+path:{}/qdrant#docs"),
    "milvus": ("millpond_milvus", "milvus+file:{}/m.db#docs"),
}
# Rows that may wait for the cache, beside a batch for each thread that computes (docs/ingest.md).
WAITING = 64

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")]


class Zygote:
    """Starts runs; see zygote.py."""

    def __init__(self):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # the parent of forks has one thread
        self.process = subprocess.Popen(
            [sys.executable, str(ZYGOTE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def start(self, argv, folder, stdin=os.devnull):
        order = {"argv": argv, "log": str(folder / "computed"), "err": str(folder / "err"), "stdin": str(stdin)}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def wait(self):
        return int(self.process.stdout.readline())

    def close(self):
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def zygote():
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("kills") / "model", "bert")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """5,000 records with distinct texts, as JSONL."""
    path = tmp_path_factory.mktemp("kills") / "source.jsonl"
    lines = (json.dumps({"id": f"r{n}", "text": f"{n} " + "stone " * (n % 7), "n": n}) for n in range(ROWS))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(params=sorted(DATABASES))
def database(request):
    module, url = DATABASES[request.param]
    pytest.importorskip(module)
    return url


def command(source, model, url, folder, *more):
    return [
        "ingest", str(source), "--model", str(model), "--to", url.format(folder), "--engine", "dtype=float32",
        "--engine", "device=cpu", "--cache", str(folder / "cache.db"), "--journal", str(folder / "journal"), *more,
    ]  # fmt: skip


def computed(folder):
    log = folder / "computed"
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def kill_until_done(zygote, argv, folder, chance, kills, signals=(signal.SIGKILL,)):
    """Run a command again and again; kill it at random moments, ``kills`` times at most. Returns the kills."""
    done = 0
    while True:
        before = sum(computed(folder))
        child = zygote.start(argv, folder)
        if done < kills:
            # Half of the kills after a number of computed rows, the others after a time: at start-up, too, and while
            # what is written is skipped.
            if chance.random() < 0.5:
                until = before + chance.randrange(1, ROWS // 2)
                while sum(computed(folder)) < until and alive(child):
                    time.sleep(0.002)
                time.sleep(chance.random() * 0.1)
            else:
                time.sleep(chance.random() ** 2 * 3)
            number = chance.choice(signals)
            with suppress(ProcessLookupError):  # it has ended
                os.kill(child, number)
            status = zygote.wait()
            if os.WIFSIGNALED(status):
                assert os.WTERMSIG(status) == signal.SIGKILL
                done += 1
                continue
            code = os.WEXITSTATUS(status)
            if code == 128 + number:
                done += 1
                continue
            assert code == 0, (folder / "err").read_text()[-3000:]
            return done
        status = zygote.wait()
        assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0, (folder / "err").read_text()[-3000:]
        return done


def alive(child):
    try:
        return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def check(url, folder, model):
    """Every row is there once, with the engine's vector."""
    sink = open_sink(url.format(folder), dimensions=None)
    try:
        ids = [row_id for row_id, _ in sink.scan()]
        assert sink.count() == len(ids) == len(set(ids)) == ROWS
        assert set(ids) == {point_id(f"r{n}") for n in range(ROWS)}
        stored = sink.fetch(ids, widths=[48])
    finally:
        sink.close()
    with Engine(model, dtype="float32", device="cpu") as engine:
        texts = [f"{n} " + "stone " * (n % 7) for n in range(ROWS)]
        wanted = engine.embed(texts, role="document", normalize=True).embeddings
    found = np.stack([stored[point_id(f"r{n}")].vectors[48] for n in range(ROWS)])
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def torture(zygote, source, model, url, folder, chance, kills):
    """One ingest with some kills; returns how many there were."""
    argv = command(source, model, url, folder)
    done = kill_until_done(zygote, argv, folder, chance, kills)
    check(url, folder, model)
    batches = computed(folder)
    twice = sum(batches) - ROWS
    assert 0 <= twice <= done * (WAITING + max(batches)), (twice, done, max(batches))
    print(f"{done} kills, {twice} rows computed twice, the largest batch {max(batches)}")
    return done


@pytest.mark.timeout(3600)
def test_a_hundred_kills_lose_and_double_nothing(zygote, source, model, database, tmp_path):
    chance, kills, number = random.Random(2), 0, 0
    while kills < 100:
        folder = tmp_path / str(number)
        folder.mkdir()
        kills += torture(zygote, source, model, database, folder, chance, min(chance.randrange(1, 12), 100 - kills))
        number += 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["term", "int"])
def test_signals_at_random_moments_end_with_their_code_and_the_next_run_goes_on(
    zygote, source, model, database, tmp_path, number
):
    kill_until_done(zygote, command(source, model, database, tmp_path), tmp_path, random.Random(3), 4, (number,))
    check(database, tmp_path, model)
    assert sum(computed(tmp_path)) == ROWS  # nothing twice: what was computed is kept


@pytest.mark.parametrize(("number", "lines"), [(signal.SIGTERM, 0), (signal.SIGINT, 1), (signal.SIGTERM, 700)])
def test_a_signal_while_standard_input_stands_still_ends_the_run(zygote, source, model, tmp_path, number, lines):
    pytest.importorskip("millpond_qdrant")
    url = DATABASES["qdrant"][1]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    texts = source.read_text().splitlines(keepends=True)
    argv = command("-", model, url, tmp_path)
    child = zygote.start(argv, tmp_path, stdin=pipe)
    with open(pipe, "w") as writer:
        writer.write("".join(texts[:lines]))
        writer.flush()
        # The run reads on: before that its handlers may not be there, and afterwards it waits.
        while alive(child) and "journal" not in {path.name for path in tmp_path.iterdir()}:
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(child, number)
        status = zygote.wait()
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 128 + number, (tmp_path / "err").read_text()[-3000:]
    assert "Traceback" not in (tmp_path / "err").read_text()
    zygote.start(command(source, model, url, tmp_path), tmp_path)
    assert os.WEXITSTATUS(zygote.wait()) == 0
    check(url, tmp_path, model)
