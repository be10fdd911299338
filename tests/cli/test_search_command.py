"""``millpond search``: questions to collections of each database, as a user types them."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from tests.cli.conftest import Finished, Run
from tests.tiny import write_checkpoint
from tests.tiny.heads import write_cross_encoder, write_splade, write_stanford

from millpond import Engine
from millpond.cli.output.results_table import Answer, RankedHit, print_table
from millpond.ingest import Chunking, Hit, Record, ingest, open_sink

pytest.importorskip("millpond_qdrant")
pytest.importorskip("millpond_milvus")
pytest.importorskip("milvus_lite")
pytest.importorskip("millpond_lancedb")

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
URLS = {"qdrant": "qdrant+path:{}/q#docs", "milvus": "milvus+file:{}/m.db#docs", "lancedb": "lancedb+path:{}/l#docs"}
EXACT = ("--dtype", "float32")
OVERRIDES = {"is_matryoshka": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and databases by their names."""
    folder = tmp_path_factory.mktemp("search")
    write_checkpoint(folder / "bert", "bert")
    write_splade(folder / "splade")
    write_stanford(folder / "colbert")
    write_cross_encoder(folder / "cross")
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder / "bert"), dtype="float32", device="cpu", hf_overrides=OVERRIDES) as engine:
        yield engine


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
def filled(folder: Path, engine: Engine) -> dict[str, str]:
    """The URL of a collection in each database."""
    return {kind: fill(url.format(folder), engine, dimensions=[16, 48]) for kind, url in URLS.items()}


@pytest.fixture(params=[*URLS, "pgvector"])
def url(request: pytest.FixtureRequest, filled: dict[str, str], engine: Engine) -> str:
    if request.param != "pgvector":
        return filled[request.param]
    pytest.importorskip("millpond_pgvector")
    address = request.getfixturevalue("postgres").schema()
    return fill(f"pgvector+{address}#docs", engine, dimensions=[16, 48])


@pytest.fixture
def search(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Searches where the collection's model is found by its name."""
    monkeypatch.chdir(folder)

    def search(*words: object, stdin: str = "", code: int = 0) -> Finished:
        done = run("search", *words, stdin=stdin)
        assert done.code == code, done.out + done.err
        assert "Traceback" not in done.err
        return done

    return search


def ids(done: Finished) -> list[object]:
    return [row["id"] for row in done.rows]


def found(url: str, engine: Engine, question: str = QUESTION, **options: Any) -> list[Hit]:
    sink = open_sink(url)
    try:
        hits: list[Hit] = sink.search(engine, question, **options)  # type: ignore[attr-defined]
        return hits
    finally:
        sink.close()


def test_the_collection_says_how_it_is_searched(search, url: str, engine: Engine):
    done = search(url, QUESTION, "--json", "-k", 3, "--dtype", "float32")
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


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["year=2025"], "wheel flour"),
        (["year=2025", "lang=sv"], "flour"),
        (["year=2024", "year=2026"], "pond fish"),
        (["year=[2024, 2026]"], "pond fish"),
        (["lang=sv"], "flour fish"),
        (['lang="sv"'], "flour fish"),
        (["wet=true", "year=2024"], "pond"),
        (["code=07"], "pond"),
        (['code="7"'], "wheel"),
        (["code=null"], "flour"),
        (["share=0.5"], "pond"),
        (["tags=b"], "fish"),
        (['{"year": [2024, 2026], "lang": "en"}'], "pond"),
        (['{"year": 2025}', "year=2026"], "wheel flour fish"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else None,
)
def test_filters_have_types(search, filled: dict[str, str], words: list[str], names: str):
    options = [option for word in words for option in ("--filter", word)]
    assert sorted(map(str, ids(search(filled["qdrant"], QUESTION, *options, "--json")))) == sorted(names.split())


def test_every_database_filters(search, url: str):
    assert ids(search(url, QUESTION, "--filter", "year=2025", "--filter", "lang=sv", "--json")) == ["flour"]


@pytest.mark.parametrize("url", ["qdrant", "milvus", "lancedb"], indirect=True)
def test_a_filter_without_a_match_shows_what_is_stored(search, url: str, caplog: pytest.LogCaptureFixture):
    assert search(url, QUESTION, "--filter", 'year="2024"', "--filter", "lang=de", "--json").rows == []
    assert "year=20" in caplog.text and 'lang="' in caplog.text and "no record matches the filter" in caplog.text
    caplog.clear()
    assert search(url, "pond", "--filter", "author=x", "--json", "--filter", "lang=en").rows == []
    assert 'author="x"' in caplog.text


