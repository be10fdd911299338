"""What an advice and a report compute with: codes, exact neighbours, quantiles, nDCG, layouts and their commands."""

import json
import math
import shlex

import numpy as np
import pytest
from peers.vector_stores import qdrant_edge, uint8
from storage_recall import cuts
from typer.main import get_command

from millpond.cli.app import app
from millpond.errors import InvalidRequestError
from millpond.ingest import Hit, Rejected, evaluate, read
from millpond.ingest.advice.judgements import ID_COLUMN, TEXT_COLUMNS, beir_folder, ndcg
from millpond.ingest.advice.layouts import DATATYPES, Layout, layouts
from millpond.ingest.advice.quantized import quantize, round_bfloat16, store
from millpond.ingest.pages import neighbors
from millpond.ingest.pages.neighbors import nearest, plotted_widths, recall, recall_by_width
from millpond.ingest.sinks.database import installed
from millpond.ingest.telemetry.trace import LogHistogram
from millpond.vectors import matryoshka


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def rows():
    return unit(normal(0, 300, 20) * np.linspace(2, 0.2, 20))


@pytest.fixture(scope="module")
def queries():
    return unit(normal(1, 9, 20) * np.linspace(2, 0.2, 20))


@pytest.mark.torch
def test_bfloat16_rounds_as_torch_does(rows):
    torch = pytest.importorskip("torch")
    halves = np.array([[1 + n * 2**-8 for n in range(20)]], np.float32)  # every second one between two bfloat16
    values = np.concatenate([rows, rows * 1e-6, -rows * 1e5, halves, -halves])
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(round_bfloat16(values), expected)


@pytest.mark.parametrize(
    ("name", "bytes_per_row", "least"),
    [
        ("float32", 80, 1),
        ("float16", 40, 0.98),
        ("bfloat16", 40, 0.9),
        ("int8", 20, 0.85),
        ("uint8", 20, 0.85),
        ("bit", 3, 0.2),
    ],
)
def test_a_datatype_takes_its_bytes_and_keeps_its_neighbours(rows, queries, name, bytes_per_row, least):
    codes = store(rows, name)
    shared = recall(codes.search(queries, 10), nearest(queries, rows, 10))
    assert codes.bytes == bytes_per_row and least <= shared <= 1
    assert "float" in name or shared < 1


def test_bits_are_compared_by_their_hamming_distance():
    rows, queries = normal(2, 40, 65), normal(3, 3, 65)
    rows[0] = 0  # as negative
    different = ((queries[:, None] > 0) != (rows[None] > 0)).sum(axis=2)
    expected = np.argsort(different, axis=1, kind="stable")
    bits = store(rows, "bit")
    np.testing.assert_array_equal(bits.search(queries, 40), expected)
    np.testing.assert_array_equal(bits.rescore(queries, expected[:, ::-1], 7), expected[:, :7])


def test_uint8_is_compared_by_the_distance_of_its_codes(rows, queries):
    def codes(floats):
        return np.clip(np.rint(floats * 127 * max(1, 20**0.5 / 8)) + 128, 0, 255)

    distances = ((codes(queries)[:, None] - codes(rows)[None]) ** 2).sum(axis=2)
    found = store(rows, "uint8").search(queries, 5)
    np.testing.assert_array_equal(np.take_along_axis(distances, found, axis=1), np.sort(distances, axis=1)[:, :5])


def test_scalar_codes_of_many_rows_cut_a_few_outliers(queries):
    rows = unit(normal(7, 1000, 20))
    rows[0] = np.eye(20, dtype=np.float32)[0]  # far from every other value
    values = np.sort(rows, axis=None)
    low, high = values[5], values[-6]  # half a percent of the rows' number, at each end
    assert high < 0.99
    step = (high - low) / 127

    def codes(floats):
        return np.clip(np.rint((floats - low) / step), 0, 127) * step + low

    scores = codes(queries) @ codes(rows).T
    best = np.take_along_axis(scores, quantize(rows, "scalar").search(queries, 5), axis=1)
    np.testing.assert_allclose(best, -np.sort(-scores, axis=1)[:, :5], atol=1e-5)


def test_product_codes_are_exact_for_few_rows_and_lossy_for_many(queries):
    few, many = unit(normal(2, 200, 20)), unit(normal(4, 3000, 20))
    np.testing.assert_array_equal(quantize(few, "product").search(queries, 9), nearest(queries, few, 9))
    codes = quantize(many, "product")
    found = codes.search(queries, 50)
    assert codes.bytes == 5 and 0.5 < recall(found, nearest(queries, many, 50)) < 0.98
    np.testing.assert_array_equal(found, quantize(many, "product").search(queries, 50))  # the same seed


