"""``millpond embed``: sources of every form, the engine's options, and errors."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.conftest import FLOAT32, FORCED, Run

import millpond
from millpond import Engine


@pytest.fixture
def engine(engine_of: Callable[..., Engine], model: Path) -> Engine:
    return engine_of(model)


def vectors(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.float32([row["embedding"] for row in rows])


def test_lines_of_standard_input_get_the_float32_exactly(run: Run, model: Path, engine: Engine):
    result = run("embed", "-m", model, *FLOAT32, stdin="mill pond\r\n\n  \nwheel\n", code=0)
    assert [row["id"] for row in result.rows] == ["1", "4"]
    np.testing.assert_allclose(vectors(result.rows), engine.embed(["mill pond", "wheel"]).embeddings, atol=1e-6)
    (alone,) = run("embed", "-", "-m", model, *FLOAT32, stdin="mill pond\n").rows
    assert np.array_equal(vectors([alone])[0], engine.embed(["mill pond"]).embeddings[0])


def test_jsonl_of_standard_input_keeps_its_ids(run: Run, model: Path):
    rows = [{"id": "b", "text": "mill"}, {"id": 7, "text": ""}, {"text": "mill"}]
    result = run("embed", "-m", model, stdin="\n" + "\n".join(map(json.dumps, rows)), code=0)
    assert [row["id"] for row in result.rows][:2] == ["b", "7"] and len(result.rows[2]["id"]) == 64
    assert result.rows[0]["embedding"] == result.rows[2]["embedding"] != result.rows[1]["embedding"]


SOURCES = {
    "x.jsonl": '{"key": "1", "body": "mill pond"}',
    "x.json": '[{"key": "1", "body": "mill pond"}]',
    "x.csv": "key,body\n1,mill pond\n",
    "x.txt": "mill pond",
    "x": "mill pond\r\n",
    "folder/1": "mill pond",
}


@pytest.mark.parametrize("name", SOURCES)
def test_files_of_every_form(run: Run, model: Path, engine: Engine, cross: Path, tmp_path: Path, name: str):
    source, text = tmp_path / name, SOURCES[name]
    if "/" in name:
        source.parent.mkdir()
        source.with_suffix(".txt").write_text(text)
        source = source.parent
    elif name in ("x.json", "x.txt"):
        source = tmp_path / f"{name}.gz"
        source.write_bytes(gzip.compress(text.encode()))
    else:
        source.write_text(text)
    columns = ["--id", "key", "--text", "body"] if "body" in text else []
    (row,) = run("embed", source, "-m", model, *FLOAT32, *columns, code=0).rows
    assert row["id"] == ("1.txt" if "/" in name else "1")
    np.testing.assert_allclose(row["embedding"], engine.embed(["mill pond"]).embeddings[0], atol=1e-6)
    (row,) = run("rerank", "wheel", source, "-m", cross, *columns, "--format", "jsonl", code=0).rows
    assert (row["id"], row["text"]) == ("1.txt" if "/" in name else "1", "mill pond")


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--role", "query"], {"role": "query"}),
        (["--prompt-name", "document"], {"prompt_name": "document"}),
        (["--engine", "normalize=false"], {"normalize": False}),
        (["--output-dtype", "ubinary"], {"output_dtype": "ubinary"}),
    ],
)
def test_options_reach_the_engine(run: Run, model: Path, engine: Engine, words, options):
    result = run("embed", "-m", model, *FLOAT32, *words, stdin="mill pond", code=0)
    expected = engine.embed(["mill pond"], **options).embeddings[0]
    tolerance = 1e-3 if expected.itemsize == 2 else 1e-6
    np.testing.assert_allclose(result.rows[0]["embedding"], expected.astype(float), atol=tolerance)


def test_a_width_is_forced_by_an_override(run: Run, model: Path):
    (row,) = run("embed", "-m", model, "--dimensions", "16", *FORCED, stdin="mill", code=0).rows
    assert len(row["embedding"]) == 16


def test_a_cache_is_filled_and_read(run: Run, model: Path, tmp_path: Path):
    words = ["embed", "-m", model, "--cache", tmp_path / "c"]
    first = run(*words, stdin="mill pond", code=0)
    with millpond.VectorCache(tmp_path / "c") as cache:
        assert len(cache) == 1
    assert run(*words, stdin="mill pond").out == first.out


def test_output_goes_to_a_file_unless_the_request_is_refused(run: Run, model: Path, tmp_path: Path):
    words = ["embed", "-m", model, "-o", tmp_path / "out.jsonl"]
    assert run(*words, stdin="mill\npond\n", code=0).out == ""
    written = (tmp_path / "out.jsonl").read_text()
    assert len(written.splitlines()) == 2
    run(*words, "--dimensions", "7", stdin="mill", code=2)
    assert (tmp_path / "out.jsonl").read_text() == written


@pytest.mark.parametrize("command", [["embed"], ["rerank", "mill", "--format", "jsonl"]], ids=lambda words: words[0])
def test_a_bad_line_is_reported_and_the_others_are_taken(run: Run, cross: Path, model: Path, command, caplog):
    words = [*command, "-m", model if command == ["embed"] else cross]
    result = run(*words, stdin=b"mill\n\xff\xfe\npond\n", code=1)
    assert sorted(row["id"] for row in result.rows) == ["1", "3"]
    assert "-:2: not UTF-8 (byte 0)" in caplog.text
    assert run(*words, stdin="", code=0).out == ""


def test_a_long_stream_stays_in_order(run: Run, model: Path, engine: Engine):
    texts = [f"pond {n % 37} mill" for n in range(3000)]  # more than the engine reads ahead
    result = run("embed", "-m", model, *FLOAT32, stdin="\n".join(texts), code=0)
    assert [row["id"] for row in result.rows] == [str(n) for n in range(1, 3001)]
    np.testing.assert_allclose(vectors(result.rows), engine.embed(texts).embeddings, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.txt"], "there is no file or folder at 'nowhere.txt'"),
        (["{here}/no.csv.gz"], "is damaged, or not a .gz file"),
        (["-", "--prompt-name", "nobody"], "--prompt-name='nobody'"),
        (["-", "--engine", "hf_overrides=[1]"], "hf_overrides"),
        (["-", "-o", "no/such/folder/x"], "cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_done_is_exit_2(run: Run, model: Path, tmp_path: Path, words: list[str], message: str):
    (tmp_path / "no.csv.gz").write_text("mill pond")
    result = run("embed", *(word.replace("{here}", str(tmp_path)) for word in words), "-m", model, stdin="mill", code=2)
    assert message in result.err and result.out == ""
