"""kill -9 of ``millpond watch`` while a folder changes: no row is lost, doubled or of another text."""

import os
import random
import signal
import socket
import time
import urllib.request
from contextlib import closing, contextmanager, suppress

import numpy as np
import pytest
from tests.ingest.postgres import running_server
from tests.ingest.test_ingest_kills import Zygote, alive
from tests.tiny import write_checkpoint

from millpond import Engine
from millpond.ingest import open_sink, point_id, read

pytestmark = [pytest.mark.contract, pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")]
pytest.importorskip("watchfiles")
FILES = 60
DATABASES = {
    "qdrant": ("millpond_qdrant", "qdrant+path:{}/qdrant#docs"),
    "milvus": ("millpond_milvus", "milvus+file:{}/m.db#docs"),
    "lancedb": ("millpond_lancedb", "lancedb+path:{}/l#docs"),
    "pgvector": ("millpond_pgvector", None),
}


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


def text_of(chance):
    sections = "".join(f"## S{number}\nstone {chance.random()}\n\n" for number in range(chance.randrange(1, 5)))
    return f"# Mill\n{sections}"


def change(folder, chance):
    """One change of the folder, as people and programs make them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    kind = chance.randrange(6)
    if kind == 0 and len(files) > FILES // 2:
        chance.choice(files).unlink()
    elif kind == 1:
        os.rename(path := chance.choice(files), path.with_name(f"moved{chance.getrandbits(40)}{path.suffix}"))
    elif kind == 2:
        new = folder / ".new"
        new.write_text(text_of(chance))
        os.replace(new, chance.choice(files))
    elif kind == 3 and (inner := [path for path in folder.iterdir() if path.is_dir()]):
        os.rename(chance.choice(inner), folder / f"dir{chance.getrandbits(40)}")
    elif kind == 4:
        (below := folder / f"dir{chance.getrandbits(40)}").mkdir(exist_ok=True)
        (below / f"new{chance.randrange(1000)}.md").write_text(text_of(chance))
    else:
        chance.choice(files).write_text(text_of(chance))


@contextmanager
def running(zygote, argv, folder):
    child = zygote.start(argv, folder)
    try:
        yield child
    except BaseException:
        os.kill(child, signal.SIGKILL)
        zygote.wait()
        raise


def expected(folder):
    return {record.id: record for record in read(folder)}


def check(url, folder, engine):
    """Every record of the folder is one row with its text, metadata and vector; there is no other row."""
    records = expected(folder)
    with closing(open_sink(url)) as sink:
        ids = [row_id for row_id, _ in sink.scan()]
        assert sink.count() == len(ids) == len(set(ids))
        assert set(ids) == {point_id(each) for each in records}, (
            "lost or left over",
            {each for _, each in sink.scan()} ^ records.keys(),
        )
        rows = sink.read_rows(ids, widths=[48])
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


def torture(zygote, model, url, tmp_path, engine, kills, seed):
    """Kill the watcher ``kills`` times while the folder changes; then let it catch up, and look at every row."""
    chance, folder = random.Random(seed), tmp_path / "f"
    folder.mkdir()
    for number in range(FILES):
        (folder / f"a{number}.md").write_text(text_of(chance))
    argv = [
        "watch", str(folder), "--model", str(model), "--to", url, "--engine", "dtype=float32", "--engine", "device=cpu",
        "--journal", str(tmp_path / "journal"), "--grace", "0.2", "--sync-max", "1",
    ]  # fmt: skip
    for _ in range(kills):
        with running(zygote, argv, tmp_path) as child:
            end = time.monotonic() + chance.random() ** 2 * 4
            while time.monotonic() < end and alive(child):
                for _ in range(chance.randrange(4)):
                    change(folder, chance)
                time.sleep(chance.random() * 0.2)
            if alive(child):
                os.kill(child, signal.SIGKILL)
            status = zygote.wait()
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (tmp_path / "err").read_text()[
                -3000:
            ]
    # The last one follows the last changes, and ends by a signal.
    port = free_port()
    with running(zygote, [*argv, "--metrics", f"127.0.0.1:{port}"], tmp_path) as child:
        until_idle(port, child)
        for _ in range(5):
            change(folder, chance)
        until_idle(port, child)
        os.kill(child, signal.SIGTERM)
        status = zygote.wait()
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 143, (tmp_path / "err").read_text()[-3000:]
    check(url, folder, engine)


def test_two_kills_lose_and_double_nothing(zygote, model, url, tmp_path, engine):
    torture(zygote, model, url, tmp_path, engine, 2, 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills_lose_and_double_nothing(zygote, model, url, tmp_path, engine):
    torture(zygote, model, url, tmp_path, engine, 50, 2)