def test_a_table_in_a_pipe_has_tabs(search, filled: dict[str, str]):
    lines = search(filled["qdrant"], QUESTION, "mill\tpond", "-k", 2).out.splitlines()
    rows = [line.split("\t") for line in lines]
    assert [row[:2] for row in rows] == [["1", "1"], ["1", "2"], ["2", "1"], ["2", "2"]]
    for _, _, score, id, text, metadata in rows:
        assert -1 <= float(score) <= 1
        assert (text, json.loads(metadata)) == (TEXTS[id], METADATA[id])


def test_questions_of_a_file_have_its_ids(search, filled: dict[str, str], tmp_path: Path, caplog):
    rows = [{"_id": "a", "q": "pond"}, {"_id": "b", "q": " \u200b"}, {"_id": 7, "q": "mill"}]
    (tmp_path / "q.jsonl").write_text("\n".join([*map(json.dumps, rows), "broken", '{"_id": "z", "q": "flour"}']))
    words = ["--queries", tmp_path / "q.jsonl", "--id", "_id", "--text", "q", "--json", "-k", 1]
    done = search(filled["qdrant"], *words, code=1)
    assert [(row["query_id"], row["query"]) for row in done.rows] == [("a", "pond"), ("7", "mill"), ("z", "flour")]
    assert "q.jsonl:4" in caplog.text and "question b: it is blank" in caplog.text


@pytest.mark.parametrize("words", [[], ["--queries", "-"]], ids=["default", "dash"])
def test_questions_come_from_standard_input(search, filled: dict[str, str], words: list[str]):
    done = search(filled["qdrant"], *words, "--json", "-k", 1, stdin="pond\n\nmill\n")
    assert [(row["query_id"], row["query"]) for row in done.rows] == [("1", "pond"), ("3", "mill")]
    assert "no question" in search(filled["qdrant"], *words, stdin="\n", code=2).err


def test_one_stage_searches_the_width_that_is_named(search, filled: dict[str, str], engine: Engine):
    for words, width in ((["--no-coarse-to-fine"], 48), (["--dimensions", "16"], 16)):
        done = search(filled["qdrant"], QUESTION, "--json", "--dtype", "float32", *words)
        query, *documents = engine.embed(
            [QUESTION, *TEXTS.values()], dimensions=width, normalize=True
        ).embeddings  # the same roles
        scores = dict(zip(TEXTS, (row @ query for row in documents), strict=True))
        assert ids(done) == sorted(TEXTS, key=scores.__getitem__, reverse=True)
        assert done.rows[0]["score"] == pytest.approx(max(scores.values()), abs=1e-5)


@pytest.mark.parametrize("second", ["self", "bert", "cross", "colbert"])
def test_the_second_stage_is_the_rerank_of_what_was_found(
    search, filled: dict[str, str], folder: Path, engine: Engine, second: str
):
    done = search(filled["milvus"], QUESTION, "--rerank", second, "--candidates", 4, "-k", 3, "--json", *EXACT)
    hits = found(filled["milvus"], engine, k=4)
    name = "bert" if second == "self" else second
    with Engine(str(folder / name), dtype="float32", device="cpu") as reranker:
        expected = reranker.rerank(QUESTION, [hit.text for hit in hits], top_n=3)
    assert ids(done) == [hits[result.index].id for result in expected]
    scores = [result.relevance_score for result in expected]
    assert [row["score"] for row in done.rows] == pytest.approx(scores, abs=1e-4)
    assert [row["retrieval_rank"] for row in done.rows] == [result.index + 1 for result in expected]
    assert [row["retrieval_score"] for row in done.rows] == pytest.approx(
        [hits[result.index].score for result in expected], abs=1e-5
    )


def test_the_second_stage_takes_a_method(search, filled: dict[str, str], engine: Engine):
    cosine = search(filled["qdrant"], QUESTION, "--rerank", "self", "--method", "cosine", "--json", *EXACT)
    assert ids(cosine) == [hit.id for hit in found(filled["qdrant"], engine)]
    refused = search(filled["qdrant"], QUESTION, "--rerank", "cross", "--method", "maxsim", code=2)
    assert "--method maxsim" in refused.err


def test_a_threshold_leaves_out_what_is_below(search, filled: dict[str, str], caplog: pytest.LogCaptureFixture):
    scores = [row["score"] for row in search(filled["qdrant"], QUESTION, "--json").rows]
    done = search(filled["qdrant"], QUESTION, "--json", "--threshold", scores[1])
    assert [row["score"] for row in done.rows] == scores[:2]
    assert search(filled["qdrant"], QUESTION, "--json", "--threshold", "1.5").rows == []
    assert "no score reaches --threshold 1.5; the best is" in caplog.text


