"""``millpond search``: questions to collections of each database, as a user types them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from tests.cli.conftest import FLOAT32, Finished, Run
from tests.tiny import write_checkpoint
from tests.tiny.heads import write_cross_encoder, write_splade, write_stanford

from millpond import Engine
from millpond.errors import ModelLoadError
from millpond.ingest import Chunking, Hit, Record, ingest, open_sink
from millpond.search.stored_model import describe_stored
from millpond.values.fingerprint import ModelIdentity

pytest.importorskip("millpond_qdrant")

TEXTS = {
    "pond": "The pond is two metres deep.",
    "wheel": "A wheel turns in the mill.",
    "flour": "The miller sells flour.",
    "fish": "There are fish in the pond.",
    "bread": "Bread is made of flour.",
}
METADATA: dict[str, dict[str, Any]] = {
    "pond": {"year": 2024, "lang": "en", "wet": True, "code": "07", "share": 0.5},
    "wheel": {"year": 2025, "lang": "en", "wet": False, "code": "7"},
    "flour": {"year": 2025, "lang": "sv", "wet": False, "code": "null"},
    "fish": {"year": 2026, "lang": "sv", "wet": True, "tags": ["a", "b"]},
    "bread": {},
}
RECORDS = [Record(name, text, METADATA[name]) for name, text in TEXTS.items()]
QUESTION = "how deep is the pond?"
LONG = " ".join(f"The pond number {number} is deep." for number in range(12))
JSONL = ("--format", "jsonl")
URLS = {"qdrant": "qdrant+path:{}/q#docs", "milvus": "milvus+file:{}/m.db#docs", "lancedb": "lancedb+path:{}/l#docs"}
EMBEDDED = ["qdrant", *(pytest.param(name, marks=pytest.mark.contract) for name in ("milvus", "lancedb"))]
EVERY = [*EMBEDDED, pytest.param("pgvector", marks=pytest.mark.contract)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models by their names, and databases."""
    folder = tmp_path_factory.mktemp("search")
    write_checkpoint(folder / "bert", "bert")
    write_splade(folder / "splade")
    write_stanford(folder / "colbert")
    write_cross_encoder(folder / "cross")
    return folder


@pytest.fixture(scope="module")
def engine(engine_of: Callable[..., Engine], folder: Path) -> Engine:
    return engine_of(folder / "bert", hf_overrides={"is_matryoshka": True})


def fill(url: str, engine: Engine, records: list[Record] = RECORDS, **options: Any) -> str:
    """Ingest records, and return the URL."""
    run_options = {name: options.pop(name) for name in ("chunking", "sparse_engine") if name in options}
    sink = open_sink(url, **options)
    try:
        ingest(records, engine=engine, sink=sink, show_progress=False, **run_options)
    finally:
        sink.close()
    return url


@pytest.fixture(scope="module")
def filled(folder: Path, engine: Engine) -> Callable[[str], str]:
    """The URL of a collection of two widths in a database."""
    done: dict[str, str] = {}

    def filled(kind: str) -> str:
        if kind not in done:
            done[kind] = fill(URLS[kind].format(folder), engine, dimensions=[16, 48])
        return done[kind]

    return filled


@pytest.fixture(params=EVERY)
def url(request: pytest.FixtureRequest, filled: Callable[[str], str], engine: Engine) -> str:
    pytest.importorskip(f"millpond_{request.param}")
    if request.param != "pgvector":
        return filled(request.param)
    address = request.getfixturevalue("postgres").schema()
    return fill(f"pgvector+{address}#docs", engine, dimensions=[16, 48])


@pytest.fixture
def docs(filled: Callable[[str], str]) -> str:
    return filled("qdrant")


@pytest.fixture
def search(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finished]:
    """Searches where the collection's model is found by its name."""
    monkeypatch.chdir(folder)
    return lambda *words, stdin="", code=0: run("search", *words, stdin=stdin, code=code)


def ids(done: Finished) -> list[str]:
    return [row["id"] for row in done.rows]


def found(url: str, engine: Engine, question: str = QUESTION, **options: Any) -> list[Hit]:
    sink: Any = open_sink(url)
    try:
        hits: list[Hit] = sink.search(engine, question, **options)
        return hits
    finally:
        sink.close()