@pytest.mark.contract
def test_qdrant_s_engine_finds_what_the_simulation_finds(tmp_path):
    pytest.importorskip("qdrant_edge")
    rows = unit(normal(0, 600, 48) * np.linspace(2, 0.3, 48))
    queries = unit(rows[:20] * 0.9 + rows[20:40] * 0.5)
    cut = cuts(rows, queries)
    found = {stored.layout: stored for stored in qdrant_edge(cut, [16, 48], tmp_path)}
    simulated = {
        f"{width} {datatype}": store(cut(width)[0], datatype).search(cut(width)[1], 10)
        for width in (16, 48)
        for datatype in ("float32", "float16", "uint8")
    }
    simulated |= {f"48 float32 + {copy}": quantize(rows, copy).search(queries, 10) for copy in ("scalar", "binary")}
    for layout, expected in simulated.items():
        # Bits have many equal distances, of which an engine takes any.
        assert recall(found[layout].found, expected) >= (0.8 if "binary" in layout else 0.97), layout
    exact = nearest(queries, rows, 10)
    for better, worse in (
        ("48 float32 + product, rescored", "48 float32 + product"),
        ("16 -> 48 float32", "16 float32"),
    ):
        assert recall(found[better].found, exact) > recall(found[worse].found, exact)
    assert found["48 uint8"].bytes < found["48 float16"].bytes < found["48 float32"].bytes


def test_uint8_rows_of_the_benchmark_are_those_of_the_sink(rows):
    storage = pytest.importorskip("millpond_qdrant.vector_storage")
    np.testing.assert_array_equal(uint8(rows), storage.StoredVectors(datatype="uint8").encode(rows))