@pytest.mark.parametrize("kind", ["qdrant", "milvus"])
def test_sparse_vectors_are_fused_if_the_collection_has_them(
    search, folder: Path, engine: Engine, kind: str, tmp_path: Path
):
    url = URLS[kind].format(tmp_path)
    with Engine(str(folder / "splade"), dtype="float32", device="cpu") as sparse:
        fill(url, engine, hybrid=True, sparse_engine=sparse)
        fused = found(url, engine, hybrid=True, sparse_engine=sparse)
    words = [url, QUESTION, "--json", "--dtype", "float32"]
    for more in ([], ["--hybrid"], ["--sparse-model", "splade"]):
        assert [row["score"] for row in search(*words, *more).rows] == pytest.approx([hit.score for hit in fused])
    dense = search(*words, "--no-hybrid").rows
    assert [row["score"] for row in dense] == pytest.approx([hit.score for hit in found(url, engine)], abs=1e-5)
    other = search(*words, "--sparse-model", folder / "bert", code=1).err
    assert "in its sparse vectors, was built by splade" in other


def test_milvus_makes_bm25_of_the_question_without_a_model(search, engine: Engine, tmp_path: Path):
    url = fill(URLS["milvus"].format(tmp_path), engine, hybrid="bm25")
    done = search(url, "Bread", "--json", "-k", 5)
    assert done.rows[0]["score"] == pytest.approx(found(url, engine, "Bread", hybrid=True, k=5)[0].score)
    assert done.rows[0]["score"] < 0.1  # fused ranks


LONG = " ".join(f"The pond number {number} is deep." for number in range(12))


@pytest.mark.parametrize("kind", URLS)
def test_chunks_of_a_record_are_shown_apart_or_once(search, engine: Engine, tmp_path: Path, kind: str):
    pytest.importorskip("semantic_text_splitter")
    records = [Record("guide.md", LONG, {"n": 1}), *RECORDS]
    url = fill(URLS[kind].format(tmp_path), engine, records, chunking=Chunking(max_tokens=20, overlap=0))
    every = search(url, "deep pond", "--json", "-k", 20).rows
    chunks = [row for row in every if row["id"] == "guide.md"]
    assert len(chunks) >= 3
    for row in chunks:
        assert row["text"] == LONG[row["metadata"]["chunk_start"] : row["metadata"]["chunk_end"]]
    once = search(url, "deep pond", "--json", "--per-record").rows
    assert sorted(row["id"] for row in once) == sorted(["guide.md", *TEXTS])
    kept = next(row for row in once if row["id"] == "guide.md")
    assert {**kept, "rank": chunks[0]["rank"]} == chunks[0]
    assert [row["rank"] for row in once] == list(range(1, 7))
    assert [row["id"] for row in once] == list(dict.fromkeys(row["id"] for row in every))


def test_settings_of_the_run_are_those_of_the_search(search, folder: Path, tmp_path: Path):
    """A model's name alone would give another fingerprint."""
    with Engine(str(folder / "bert"), dtype="float32", max_length=12, pooling="cls") as engine:
        url = fill(URLS["qdrant"].format(tmp_path), engine)
    assert len(search(url, QUESTION, "--json").rows) == 5
    refused = search(url, QUESTION, "--max-length", 16, code=1).err
    assert "--max-length 12" in refused and "another collection name" in refused


@pytest.mark.parametrize("url", ["qdrant", "milvus", "lancedb"], indirect=True)
def test_another_model_is_refused_before_its_weights_are_read(search, url: str, folder: Path, tmp_path: Path):
    other = write_checkpoint(tmp_path / "other", "bert", seed=1)
    refused = search(url, QUESTION, "-m", other, code=1).err
    assert "was built by bert" in refused and "this engine is other" in refused