def test_the_collection_says_how_it_is_searched(search, url: str, engine: Engine):
    done = search(url, QUESTION, *JSONL, "-k", 3, *FLOAT32)
    expected = found(url, engine, k=3)
    assert ids(done) == [hit.id for hit in expected]
    assert [row["score"] for row in done.rows] == pytest.approx([hit.score for hit in expected], abs=1e-5)
    assert done.rows[0] == {
        "query_id": "1",
        "query": QUESTION,
        "rank": 1,
        "id": expected[0].id,
        "score": done.rows[0]["score"],
        "text": TEXTS[expected[0].id],
        "metadata": METADATA[expected[0].id],
    }
    assert done.err == ""
    assert ids(search(url, QUESTION, "--filter", "year=2025", "--filter", "lang=sv", *JSONL)) == ["flour"]
    assert len(search(url, QUESTION, *JSONL, "-k", 16_000).rows) == 5
    for words in (("-k", 2**63), ("-k", 3, "--candidates", 2**63)):
        option = "--k" if words[0] == "-k" and len(words) == 2 else "--candidates"
        assert f"{option}={2**63} is more than" in search(url, QUESTION, *words, code=2).err


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["year=2025"], "wheel flour"),
        (["wet=true", "year=2024"], "pond"),
        (["code=07"], "pond"),
        (['code="7"'], "wheel"),
        (["code=null"], "flour"),
        (["tags=b"], "fish"),
        (['{"year": [2024, 2026], "lang": "en"}'], "pond"),
        (['{"year": 2025}', "year=2026"], "wheel flour fish"),
        (["year>=2025"], "wheel flour fish"),
        (["year > 2024", "year<2026"], "wheel flour"),
        (['{"year": {"gt": 2024}}', "year<=2025", "lang=sv"], "flour"),
        (["code>=7"], ""),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else None,
)
def test_filters_have_types(search, docs: str, words: list[str], names: str):
    options = [option for word in words for option in ("--filter", word)]
    assert sorted(ids(search(docs, QUESTION, *options, *JSONL))) == sorted(names.split())


def test_questions_of_a_file_have_its_ids(search, docs: str, tmp_path: Path, caplog):
    rows = [{"_id": "a", "q": "pond"}, {"_id": "b", "q": " \u200b"}, {"_id": 7, "q": "mill"}]
    (tmp_path / "q.jsonl").write_text("\n".join([*map(json.dumps, rows), "broken", '{"_id": "z", "q": "flour"}']))
    words = ["--queries", tmp_path / "q.jsonl", "--id", "_id", "--text", "q", *JSONL, "-k", 1]
    done = search(docs, *words, code=1)
    assert [(row["query_id"], row["query"]) for row in done.rows] == [("a", "pond"), ("7", "mill"), ("z", "flour")]
    assert "q.jsonl:4" in caplog.text and "question b: it is blank" in caplog.text


def test_one_stage_searches_the_width_that_is_named(search, docs: str, engine: Engine):
    for words, width in ((["--no-coarse-to-fine"], 48), (["--dimensions", "16"], 16)):
        done = search(docs, QUESTION, *JSONL, *FLOAT32, *words)
        query, *rows = engine.embed([QUESTION, *TEXTS.values()], dimensions=width, normalize=True).embeddings
        scores = dict(zip(TEXTS, (row @ query for row in rows), strict=True))
        assert ids(done) == sorted(TEXTS, key=scores.__getitem__, reverse=True)
        assert done.rows[0]["score"] == pytest.approx(max(scores.values()), abs=1e-5)


@pytest.mark.parametrize("second", ["self", "bert", "cross", "colbert"])
def test_the_second_stage_is_the_rerank_of_what_was_found(
    search, docs: str, folder: Path, engine: Engine, engine_of: Callable[..., Engine], second: str
):
    done = search(docs, QUESTION, "--rerank", second, "--candidates", 4, "-k", 3, *JSONL, *FLOAT32)
    hits = found(docs, engine, k=4)
    reranker = engine_of(folder / ("bert" if second == "self" else second))
    expected = reranker.rerank(QUESTION, [hit.text for hit in hits], top_n=3)
    assert ids(done) == [hits[result.index].id for result in expected]
    scores = [result.relevance_score for result in expected]
    assert [row["score"] for row in done.rows] == pytest.approx(scores, abs=1e-4)
    assert [row["retrieval_rank"] for row in done.rows] == [result.index + 1 for result in expected]
    retrieved = [hits[result.index].score for result in expected]
    assert [row["retrieval_score"] for row in done.rows] == pytest.approx(retrieved, abs=1e-5)


