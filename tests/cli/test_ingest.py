"""``millpond ingest``: records arrive in a database, what is left out is counted, and errors come before a database."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import FLOAT32, FORCED, Run

import millpond
from millpond import Engine
from millpond.ingest import point_id

pytest.importorskip("millpond_qdrant")

QDRANT = "qdrant+path:{}/q#docs"
ROWS = [{"id": "a", "text": "mill pond"}, {"id": "b", "text": "wheel", "metadata": {"n": 1}}]
LINES = "\n".join(map(json.dumps, ROWS))


def count(url: str) -> int:
    with contextlib.closing(millpond.ingest.open_sink(url)) as sink:
        found: Any = sink
        return int(found.count())


@pytest.mark.parametrize(
    "url", [QDRANT, pytest.param("milvus+file:{}/m.db#docs", marks=pytest.mark.contract)], ids=["qdrant", "milvus"]
)
def test_records_arrive(run: Run, engine_of: Callable[..., Engine], model: Path, tmp_path: Path, url: str):
    url = url.format(tmp_path)
    words = ["ingest", "-", "-m", model, "--to", url, "--dimensions", "16,48", "--cache", tmp_path / "c", *FORCED]
    result = run(*words, *FLOAT32, stdin=LINES, code=0)
    counts = {"read": 2, "embedded": 2, "cached": 0, "failed": 0, "duplicates": 0, "written": 2, "retried": 0}
    counts |= {"blank": 0, "truncated": 0, "truncated_ids": [], "skipped": 0, "skipped_files": []}
    assert {name: count for name, count in result.rows[0].items() if name != "seconds"} == counts
    again = run(*words, *FLOAT32, stdin=LINES).rows[0]
    assert (again["cached"], again["embedded"]) == (2, 0)
    engine = engine_of(model, hf_overrides={"is_matryoshka": True})
    with contextlib.closing(millpond.ingest.open_sink(url, dimensions=[16, 48])) as sink:
        found: Any = sink
        hits = found.search(engine, "wheel", k=2)
    query = engine.embed(["wheel"], role="query", normalize=True).embeddings[0]
    documents = engine.embed(["mill pond", "wheel"], role="document", normalize=True).embeddings
    cosines = dict(zip("ab", documents @ query, strict=True))  # weights are random: either may be the nearer one
    assert [hit.id for hit in hits] == sorted(cosines, key=cosines.__getitem__, reverse=True)
    stored = {"a": ("mill pond", {}), "b": ("wheel", {"n": 1})}
    assert {hit.id: (hit.text, dict(hit.metadata)) for hit in hits} == stored
    assert [hit.score for hit in hits] == pytest.approx([cosines[hit.id] for hit in hits], abs=1e-5)
    # The collection knows its widths.
    unnamed = ("ingest", "-", "-m", model, "--to", url, *FORCED, *FLOAT32)
    assert run(*unnamed, stdin='{"id": "c", "text": "sluice"}\n', code=0).rows[0]["written"] == 1
    assert "pass --dimensions" in run(*unnamed, "--dimensions", "48", stdin=LINES, code=2).err
    with contextlib.closing(millpond.ingest.open_sink(url)) as sink:
        reread: Any = sink
        (row,) = reread.fetch([point_id("c")], widths=[16, 48]).values()
        assert [len(row.vectors[width]) for width in (16, 48)] == [16, 48]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "nobody/nothing"], "nobody/nothing"),
        (["-m", "{model}", "--dimensions", "16"], "--dimensions=16"),
        (["-m", "{cross}"], "does not embed"),
        (["-m", "{model}", "--cache", "{here}/missing/c"], "--cache='{here}/missing/c': there is no folder "),
        (["-m", "{model}", "--journal", "{here}/missing/j"], "--journal='{here}/missing/j': there is no folder "),
    ],
    ids=["unknown model", "width", "no embedder", "cache", "journal"],
)
def test_what_cannot_be_opened_makes_no_database(
    run: Run, model: Path, cross: Path, tmp_path: Path, words: list[str], message: str
):
    names = {"model": model, "cross": cross, "here": tmp_path}
    words = [word.format(**names) for word in words]
    result = run("ingest", "-", *words, "--to", QDRANT.format(tmp_path), stdin='{"text": "mill"}')
    assert result.code in (1, 2) and list(tmp_path.iterdir()) == []
    assert message.format(**names).replace("'", "") in result.err.replace("'", "")


def test_blank_texts_are_left_out_and_counted(run: Run, model: Path, tmp_path: Path):
    lines = '{"id": "a", "text": "mill"}\n{"id": "b", "text": " \\u200b"}\n'
    words = ["ingest", "-", "-m", model, "--to", QDRANT.format(tmp_path)]
    counts = [run(*words, *more, stdin=lines, code=0).rows[0] for more in ([], ["--keep-blank"], [])]
    assert [(one["written"], one["blank"]) for one in counts] == [(1, 1), (2, 0), (1, 1)]
    assert count(QDRANT.format(tmp_path)) == 1


def test_columns_of_a_csv_have_types_and_a_record_that_fails_is_exit_1(run: Run, model: Path, tmp_path: Path):
    path, url = tmp_path / "x.csv.gz", QDRANT.format(tmp_path)
    path.write_bytes(gzip.compress(b"id,text,year,day\na,mill,2024,2024-05-31\nb,pond,later,\n"))
    result = run("ingest", path, "-m", model, "--to", url, "--types", "year=int, day=date", code=1)
    assert (result.rows[0]["written"], result.rows[0]["failed"]) == (1, 1)
    assert result.err.endswith("1 record was left out; the log names it\n")
    kept = run("ingest", path, "-m", model, "--to", url, "--types", "year=int", "--dead-letters", tmp_path / "d.jsonl")
    assert f"1 record was left out; the log and the dead letters in {tmp_path / 'd.jsonl'} name it" in kept.err
    found = run("search", url, "mill", "-m", model, "--filter", "year=2024", "--format", "jsonl", code=0).rows
    assert [row["metadata"] for row in found] == [{"year": 2024, "day": "2024-05-31"}]


def test_further_options_reach_the_sink(run: Run, model: Path, tmp_path: Path):
    words = ["ingest", "-", "-m", model, "--to", QDRANT.format(tmp_path), "--sink", "datatype=float16"]
    run(*words, stdin=LINES, code=0)
    assert "--sink datatype=float16" in run(*words[:-1], "datatype=uint8", stdin=LINES).err
    for word, message in (("datatyp=bit", "this sink has no option 'datatyp'"), ("datatype", "is not NAME=VALUE")):
        assert message in run(*words[:-1], word, stdin=LINES, code=2).err


def test_settings_that_differ_are_named_as_they_are_written(run: Run, model: Path, tmp_path: Path):
    words = ["ingest", "-", "-m", model, "--to", QDRANT.format(tmp_path)]
    run(*words, "--engine", "max_length=40", "--engine", "pooling=cls", stdin=LINES, code=0)
    refused = run(*words, "--engine", "max_length=16", stdin=LINES, code=2).err
    assert "with --engine max_length=40, --engine pooling=cls (fingerprint" in refused
    assert "with --engine max_length=16, --engine pooling=mean (" in refused
    assert "Open the engine with --engine max_length=40, --engine pooling=cls, or another collection name" in refused


def test_chunks_of_a_long_text_are_rows(run: Run, model: Path, tmp_path: Path):
    pytest.importorskip("semantic_text_splitter")
    url, stdin = QDRANT.format(tmp_path), json.dumps({"id": "a", "text": "The pond is deep. " * 40})
    words = ["ingest", "-", "-m", model, "--to", url]
    few = run(*words, "--chunk", stdin=stdin, code=0).rows[0]["written"]
    more = run(*words, "--chunk-tokens", "20", "--chunk-overlap", "4", stdin=stdin, code=0).rows[0]["written"]
    assert 1 < few < more == count(url)
    late = [*words[:-1], f"{url}late", "--chunk-context", "late"]
    assert "--chunk-context='late' needs --chunk-tokens" in run(*late, stdin=stdin, code=2).err
    run(*late, "--chunk-tokens", "20", "--chunk-overlap", "4", stdin=stdin, code=0)
    assert count(f"{url}late") == more
    mixed = run(*words, "--chunk-tokens", "20", "--chunk-context", "late", stdin=stdin, code=2).err
    assert "rows that are embedded by themselves, and this run writes late chunks" in mixed


def test_a_damaged_source_is_an_error_after_what_it_held(run: Run, model: Path, tmp_path: Path):
    path, url = tmp_path / "x.jsonl.gz", QDRANT.format(tmp_path)
    path.write_bytes(gzip.compress(b'{"id": "a", "text": "mill"}\n{"id": "b", "text": "pond"}\n')[:-8])
    result = run("ingest", path, "-m", model, "--to", url, code=2)
    assert f"{str(path)!r} is damaged, or not a .gz file" in result.err
    assert "raised by the source at item 2 (from 0); those before are written" in result.err
    assert count(url) == 2


def test_a_report_is_drawn_and_replaces_no_source(run: Run, model: Path, tmp_path: Path):
    source, page = tmp_path / "docs.jsonl", tmp_path / "run.html"
    source.write_text('{"text": "mill"}\n')
    words = ["ingest", source, "-m", model, "--to", "qdrant+memory:#docs", "--report"]
    assert "is not an HTML page, so it is not replaced" in run(*words, source, code=2).err
    assert source.read_text() == '{"text": "mill"}\n'
    pytest.importorskip("matplotlib")
    run(*words, page, code=0)
    assert "<svg" in page.read_text(encoding="utf-8")


def test_a_journal_lets_a_second_run_write_nothing(run: Run, model: Path, tmp_path: Path):
    words = ["ingest", "-", "-m", model, "--to", QDRANT.format(tmp_path), "--journal", tmp_path / "j"]
    counts = [run(*words, *more, stdin=LINES, code=0).rows[0] for more in ([], [], ["--no-resume"])]
    assert [(one["written"], one.get("unchanged", 0)) for one in counts] == [(2, 0), (0, 2), (2, 0)]
    dropped = run(*words, "--sync", "--verify", stdin=json.dumps(ROWS[0]), code=0).rows[0]
    assert dropped["deleted"] == 1 and dropped["verification"]["missing"] == 0


TO = ["-", "--to", "qdrant+memory:#docs"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.jsonl", *TO[1:]], "there is no file or folder"),
        (["", *TO[1:]], "the path of the source is empty"),
        (["-", "--to", "somewhere"], "is no URL of a collection"),
        (["-", "--to", "redis+x:#docs"], "'redis'"),
        ([*TO, "--dimensions", "16,wide"], "is not a list of widths"),
        ([*TO, "--dimensions", "0"], "--dimensions=0: 0 is no width"),
        ([*TO, "--types", "year=int"], "--types"),
        ([*TO, "--types", "year=int,year=str"], "names the column again"),
        ([*TO, "--id", "x", "--text", "x"], "--id and --text are both 'x'"),
        ([*TO, "--fields", "xml"], "--fields='xml'"),
        ([*TO, "--chunk-overlap", "inf"], "--chunk-overlap=inf must be a number"),
        ([*TO, "--chunk-overlap", "1.5"], "--chunk-overlap=1.5 is more than half"),
        ([*TO, "--ray-workers", "2"], "--ray-workers, --ray-cpus and --ray-gpus require --ray"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_done_is_exit_2(run: Run, model: Path, words: list[str], message: str):
    result = run("ingest", *words, "-m", model, stdin='{"text": "mill"}', code=2)
    assert message in " ".join(result.err.replace("│", " ").split()) and result.out == ""
