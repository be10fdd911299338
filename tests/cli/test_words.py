"""Words of the shell: options that were renamed, help texts, and Python's names in messages."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from tests.cli.conftest import Run
from tests.cli.test_program import COMMANDS

from millpond.cli.arguments.shell_words import ShellWords


@pytest.mark.parametrize(
    ("words", "new"),
    [
        (["advise", "docs.jsonl", "-m", "x", "--out", "a.html"], "--report"),
        (["advise", "docs.jsonl", "-m", "x", "--output", "json"], "--format"),
        (["explain", "mill", "--text", "a mill", "-m", "x", "--html", "a.html"], "--report"),
        (["explain", "mill", "--text", "a mill", "-m", "x", "--output=table"], "--format"),
        (["rerank", "mill", "-m", "x", "--top-n", "3"], "--k"),
        (["rerank", "mill", "-m", "x", "--output", "jsonl"], "--format"),
        (["search", "qdrant+path:v#docs", "mill", "--output", "jsonl"], "--format"),
        (["index", "search", "i", "mill", "--output", "jsonl"], "--format"),
        (["index", "build", "i", "docs.jsonl", "-m", "x", "--width", "8"], "--dimensions"),
        (["ingest", "docs.jsonl", "-m", "x", "--to", "qdrant+path:v#docs", "--widths", "8"], "--dimensions"),
        (["env", "--json"], "--format json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_an_option_of_earlier_versions_names_the_one_of_now(run: Run, words: list[str], new: str):
    old = next(word.partition("=")[0] for word in words[1:] if word.startswith("--") and word not in ("--text", "--to"))
    done = run(*words, code=2)
    assert done.err == f"millpond: {old} is {new} now; write that\n" and done.out == ""


def test_an_option_that_never_was_names_none_of_them(run: Run):
    assert "No such option: --output" in run("demo", "--output", "x", code=2).err


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_text_keeps_its_brackets_and_fills_its_lines(run: Run, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    shown = run(*name.split()[1:], "--help", code=0).out
    one_line = re.sub(r"\s+", "", shown)
    texts = [COMMANDS[name].help or "", *(getattr(each, "help", None) or "" for each in COMMANDS[name].params)]
    for text in (part for each in texts for part in each.split("{sinks}")):
        assert re.sub(r"\s+", "", text) in one_line
    assert max(map(len, shown.splitlines())) <= 80
    # A paragraph breaks where the next word has no room: no line ends early, as the source's lines would.
    paragraphs = shown.partition("\n\n")[2].partition("Options:")[0].partition("Arguments:")[0].split("\n\n")
    for paragraph in paragraphs:
        lines = paragraph.splitlines()
        for line, following in pairwise(lines):
            assert len(line) + 1 + len(following.split()[0]) > 78, (name, line)


WORDS = ShellWords(
    option={"dimensions": "--dimensions", "sync": "--sync", "sparse_model": "--sparse-model", "k": "--k"}.get,
    negation=lambda name: None,
    engine={"hf_overrides", "max_length"},
    sink={"hybrid", "datatype", "fields"},
)


@pytest.mark.parametrize(
    ("python", "shell"),
    [
        ("dimensions=[64, 128] is wrong", "--dimensions=64,128 is wrong"),
        ("dimensions=64 cuts x; leave dimensions out", "--dimensions=64 cuts x; leave --dimensions out"),
        ('with hf_overrides={"a": True}', """with --engine 'hf_overrides={"a": true}'"""),
        ("pass datatype='float16', or", "pass --sink datatype=float16, or"),
        ("pass hybrid=True, or leave hybrid out", "pass --sink hybrid=true, or leave --sink hybrid out"),
        ("sync=True would delete; leave sync out", "--sync would delete; leave --sync out"),
        ("in 'dimensions=64.txt' and a/k=3", "in 'dimensions=64.txt' and a/k=3"),
        ("candidates=3 is less", "candidates=3 is less"),
        ("--dimensions=64 stays", "--dimensions=64 stays"),
        ("k=Ellipsis is odd", "--k=Ellipsis is odd"),
    ],
)
def test_a_message_names_the_options_of_the_shell(python: str, shell: str):
    assert WORDS.rewrite(python) == shell


@pytest.mark.parametrize("command", [["embed"], ["ingest", "-", "--to", "qdrant+memory:#docs"]])
def test_a_width_that_cannot_be_advises_the_shell(run: Run, model: Path, command: list[str]):
    err = run(*command, "-m", model, "--dimensions", "8", stdin='{"text": "mill"}\n', code=2).err
    assert "leave --dimensions out" in err and """--engine 'hf_overrides={"is_matryoshka": true}'""" in err
    assert err.count("\n") == 1