def test_a_second_stage_within_a_budget(search, docs: str, engine: Engine, caplog: pytest.LogCaptureFixture):
    words = ["--rerank", "cross", "-k", 3, *FLOAT32, "--budget-ms"]
    none = search(docs, QUESTION, *words, 1e-9, *JSONL).rows
    assert [row["id"] for row in none] == [hit.id for hit in found(docs, engine, k=3)]
    assert [row["score"] for row in none] == [None] * 3 and [row["rank"] for row in none] == [1, 2, 3]
    assert search(docs, QUESTION, *words, 1e-9).out.split("\t")[2] == "-"
    assert search(docs, QUESTION, *words, 1e-9, "--threshold", 0).out == ""
    assert "no hit was scored within --budget-ms 1e-09" in caplog.text
    every = search(docs, QUESTION, "--rerank", "cross", *FLOAT32, *JSONL).rows
    assert search(docs, QUESTION, "--rerank", "cross", *FLOAT32, "--budget-ms", 3600000, *JSONL).rows == every


@pytest.mark.parametrize("kind", EMBEDDED[:2])
def test_sparse_vectors_are_fused_if_the_collection_has_them(
    search, folder: Path, engine: Engine, engine_of: Callable[..., Engine], kind: str, tmp_path: Path
):
    sparse = engine_of(folder / "splade")
    url = fill(URLS[kind].format(tmp_path), engine, hybrid=True, sparse_engine=sparse)
    fused = found(url, engine, hybrid=True, sparse_engine=sparse)
    words = [url, QUESTION, *JSONL, *FLOAT32]
    for more in ([], ["--hybrid"], ["--sparse-model", "splade"]):
        assert [row["score"] for row in search(*words, *more).rows] == pytest.approx([hit.score for hit in fused])
    dense = search(*words, "--no-hybrid").rows
    assert [row["score"] for row in dense] == pytest.approx([hit.score for hit in found(url, engine)], abs=1e-5)
    other = search(*words, "--sparse-model", folder / "bert", code=2).err
    assert "in its sparse vectors, was built by splade" in other


def test_chunks_of_a_record_are_shown_apart_or_once(search, engine: Engine, tmp_path: Path):
    pytest.importorskip("semantic_text_splitter")
    records = [Record("guide.md", LONG, {"n": 1}), *RECORDS]
    url = fill(URLS["qdrant"].format(tmp_path), engine, records, chunking=Chunking(max_tokens=20, overlap=0))
    every = search(url, "deep pond", *JSONL, "-k", 20).rows
    chunks = [row for row in every if row["id"] == "guide.md"]
    assert len(chunks) >= 3
    for row in chunks:
        assert row["text"] == LONG[row["metadata"]["chunk_start"] : row["metadata"]["chunk_end"]]
    once = search(url, "deep pond", *JSONL, "--per-record").rows
    kept = next(row for row in once if row["id"] == "guide.md")
    assert {**kept, "rank": chunks[0]["rank"]} == chunks[0]
    assert [row["rank"] for row in once] == list(range(1, 7))
    assert [row["id"] for row in once] == list(dict.fromkeys(row["id"] for row in every))


@pytest.mark.parametrize("stage", [(), ("--rerank", "self")], ids=["one stage", "reranked"])
def test_whole_documents_are_printed(search, engine: Engine, tmp_path: Path, stage: tuple[str, ...]):
    chunking = Chunking(max_tokens=20, overlap=0.2)
    url = fill(URLS["qdrant"].format(tmp_path), engine, [*RECORDS, Record("guide.md", LONG)], chunking=chunking)
    chunks = search(url, "deep pond", *JSONL, "-k", 20, *stage).rows
    found = search(url, "deep pond", *JSONL, "--expand", "parent", *stage).rows
    assert [row["id"] for row in found] == list(dict.fromkeys(row["id"] for row in chunks)) and len(found) == 6
    guide = next(row for row in found if row["id"] == "guide.md")
    best = next(row for row in chunks if row["id"] == "guide.md")
    assert guide["text"] == LONG and guide["metadata"] == best["metadata"] and guide["score"] == best["score"]
    assert best["text"] == LONG[slice(guide["metadata"]["chunk_start"], guide["metadata"]["chunk_end"])] != LONG


def test_settings_of_the_run_are_those_of_the_search(search, folder: Path, engine_of, tmp_path: Path):
    """A model's name alone would give another fingerprint."""
    url = fill(URLS["qdrant"].format(tmp_path), engine_of(folder / "bert", max_length=12, pooling="cls"))
    assert len(search(url, QUESTION, *JSONL).rows) == 5
    refused = search(url, QUESTION, "--engine", "max_length=16", code=2).err
    assert "max_length=12" in refused and "another collection name" in refused


