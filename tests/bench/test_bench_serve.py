"""`millpond bench-serve`, against the real server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.server.conftest import running

from millpond.cli.app import main
from millpond.server.served.models import ServedModels
from millpond.server.settings.config import ModelConfig, ServerConfig

TEXTS = ["still water", "a mill", "the wheel turns", "grain", "flour, and bread of it"]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def command(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["millpond", "bench-serve", *map(str, words)])
        code: object = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return int(code or 0) if isinstance(code, int | None) else 1, out, err

    return command


@pytest.fixture(scope="module")
def address(embedder: Path) -> Iterator[str]:
    with running(ServedModels.load([ModelConfig(model=str(embedder), names=("tiny",))])) as url:
        yield url


def test_the_command_measures_our_server(command: Callable[..., tuple[int, str, str]], address: str, tmp_path: Path):
    texts, figures = tmp_path / "texts.txt", tmp_path / "figures.json"
    texts.write_text("\n".join(TEXTS), encoding="utf-8")
    words = [address, "--texts", texts, "-n", 3, "-c", 2, "--requests", 12, "--warm-up", 0]
    code, out, err = command(*words, "--output", "json", "-o", figures)
    found = json.loads(out)
    assert code == 0 and not err  # and no bar: standard error is no terminal
    assert found == json.loads(figures.read_text(encoding="utf-8"))
    assert (found["requests"], found["failed"], found["model"], found["api"]) == (12, 0, "tiny", "embeddings")
    assert found["tokens_per_second"] > 0
    code, out, err = command(*words, "--words", 1, "--rate", 300)
    assert code == 0 and not err and "texts/s" in out and "300 requests/s" in out


def test_the_command_sends_the_documentation_of_python_by_default(
    command: Callable[..., tuple[int, str, str]], address: str, tmp_path: Path
):
    words = [address, "-n", 2, "--requests", 4, "--warm-up", 0, "--output", "json"]
    code, out, _ = command(*words, "--truncate-prompt-tokens", -1)
    assert code == 0 and json.loads(out)["distinct_requests"] > 1000
    texts = tmp_path / "texts.txt"
    texts.write_text("mill " * 99, encoding="utf-8")
    code, out, err = command(*words, "--texts", texts)  # the model reads 64 tokens
    assert code == 1 and "maximum context length" in out + err


def test_the_command_says_what_is_wrong(command: Callable[..., tuple[int, str, str]], address: str, tmp_path: Path):
    empty = tmp_path / "empty.txt"
    empty.write_text("\n", encoding="utf-8")
    assert command(address, "--texts", empty)[0] == 2
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS), encoding="utf-8")
    code, _, err = command(address, "--texts", texts, "--model", "another", "--words", 3)
    assert code == 1 and "404" in err and "another" in err
    code, _, err = command(address, "--output-file", tmp_path / "nowhere" / "x.json")
    assert code == 2 and "no folder" in err


def test_the_command_sends_the_key_of_its_environment(
    command: Callable[..., tuple[int, str, str]], embedder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS), encoding="utf-8")
    models = ServedModels.load([ModelConfig(model=str(embedder), names=("tiny",))])
    with running(models, ServerConfig(api_keys=("open sesame",))) as url:
        words = [url, "--texts", texts, "--requests", 2, "--warm-up", 0]
        code, _, err = command(*words)
        assert code == 1 and "401" in err
        monkeypatch.setenv("MILLPOND_API_KEY", "open sesame")
        assert command(*words)[0] == 0
