"""``millpond explain``: of an index, of a file, of standard input, as a heat map, a table and a page."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import FLOAT32, Finished, Run

from millpond import Engine
from millpond.late_interaction import MemoryIndex, PlaidIndex, TokenMatch

QUERY = "who sells flour?"
TEXT = "The miller sells flour.\n\tA wheel <turns> 🌊 at dusk."


@pytest.fixture(scope="module")
def folder(engine_of: Callable[..., Engine], colbert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "docs.index"
    with PlaidIndex(path, engine_of(colbert)) as index:
        index.add(["flour", "pond"], [TEXT, "The pond is deep."])
    return path


@pytest.fixture(scope="module")
def expected(engine_of: Callable[..., Engine], colbert: Path) -> list[TokenMatch]:
    """The matches of an index, which encodes and explains by itself."""
    with MemoryIndex(engine_of(colbert), codec="float32") as index:
        index.add(["a"], [TEXT])
        return index.explain(QUERY, "a")


def rows(done: Finished) -> list[TokenMatch]:
    return [TokenMatch(**row) for row in done.rows]  # type: ignore[arg-type]


def refused(done: Finished) -> str:
    assert done.code == 2, done.out + done.err
    assert done.out == ""
    return " ".join(done.err.replace("│", " ").split())


def same(found: list[TokenMatch], expected: list[TokenMatch]) -> bool:
    return [(m.token, m.start, m.end, m.text) for m in found] == [
        (m.token, m.start, m.end, m.text) for m in expected
    ] and [m.score for m in found] == pytest.approx([m.score for m in expected], abs=1e-5)


def test_every_source_of_a_text_has_the_same_matches(
    run: Run, colbert: Path, folder: Path, expected: list[TokenMatch], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.encode() + b"\r\n\n")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    model = ("--model", colbert, *FLOAT32, "--format", "jsonl")
    assert any(match.text == "🌊" or "flo" in match.text for match in expected)
    sources = (["--text", TEXT], ["--index", folder, "--id", "flour"], [tmp_path / "a.txt"], [tmp_path / "a.txt.gz"])
    for source in sources:
        assert same(rows(run("explain", QUERY, *source, *model)), expected)
    assert same(rows(run("explain", QUERY, "-", *model, stdin=b"\xef\xbb\xbf" + TEXT.encode() + b"\n")), expected)


def test_a_pipe_gets_columns_and_a_terminal_the_heat_map(
    run: Run, colbert: Path, expected: list[TokenMatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("explain", QUERY, "--text", TEXT, "--model", colbert, *FLOAT32)
    table = [line.split("\t") for line in run(*words).out.splitlines()]
    assert [(row[0], row[2], row[3], row[4]) for row in table] == [
        (match.token, str(match.start), str(match.end), " ".join(match.text.split())) for match in expected
    ]
    assert [float(row[1]) for row in table] == pytest.approx([match.score for match in expected], abs=1e-5)
    drawn = run(*words, "--format", "heatmap").out
    assert drawn.startswith(f"{QUERY}\nMaxSim ")
    assert "\x1b" not in drawn and "[miller]" in drawn
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[38;5;16;48;5;" in run(*words).out
    assert run(*words, "--format", "table").out.count("\t") == 4 * len(expected)


def test_the_page_replaces_an_older_one(run: Run, colbert: Path, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "map.html"
    path.write_text("<!doctype html>" + "older " * 100_000)
    done = run("explain", QUERY, "--index", folder, "--id", "flour", "--model", colbert, "--report", path)
    assert done.code == 0 and done.out.count("\n") == 12
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and page.endswith("</html>\n")
    assert "<title>flour</title>" in page and "&lt;" in page
    assert "<turns>" not in page and "older" not in page and "🌊" in page
    assert page.count("<mark ") > 2 and "miller</mark>" in page and "<script" not in page and "http:" not in page
    again = run("explain", QUERY, "--text", TEXT, "--model", colbert, "--report", tmp_path / "new.html")
    assert again.code == 0
    assert "<title>Matches</title>" in (tmp_path / "new.html").read_text(encoding="utf-8")


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is loaded: what is wrong is said before."""

    def load(*_: Any, **__: Any) -> None:
        pytest.fail("a model was loaded")

    monkeypatch.setattr(Engine, "__init__", load)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([" ", "--text", "a", "-m", "{model}"], "QUERY: it is blank"),
        (["a", "-m", "{model}"], "pass one text: FILE"),
        (["a", "--text", "a"], "name the model"),
        (["a", "{here}/a.txt", "--text", "a", "-m", "{model}"], "pass one text: FILE"),
        (["a", "--text", "a", "--id", "pond", "-m", "{model}"], "--index and --id name a document together"),
        (["a", "--index", "{here}/none", "--id", "pond"], "build it first"),
        (["a", "--index", "{index}", "--id", "gone", "-m", "{model}"], "no document of id 'gone'"),
        (["a", "--text", "\u200b", "-m", "{model}"], "the text is blank"),
        (["a", "{here}/none.txt", "-m", "{model}"], "there is no file at"),
        (["a", "{here}/latin.txt", "-m", "{model}"], "latin.txt' is not UTF-8 (byte 3)"),
        (["a", "--text", "a", "-m", "{classifier}"], "has no token vectors"),
        (["a", "--text", "a", "-m", "{model}", "--report", "{here}/no/such/a.html"], "there is no folder"),
    ],
    ids=range(12),
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    run: Run, colbert: Path, classifier: Path, folder: Path, tmp_path: Path, words: list[str], part: str
) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "latin.txt").write_bytes(b"abc\xfc")
    names = {"model": colbert, "classifier": classifier, "index": folder, "here": tmp_path}
    assert part in refused(run("explain", *(word.format(**names) for word in words)))


@pytest.fixture
def classifier(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("bert", head="SequenceClassification")


def test_the_model_of_a_local_folder_is_found_again(run: Run, folder: Path, colbert: Path) -> None:
    words = ["explain", QUERY, "--index", folder, "--id", "pond"]
    assert run(*words, code=0).out == run(*words, "-m", colbert, code=0).out


def test_a_text_that_gives_orders_to_the_terminal_gives_none(run: Run, colbert: Path) -> None:
    text = "flour \x1b]0;owned\x07 \x1b[2J wheel"
    drawn = run("explain", "flour", "--text", text, "-m", colbert, "--format", "heatmap").out
    assert "\x1b" not in drawn and "\x07" not in drawn
    assert "owned" in drawn.replace("[", "").replace("]", "")
    table = run("explain", "flour", "--text", text, "-m", colbert, "--format", "table").out
    assert "\x1b" not in table and "\x07" not in table
    lines = run("explain", "flour", "--text", text, "-m", colbert, "--format", "jsonl").out
    assert "\x1b" not in lines and json.loads(lines.splitlines()[0])["token"] == "[CLS]"
