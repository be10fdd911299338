"""``millpond watch``: the program follows a folder, ends by a signal with its code, and goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Run

from millpond.ingest import open_sink

pytest.importorskip("millpond_qdrant")
pytest.importorskip("watchfiles")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{here}/none"], "there is no folder or file at '{here}/none'"),
        (["{here}", "--updated", "at"], "--updated=at is of a table, and "),
        (["{here}", "--metrics", "9400x"], "--metrics=9400x is no address; write HOST:PORT"),
        (["{here}", "--id", "url"], "have no columns"),
        (["{here}", "--dimensions", "16"], "--dimensions=16 cuts"),
    ],
    ids=["source", "updated", "metrics", "id", "width"],
)
def test_a_mistake_makes_no_database(run: Run, model: Path, tmp_path: Path, words: list[str], message: str):
    words = [word.format(here=tmp_path) for word in words]
    done = run("watch", *words, "-m", model, "--to", f"qdrant+path:{tmp_path}/q#docs", code=2)
    assert message.format(here=tmp_path).replace("'", "") in done.err.replace("'", "")
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def program(folder: Path, model: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "millpond", "watch", str(folder), "-m", str(model), *words]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder.parent / "cache")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as one:
        try:
            yield one
        finally:
            one.kill()


@pytest.mark.contract
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["term", "int"])
def test_a_signal_ends_it_and_the_same_command_goes_on(model: Path, tmp_path: Path, free_port: int, number: int):
    folder, url = tmp_path / "f", f"qdrant+path:{tmp_path}/q#docs"
    folder.mkdir()
    (folder / "a.txt").write_text("mill")
    pause = threading.Event()

    def metric(name: str) -> float:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
            return next(float(line.split()[1]) for line in lines if line.startswith(f"millpond_watch_{name} "))
        return -1

    def until(name: str, value: float) -> None:
        while metric(name) != value:
            assert one.poll() is None, one.communicate()
            pause.wait(0.05)

    expected: dict[str, Any] = {}
    for words in (["a.txt", "b.txt"], ["b.txt", "c.txt"]):
        with program(folder, model, "--to", url, "--metrics", f"127.0.0.1:{free_port}", "--grace", "0.2") as one:
            until("passes_total", 1)
            written = metric("rows_written_total")
            assert written == (0 if expected else 1)  # the second time nothing is new
            (folder / words[1]).write_text(words[1])
            until("rows_written_total", written + 1)
            if words[0] == "b.txt":
                (folder / "b.txt").unlink()
                until("rows_deleted_total", 1)
            one.send_signal(number)
            out, err = one.communicate(timeout=60)
        assert one.returncode == 128 + number, err
        assert "Traceback" not in err
        expected = json.loads(out)
        assert expected["stopped"] and expected["written"] == written + 1
    sink: Any = open_sink(url)
    with contextlib.closing(sink):
        assert {record for _, record in sink.scan()} == {"a.txt", "c.txt"}


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
