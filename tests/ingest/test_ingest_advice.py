"""The advice: codes by hand, sizes, trade-offs, samples, judgements, and what is refused."""

import json
import logging
import math
import re
import shlex

import numpy as np
import pytest
from typer.main import get_command

from millpond.cli.app import app
from millpond.errors import InvalidDimensionsError, InvalidRequestError
from millpond.ingest import Advice, Record, Rejected, advise, read_judgements
from millpond.ingest.advice.advisor import quality
from millpond.ingest.advice.beir import beir_folder
from millpond.ingest.advice.judgements import ndcg
from millpond.ingest.advice.layouts import DATATYPES, Layout, layouts
from millpond.ingest.advice.page import advice_page
from millpond.ingest.advice.quantized import quantize, round_bfloat16, store
from millpond.ingest.pages.neighbors import nearest
from millpond.ingest.sinks.database import installed


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def rows():
    return unit(np.random.default_rng(0).normal(size=(300, 20)) * np.linspace(2, 0.2, 20))


@pytest.fixture(scope="module")
def queries():
    return unit(np.random.default_rng(1).normal(size=(9, 20)) * np.linspace(2, 0.2, 20))


@pytest.fixture
def engine(engine_of):
    return engine_of("bert", hf_overrides={"is_matryoshka": True})


TEXTS = [f"the {noun} {verb} {number}" for number in range(10) for noun in ("wing", "lake") for verb in ("a", "be")]
QUERIES = [f"what {noun} {number}" for number in range(8) for noun in ("wing", "lake")]


def advised(engine, source=TEXTS, queries=QUERIES, **options):
    return advise(source, queries=queries, engine=engine, show_progress=False, **options)


# Codes


def test_float32_is_the_exact_search(rows, queries):
    codes = store(rows, "float32")
    np.testing.assert_array_equal(codes.search(queries, 7), nearest(queries, rows, 7))
    assert codes.bytes == 80


def test_bfloat16_rounds_as_torch_does(rows):
    torch = pytest.importorskip("torch")
    halves = np.array([[1 + n * 2**-8 for n in range(20)]], np.float32)  # every second one between two bfloat16
    values = np.concatenate([rows, rows * 1e-6, -rows * 1e5, halves, -halves])
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(round_bfloat16(values), expected)


@pytest.mark.parametrize(
    ("name", "bytes_per_row", "least"),
    [("float16", 40, 0.98), ("bfloat16", 40, 0.9), ("int8", 20, 0.85), ("uint8", 20, 0.85), ("bit", 3, 0.2)],
)
def test_a_datatype_takes_its_bytes_and_keeps_its_neighbours(rows, queries, name, bytes_per_row, least):
    codes = store(rows, name)
    exact = nearest(queries, rows, 10)
    shared = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(codes.search(queries, 10), exact, strict=True)])
    assert codes.bytes == bytes_per_row and least <= shared <= 1
    assert name in ("float16", "bfloat16") or shared < 1


@pytest.mark.parametrize("width", [1, 63, 65])
def test_bits_of_any_width_are_not_mixed_with_padding(width):
    random = np.random.default_rng(width)
    rows, queries = (
        random.normal(size=(40, width)).astype(np.float32),
        random.normal(size=(3, width)).astype(np.float32),
    )
    different = ((queries[:, None] > 0) != (rows[None] > 0)).sum(axis=2)
    np.testing.assert_array_equal(store(rows, "bit").search(queries, 40), np.argsort(different, axis=1, kind="stable"))


def test_uint8_is_compared_by_the_distance_of_its_codes(rows, queries):
    def codes(floats):
        return np.clip(np.rint(floats * 127 * max(1, 20**0.5 / 8)) + 128, 0, 255)

    distances = ((codes(queries)[:, None] - codes(rows)[None]) ** 2).sum(axis=2)
    found = store(rows, "uint8").search(queries, 5)
    np.testing.assert_array_equal(np.take_along_axis(distances, found, axis=1), np.sort(distances, axis=1)[:, :5])


