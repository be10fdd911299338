"""The program as a user runs it: its output, its error messages and its exit codes."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.cli.conftest import Run
from tests.tiny import Layout, write_checkpoint
from tests.tiny.heads import write_cross_encoder, write_stanford

import millpond
from millpond import Engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layout = Layout(prompts={"query": "find: ", "document": "keep: "})
    return write_checkpoint(tmp_path_factory.mktemp("cli") / "bert", "bert", sentence_transformers=layout)


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cross_encoder(tmp_path_factory.mktemp("cli") / "cross")


@pytest.fixture(scope="module")
def colbert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stanford(tmp_path_factory.mktemp("cli") / "colbert")


@pytest.fixture(scope="module")
def engine(model: Path):
    with Engine(model, dtype="float32", device="cpu") as engine:
        yield engine


def test_the_script_and_the_module_are_one_program():
    script = Path(sys.executable).with_name("millpond")
    starts = [[str(script)], [sys.executable, "-m", "millpond"]]
    outputs = [subprocess.check_output([*start, "--version"], text=True, timeout=60) for start in starts]
    assert outputs == [f"millpond {millpond.__version__}\n"] * 2


def test_usage_names_the_program(run: Run):
    assert "Usage: millpond embed " in run("embed").err


def test_without_arguments_it_explains_itself(run: Run):
    result = run()
    assert result.code == 2
    names = ("demo", "embed", "rerank", "ingest", "search", "models", "env")
    assert all(name in result.out + result.err for name in names)


@pytest.mark.parametrize("command", ["demo", "embed", "rerank", "ingest", "search", "models", "env"])
def test_every_command_explains_itself(run: Run, command: str):
    result = run(command, "--help")
    assert result.code == 0
    assert f"millpond {command}" in result.out
    assert result.err == ""


class TestEmbed:
    def test_lines_of_standard_input(self, run: Run, model: Path, engine: Engine):
        result = run("embed", "-m", model, "--dtype", "float32", stdin="mill pond\r\n\n  \nwheel\n")
        assert result.code == 0
        assert [row["id"] for row in result.rows] == ["1", "4"]
        expected = engine.embed(["mill pond", "wheel"]).embeddings
        np.testing.assert_allclose(np.float32([row["embedding"] for row in result.rows]), expected, atol=1e-6)

    def test_the_numbers_are_the_float32_exactly(self, run: Run, model: Path, engine: Engine):
        result = run("embed", "-", "-m", model, "--dtype", "float32", stdin="mill pond\n")
        written = np.array(result.rows[0]["embedding"], dtype=np.float64)
        expected = engine.embed(["mill pond"]).embeddings[0]
        assert np.array_equal(written.astype(np.float32), expected)

    def test_jsonl_of_standard_input_keeps_its_ids(self, run: Run, model: Path):
        rows = [{"id": "b", "text": "mill"}, {"id": 7, "text": ""}, {"text": "mill"}]
        result = run("embed", "-m", model, stdin="\n" + "\n".join(map(json.dumps, rows)))
        assert [row["id"] for row in result.rows][:2] == ["b", "7"]
        assert len(str(result.rows[2]["id"])) == 64
        assert result.rows[0]["embedding"] == result.rows[2]["embedding"] != result.rows[1]["embedding"]

    @pytest.mark.parametrize("name", ["x.json", "x.ndjson", "x.txt", "x"])
    @pytest.mark.parametrize("compression", ["", ".gz"])
    def test_files_of_every_form(self, run: Run, model: Path, tmp_path: Path, name: str, compression: str):
        rows = [{"id": "1", "text": "mill pond"}, {"id": "2", "text": "wheel"}]
        lines = "\n".join(row["text"] for row in rows) if name in ("x.txt", "x") else "\n".join(map(json.dumps, rows))
        data = (json.dumps(rows) if name == "x.json" else lines).encode()
        source = tmp_path / (name + compression)
        source.write_bytes(gzip.compress(data) if compression else data)
        result = run("embed", source, "-m", model)
        assert (result.code, [row["id"] for row in result.rows]) == (0, ["1", "2"]), result.err
        ranked = run("rerank", "wheel", source, "-m", model, "--output", "jsonl")
        assert sorted(str(row["text"]) for row in ranked.rows) == ["mill pond", "wheel"]

    @pytest.mark.parametrize("name", ["x.txt.gz", "x.jsonl.gz", "x.csv.gz"])
    def test_a_file_that_is_no_gz_is_exit_2(self, run: Run, model: Path, tmp_path: Path, name: str):
        (tmp_path / name).write_text("mill pond")
        result = run("embed", tmp_path / name, "-m", model)
        assert result.code == 2 and f"{str(tmp_path / name)!r} is damaged, or not a .gz file" in result.err

    def test_lines_may_begin_with_a_brace(self, run: Run, model: Path):
        result = run("embed", "-m", model, "--lines", stdin='{"id": "b", "text": "mill"}\n{\n')
        assert result.code == 0
        assert [row["id"] for row in result.rows] == ["1", "2"]

    @pytest.mark.parametrize("kind", ["jsonl", "csv", "folder", "lines"])
    def test_files(self, run: Run, model: Path, engine: Engine, tmp_path: Path, kind: str):
        source = tmp_path / {"jsonl": "x.jsonl", "csv": "x.csv", "folder": "x", "lines": "x.txt"}[kind]
        if kind == "folder":
            source.mkdir()
            (source / "1.txt").write_text("mill pond")
        else:
            source.write_text(
                {"jsonl": '{"key": "1", "body": "mill pond"}', "csv": "key,body\n1,mill pond\n", "lines": "mill pond"}[
                    kind
                ]
            )
        columns = ["--id", "key", "--text", "body"] if kind in ("jsonl", "csv") else []
        result = run("embed", source, "-m", model, "--dtype", "float32", *columns)
        assert result.code == 0
        assert result.rows[0]["id"] == ("1.txt" if kind == "folder" else "1")
        expected = engine.embed(["mill pond"]).embeddings[0]
        np.testing.assert_allclose(result.rows[0]["embedding"], expected, atol=1e-6)

    @pytest.mark.parametrize(
        ("words", "options"),
        [
            (["--role", "query"], {"role": "query"}),
            (["--prompt", "x: "], {"prompt": "x: "}),
            (["--prompt-name", "document"], {"prompt_name": "document"}),
            (["--normalize"], {"normalize": True}),
            (["--no-normalize"], {"normalize": False}),
            (["--output-dtype", "ubinary"], {"output_dtype": "ubinary"}),
            (["--output-dtype", "float16"], {"output_dtype": "float16"}),
        ],
    )
    def test_options_reach_the_engine(self, run: Run, model: Path, engine: Engine, words, options):
        result = run("embed", "-m", model, "--dtype", "float32", *words, stdin="mill pond")
        expected = engine.embed(["mill pond"], **options).embeddings[0]
        np.testing.assert_allclose(
            result.rows[0]["embedding"], expected.astype(float), atol=1e-3 if expected.itemsize == 2 else 1e-6
        )

    def test_a_width_is_forced_by_an_override(self, run: Run, model: Path):
        words = ["embed", "-m", model, "--dimensions", "16"]
        refused = run(*words, stdin="mill")
        assert refused.code == 2
        assert refused.out == ""
        assert refused.err.startswith("millpond: --dimensions 16 ")
        assert refused.err.count("\n") == 1
        result = run(*words, "--hf-overrides", '{"is_matryoshka": true}', stdin="mill")
        assert result.code == 0
        assert len(result.rows[0]["embedding"]) == 16  # type: ignore[arg-type]

    def test_a_classifier_embeds_with_convert(self, run: Run, cross: Path):
        words = ["embed", "-m", cross, "--runner", "pooling"]
        assert run(*words, stdin="mill").code == 2
        result = run(*words, "--convert", "embed", stdin="mill")
        assert (result.code, len(result.rows)) == (0, 1)

    @pytest.mark.parametrize("option", ["--convert", "--runner"])
    def test_no_such_conversion_or_runner(self, run: Run, model: Path, option: str):
        result = run("embed", "-m", model, option, "generate", stdin="mill")
        assert result.code == 2
        assert "'generate' is not one of 'auto'" in result.err

    def test_a_cache_is_filled_and_read(self, run: Run, model: Path, tmp_path: Path):
        words = ["embed", "-m", model, "--cache", tmp_path / "c"]
        first = run(*words, stdin="mill pond")
        with millpond.VectorCache(tmp_path / "c") as cache:
            assert len(cache) == 1
        assert run(*words, stdin="mill pond").out == first.out

    def test_output_goes_to_a_file(self, run: Run, model: Path, tmp_path: Path):
        result = run("embed", "-m", model, "-o", tmp_path / "out.jsonl", stdin="mill\npond\n")
        assert (result.code, result.out) == (0, "")
        assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2

    def test_a_refused_request_leaves_the_file_alone(self, run: Run, model: Path, tmp_path: Path):
        (tmp_path / "out.jsonl").write_text("kept")
        assert run("embed", "-m", model, "--dimensions", "7", "-o", tmp_path / "out.jsonl", stdin="mill").code == 2
        assert (tmp_path / "out.jsonl").read_text() == "kept"

    def test_a_bad_line_is_reported_and_the_rest_embedded(
        self, run: Run, model: Path, caplog: pytest.LogCaptureFixture
    ):
        result = run("embed", "-m", model, stdin=b"mill\n\xff\xfe\npond\n")
        assert result.code == 1
        assert [row["id"] for row in result.rows] == ["1", "3"]
        assert "-:2: not UTF-8 (byte 0)" in caplog.text

    def test_a_long_stream_stays_in_order(self, run: Run, model: Path, engine: Engine):
        texts = [f"pond {n % 37} mill" for n in range(3000)]  # more than the engine reads ahead
        result = run("embed", "-m", model, "--dtype", "float32", stdin="\n".join(texts))
        assert [row["id"] for row in result.rows] == [str(n) for n in range(1, 3001)]
        expected = engine.embed(texts).embeddings
        np.testing.assert_allclose(np.float32([row["embedding"] for row in result.rows]), expected, atol=1e-6)

    def test_nothing_in_nothing_out(self, run: Run, model: Path):
        assert run("embed", "-m", model, stdin="")[:2] == (0, "")

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["nowhere.txt"], "there is no file or folder at 'nowhere.txt'"),
            (["nowhere.jsonl"], "there is no file or folder at 'nowhere.jsonl'"),
            (["-", "--output-dtype", "int8"], "int8"),
            (["-", "--role", "passage"], "passage"),
            (["-", "--prompt-name", "nobody"], "nobody"),
            (["-", "--hf-overrides", "{"], "is not JSON"),
            (["-", "--hf-overrides", "[1]"], "is not a JSON object"),
            (["-", "--dimensions", "many"], "--dimensions"),
            (["-", "-o", "no/such/folder/x"], "cannot be written"),
            (["-", "--nothing"], "--nothing"),
        ],
    )
    def test_what_cannot_be_done_is_exit_2(self, run: Run, model: Path, words: list[str], message: str):
        result = run("embed", *words, "-m", model, stdin="mill")
        assert result.code == 2
        assert message in result.err
        assert "Traceback" not in result.err
        assert result.out == ""

    def test_a_model_that_is_not_there_is_exit_1(self, run: Run):
        result = run("embed", "-m", "nobody/nothing", stdin="mill")
        assert result.code == 1
        assert result.err.startswith("millpond: nobody/nothing ")
        assert result.err.count("\n") == 1


QUERY = "How deep is the mill pond?"
DOCUMENTS = [
    "The wheel turns\tslowly.",
    "The pond is four feet deep.",
    "The miller sleeps.",
    "Deep water drives the wheel of the mill.",
]


class TestRerank:
    @pytest.mark.parametrize("kind", ["cross", "colbert", "model"])
    def test_the_order_and_the_scores_are_the_engines(self, run: Run, request: pytest.FixtureRequest, kind: str):
        folder = request.getfixturevalue(kind)
        words = ["-m", folder, "--dtype", "float32", "--device", "cpu", "--output", "jsonl"]
        result = run("rerank", QUERY, "-", *words, stdin="\n".join(DOCUMENTS))
        assert result.code == 0, result.err
        with Engine(folder, dtype="float32", device="cpu") as engine:
            expected = engine.rerank(QUERY, DOCUMENTS)
        assert [row["index"] for row in result.rows] == [result.index for result in expected]
        assert [row["text"] for row in result.rows] == [result.document for result in expected]
        assert [row["id"] for row in result.rows] == [str(result.index + 1) for result in expected]
        scores = [result.relevance_score for result in expected]
        np.testing.assert_allclose([row["relevance_score"] for row in result.rows], scores, atol=1e-5)
        assert len(set(scores)) == len(DOCUMENTS)

    @pytest.mark.parametrize(("method", "measure"), [("maxsim", "MaxSim"), ("cosine", "cosine"), ("auto", "MaxSim")])
    def test_the_method_is_the_engines(
        self, run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, method: str, measure: str
    ):
        words = ["rerank", QUERY, "-m", model, "--dtype", "float32", "--device", "cpu", "--method", method]
        rows = run(*words, "--output", "jsonl", stdin="\n".join(DOCUMENTS)).rows
        with Engine(model, dtype="float32", device="cpu") as engine:
            expected = engine.rerank(QUERY, DOCUMENTS, method=method)
            other = engine.rerank(QUERY, DOCUMENTS, method="maxsim" if method == "cosine" else "cosine")
        scores = [row["relevance_score"] for row in rows]
        np.testing.assert_allclose(scores, [result.relevance_score for result in expected], atol=1e-4)
        assert abs(scores[0] - other[0].relevance_score) > 0.1
        monkeypatch.setenv("FORCE_COLOR", "1")
        title = run(*words, stdin="\n".join(DOCUMENTS)).out.splitlines()[0]
        assert f"4 of 4 documents by {measure} (" in re.sub(r"\x1b\[[0-9;]*m", "", title)

    @pytest.mark.parametrize("kind", ["jsonl", "csv", "folder", "lines"])
    def test_files(self, run: Run, cross: Path, tmp_path: Path, kind: str):
        source = tmp_path / {"jsonl": "x.jsonl", "csv": "x.csv", "folder": "x", "lines": "x.txt"}[kind]
        if kind == "folder":
            source.mkdir()
            (source / "1.txt").write_text("mill pond")
        else:
            written = {"jsonl": '{"key": "1", "body": "mill pond"}', "csv": "key,body\n1,mill pond\n"}
            source.write_text(written.get(kind, "mill pond"))
        columns = ["--id", "key", "--text", "body"] if kind in ("jsonl", "csv") else []
        result = run("rerank", QUERY, source, "-m", cross, "--output", "jsonl", *columns)
        assert result.code == 0, result.err
        assert [(row["id"], row["text"]) for row in result.rows] == [
            ("1.txt" if kind == "folder" else "1", "mill pond")
        ]

    def test_a_pipe_gets_tab_separated_values(self, run: Run, cross: Path):
        result = run("rerank", QUERY, "-m", cross, "--top-n", "4", stdin="\n".join(DOCUMENTS))
        rows = [line.split("\t") for line in result.out.splitlines()]
        assert sorted(row[1:] for row in rows) == [
            [str(i + 1), " ".join(text.split())] for i, text in enumerate(DOCUMENTS)
        ]
        scores = [float(row[0]) for row in rows]
        assert scores == sorted(scores, reverse=True)

    def test_a_terminal_gets_bars(self, run: Run, model: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
        rows = [{"id": f"a rather long name for a document, {i}", "text": text} for i, text in enumerate(DOCUMENTS)]
        long = {"id": "far", "text": "water " * 60}
        words = ["rerank", QUERY, "-m", model, "--top-n", "4", "--method", "cosine"]
        result = run(*words, stdin="\n".join(map(json.dumps, [*rows, long])))
        title, *lines = re.sub(r"\x1b\[[0-9;]*m", "", result.out).splitlines()
        assert "\x1b[" in result.out
        assert title.startswith("4 of 5 documents by cosine (")
        assert [line.split()[0] for line in lines] == ["1", "2", "3", "4"]
        assert all(len(line) <= 120 for line in lines)
        bars = [re.sub("[^█▏▎▍▌▋▊▉]", "", line) for line in lines]
        scores = [float(line.split()[1]) for line in lines]
        assert scores == sorted(scores, reverse=True)
        for bar, score in zip(bars, scores, strict=True):
            assert bar.count("█") == pytest.approx(20 * score, abs=1)
        assert "…" in result.out

    def test_bars_of_scores_below_zero(self, run: Run, cross: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("FORCE_COLOR", "1")
        result = run("rerank", QUERY, "-m", cross, stdin="\n".join(DOCUMENTS))
        lines = re.sub(r"\x1b\[[0-9;]*m", "", result.out).splitlines()[1:]
        scores = [float(line.split()[1]) for line in lines]
        assert min(scores) < 0
        share = (scores[0] - scores[-1]) / (max(1, scores[0]) - scores[-1])
        assert lines[0].count("█") == pytest.approx(20 * share, abs=1)
        assert lines[-1].count("█") == 0

    def test_options_reach_the_engine(self, run: Run, cross: Path):
        words = ["rerank", QUERY, "-", "-m", cross, "--dtype", "float32", "--output", "jsonl"]
        whole = run(*words, stdin="\n".join(DOCUMENTS)).rows
        assert run(*words, "--top-n", "2", stdin="\n".join(DOCUMENTS)).rows == whole[:2]
        long = "wheel " * 40 + "pond"
        ends = [
            run(*words, "--max-length", "12", "--truncate", end, stdin=long).rows[0]["relevance_score"]
            for end in ("end", "start")
        ]
        assert ends[0] != ends[1]
        refused = run(*words, "--max-length", "12", "--truncate", "error", stdin=long)
        assert refused.code == 2
        assert "--max-length 12" in refused.err

    def test_an_instruction_fills_the_templates_slot(self, run: Run, cross: Path, tmp_path: Path):
        slots = "".join(
            f"{{{{ messages | selectattr('role', 'eq', '{role}') | map(attribute='content') | first }}}} "
            for role in ("query", "document")
        )
        (tmp_path / "t.jinja").write_text("{{ instruction or 'wheel' }} " + slots)
        words = ["rerank", QUERY, "-", "-m", cross, "--score-template", tmp_path / "t.jinja", "--output", "jsonl"]
        scores = [
            run(*words, *more, stdin="pond").rows[0]["relevance_score"]
            for more in ([], ["--instruction", "wheel"], ["--instruction", "miller"])
        ]
        assert scores[0] == scores[1] != scores[2]

    @pytest.mark.parametrize("name", ["x.json", "x.ndjson", "x.txt", "x"])
    @pytest.mark.parametrize("compression", ["", ".gz"])
    def test_files_of_every_form(self, run: Run, model: Path, tmp_path: Path, name: str, compression: str):
        rows = [{"id": "1", "text": "mill pond"}, {"id": "2", "text": "wheel"}]
        lines = "\n".join(row["text"] for row in rows) if name in ("x.txt", "x") else "\n".join(map(json.dumps, rows))
        data = (json.dumps(rows) if name == "x.json" else lines).encode()
        source = tmp_path / (name + compression)
        source.write_bytes(gzip.compress(data) if compression else data)
        result = run("embed", source, "-m", model)
        assert (result.code, [row["id"] for row in result.rows]) == (0, ["1", "2"]), result.err
        ranked = run("rerank", "wheel", source, "-m", model, "--output", "jsonl")
        assert sorted(str(row["text"]) for row in ranked.rows) == ["mill pond", "wheel"]

    @pytest.mark.parametrize("name", ["x.txt.gz", "x.jsonl.gz", "x.csv.gz"])
    def test_a_file_that_is_no_gz_is_exit_2(self, run: Run, model: Path, tmp_path: Path, name: str):
        (tmp_path / name).write_text("mill pond")
        result = run("embed", tmp_path / name, "-m", model)
        assert result.code == 2 and f"{str(tmp_path / name)!r} is damaged, or not a .gz file" in result.err

    def test_lines_may_begin_with_a_brace(self, run: Run, cross: Path):
        result = run("rerank", QUERY, "-m", cross, "--lines", "--output", "jsonl", stdin='{"id": "b"}\n{\n')
        assert sorted(str(row["text"]) for row in result.rows) == ["{", '{"id": "b"}']

    @pytest.mark.parametrize("blank", ["", " \n\t ", "\u00a0\u3000"])
    def test_empty_texts_are_left_out_and_counted(
        self, run: Run, model: Path, caplog: pytest.LogCaptureFixture, blank: str
    ):
        rows = [{"id": str(i), "text": text} for i, text in enumerate([blank, DOCUMENTS[0], blank, DOCUMENTS[1]])]
        words = ["rerank", QUERY, "-m", model, "--dtype", "float32", "--device", "cpu", "--output", "jsonl"]
        result = run(*words, stdin="\n".join(map(json.dumps, rows)))
        assert result.code == 0
        assert {(row["id"], row["index"], row["text"]) for row in result.rows} == {
            ("1", 1, DOCUMENTS[0]),
            ("3", 3, DOCUMENTS[1]),
        }
        assert "2 of 4 texts are empty or blank and left out; --keep-empty ranks them too" in caplog.text
        caplog.clear()
        kept = run(*words, "--keep-empty", stdin="\n".join(map(json.dumps, rows))).rows
        assert sorted(row["index"] for row in kept) == [0, 1, 2, 3]
        assert "left out" not in caplog.text
        scores = {row["index"]: row["relevance_score"] for row in kept}
        np.testing.assert_allclose(
            [scores[row["index"]] for row in result.rows], [row["relevance_score"] for row in result.rows], atol=1e-4
        )

    def test_an_index_counts_the_texts_that_are_left_out(self, run: Run, model: Path, caplog: pytest.LogCaptureFixture):
        stdin = json.dumps({"text": " "}) + "\n" + json.dumps({"text": "mill " * 2000})
        words = ["rerank", QUERY, "-m", model, "--top-n", "1", "--output", "jsonl"]
        result = run(*words, stdin=stdin)
        assert [row["index"] for row in result.rows] == [1]
        assert "1 of 2 documents were cut to" in caplog.text
        assert "index 1" in caplog.text
        refused = run(*words, "--truncate", "error", stdin=stdin)
        assert refused.code == 2
        assert "document at index 1" in refused.err or "text at index 1" in refused.err

    def test_only_empty_texts_leave_nothing_to_rank(self, run: Run, model: Path, caplog: pytest.LogCaptureFixture):
        result = run("rerank", QUERY, "-m", model, "--output", "jsonl", stdin='{"id": "a", "text": ""}')
        assert result[:2] == (0, "")
        assert "1 of 1 texts is empty or blank and left out" in caplog.text

    @pytest.mark.parametrize("query", ["", "  ", "\u3000\n"])
    def test_a_blank_query_is_exit_2(self, run: Run, query: str):
        result = run("rerank", query, "-m", "nobody/nothing", stdin="mill")  # noticed before the model is looked for
        assert result.code == 2
        assert "QUERY" in result.err
        assert "it is blank" in result.err

    def test_a_bad_line_is_reported_and_the_rest_ranked(self, run: Run, cross: Path, caplog: pytest.LogCaptureFixture):
        result = run("rerank", QUERY, "-m", cross, "--output", "jsonl", stdin=b"mill\n\xff\xfe\npond\n")
        assert result.code == 1
        assert sorted(str(row["id"]) for row in result.rows) == ["1", "3"]
        assert "-:2: not UTF-8 (byte 0)" in caplog.text

    @pytest.mark.parametrize("kind", ["cross", "model"])
    @pytest.mark.parametrize("output", ["table", "jsonl"])
    def test_nothing_in_nothing_out(self, run: Run, request: pytest.FixtureRequest, kind: str, output: str):
        folder = request.getfixturevalue(kind)
        assert run("rerank", QUERY, "-m", folder, "--output", output, stdin="")[:2] == (0, "")

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ([], "'query'"),
            ([QUERY, "nowhere.txt"], "there is no file or folder at 'nowhere.txt'"),
            ([QUERY, "--top-n", "0"], "--top-n"),
            ([QUERY, "--max-length", "0"], "--max-length"),
            ([QUERY, "--output", "xml"], "xml"),
            ([QUERY, "--truncate", "middle"], "middle"),
            ([QUERY, "--instruction", "be kind"], "--instruction 'be kind'"),
            ([QUERY, "--method", "dot"], "dot"),
            ([QUERY, "--method", "maxsim"], "--method maxsim compares token vectors"),
            ([QUERY, "--hf-overrides", "{"], "is not JSON"),
            ([QUERY, "--nothing"], "--nothing"),
        ],
    )
    def test_what_cannot_be_done_is_exit_2(self, run: Run, cross: Path, words: list[str], message: str):
        result = run("rerank", *words, "-m", cross, stdin="mill")
        assert result.code == 2
        assert message in result.err
        assert "Traceback" not in result.err
        assert result.out == ""

    def test_a_model_that_is_not_there_is_exit_1(self, run: Run):
        result = run("rerank", QUERY, "-m", "nobody/nothing", stdin="mill")
        assert result.code == 1
        assert result.err.startswith("millpond: nobody/nothing ")
        assert result.err.count("\n") == 1


class TestIngest:
    @pytest.mark.parametrize("url", ["qdrant+path:{}/q#docs", "milvus+file:{}/m.db#docs"])
    def test_records_arrive(self, run: Run, model: Path, tmp_path: Path, url: str):
        rows = [{"id": "a", "text": "mill pond"}, {"id": "b", "text": "wheel", "metadata": {"n": 1}}]
        location = url.format(tmp_path)
        words = ["-m", model, "--to", location, "--dimensions", "16,48", "--cache", tmp_path / "c"]
        words += ["--hf-overrides", '{"is_matryoshka": true}', "--dtype", "float32"]
        result = run("ingest", "-", *words, stdin="\n".join(map(json.dumps, rows)))
        assert result.code == 0, result.err
        counts = {"read": 2, "embedded": 2, "cached": 0, "failed": 0, "duplicates": 0, "written": 2, "retried": 0}
        counts |= {"empty": 0, "truncated": 0, "truncated_ids": [], "skipped": 0, "skipped_files": []}
        assert {name: count for name, count in result.rows[0].items() if name != "seconds"} == counts
        again = run("ingest", "-", *words, stdin="\n".join(map(json.dumps, rows)))
        assert (again.rows[0]["cached"], again.rows[0]["embedded"]) == (2, 0)
        with Engine(model, dtype="float32", hf_overrides={"is_matryoshka": True}) as engine:
            sink = millpond.ingest.open_sink(location, dimensions=[16, 48])
            try:
                hits = sink.search(engine, "wheel", k=2)  # type: ignore[attr-defined]
            finally:
                sink.close()
            query = engine.embed(["wheel"], role="query", normalize=True).embeddings[0]
            documents = engine.embed(["mill pond", "wheel"], role="document", normalize=True).embeddings
        cosines = dict(zip("ab", documents @ query, strict=True))  # weights are random: either may be the nearer one
        stored = {"a": ("mill pond", {}), "b": ("wheel", {"n": 1})}
        assert [hit.id for hit in hits] == sorted(cosines, key=cosines.__getitem__, reverse=True)
        assert {hit.id: (hit.text, dict(hit.metadata)) for hit in hits} == stored
        assert [hit.score for hit in hits] == pytest.approx([cosines[hit.id] for hit in hits], abs=1e-5)

    @pytest.mark.parametrize("url", ["qdrant+path:{}/db#docs", "milvus+file:{}/db.db#docs"])
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["-m", "nobody/nothing"], "nobody/nothing"),
            (["-m", "{model}", "--dimensions", "16"], "--dimensions 16"),
            (["-m", "{cross}"], "does not embed"),
        ],
    )
    def test_a_model_that_cannot_fill_it_makes_no_database(
        self, run: Run, model: Path, cross: Path, tmp_path: Path, url: str, words: list[str], message: str
    ):
        words = [word.format(model=model, cross=cross) for word in words]
        result = run("ingest", "-", *words, "--to", url.format(tmp_path), stdin='{"text": "mill"}')
        assert result.code in (1, 2) and message in result.err and "Traceback" not in result.err
        assert list(tmp_path.iterdir()) == []

    def test_blank_texts_are_left_out_and_counted(self, run: Run, model: Path, tmp_path: Path):
        lines = '{"id": "a", "text": "mill"}\n{"id": "b", "text": " \\u200b"}\n'
        words = ["ingest", "-", "-m", model, "--to", f"qdrant+path:{tmp_path}/q#docs"]
        result = run(*words, stdin=lines)
        assert result.code == 0
        assert (result.rows[0]["written"], result.rows[0]["empty"]) == (1, 1)
        kept = run(*words, "--keep-empty", stdin=lines)
        assert (kept.rows[0]["written"], kept.rows[0]["empty"]) == (2, 0)
        again = run(*words, stdin=lines)
        assert again.rows[0]["empty"] == 1
        with millpond.ingest.open_sink(f"qdrant+path:{tmp_path}/q#docs") as sink:  # type: ignore[attr-defined]
            assert sink.count() == 1

    def test_columns_of_a_csv_have_types(self, run: Run, model: Path, tmp_path: Path):
        path = tmp_path / "x.csv.gz"
        path.write_bytes(gzip.compress(b"id,text,year,day\na,mill,2024,2024-05-31\nb,pond,later,\n"))
        words = ["-m", model, "--to", f"qdrant+path:{tmp_path}/q#docs", "--types", "year=int, day=date"]
        result = run("ingest", path, *words)
        assert result.code == 1 and (result.rows[0]["written"], result.rows[0]["failed"]) == (1, 1)
        with millpond.ingest.open_sink(f"qdrant+path:{tmp_path}/q#docs") as sink, Engine(model) as engine:  # type: ignore[attr-defined]
            (hit,) = sink.search(engine, "mill", filter={"year": 2024})
        assert hit.metadata == {"year": 2024, "day": "2024-05-31"}

    def test_settings_that_differ_are_named_as_flags(self, run: Run, model: Path, tmp_path: Path):
        words = ["ingest", "-", "-m", model, "--to", f"qdrant+path:{tmp_path}/q#docs"]
        first = '{"id": "a", "text": "mill"}'
        assert run(*words, "--max-length", "40", "--pooling", "cls", stdin=first).code == 0
        refused = run(*words, "--max-length", "16", stdin=first)
        assert refused.code == 1
        assert "with --max-length 40, --pooling cls (fingerprint" in refused.err
        assert "with --max-length 16, --pooling mean (" in refused.err
        assert "Open the engine with --max-length 40, --pooling cls, or another collection name" in refused.err

    def test_a_damaged_source_is_an_error_after_what_it_held(self, run: Run, model: Path, tmp_path: Path):
        path = tmp_path / "x.json"
        path.write_text('[{"id": "a", "text": "mill"}, {"id": "b", "text": "pond"}, oops]')
        result = run("ingest", path, "-m", model, "--to", f"qdrant+path:{tmp_path}/q#docs")
        assert result.code == 2
        assert f"{str(path)!r}: element 2 is not JSON" in result.err
        assert "raised by the source at item 2 (from 0); those before are written" in result.err
        with millpond.ingest.open_sink(f"qdrant+path:{tmp_path}/q#docs") as sink:  # type: ignore[attr-defined]
            assert sink.count() == 2

    def test_a_cache_in_a_missing_folder_is_refused_before_a_database_is_made(
        self, run: Run, model: Path, tmp_path: Path
    ):
        cache = tmp_path / "missing" / "cache"
        result = run("ingest", "-", "-m", model, "--to", f"qdrant+path:{tmp_path}/q#docs", "--cache", cache, stdin="{}")
        assert result.code == 1
        assert result.err.startswith(f"millpond: --cache {cache}: there is no folder ")
        assert list(tmp_path.iterdir()) == []

    def test_a_journal_in_a_missing_folder_is_refused_by_its_name(self, run: Run, model: Path, tmp_path: Path):
        journal = tmp_path / "missing" / "journal"
        result = run("ingest", "-", "-m", model, "--to", f"qdrant+path:{tmp_path}/q#docs", "--journal", journal)
        assert result.code == 1
        assert result.err.startswith(f"millpond: --journal {journal}: there is no folder ")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("option", ["--cache", "--journal"])
    def test_a_folder_is_no_cache_and_no_journal(self, run: Run, model: Path, tmp_path: Path, option: str):
        with contextlib.chdir(tmp_path):
            result = run("ingest", "-", "-m", model, "--to", "qdrant+memory:#docs", option, ".", stdin='{"text": "a"}')
        assert result.code == 1
        assert "is not a file; choose another path" in result.err

    def test_a_report_does_not_replace_the_source(self, run: Run, model: Path, tmp_path: Path):
        source = tmp_path / "docs.jsonl"
        source.write_text('{"text": "mill"}\n')
        result = run("ingest", source, "-m", model, "--to", "qdrant+memory:#docs", "--report", source)
        assert result.code == 2
        assert "is no HTML page, so it is not replaced" in result.err
        assert source.read_text() == '{"text": "mill"}\n'

    def test_a_record_that_fails_is_exit_1(self, run: Run, model: Path, tmp_path: Path):
        lines = '{"id": "a", "text": "mill"}\n{"id": "b"}\n'
        result = run("ingest", "-", "-m", model, "--to", "qdrant+memory:#docs", stdin=lines)
        assert result.code == 1
        assert (result.rows[0]["written"], result.rows[0]["failed"]) == (1, 1)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["nowhere.jsonl", "--to", "qdrant+memory:#docs"], "there is no file or folder"),
            (["-", "--to", "somewhere"], "is no URL of a collection"),
            (["-", "--to", "redis+x:#docs"], "'redis'"),
            (["-", "--to", "qdrant+memory:#docs", "--dimensions", "16,wide"], "is not a list of widths"),
            (["-", "--to", "qdrant+memory:#docs", "--dimensions", "16"], "--dimensions 16"),
            (["-", "--to", "qdrant+memory:#docs", "--dimensions", "0"], "--dimensions 0: 0 is no width"),
            (["-", "--to", "qdrant+memory:#docs", "--types", "year=int"], "--types"),
            (["-", "--to", "qdrant+memory:#docs", "--types", "year"], "write year=int,price=float"),
            (["-", "--to", "qdrant+memory:#docs", "--types", "year=int,year=str"], "names the column again"),
            (["-", "--to", "qdrant+memory:#docs", "--id", "x", "--text", "x"], "--id and --text are both 'x'"),
            (["-", "--to", "qdrant+memory:#docs", "--fields", "xml"], "--fields xml"),
            (["-", "--to", "qdrant+memory:#docs", "--datatype", "float99"], "float99"),
            (["-", "--to", "qdrant+memory:#docs", "--chunk-overlap", "inf"], "--chunk-overlap inf must be a number"),
            (["-", "--to", "qdrant+memory:#docs", "--chunk-overlap", "1.5"], "--chunk-overlap 1.5 is more than half"),
            (["-"], "--to"),
        ],
    )
    def test_what_cannot_be_done_is_exit_2(self, run: Run, model: Path, words: list[str], message: str):
        result = run("ingest", *words, "-m", model, stdin='{"text": "mill"}')
        assert result.code == 2
        assert message in result.err
        assert "Traceback" not in result.err
        assert result.out == ""


class TestModels:
    def test_every_architecture_has_a_line(self, run: Run):
        from millpond.checkpoints.architectures import ARCHITECTURES

        lines = run("models").out.splitlines()
        listed = {line.split()[0]: line for line in lines}
        for row in ARCHITECTURES:
            assert row.model_class in listed[row.model_type]
            assert row.example in listed[row.model_type]

    def test_a_checkpoint_is_described_as_the_engine_has_it(self, run: Run, model: Path, engine: Engine):
        out = run("models", model).out
        facts = {line.split("  ")[0].strip(): line.split("  ", 1)[1].strip() for line in out.splitlines()}
        spec = engine.spec
        assert facts["dimensions"] == str(spec.dimensions)
        assert facts["max length"] == f"{spec.max_length} tokens"
        assert facts["pooling"] == "mean"
        assert facts["matryoshka"] == "no"
        assert facts["prompt 'query'"] == "'find: '"
        assert facts["fingerprint"] == spec.fingerprint

    def test_an_override_shows(self, run: Run, model: Path):
        out = run("models", model, "--hf-overrides", '{"matryoshka_dimensions": [8, 48]}').out
        assert "8, 48" in out

    @pytest.mark.parametrize(
        ("convert", "tasks"),
        [
            ("auto", "classify, reward, score, token_classify"),
            ("none", "classify, reward, score, token_classify"),
            ("embed", "embed, token_embed"),
        ],
    )
    def test_a_conversion_shows(self, run: Run, cross: Path, convert: str, tasks: str):
        lines = run("models", cross, "--runner", "pooling", "--convert", convert).out.splitlines()
        assert [line.split("  ", 1)[1].strip() for line in lines if line.startswith("tasks ")] == [tasks]

    def test_what_is_no_checkpoint_is_an_error(self, run: Run, tmp_path: Path):
        result = run("models", tmp_path)
        assert result.code == 1
        assert result.err.startswith("millpond: ")


def test_env_names_variables_and_never_their_values(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QDRANT_API_KEY", "s3cret-of-qdrant")
    monkeypatch.setenv("HF_TOKEN", "s3cret-of-the-hub")
    monkeypatch.setenv("UNRELATED", "nothing")
    result = run("env")
    assert result.code == 0
    assert "QDRANT_API_KEY" in result.out
    assert "HF_TOKEN" in result.out
    assert "UNRELATED" not in result.out
    assert "s3cret" not in result.out + result.err
    assert f"millpond {millpond.__version__}" in result.out
    assert str(Path.home()) not in result.out


def test_env_says_which_attention_kernels_can_run_and_why_not(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("millpond.attention.varlen.unavailable", lambda: "there is a reason")
    lines = [line for line in run("env").out.splitlines() if line.startswith("attention ")]
    assert [line.split()[1] for line in lines] == ["native", "matmul", "varlen", "flex", "sdpa"]
    assert lines[2].endswith("CUDA in half precision: there is a reason")
    assert lines[-1].endswith("for every other call: can run")


def test_a_bug_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("millpond.models.placement.has_native_bfloat16", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("env")