def test_questions_of_a_pipe_have_numbers_and_a_table_has_tabs(search, docs: str):
    lines = search(docs, "-k", 2, stdin="pond\n\nmill\n").out.splitlines()
    rows = [line.split("\t") for line in lines]
    assert [row[:2] for row in rows] == [["1", "1"], ["1", "2"], ["3", "1"], ["3", "2"]]
    for _, _, score, id, text, metadata in rows:
        assert -1 <= float(score) <= 1
        assert (text, json.loads(metadata)) == (TEXTS[id], METADATA[id])
    assert "no question" in search(docs, "--queries", "-", stdin="\n", code=2).err


def test_a_method_ranks_and_a_threshold_leaves_out(search, docs: str, engine: Engine, caplog: pytest.LogCaptureFixture):
    cosine = search(docs, QUESTION, "--rerank", "self", "--method", "cosine", *JSONL, *FLOAT32)
    assert ids(cosine) == [hit.id for hit in found(docs, engine)]
    scores = [row["score"] for row in search(docs, QUESTION, *JSONL).rows]
    assert [row["score"] for row in search(docs, QUESTION, *JSONL, "--threshold", scores[1]).rows] == scores[:2]
    assert search(docs, QUESTION, *JSONL, "--threshold", "1.5").rows == []
    assert "no score reaches --threshold 1.5; the best is" in caplog.text
    assert search(docs, QUESTION, "--filter", 'year="2024"', *JSONL).rows == []
    assert 'no record matches the filter {"year": "2024"}' in caplog.text


def test_another_model_is_refused_and_one_that_is_elsewhere_is_named_again(
    search, docs: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    refused = search(docs, QUESTION, "-m", write_checkpoint(tmp_path / "other", "bert", seed=1), code=2).err
    assert "was built by bert" in refused and "this engine is other" in refused
    monkeypatch.chdir(tmp_path)
    found = search(docs, QUESTION, *JSONL).rows
    moved = (folder / "bert").rename(folder / "moved")
    try:
        refused = search(docs, QUESTION, code=2).err
        assert f"was filled by 'bert'. Its folder '{folder / 'bert'}' is not there; if it is elsewhere, " in refused
        assert search(docs, QUESTION, *JSONL, "-m", moved).rows == found and len(found) == 5
        (folder / "bert").symlink_to(tmp_path / "other", target_is_directory=True)
        assert (
            "holds another model now; if it is elsewhere, name it with --model." in search(docs, QUESTION, code=2).err
        )
    finally:
        (folder / "bert").unlink(missing_ok=True)
        moved.rename(folder / "bert")


def test_a_collection_that_stored_no_folder_asks_for_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    identity = ModelIdentity(**json.loads(json.dumps({**ModelIdentity.of(engine.spec).to_json(), "folder": None})))
    with pytest.raises(ModelLoadError) as error:
        describe_stored(identity, None, {}, owner="The collection", option="--model")
    assert error.value.__notes__ == ["The collection was filled by 'bert'. If that was a folder, name it with --model."]


def test_an_empty_collection_says_so_and_nothing_is_written(search, engine: Engine, tmp_path: Path, caplog):
    url = URLS["qdrant"].format(tmp_path)
    sink: Any = open_sink(url)
    sink.prepare(engine.spec)
    sink.close()

    def contents() -> dict[str, bytes]:
        files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal"))]
        return {str(path): path.read_bytes() for path in files}

    before = contents()
    assert search(url, QUESTION, "--rerank", "self").out == ""
    assert "collection 'docs' is empty" in caplog.text and contents() == before
    refused = search(url.replace("#docs", "#dogs"), QUESTION, code=2).err
    assert "there is no collection 'dogs'" in refused and "ingest into it first" in refused and contents() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--candidates", 3], "3 is less than --k 10"),
        (["--filter", "{year}"], "is not JSON"),
        (["--filter", '{"year": {"from": 1}}'], "--filter: filter['year'] has the word 'from'"),
        (["--filter", "year!=2024"], "'year!=2024' has '!='; a condition has =, >, >=, < or <="),
        (["--filter", "year=>2024"], "has '=>'; a condition has"),
        (["--filter", ">=2024"], "'>=2024' is no condition, like year=2024 or 'year>=2020'"),
        (["--filter", "year>=soon"], "filter['year']['gte']='soon' is no bound; pass a number"),
        (["--filter", "year>=1", "--filter", "year>=2"], "year has gte twice; name one bound"),
        (["--filter", "year>=1", "--filter", "year=2"], "year has a value and a range"),
        (["--filter", "year>=2025", "--filter", "year<2024"], "has nothing between its bounds"),
        (["--dimensions", "32"], "holds the widths [16, 48], not [32]"),
        (["--hybrid"], "holds no sparse vectors; leave --hybrid out"),
        (["--method", "maxsim"], "name --rerank, too"),
        (["--budget-ms", "9"], "name --rerank, too"),
        (["--rerank", "cross", "--budget-ms", "-9"], "--budget-ms=-9.0 must be a positive"),
        (["--rerank", "cross", "--method", "maxsim"], "--method='maxsim'"),
        (["--threshold", "nan"], "nan is not a score"),
        (["--sink", "speed=1"], "this sink has no option 'speed'"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
)
def test_wrong_options_are_exit_2(search, docs: str, words: list[object], message: str):
    assert message in search(docs, QUESTION, *words, code=2).err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["qdrant+path:{}/none#docs"], "there is no database of Qdrant at"),
        (["docs"], "is no URL of a collection"),
        (["chroma+path:{}#docs"], "no installed package writes to 'chroma'"),
        (["qdrant+path:{}/q#docs", " "], "it is blank"),
        pytest.param(["milvus+file:{}/none.db#docs"], "there is no database of Milvus", marks=pytest.mark.contract),
        pytest.param(["lancedb+path:{}#docs"], "there is no collection 'docs'", marks=pytest.mark.contract),
        pytest.param(["milvus+parquet:{}#docs"], "'milvus+parquet' only writes", marks=pytest.mark.contract),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_not_there_is_named_and_not_made(search, tmp_path: Path, words: list[str], message: str):
    url, *questions = words
    assert message in search(url.format(tmp_path), *(questions or [QUESTION]), code=2).err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.contract