def test_scalar_codes_of_many_rows_cut_a_few_outliers(queries):
    random = np.random.default_rng(7)
    rows = random.normal(size=(1000, 20)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows[0] = np.eye(20, dtype=np.float32)[0]  # far from every other value
    values = np.sort(rows, axis=None)
    low, high = values[5], values[-6]  # half a percent of the rows' number, at each end
    assert high < 0.99
    step = (high - low) / 127

    def codes(floats):
        return np.clip(np.rint((floats - low) / step), 0, 127) * step + low

    scores = codes(queries) @ codes(rows).T
    found = quantize(rows, "scalar").search(queries, 5)
    best = np.take_along_axis(scores, found, axis=1)
    np.testing.assert_allclose(best, -np.sort(-scores, axis=1)[:, :5], atol=1e-5)


def test_product_codes_are_exact_for_few_rows_and_lossy_for_many(queries):
    random = np.random.default_rng(2)
    few, many = unit(random.normal(size=(200, 20))), unit(random.normal(size=(3000, 20)))
    np.testing.assert_array_equal(quantize(few, "product").search(queries, 9), nearest(queries, few, 9))
    codes = quantize(many, "product")
    found, exact = codes.search(queries, 50), nearest(queries, many, 50)
    shared = np.mean([len(set(a) & set(b)) / 50 for a, b in zip(found, exact, strict=True)])
    assert codes.bytes == 5 and 0.5 < shared < 0.98
    np.testing.assert_array_equal(found, quantize(many, "product").search(queries, 50))  # the same seed


# Layouts


def test_layouts_are_all_different_and_each_but_bits_alone_is_stored_by_a_database():
    every = list(layouts([8, 16, 32]))
    assert len(set(every)) == len(every) == 3 * (6 + 12) + 2 * 6
    assert [one for one in every if not one.databases] == [Layout(width=d, datatype="bit") for d in (8, 16, 32)]
    assert Layout(width=32, coarse=8, datatype="int8") in every
    assert list(layouts([32])) == [one for one in every if one.width == 32 and not one.coarse]
    for database in installed():
        mine = list(layouts([8, 16, 32], DATATYPES, database))
        assert mine == [one for one in every if database in one.databases] and 0 < len(mine) < len(every)


def test_a_command_names_widths_type_and_copy():
    layout = Layout(width=384, datatype="float16", quantization="binary", rescore=True)
    assert layout.name == "384 float16 + binary, rescored"
    assert layout.command("a b.jsonl", "m", options=["--id", "_id"]) == (
        "millpond ingest 'a b.jsonl' --model m --to 'qdrant+http://localhost:6333#docs' --dimensions 384 "
        "--sink datatype=float16 --sink index_quantization=binary --id _id"
    )
    funnel = Layout(width=384, coarse=128)
    assert funnel.name == "128 -> 384 float32" and "--dimensions 128,384" in funnel.command("x", "m")
    assert "lancedb+path" in funnel.command("x", "m", database="lancedb")
    bits = Layout(width=384, coarse=128, datatype="bit")
    assert bits.name == "128 bit -> 384 float32" and bits.databases == ("pgvector",)
    assert "pgvector+postgresql://localhost/db#docs --dimensions 128,384 --sink datatype=bit" in bits.command(
        "x", "m"
    ).replace("'", "")


# Advice


def test_every_layout_is_measured_against_the_full_width(engine):
    native = engine.spec.dimensions
    advice = advised(engine, k=5, dimensions=[4, 8])
    assert [one.layout for one in advice.measurements] == list(layouts([4, 8, native]))
    assert advice.full.layout == Layout(width=native) and advice.full.recall == 1.0 and advice.full.keeps
    assert (advice.rows, advice.read, advice.queries, advice.judged) == (40, 40, 16, False)
    by_layout = {one.layout: one for one in advice.measurements}
    for one in advice.measurements:
        assert 0 <= one.recall <= 1 and one.scanned_bytes <= one.stored_bytes and one.ndcg is None
        if one.layout.rescore or one.layout.coarse:  # 100 candidates of 40 rows: only the stored vectors decide
            alone = Layout(width=one.layout.width, datatype=one.layout.final_datatype)
            assert one.recall == by_layout[alone].recall
    funnel = by_layout[Layout(width=native, coarse=4)]
    assert (funnel.stored_bytes, funnel.scanned_bytes) == (4 * native + 16, 16)
    assert funnel.read_bytes == 16e6 + 40 * 4 * native
    copy = by_layout[Layout(width=native, datatype="float16", quantization="binary", rescore=True)]
    assert (copy.stored_bytes, copy.scanned_bytes) == (2 * native + math.ceil(native / 8), math.ceil(native / 8))
    bits = by_layout[Layout(width=native, coarse=8, datatype="bit")]
    assert (bits.stored_bytes, bits.scanned_bytes, bits.recall) == (4 * native + 1, 1, 1.0)
    assert any("16 queries" in note for note in advice.notes) and any("40 records" in note for note in advice.notes)


def test_the_best_are_those_that_no_other_layout_beats(engine):
    advice = advised(engine, k=3, dimensions=[2, 8])
    for one in advice.measurements:
        beaten = [
            other
            for other in advice.measurements
            if other.layout.databases
            and other.stored_bytes <= one.stored_bytes
            and other.scanned_bytes <= one.scanned_bytes
            and other.recall >= one.recall
            and (other.stored_bytes, other.scanned_bytes, -other.recall)
            != (one.stored_bytes, one.scanned_bytes, -one.recall)
        ]
        assert one.best == (bool(one.layout.databases) and not beaten), one.layout.name
    keeping = [one for one in advice.measurements if one.recall >= 0.99]
    assert [one for one in advice.measurements if one.keeps] == keeping
    keeping = [one for one in keeping if one.layout.databases]
    assert advice.smallest.stored_bytes == min(one.stored_bytes for one in keeping)
    assert advice.lightest.scanned_bytes == min(one.scanned_bytes for one in keeping)


def test_a_sample_is_said_and_holds_every_judged_document(engine):
    records = [Record(f"r{i}", text) for i, text in enumerate(TEXTS)]
    asked = [{"id": f"q{i}", "text": text} for i, text in enumerate(QUERIES)]
    judged = {"q0": {"r7": 1, "r39": 2}, "q1": {"r3": 1}, "q9": {"r1": 0}, "q77": {"r2": 1}}
    advice = advised(engine, records, asked, judgements=judged, sample=5, k=2, dimensions=[8])
    assert (advice.rows, advice.read, advice.queries) == (5, 40, 2)
    assert advice.judged and advice.full.ndcg is not None and 0 < advice.full.ndcg <= 1
    text = " ".join(advice.notes)
    assert "14 of 16 queries have no relevant document" in text and "1 judged queries are not among" in text
    assert "5 of 40 records are searched" in text
    tiny = advised(engine, records, asked, judgements=judged, sample=1, k=2, dimensions=[8])
    assert tiny.rows == 3  # the judged ones, though more than the sample


def test_with_judgements_the_ndcg_decides(engine):
    records = [Record(str(i), text) for i, text in enumerate(TEXTS)]
    asked = [Record(f"q{i}", text) for i, text in enumerate(QUERIES)]
    found = advised(engine, records, asked, k=1)
    judged = {f"q{i}": {str(i): 1.0} for i in range(len(QUERIES))}
    advice = advised(engine, records, asked, judgements=judged, k=1, keep=1.0)
    assert not found.judged and quality(found.full) == 1.0
    assert quality(advice.full) == advice.full.ndcg < 1
    assert all(one.keeps == (one.ndcg >= advice.full.ndcg - 1e-9) for one in advice.measurements)


def test_judgements_that_the_full_width_finds_nothing_of_are_refused(engine):
    records = [Record(str(i), text) for i, text in enumerate(TEXTS)]
    judged = {"q": {farthest(engine): 1.0}}
    with pytest.raises(InvalidRequestError, match="the full width finds no relevant document"):
        advised(engine, records, [Record("q", TEXTS[1])], judgements=judged, k=1)


def farthest(engine):
    """The id of the text that is the last one of the ranking for the second text."""
    query = engine.embed([TEXTS[1]], role="query", normalize=True).embeddings[0]
    return str(int(np.argmin(engine.embed(TEXTS, role="document", normalize=True).embeddings @ query)))


def test_blank_and_broken_items_are_left_out_and_said(engine, caplog):
    source = [*TEXTS, "  ", {"id": 1}, Rejected(where="x:3", reason="not JSON"), 7, {"id": "a", "text": "good"}]
    with caplog.at_level(logging.WARNING):
        advice = advised(engine, source, [*QUERIES, "", "again"], k=2, dimensions=[8])
    assert (advice.rows, advice.queries) == (41, 17)
    assert any("left out 4 of the records" in record.getMessage() for record in caplog.records)
    assert any("left out 1 of the queries" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"queries": []}, "there is no query", id="no queries"),
        pytest.param({"queries": ["", " "]}, "there is no query", id="blank queries"),
        pytest.param({"source": []}, "no record with a visible character", id="empty source"),
        pytest.param({"source": ["one", "two"]}, "k=10 is more than the source's 2 records", id="k above rows"),
        pytest.param({"k": 0}, "k=0 is not a number of rows", id="k of 0"),
        pytest.param({"keep": 1.5}, "keep=1.5 is not a share", id="keep above 1"),
        pytest.param({"sample": 0}, "sample=0 is not a number", id="sample of 0"),
        pytest.param({"datatypes": ["float8"]}, "choose among float32", id="datatype"),
        pytest.param({"database": "oracle"}, "choose one of qdrant", id="database"),
        pytest.param({"judgements": {"x": {"1": 1}}}, "no query is judged", id="judgements of other queries"),
        pytest.param({"judgements": {"1": {"1": 0}}}, "no query is judged", id="nothing relevant"),
        pytest.param({"judgements": {"1": {"x": 1}}}, "no judged document is in the source", id="other documents"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_a_way_out(engine, options, message):
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        advised(engine, **options)


def test_widths_follow_the_rule_of_the_model(engine, engine_of):
    with pytest.raises(InvalidDimensionsError, match="is more than"):
        advised(engine, dimensions=[100_000])
    plain = engine_of("bert")
    with pytest.raises(InvalidDimensionsError, match="is_matryoshka"):
        advised(plain, dimensions=[8])
    assert {one.layout.width for one in advised(plain).measurements} == {plain.spec.dimensions}


# Judgements


@pytest.mark.parametrize(
    "text",
    [
        "query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td 2\t0\nq2\td1\t1\n",
        "\ufeffquery-id\tcorpus-id\tscore\r\nq1\td1\t2\r\n\r\nq1\td 2\t0\r\nq2\td1\t1",
        "q1\tQ0\td1\t2\nq1\tQ0\td 2\t0\nq2\tQ0\td1\t1\n",
    ],
    ids=["beir", "bom and crlf", "trec with tabs"],
)
def test_judgements_are_read_from_beir_and_trec(tmp_path, text):
    (tmp_path / "qrels").write_text(text, encoding="utf-8", newline="")
    assert read_judgements(tmp_path / "qrels") == {"q1": {"d1": 2.0, "d 2": 0.0}, "q2": {"d1": 1.0}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no judgement"),
        (b"q1\td1\t2\nq1\td2\thigh\n", "qrels:2: 'q1 d2 high' is not a judgement"),
        (b"q1\td1\tnan\n", "qrels:1"),
        (b"\xff\xfe\x00", "is not UTF-8"),
    ],
    ids=["empty", "a word as grade", "nan", "not text"],
)
def test_a_file_that_holds_no_judgements_is_refused(tmp_path, content, message):
    (tmp_path / "qrels").write_bytes(content)
    with pytest.raises(InvalidRequestError, match=message):
        read_judgements(tmp_path / "qrels")


