"""``millpond advise``, as a user types it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from tests.cli.conftest import FORCED, Run


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    (folder / "qrels").mkdir(parents=True)
    documents = [{"_id": f"d{i}", "title": "mill", "text": f"pond number {i}"} for i in range(30)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(one) + "\n" for one in documents))
    queries = [{"_id": f"q{i}", "text": f"number {i}?"} for i in range(12)]
    (folder / "queries.jsonl").write_text("".join(json.dumps(one) + "\n" for one in queries))
    rows = "".join(f"q{i}\td{i}\t1\n" for i in range(10))
    (folder / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{rows}")
    return folder


def test_a_beir_folder_needs_no_further_options(run: Run, beir: Path, model: Path) -> None:
    done = run("advise", beir, "--model", model, "--dimensions", "8", *FORCED)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("30 records, 10 queries; ")
    assert lines[2].split()[:3] == ["layout", "recall@10", "nDCG@10"]
    commands = [shlex.split(line) for line in lines if line.startswith("  millpond ingest")]
    assert commands and all(words[2] == str(beir / "corpus.jsonl") for words in commands)
    for words in commands:
        assert words[words.index("--id") + 1] == "_id"
        assert words[words.index("--text") + 1] == "title,text"
        assert words[words.index("--engine") + 1] == FORCED[1]
    assert "! 2 of 12 queries have no relevant document" in done.out


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((), "mill pond number 7"),
        (("--text", "text"), "pond number 7"),
        (("--template", "{title}: {text}"), "mill: pond number 7"),
    ],
)
def test_the_command_that_is_printed_stores_the_texts_that_were_measured(
    run: Run, beir: Path, model: Path, given: tuple[str, ...], text: str
) -> None:
    options = ("--dimensions", "8", "--database", "qdrant", "--format", "json", *given, *FORCED)
    done = run("advise", beir, "--model", model, *options)
    assert done.code == 0, done.err
    command = shlex.split(json.loads(done.out)["smallest"]["command"])
    url = f"qdrant+path:{beir / 'vectors'}#docs"
    command[command.index("--to") + 1] = url
    stored = run(*command[1:])
    assert stored.code == 0, stored.err
    found = run("search", url, text, "--model", model, "-k", "30", "--format", "jsonl", *FORCED)
    assert found.code == 0, found.err
    assert text in [json.loads(line)["text"] for line in found.out.splitlines()]


def test_lines_of_text_are_records_and_queries_and_json_has_everything(run: Run, tmp_path: Path, model: Path) -> None:
    (tmp_path / "docs.txt").write_text("".join(f"pond number {i}\n" for i in range(30)))
    (tmp_path / "queries.txt").write_text("what is 3?\n\nwhere is 4?\n")
    options = ("--model", model, "--dimensions", "4,8", "-k", "3", "--format", "json", "--database", "qdrant", *FORCED)
    done = run("advise", tmp_path / "docs.txt", "--queries", tmp_path / "queries.txt", *options)
    assert done.code == 0, done.err
    advice = json.loads(done.out)
    assert (advice["rows"], advice["queries"], advice["k"]) == (30, 2, 3)
    assert {one["layout"]["width"] for one in advice["measurements"]} >= {4, 8}
    assert all(one["ndcg"] is None for one in advice["measurements"])
    assert advice["smallest"]["command"].startswith(f"millpond ingest {tmp_path / 'docs.txt'}")
    assert any("write the lines of" in note and "as JSONL first" in note for note in advice["notes"])
    assert "qdrant" in advice["smallest"]["command"] and "qdrant" in advice["lightest"]["command"]


def test_all_layouts_are_printed_on_request_and_drawn_on_a_page(run: Run, beir: Path, model: Path) -> None:
    page = beir / "advice.html"
    done = run("advise", beir, "--model", model, "--dimensions", "8", "--all", "--report", page, *FORCED)
    assert done.code == 0, done.err
    count = int(done.out.split(" layouts measured on title,text")[0].rsplit(maxsplit=1)[-1])
    table = done.out.split("\n\n")[1].splitlines()
    assert len(table) == 1 + count > 30
    best = run("advise", beir, "--model", model, "--dimensions", "8", *FORCED).out.split("\n\n")[1].splitlines()
    marked = sum(line.startswith("*") for line in table)
    assert marked == sum(line.startswith("*") for line in best) and marked <= len(best) - 1 <= marked + 1
    assert page.read_text(encoding="utf-8").count("<svg") == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            ["--dimensions", "8"],
            """leave --dimensions out, or force it with --engine 'hf_overrides={"is_matryoshka": true}'""",
            id="a width of no Matryoshka model",
        ),
        pytest.param(["--dimensions", "a"], "is not a list of widths", id="widths that are none"),
        pytest.param(["--keep", "2", *FORCED], "--keep=2.0 is not a share", id="keep"),
        pytest.param(["--k", "31", *FORCED], "--k=31 is more than the source's 30 records", id="k above rows"),
        pytest.param(["--qrels", "none.tsv"], "no file of judgements at 'none.tsv'", id="no judgements"),
        pytest.param(["--queries", "none.jsonl"], "none.jsonl", id="no queries"),
        pytest.param(["--report", "no/folder/x.html"], "there is no folder", id="out"),
    ],
)
def test_wrong_options_exit_with_2_and_say_what_to_do(
    run: Run, beir: Path, model: Path, options: list[str], message: str
) -> None:
    done = run("advise", beir, "--model", model, *options)
    assert done.code == 2 and message in done.err.replace("\n", " ") and done.out == ""


def test_without_queries_the_option_is_named(run: Run, tmp_path: Path, model: Path) -> None:
    (tmp_path / "docs.txt").write_text("one\ntwo\n")
    done = run("advise", tmp_path / "docs.txt", "--model", model)
    assert done.code == 2 and "--queries" in done.err
    done = run("advise", "-", "--queries", "-", "--model", model, stdin="one\n")
    assert done.code == 2 and "both standard input" in done.err
