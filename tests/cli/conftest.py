"""The program ``millpond``, run in this process, and the models that its commands load."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.tiny import Layout
from tests.tiny.heads import write_cross_encoder, write_stanford
from typer.main import get_command

from millpond.cli.app import app, main
from millpond.cli.demo.stdlib_docs import read_stdlib
from millpond.ingest import Record

FLOAT32 = ("--engine", "dtype=float32", "--engine", "device=cpu")
FORCED = ("--engine", 'hf_overrides={"is_matryoshka": true}')


PROGRAM = get_command(app)


class Finished(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Finished]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the program in this process, which has imported torch already."""

    def run(*words: object, stdin: str | bytes = "", code: int | None = None) -> Finished:
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "argv", ["millpond", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
        monkeypatch.setenv("COLUMNS", "200")
        ended = 0
        try:
            main()
        except SystemExit as end:
            ended = end.code if isinstance(end.code, int) else int(end.code is not None)
        done = Finished(ended, *capsys.readouterr())
        assert "Traceback" not in done.err
        assert code in (None, ended), done.out + done.err
        return done

    return run


@pytest.fixture(scope="session")
def model(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("bert", sentence_transformers=Layout(prompts={"query": "find: ", "document": "keep: "}))


@pytest.fixture(scope="session")
def cross(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of(write_cross_encoder)


@pytest.fixture(scope="session")
def colbert(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of(write_stanford)


@pytest.fixture(scope="session")
def records() -> list[Record]:
    """The docstrings of this Python's standard library."""
    return read_stdlib()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output is a terminal for rich."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
