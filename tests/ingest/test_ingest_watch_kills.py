"""kill -9 of ``millpond watch`` while its source changes: no row is lost, doubled or of another text."""

import os
import random
import signal
import socket
import time
import urllib.request
from contextlib import closing, contextmanager, suppress

import numpy as np
import pytest
from tests.ingest.changing import Folder, Lines, Table
from tests.ingest.postgres import running_server
from tests.ingest.test_ingest_kills import Zygote, alive, computed
from tests.tiny import write_checkpoint

from millpond import Engine
from millpond.ingest import open_sink, point_id

pytestmark = [pytest.mark.contract, pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")]
pytest.importorskip("watchfiles")
DATABASES = {
    "qdrant": ("millpond_qdrant", "qdrant+path:{}/qdrant#docs"),
    "milvus": ("millpond_milvus", "milvus+file:{}/m.db#docs"),
    "lancedb": ("millpond_lancedb", "lancedb+path:{}/l#docs"),
    "pgvector": ("millpond_pgvector", None),
}
KINDS = ["folder", "lines", "table"]
QUICK = [("lines", "qdrant"), ("table", "pgvector")]  # beside those of a folder


@pytest.fixture(scope="module")
def zygote():
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("kills") / "model", "bert")


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, dtype="float32", device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


@pytest.fixture(params=sorted(DATABASES))
def url(request, tmp_path):
    module, pattern = DATABASES[request.param]
    pytest.importorskip(module)
    if pattern is not None:
        return pattern.format(tmp_path)
    return f"pgvector+{request.getfixturevalue('server').schema()}#docs"


def made(kind, place, chance, request):
    """A source of a kind."""
    if kind == "table":
        pytest.importorskip("millpond_pgvector")
        return Table(request.getfixturevalue("server"), chance)
    return {"folder": Folder, "lines": Lines}[kind](place, chance)


@contextmanager
def running(zygote, argv, folder):
    child = zygote.start(argv, folder)
    try:
        yield child
    except BaseException:
        os.kill(child, signal.SIGKILL)
        zygote.wait()
        raise


def check(url, records, engine):
    """Every record of the source is one row with its text, metadata and vector; there is no other row."""
    with closing(open_sink(url)) as sink:
        stored = dict(sink.scan())
        assert sink.count() == len(stored) == sum(1 for _ in sink.scan())
        assert set(stored.values()) == records.keys(), "lost or left over"
        assert set(stored) == {point_id(each) for each in records}
        rows = sink.read_rows(list(stored), widths=[48])
    texts = [record.text for record in records.values()]
    wanted = engine.embed(texts, role="document", normalize=True).embeddings
    for record, vector in zip(records.values(), wanted, strict=True):
        row = rows[point_id(record.id)]
        assert row.text == record.text and row.metadata == record.metadata
        np.testing.assert_allclose(row.vectors[48], vector, atol=1e-5)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def until_idle(port, child):
    """Wait until nothing waits, for a second."""
    quiet = 0
    while quiet < 5:
        assert alive(child)
        time.sleep(0.2)
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            found = dict(line.split() for line in answer.read().decode().splitlines() if line[0] != "#")
            waits = ("oldest_pending_seconds", "waiting_deletions")
            idle = not any(float(found[f"millpond_watch_{name}"]) for name in waits)
            quiet = quiet + 1 if idle and float(found["millpond_watch_passes_total"]) else 0


def torture(zygote, model, url, source, chance, tmp_path, engine, kills):
    """Kill the watcher ``kills`` times while the source changes; then let it catch up, and look at every row."""
    argv = [
        "watch", source.name, *source.options, "--model", str(model), "--to", url, "--engine", "dtype=float32",
        "--engine", "device=cpu", "--journal", str(tmp_path / "journal"), "--cache", str(tmp_path / "cache"),
        "--grace", "0.2", "--sync-max", "1",
    ]  # fmt: skip
    while_writing = 0
    for number in range(kills):
        before = sum(computed(tmp_path))
        # Every other kill follows the first rows that are computed, or some of the next ones; the others come anytime.
        wanted = before + chance.choice([1, 1, 10, 50]) if number % 2 else None
        with running(zygote, argv, tmp_path) as child:
            end = time.monotonic() + (30 if wanted else chance.random() ** 2 * 4)
            while time.monotonic() < end and alive(child):
                for _ in range(chance.randrange(4)):
                    source.change()
                if wanted and sum(computed(tmp_path)) >= wanted:
                    time.sleep(chance.random() * 0.05)  # rows are written, the journal, deletions
                    break
                time.sleep(chance.random() * (0.02 if wanted else 0.2))
            if alive(child):
                os.kill(child, signal.SIGKILL)
            status = zygote.wait()
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            assert killed, (tmp_path / "err").read_text()[-3000:]
        while_writing += sum(computed(tmp_path)) > before
    assert while_writing >= kills // 2
    # The last one follows the last changes, and ends by a signal.
    port = free_port()
    with running(zygote, [*argv, "--metrics", f"127.0.0.1:{port}"], tmp_path) as child:
        until_idle(port, child)
        for _ in range(5):
            source.change()
        source.settle()
        until_idle(port, child)
        os.kill(child, signal.SIGTERM)
        status = zygote.wait()
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 143, (tmp_path / "err").read_text()[-3000:]
    records = source.records()
    check(url, records, engine)
    print(f"{kills} kills, {while_writing} of them after rows were computed; {len(records)} rows, all right")


@pytest.mark.parametrize(
    ("kind", "url"),
    [
        pytest.param(kind, name, marks=() if kind == "folder" or (kind, name) in QUICK else pytest.mark.slow)
        for name in sorted(DATABASES)
        for kind in KINDS
    ],
    indirect=["url"],
)
def test_two_kills_lose_and_double_nothing(zygote, model, url, tmp_path, engine, kind, request):
    chance = random.Random(1)
    torture(zygote, model, url, made(kind, tmp_path, chance, request), chance, tmp_path, engine, 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_kills_lose_and_double_nothing(zygote, model, url, tmp_path, engine, kind, request):
    chance = random.Random(2)
    torture(zygote, model, url, made(kind, tmp_path, chance, request), chance, tmp_path, engine, 50)