def test_more_than_the_database_hands_out_is_an_option_and_no_question(search, filled, caplog):
    url, rerank = filled("milvus"), ("--rerank", "self", *JSONL)
    for questions in (["pond"], ["pond", "mill", "flour"]):
        refused = search(url, *questions, "-k", 20_000, code=2).err
        assert "--k=20000 is more than Milvus hands out (16384)" in refused
    assert "flour" not in caplog.text and "question 3" not in caplog.text
    assert len(search(url, QUESTION, *rerank, "-k", 16_000).rows) == 5
    for words, option in ((["-k", 3, "--candidates", 20_000], "--candidates"), (["-k", 20_000], "--k")):
        refused = search(url, QUESTION, *rerank, *words, code=2).err
        assert f"{option}=20000 is more than Milvus hands out (16384)" in refused


@pytest.mark.contract
@pytest.mark.parametrize("closed", ["stdin", "stdout"])
def test_a_stream_that_the_caller_closed_is_no_traceback(docs: str, folder: Path, closed: str):
    """``<&-`` and ``>&-`` of a shell: Python then has no object for the stream."""
    words = ["search", docs, *([QUESTION] if closed == "stdout" else [])]
    program = f"import sys, runpy; sys.{closed} = None; sys.argv[1:] = {words!r}; "
    program += "runpy.run_module('millpond', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder)
    assert "Traceback" not in done.stderr
    assert done.returncode == (2 if closed == "stdin" else 1), done.stderr
    assert ("write a question" if closed == "stdin" else "standard output is closed") in done.stderr


def test_a_long_question_is_cut_and_said_to_be_and_long_records_without_a_word(
    search, docs: str, engine: Engine, tmp_path: Path, caplog
):
    assert len(search(docs, LONG * 5, *JSONL).rows) == 5
    assert "cut to 64 tokens" in caplog.text
    url = fill(URLS["qdrant"].format(tmp_path), engine, [Record("long", LONG * 5)])
    caplog.clear()
    assert len(search(url, QUESTION, *JSONL, "--rerank", "self").rows) == 1
    assert "cut to" not in caplog.text


@pytest.mark.usefixtures("terminal")
def test_columns_are_aligned_and_controls_are_replaced(search, engine: Engine, tmp_path: Path):
    records = [
        Record("guide.md", "池塘有多深" * 30, {"title": "池 x"}),
        Record("a" * 60, "one\ntwo\x1b[31m\tred\x07", {"year": 2024}),
        Record("p", "pond"),
    ]
    out = search(fill(URLS["qdrant"].format(tmp_path), engine, records), "one two", "-k", 3).out
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    assert max(map(cell_len, lines)) <= 120 and lines[0].startswith("3 records by cosine at 48 (bert), ")
    (guide, *_), (long, *_) = ([line for line in lines if part in line] for part in ("池塘", "aaa"))
    assert guide.endswith("…") and "guide.md  " in guide
    assert f"{'a' * 27}…  one two�[31m red�" in long
    assert {line.strip() for line in lines} >= {"title=池 x", "year=2024"}
    assert len({cell_len(line.partition(text)[0]) for line, text in ((guide, "池塘"), (long, "one two�"))}) == 1
