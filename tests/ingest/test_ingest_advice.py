"""The advice: trade-offs, samples, judgements, and what is refused."""

import logging
import re

import numpy as np
import pytest

from millpond.errors import InvalidDimensionsError, InvalidRequestError
from millpond.ingest import Record, Rejected, advise, read_judgements


@pytest.fixture
def engine(engine_of):
    return engine_of("bert", hf_overrides={"is_matryoshka": True})


# The model's vocabulary has these words: texts of the same vector would be ranked by the last bit of a product.
WORDS = ("mill", "river", "pond", "wheel", "gate", "grain", "oak", "flood", "stone", "bridge")
TEXTS = [f"the {noun} {verb} {word}" for word in WORDS for noun in ("wing", "lake") for verb in ("fish", "drink")]
QUERIES = [f"what {noun} {word}" for word in WORDS[:8] for noun in ("wing", "lake")]


def advised(engine, source=TEXTS, queries=QUERIES, **options):
    return advise(source, queries=queries, engine=engine, show_progress=False, **options)


def test_every_layout_is_measured_against_the_full_width(engine):
    native = engine.spec.dimensions
    advice = advised(engine, k=5, dimensions=[4, 8])
    assert advice.full.layout.name == f"{native} float32" and advice.full.recall == 1.0 and advice.full.keeps
    assert (advice.rows, advice.read, advice.queries, advice.judged) == (40, 40, 16, False)
    by_name = {one.layout.name: one for one in advice.measurements}
    for one in advice.measurements:
        assert 0 <= one.recall <= 1 and one.scanned_bytes <= one.stored_bytes and one.ndcg is None
        if one.layout.rescore or one.layout.coarse:  # 100 candidates of 40 rows: only the stored vectors decide
            assert one.recall == by_name[f"{one.layout.width} {one.layout.final_datatype}"].recall
    coarse_to_fine = by_name[f"4 -> {native} float32"]
    assert (coarse_to_fine.stored_bytes, coarse_to_fine.scanned_bytes) == (4 * native + 16, 16)
    assert coarse_to_fine.read_bytes == 16e6 + 40 * 4 * native
    copy, bits = by_name[f"{native} float16 + binary, rescored"], by_name[f"8 bit -> {native} float32"]
    assert (copy.stored_bytes, copy.scanned_bytes) == (2 * native + -(-native // 8), -(-native // 8))
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
    assert "14 of 16 queries have no relevant document" in text
    assert "5 of 40 records are searched" in text
    tiny = advised(engine, records, asked, judgements=judged, sample=1, k=2, dimensions=[8])
    assert tiny.rows == 3  # the judged ones, though more than the sample


def test_with_judgements_the_ndcg_decides(engine):
    records = [Record(str(i), text) for i, text in enumerate(TEXTS)]
    asked = [Record(f"q{i}", text) for i, text in enumerate(QUERIES)]
    found = advised(engine, records, asked, k=1)
    judged = {f"q{i}": {str(i): 1.0} for i in range(len(QUERIES))}
    advice = advised(engine, records, asked, judgements=judged, k=1, keep=1.0)
    assert not found.judged and found.full.quality == 1.0
    assert advice.full.quality == advice.full.ndcg < 1
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
        pytest.param({"k": 0}, "k=0 must be an int from 1", id="k of 0"),
        pytest.param({"keep": 1.5}, "keep=1.5 is not a share", id="keep above 1"),
        pytest.param({"sample": 0}, "sample=0 must be an int from 1", id="sample of 0"),
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