@pytest.mark.parametrize(("k", "block"), [(1, 300), (10, 1), (99, 1 << 23), (500, 300)])
def test_nearest_equals_a_full_sort_in_any_blocks_and_with_equal_scores(monkeypatch, k, block):
    random = np.random.default_rng(3)
    queries = random.integers(-2, 3, (7, 4)).astype(np.float32)
    rows = random.integers(-2, 3, (100, 4)).astype(np.float32)  # integers: many scores are equal
    monkeypatch.setattr(neighbors, "_BLOCK_SCORES", block)
    expected = np.argsort(-(queries @ rows.T), axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(nearest(queries, rows, k), expected)
    np.testing.assert_array_equal(nearest(queries, rows.astype(np.int8), k), expected)


def test_recall_by_width_is_that_of_a_search_among_the_other_rows():
    rows = normal(0, 120, 16)
    values = recall_by_width(rows, [4, 16, 8], k=5)
    assert list(values) == [4, 8, 16] and values[16] == 1.0
    assert values[4] < values[8] < 1.0

    def by_hand(width):
        cut = matryoshka.cut(rows, width, normalize=True)
        scores = cut @ cut.T
        np.fill_diagonal(scores, -np.inf)
        return [set(np.argsort(-row)[:5]) for row in scores]

    shares = [len(a & b) / 5 for a, b in zip(by_hand(8), by_hand(16), strict=True)]
    assert values[8] == pytest.approx(np.mean(shares))


def test_the_widths_of_a_plot_are_the_declared_ones_the_stored_ones_and_the_full_one():
    assert plotted_widths(384, None) == [32, 64, 128, 256, 384]
    assert plotted_widths(1024, (64, 512, 1024), stored=[100, 4096]) == [64, 100, 512, 1024]
    assert plotted_widths(16, None) == [16]


@pytest.mark.parametrize("share", [0.01, 0.95])
def test_quantiles_of_a_histogram_are_within_five_percent(share):
    values = np.random.default_rng(0).lognormal(0, 3, 2_000)
    one, many = LogHistogram(1e-6, 1e5), LogHistogram(1e-6, 1e5)
    for value in values.tolist():
        one.add(value)
    many.add(values)
    true = np.quantile(values, share, method="inverted_cdf")
    assert one.quantile(share) == many.quantile(share) == pytest.approx(true, rel=0.05)
    assert (one.count, one.least, one.most) == (many.count, many.least, many.most) == (2000, min(values), max(values))
    assert one.total == pytest.approx(many.total)


def test_ndcg_by_hand():
    grades = {"a": 3.0, "b": 1.0, "c": -1.0}
    ideal = 3 + 1 / math.log2(3)
    assert ndcg(["b", "x", "a"], grades) == pytest.approx((1 + 3 / 2) / ideal)
    assert ndcg(["c"], grades) == 0.0 and ndcg(["a", "b"], grades) == 1.0
    assert ndcg(["x", "a"], grades, k=1) == 0.0 and ndcg(["a"], {}) == 0.0


@pytest.mark.torch
def test_an_evaluation_is_that_of_sentence_transformers():
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    random = np.random.default_rng(3)
    judgements = {f"q{q}": {f"d{d}": 1.0 for d in random.choice(30, 3, replace=False)} for q in range(20)}
    results = {query: [f"d{d}" for d in random.permutation(30)[:12]] for query in judgements}
    scored = [[{"corpus_id": d, "score": -rank} for rank, d in enumerate(found)] for found in results.values()]
    texts = dict.fromkeys((f"d{d}" for d in range(30)), "")
    reference = InformationRetrievalEvaluator(
        dict.fromkeys(judgements, ""), texts, {query: set(grades) for query, grades in judgements.items()}
    ).compute_metrics(scored)
    found = evaluate(results, judgements, k=10)
    assert (found.k, found.queries) == (10, 20)
    means = [found.ndcg, found.mrr, found.recall, found.precision]
    assert means == pytest.approx([reference[f"{name}@k"][10] for name in ("ndcg", "mrr", "recall", "precision")])
    assert found.ndcg == pytest.approx(sum(found.by_query.values()) / 20)


def test_what_is_evaluated():
    judgements = {"a": {"1": 2.0, "2": 0.0}, "b": {"1": 0.0}, "c": {"3": 1.0}}
    chunks = [Hit(id=each, score=1.0, text="", metadata={}) for each in ("2", "2", "1")]
    found = evaluate({"a": chunks, "b": ["1"], "unknown": ["1"]}, judgements, k=2)
    assert (found.queries, found.mrr, found.recall, found.precision) == (1, 0.5, 1.0, 0.5)
    for results, k, message in (
        ({"b": ["1"]}, 2, "no query of the results has a relevant document"),
        ({"a": [7]}, 2, "a result is of type int, without an id"),
        ({"a": ["1"]}, 0, "k=0 must be an int from 1"),
        ([["1"]], 2, r"results is a list; pass a dict \{query id: \[results\]\}"),
        ({"a": "1"}, 2, "the results of query 'a' are a str; pass a list"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            evaluate(results, judgements, k=k)


def test_a_beir_folder_has_titles_before_texts(tmp_path):
    assert beir_folder(tmp_path) is None
    titled = {"_id": "1", "title": " A ", "text": "b"}
    documents = [titled, {"_id": "2", "text": "c"}, {"_id": "3", "title": "d", "text": ""}]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, documents)) + "\n{broken\n")
    found = beir_folder(tmp_path)
    items = list(read(found.corpus, id_column=ID_COLUMN, text_column=TEXT_COLUMNS))
    assert [(item.id, item.text) for item in items[:3]] == [("1", "A b"), ("2", "c"), ("3", "d")]
    assert isinstance(items[3], Rejected) and found.queries is None and found.judgements is None
    (tmp_path / "qrels").mkdir()
    for name in ("dev.tsv", "train.tsv"):
        (tmp_path / "qrels" / name).touch()
    with pytest.raises(InvalidRequestError, match=r"dev\.tsv, train\.tsv"):
        beir_folder(tmp_path)
    (tmp_path / "qrels" / "test.tsv").touch()
    assert beir_folder(tmp_path).judgements == tmp_path / "qrels" / "test.tsv"


def test_layouts_are_all_different_and_each_but_bits_alone_is_stored_by_a_database():
    every = list(layouts([8, 16, 32]))
    assert len(set(every)) == len(every) == 3 * (6 + 12) + 2 * 6
    assert [one for one in every if not one.databases] == [Layout(width=d, datatype="bit") for d in (8, 16, 32)]
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
    bits = Layout(width=384, coarse=128, datatype="bit")
    assert bits.name == "128 bit -> 384 float32" and bits.databases == ("pgvector",)


@pytest.mark.contract
def test_the_command_of_every_layout_is_one_that_ingest_takes():
    program = get_command(app)
    for database in installed():
        for one in layouts([8, 16], DATATYPES, database):
            words = shlex.split(one.command("docs.jsonl", "m", database=database))
            assert program.commands["ingest"].make_context("ingest", words[2:])
            assert words[words.index("--to") + 1].partition("+")[0] == database