def test_a_folder_that_is_elsewhere_is_named_again(search, filled: dict[str, str], folder: Path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    refused = search(filled["qdrant"], QUESTION, code=1).err
    assert "was filled by 'bert'. If that was a folder, name it with --model." in refused
    assert len(search(filled["qdrant"], QUESTION, "--json", "-m", folder / "bert").rows) == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--candidates", 3], "3 is less than --k 10"),
        (["-k", 0], "greater than or equal to 1"),
        (["--filter", "year"], "'year' is no KEY=VALUE"),
        (["--filter", "=3"], "'=3' is no KEY=VALUE"),
        (["--filter", "{year}"], "is not JSON"),
        (["--filter", "year=[]"], "empty list"),
        (["--filter", '{"year": {"from": 1}}'], "filter['year'] holds"),
        (["--dimensions", "32"], "holds the widths [16, 48], not [32]"),
        (["--dimensions", "x"], "is not a list of widths"),
        (["--hybrid"], "holds no sparse vectors; leave --hybrid out"),
        (["--method", "maxsim"], "name --rerank, too"),
        (["--instruction", "x"], "name --rerank, too"),
        (["--rerank", " "], "name a model, or write self"),
        (["--threshold", "nan"], "nan is no score"),
        (["--queries", "x.txt"], "not both"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
)
def test_wrong_options_are_exit_2(search, filled: dict[str, str], words: list[object], message: str):
    assert message in search(filled["qdrant"], QUESTION, *words, code=2).err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["qdrant+path:{}/none#docs"], "there is no database of Qdrant at"),
        (["qdrant+path:{}#docs"], "there is no database of Qdrant at"),
        (["milvus+file:{}/none.db#docs"], "there is no database of Milvus Lite at"),
        (["lancedb+path:{}/none#docs"], "there is no database of LanceDB at"),
        (["lancedb+path:{}#docs"], "there is no collection 'docs'"),
        (["qdrant+memory:#docs"], "there is no collection 'docs'"),
        (["milvus+parquet:{}#docs"], "'milvus+parquet' only writes"),
        (["docs"], "is no URL of a collection"),
        (["chroma+path:{}#docs"], "no installed package writes to 'chroma'"),
        (["qdrant+path:{}/q#docs", " "], "it is blank"),
        (["qdrant+path:{}/q#docs", "pond", ""], "it is blank"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_not_there_is_named_and_not_made(search, tmp_path: Path, words: list[str], message: str):
    url, *questions = words
    assert message in search(url.format(tmp_path), *(questions or [QUESTION]), code=2).err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", URLS)
def test_another_name_in_a_database_is_no_collection(search, filled: dict[str, str], kind: str):
    refused = search(filled[kind].replace("#docs", "#dogs"), QUESTION, code=2).err
    assert "there is no collection 'dogs'" in refused and "ingest into it first" in refused


@pytest.mark.parametrize("kind", URLS)
def test_an_empty_collection_says_so(search, engine: Engine, tmp_path: Path, kind: str, caplog):
    url = URLS[kind].format(tmp_path)
    sink: Any = open_sink(url)
    sink.prepare(engine.spec)
    sink.close()
    assert search(url, QUESTION, "--json").rows == []
    assert "collection 'docs' is empty" in caplog.text
    caplog.clear()
    assert search(url, QUESTION, "--filter", "a=1").out == ""
    assert "collection 'docs' is empty" in caplog.text


@pytest.mark.parametrize("url", ["qdrant", "milvus", "lancedb", "pgvector"], indirect=True)
def test_more_than_there_is(search, url: str):
    assert len(search(url, QUESTION, "--json", "-k", 16_000).rows) == 5
    assert len(search(url, QUESTION, "--json", "-k", 3, "--candidates", 16_000).rows) == 3


def test_more_than_the_database_hands_out_is_an_option_and_no_question(search, filled: dict[str, str], caplog):
    for questions in (["pond"], ["pond", "mill", "flour"]):
        refused = search(filled["milvus"], *questions, "-k", 20_000, code=2).err
        assert "--k 20000 is more than Milvus hands out (16384)" in refused
    assert "flour" not in caplog.text and "question 3" not in caplog.text


@pytest.mark.parametrize("url", ["qdrant", "milvus", "lancedb", "pgvector"], indirect=True)
@pytest.mark.parametrize("words", [("-k", 2**63), ("-k", 3, "--candidates", 2**63)], ids=["k", "candidates"])
def test_a_number_that_no_database_counts_to(search, url: str, words: tuple[object, ...]):
    refused = search(url, QUESTION, *words, code=2).err
    assert f"{words[-2]} {2**63} is more than" in refused


@pytest.mark.parametrize("url", ["qdrant", "lancedb", "pgvector"], indirect=True)
def test_the_largest_number_of_records(search, url: str):
    assert len(search(url, QUESTION, "--json", "-k", 2**31 - 1).rows) == 5


def test_a_second_stage_gets_what_the_database_hands_out(search, filled: dict[str, str]):
    rerank = ("--rerank", "self", "--json")
    assert len(search(filled["milvus"], QUESTION, *rerank, "-k", 16_000).rows) == 5
    refused = search(filled["milvus"], QUESTION, *rerank, "-k", 3, "--candidates", 20_000, code=2).err
    assert "--candidates 20000 is more than Milvus hands out (16384)" in refused
    refused = search(filled["milvus"], QUESTION, *rerank, "-k", 20_000, code=2).err
    assert "--k 20000 is more than Milvus hands out (16384)" in refused


@pytest.mark.parametrize("closed", ["stdin", "stdout"])
def test_a_stream_that_the_caller_closed_is_no_traceback(filled: dict[str, str], folder: Path, closed: str):
    """``<&-`` and ``>&-`` of a shell: Python then has no object for the stream."""
    words = ["search", filled["qdrant"], *([QUESTION] if closed == "stdout" else [])]
    program = f"import sys; sys.{closed} = None; from millpond.cli.app import main; sys.argv[1:] = {words!r}; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder)
    assert "Traceback" not in done.stderr
    assert done.returncode == (2 if closed == "stdin" else 0), done.stderr
    assert closed == "stdout" or "write a question" in done.stderr


def test_a_long_question_is_cut_and_said_to_be(search, filled: dict[str, str], caplog):
    assert len(search(filled["qdrant"], LONG * 5, "--json").rows) == 5
    assert "cut to 64 tokens" in caplog.text


def test_long_records_are_reranked_without_a_word(search, engine: Engine, tmp_path: Path, caplog):
    url = fill(URLS["qdrant"].format(tmp_path), engine, [Record("long", LONG * 5)])
    caplog.clear()
    assert len(search(url, QUESTION, "--json", "--rerank", "self").rows) == 1
    assert "cut to" not in caplog.text


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # of the client
def test_a_folder_in_use_is_exit_1(search, filled: dict[str, str], folder: Path):
    from qdrant_client import QdrantClient

    client = QdrantClient(path=str(folder / "q"))
    try:
        assert "is in use by another process or client" in search(filled["qdrant"], QUESTION, code=1).err
    finally:
        client.close()


@pytest.mark.slow
def test_a_file_in_use_is_exit_1(search, engine: Engine, tmp_path: Path):
    url = URLS["milvus"].format(tmp_path)
    program = "import sys; from pymilvus import MilvusClient; MilvusClient(sys.argv[1]); print('open'); input()"
    command = [sys.executable, "-c", program, str(tmp_path / "m.db")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        refused = search(url, QUESTION, code=1).err
        other.communicate("\n")
    assert "another process" in refused and "cannot be opened" in refused


@pytest.mark.parametrize("kind", ["qdrant", "lancedb"])
def test_a_search_writes_nothing(search, engine: Engine, tmp_path: Path, kind: str):
    url = fill(URLS[kind].format(tmp_path), engine, dimensions=[16, 48])

    def contents() -> dict[str, str]:
        files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal"))]
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    before = contents()
    search(url, QUESTION, "--filter", "year=2024", "--rerank", "self")
    assert contents() == before


class TestTable:
    HITS = (
        Hit(
            id="guide.md", score=0.5, text="池塘有多深" * 30, metadata={"chunk": 3, "chunk_start": 90, "chunk_end": 240}
        ),
        Hit(id="a" * 60, score=-0.25, text="one\ntwo\x1b[31m\tred\x07", metadata={"year": 2024, "title": "池 x"}),
        Hit(id="p", score=0.125, text="", metadata={}),
    )

    def lines(self, *, width: int = 70, chunked: bool = True, title: str = "by cosine") -> list[str]:
        file = io.StringIO()
        hits = [RankedHit(hit=hit, score=hit.score, retrieval_rank=1) for hit in self.HITS]
        answer = Answer(query_id="1", query="q", hits=hits, reranked=False, seconds=0.1)
        console = Console(file=file, force_terminal=True, width=width, no_color=True, color_system=None)
        print_table(answer, title=title, chunked=chunked, console=console)
        return file.getvalue().splitlines()

    def test_no_line_is_wider_than_the_terminal(self):
        for width in (40, 70, 150):
            assert max(map(cell_len, self.lines(width=width))) <= width

    def test_columns_are_aligned_and_controls_are_replaced(self):
        title, first, chunk, second, metadata, third = self.lines()
        assert title == "by cosine"
        assert first.startswith("  1   0.5000  guide.md [3]") and "池塘" in first
        assert chunk.strip() == "characters 90 to 240"
        assert second.startswith(f"  2  -0.2500  {'a' * 27}…  one two�[31m red�")
        assert metadata.strip() == "year=2024  title=池 x"
        assert third.split() == ["3", "0.1250", "p"]

    def test_a_record_with_a_chunk_key_of_its_own_is_shown_as_it_is(self):
        _, first, metadata, *_ = self.lines(chunked=False, width=100)
        assert "guide.md  " in first and "[3]" not in first
        assert metadata.strip() == "chunk=3  chunk_start=90  chunk_end=240"