def test_ndcg_by_hand():
    grades = {"a": 3.0, "b": 1.0, "c": -1.0}
    ideal = 3 + 1 / math.log2(3)
    assert ndcg(["b", "x", "a"], grades) == pytest.approx((1 + 3 / 2) / ideal)
    assert ndcg(["c"], grades) == 0.0 and ndcg(["a", "b"], grades) == 1.0
    assert ndcg(["x", "a"], grades, k=1) == 0.0 and ndcg(["a"], {}) == 0.0


def test_a_beir_folder_has_titles_before_texts(tmp_path):
    assert beir_folder(tmp_path) is None
    documents = [
        {"_id": "1", "title": " A ", "text": "b"},
        {"_id": "2", "text": "c"},
        {"_id": "3", "title": "d", "text": ""},
    ]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, documents)) + "\n{broken\n")
    found = beir_folder(tmp_path)
    items = list(found.documents())
    assert [(item.id, item.text) for item in items[:3]] == [("1", "A b"), ("2", "c"), ("3", "d")]
    assert isinstance(items[3], Rejected) and found.queries is None and found.judgements is None
    (tmp_path / "qrels").mkdir()
    for name in ("dev.tsv", "train.tsv"):
        (tmp_path / "qrels" / name).touch()
    with pytest.raises(InvalidRequestError, match=r"dev\.tsv, train\.tsv"):
        beir_folder(tmp_path)
    (tmp_path / "qrels" / "test.tsv").touch()
    assert beir_folder(tmp_path).judgements == tmp_path / "qrels" / "test.tsv"


# The page


def test_the_page_draws_every_layout_and_shows_the_commands(engine):
    advice = advised(engine, k=3, dimensions=[8])
    commands = {advice.smallest.layout: "millpond <x>", advice.lightest.layout: "millpond <x>"}
    page = advice_page(
        advice, source="<docs>", model="m&m", commands=commands, settings={"device": "cpu", "none": None}
    )
    assert page.count("<svg") == 3 and "millpond &lt;x&gt;" in page and "<docs>" not in page
    assert page.count('<th scope="row">') >= len(advice.measurements)
    assert page.count('class="marked"') == sum(one.best for one in advice.measurements)
    assert page.count("<title>") >= 2 * len(advice.measurements)  # a reader who points at a point learns what it is
    assert isinstance(advice, Advice)


# The databases


@pytest.mark.contract
def test_the_command_of_every_layout_is_one_that_ingest_takes():
    program = get_command(app)
    for database in installed():
        for one in layouts([8, 16], DATATYPES, database):
            words = shlex.split(one.command("docs.jsonl", "m", database=database))
            assert program.commands["ingest"].make_context("ingest", words[2:])
            assert words[words.index("--to") + 1].partition("+")[0] == database
