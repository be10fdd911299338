"""MaxSim equals its definition, whatever the lengths and however the work is cut."""

import importlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millpond.late_interaction
from millpond.errors import InvalidRequestError
from millpond.late_interaction import Ragged, maxsim

module = importlib.import_module("millpond.late_interaction.similarity")


def ragged(lengths, width=8, seed=0, dtype=np.float32):
    """Matrices of these heights, filled with normal numbers."""
    flat = np.random.default_rng(seed).standard_normal((sum(lengths), width)).astype(dtype)
    return Ragged(flat=flat, offsets=np.cumsum([0, *lengths]).astype(np.int64))


def naive(queries, documents):
    """The definition, in float64 and two loops."""
    scores = np.zeros((len(queries), len(documents)))
    for i, query in enumerate(queries):
        for j, document in enumerate(documents):
            for token in query.astype(np.float64):
                scores[i, j] += max((document.astype(np.float64) @ token).tolist(), default=-np.inf)
    return scores


lengths = st.lists(st.integers(0, 9), max_size=6)


@settings(deadline=None)
@given(queries=lengths, documents=lengths, block=st.integers(1, 64), tokens=st.integers(1, 12), seed=st.integers(0, 99))
def test_equals_the_definition_however_it_is_cut(queries, documents, block, tokens, seed):
    asked, told = ragged(queries, seed=seed), ragged(documents, seed=seed + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        patch.setattr(module, "_QUERY_TOKENS", tokens)
        scores = maxsim(asked, told)
        best, indices = maxsim(asked, told, top_k=3)
    expected = naive(asked, told)
    assert scores.dtype == np.float32
    assert scores.shape == (len(queries), len(documents))
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)
    kept = min(3, len(documents))
    assert best.shape == indices.shape == (len(queries), kept)
    assert indices.dtype == np.int64
    order = np.argsort(-scores, axis=1, kind="stable")[:, :kept]
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(best, np.take_along_axis(scores, order, axis=1))


def test_no_implicit_zero_and_no_neighbour():
    """Every similarity is negative, and the neighbours' tokens would all score higher."""
    query = Ragged.from_matrices([np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float32)], width=2)
    cold = np.array([[-3.0, -2.0], [-1.0, -5.0]], dtype=np.float32)
    warm = np.array([[9.0, 9.0]], dtype=np.float32)
    documents = Ragged.from_matrices([warm, cold, warm], width=2)
    np.testing.assert_array_equal(maxsim(query, documents), [[18.0, -3.0, 18.0]])


def test_the_sum_is_over_query_tokens():
    """Negative control: with the arguments exchanged the score is another."""
    one, other = ragged([3]), ragged([5], seed=1)
    assert abs(maxsim(one, other)[0, 0] - maxsim(other, one)[0, 0]) > 0.1


def test_empty_documents_rank_last_and_empty_queries_score_zero():
    queries, documents = ragged([2, 0]), ragged([0, 3, 0], seed=1)
    scores = maxsim(queries, documents)
    assert scores[0, 0] == scores[0, 2] == -np.inf
    assert np.isfinite(scores[0, 1])
    np.testing.assert_array_equal(scores[1], 0)
    np.testing.assert_array_equal(maxsim(queries, documents, top_k=3)[1], [[1, 0, 2], [0, 1, 2]])


def test_equal_scores_keep_the_order_of_the_documents(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 40)
    query, document = ragged([4])[0], ragged([5], seed=1)[0]
    copies = Ragged.from_matrices([document] * 50, width=8)
    scores, indices = maxsim(Ragged.from_matrices([query], width=8), copies, top_k=7)
    assert len(set(scores[0].tolist())) == 1
    assert indices.tolist() == [list(range(7))]


def test_a_document_longer_than_a_block(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 256)
    queries, documents = ragged([300, 7]), ragged([2, 700, 3], seed=1)
    np.testing.assert_allclose(maxsim(queries, documents), naive(queries, documents), rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8])
def test_other_dtypes_are_computed_in_float32(dtype):
    queries, documents = ragged([3]), ragged([4, 5], seed=1)
    scaled = Ragged(flat=(documents.flat * 20).astype(dtype), offsets=documents.offsets)
    scores = maxsim(queries, scaled)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, naive(queries, scaled), rtol=1e-5)


def test_takes_read_only_rows_without_a_warning():
    queries, documents = ragged([3]), ragged([4, 5], seed=1)
    expected = maxsim(queries, documents)
    for matrix in (queries.flat, documents.flat):
        matrix.flags.writeable = False
    np.testing.assert_array_equal(maxsim(queries, documents), expected)


def test_takes_strided_rows_and_leaves_them_alone():
    queries, documents = ragged([3]), ragged([4, 5], width=16, seed=1)
    expected = maxsim(queries, Ragged(flat=documents.flat[:, :8].copy(), offsets=documents.offsets))
    before = documents.flat.copy()
    half = Ragged(flat=documents.flat[:, :8], offsets=documents.offsets)
    np.testing.assert_array_equal(maxsim(queries, half), expected)
    np.testing.assert_array_equal(documents.flat, before)


def test_a_nan_stays_visible():
    documents = ragged([4, 5], seed=1)
    documents.flat[2, 3] = np.nan
    scores = maxsim(ragged([3]), documents)
    assert np.isnan(scores[0, 0])
    assert np.isfinite(scores[0, 1])


def test_widths_must_agree():
    with pytest.raises(InvalidRequestError, match=r"queries are 8 wide and documents 4"):
        maxsim(ragged([3]), ragged([3], width=4))


@pytest.mark.parametrize("top_k", [0, -1, True, 2.0, "3"])
def test_top_k_must_be_a_positive_int(top_k):
    with pytest.raises(InvalidRequestError, match="top_k"):
        maxsim(ragged([3]), ragged([3]), top_k=top_k)


@pytest.mark.parametrize("which", ["queries", "documents"])
def test_a_matrix_is_no_ragged(which):
    arguments = {"queries": ragged([3]), "documents": ragged([3]), which: ragged([3]).flat}
    with pytest.raises(TypeError, match=rf"{which} is of type ndarray; pass a Ragged"):
        maxsim(**arguments)


def test_the_package_exports_lazily():
    assert sorted(millpond.late_interaction.__all__) == dir(millpond.late_interaction)
    with pytest.raises(AttributeError, match="nothing"):
        _ = millpond.late_interaction.nothing
    code = (
        "import sys, millpond.late_interaction as late; assert 'torch' not in sys.modules; "
        "import millpond.late_interaction.similarity; assert callable(late.maxsim), late.maxsim"
    )
    # Path by path, since the package may be found by PYTHONPATH alone.
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"], check=True, timeout=120)
