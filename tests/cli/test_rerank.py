"""``millpond rerank``: order and scores of the engine, bars on a terminal, blank texts, and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.cli.conftest import FLOAT32, Run

from millpond import Engine

QUERY = "How deep is the mill pond?"
DOCUMENTS = [
    "The wheel turns\tslowly.",
    "The pond is four feet deep.",
    "The miller sleeps.",
    "Deep water drives the wheel of the mill.",
]
STDIN = "\n".join(DOCUMENTS)
JSONL = ("--format", "jsonl")


def plain(text: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()


@pytest.mark.parametrize(
    ("kind", "method", "measure"),
    [
        ("cross", "auto", "the model's own score"),
        ("colbert", "auto", "MaxSim"),
        ("model", "auto", "MaxSim"),
        ("model", "maxsim", "MaxSim"),
        ("model", "cosine", "cosine"),
    ],
)
@pytest.mark.usefixtures("terminal")
def test_order_and_scores_are_the_engines(
    run: Run, request, engine_of: Callable[..., Engine], kind: str, method: str, measure: str
):
    folder = request.getfixturevalue(kind)
    words = ["rerank", QUERY, "-", "-m", folder, *FLOAT32, "--method", method]
    rows = run(*words, *JSONL, stdin=STDIN, code=0).rows
    expected = engine_of(folder).rerank(QUERY, DOCUMENTS, method=method)
    assert [(row["index"], row["text"], row["id"]) for row in rows] == [
        (result.index, result.document, str(result.index + 1)) for result in expected
    ]
    assert {row["method"] for row in rows} == {expected.method}
    scores = [result.relevance_score for result in expected]
    np.testing.assert_allclose([row["relevance_score"] for row in rows], scores, atol=1e-4)
    assert len(set(scores)) == len(DOCUMENTS)
    assert f"4 of 4 documents by {measure} (" in plain(run(*words, stdin=STDIN).out)[0]


def test_a_pipe_gets_tab_separated_values(run: Run, cross: Path):
    result = run("rerank", QUERY, "-m", cross, "-k", "4", stdin=STDIN)
    rows = [line.split("\t") for line in result.out.splitlines()]
    assert sorted(row[1:] for row in rows) == [[str(i + 1), " ".join(text.split())] for i, text in enumerate(DOCUMENTS)]
    scores = [float(row[0]) for row in rows]
    assert scores == sorted(scores, reverse=True)


def test_within_a_budget_the_order_of_the_documents_decides(run: Run, cross: Path):
    words = ["rerank", QUERY, "-m", cross, *FLOAT32, "--budget-ms"]
    none = run(*words, "1e-9", "-k", "3", *JSONL, stdin=STDIN, code=0).rows
    assert [row["index"] for row in none] == [0, 1, 2] and all(row["relevance_score"] is None for row in none)
    assert run(*words, "1e-9", stdin=STDIN).out.startswith("-\t1\tThe wheel")
    every = run(*words, "3600000", *JSONL, stdin=STDIN, code=0).rows
    plain_rows = run("rerank", QUERY, "-m", cross, *FLOAT32, *JSONL, stdin=STDIN, code=0).rows
    assert [row["index"] for row in every] == [row["index"] for row in plain_rows]
    assert "--budget-ms=-5.0 must be a positive" in run(*words, "-5", stdin=STDIN, code=2).err


@pytest.mark.usefixtures("terminal")
def test_a_terminal_says_how_many_were_scored(run: Run, cross: Path):
    out = plain(run("rerank", QUERY, "-m", cross, "--budget-ms", "1e-9", stdin=STDIN).out)
    assert re.search(r"4 of 4 documents by .*, 0 of them scored in \d+ ms \(time\)$", out[0])
    assert re.search(r"^ *1 +- +1 +The wheel", out[1])


@pytest.mark.usefixtures("terminal")
def test_a_terminal_gets_bars(run: Run, model: Path, cross: Path):
    rows = [{"id": f"a rather long name for a document, {i}", "text": text} for i, text in enumerate(DOCUMENTS)]
    rows.append({"id": "far", "text": "water " * 60})
    words = ["rerank", QUERY, "-m", model, "-k", "4", "--method", "cosine"]
    out = run(*words, stdin="\n".join(map(json.dumps, rows))).out
    title, *lines = plain(out)
    assert "\x1b[" in out and title.startswith("4 of 5 documents by cosine (") and "…" in out
    assert [line.split()[0] for line in lines] == ["1", "2", "3", "4"] and all(len(line) <= 120 for line in lines)
    bars = [re.sub("[^█▏▎▍▌▋▊▉]", "", line) for line in lines]
    for bar, score in zip(bars, [float(line.split()[1]) for line in lines], strict=True):
        assert bar.count("█") == pytest.approx(20 * score, abs=1)
    lines = plain(run("rerank", QUERY, "-m", cross, stdin=STDIN).out)[1:]
    scores = [float(line.split()[1]) for line in lines]
    share = (scores[0] - scores[-1]) / (max(1, scores[0]) - scores[-1])
    assert min(scores) < 0 and lines[0].count("█") == pytest.approx(20 * share, abs=1) and lines[-1].count("█") == 0


def test_options_reach_the_engine(run: Run, cross: Path, tmp_path: Path):
    words = ["rerank", QUERY, "-", "-m", cross, *FLOAT32, *JSONL]
    whole = run(*words, stdin=STDIN).rows
    assert run(*words, "-k", "2", stdin=STDIN).rows == whole[:2]
    long, short = "wheel " * 40 + "pond", ("--engine", "max_length=12")
    ends = [run(*words, *short, "--truncate", end, stdin=long).rows[0]["relevance_score"] for end in ("end", "start")]
    assert ends[0] != ends[1]
    assert "max_length=12" in run(*words, *short, "--truncate", "error", stdin=long, code=2).err
    slots = "".join(
        f"{{{{ messages | selectattr('role', 'eq', '{role}') | map(attribute='content') | first }}}} "
        for role in ("query", "document")
    )
    (tmp_path / "t.jinja").write_text("{{ instruction or 'wheel' }} " + slots)
    words += ["--engine", f"score_template={tmp_path / 't.jinja'}"]
    scores = [
        run(*words, *more, stdin="pond").rows[0]["relevance_score"]
        for more in ([], ["--instruction", "wheel"], ["--instruction", "miller"])
    ]
    assert scores[0] == scores[1] != scores[2]


@pytest.mark.parametrize("blank", ["", "\u00a0\u3000"])
def test_blank_texts_are_left_out_and_counted(run: Run, model: Path, caplog: pytest.LogCaptureFixture, blank: str):
    rows = [{"id": str(i), "text": text} for i, text in enumerate([blank, DOCUMENTS[0], blank, DOCUMENTS[1]])]
    words, stdin = ["rerank", QUERY, "-m", model, *FLOAT32, *JSONL], "\n".join(map(json.dumps, rows))
    result = run(*words, stdin=stdin, code=0)
    assert {(row["id"], row["index"]) for row in result.rows} == {("1", 1), ("3", 3)}
    assert "2 of 4 texts are blank and left out" in caplog.text
    assert run(*words, stdin=json.dumps(rows[0]), code=0).out == ""
    assert "1 of 1 texts is blank and left out" in caplog.text


def test_an_index_counts_the_texts_that_are_left_out(run: Run, model: Path, caplog: pytest.LogCaptureFixture):
    stdin = json.dumps({"text": " "}) + "\n" + json.dumps({"text": "mill " * 2000})
    words = ["rerank", QUERY, "-m", model, "-k", "1", *JSONL]
    assert [row["index"] for row in run(*words, stdin=stdin).rows] == [1]
    assert "1 of 2 documents were cut to" in caplog.text and "index 1" in caplog.text
    assert "at index 1" in run(*words, "--truncate", "error", stdin=stdin, code=2).err


def test_a_blank_query_is_refused_before_the_model_is_looked_for(run: Run):
    err = run("rerank", "\u3000\n", "-m", "nobody/nothing", stdin="mill", code=2).err
    assert "QUERY" in err and "it is blank" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "'QUERY'"),
        ([QUERY, "nowhere.txt"], "there is no file or folder at 'nowhere.txt'"),
        ([QUERY, "-k", "0"], "-k"),
        ([QUERY, "--instruction", "be kind"], "--instruction='be kind'"),
        ([QUERY, "--method", "maxsim"], "--method='maxsim' compares token vectors"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_done_is_exit_2(run: Run, cross: Path, words: list[str], message: str):
    result = run("rerank", *words, "-m", cross, stdin="mill", code=2)
    assert message in result.err and result.out == ""
