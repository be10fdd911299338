"""MaxSim equals its definition, for all lengths and block sizes."""

import importlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import millpond.late_interaction
from millpond.errors import InvalidRequestError
from millpond.late_interaction import Ragged, maxsim
from millpond.late_interaction.kernels import compiled, exact

module = importlib.import_module("millpond.late_interaction.scoring.similarity")


@pytest.fixture(params=["compiled", "torch"])
def path(request, monkeypatch):
    """With the compiled kernels, where there are any, and without."""
    if request.param == "torch":
        monkeypatch.setattr(compiled, "kernel_table", lambda: None)
    elif compiled.kernel_table() is None:
        pytest.skip("no compiled kernels")


def ragged(lengths, width=8, seed=0, dtype=np.float32):
    """Matrices with these numbers of rows, of normally distributed numbers."""
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


@pytest.mark.usefixtures("path")
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(queries=lengths, documents=lengths, block=st.integers(1, 64), tokens=st.integers(1, 12), seed=st.integers(0, 99))
def test_equals_the_definition_at_any_block_size(queries, documents, block, tokens, seed):
    query_matrices, document_matrices = ragged(queries, seed=seed), ragged(documents, seed=seed + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        patch.setattr(exact, "_BLOCK", block)
        patch.setattr(exact, "_QUERY_TOKENS", tokens)
        scores = maxsim(query_matrices, document_matrices)
        best, indices = maxsim(query_matrices, document_matrices, top_k=3)
    expected = naive(query_matrices, document_matrices)
    assert scores.dtype == np.float32
    assert scores.shape == (len(queries), len(documents))
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)
    kept = min(3, len(documents))
    assert best.shape == indices.shape == (len(queries), kept)
    assert indices.dtype == np.int64
    order = np.argsort(-scores, axis=1, kind="stable")[:, :kept]
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(best, np.take_along_axis(scores, order, axis=1))


@pytest.mark.usefixtures("path")
def test_no_implicit_zero_and_no_token_of_a_neighbour():
    """Every similarity of the middle document is negative, and its neighbours' tokens would all score higher."""
    query = Ragged.from_matrices([np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float32)], width=2)
    negative = np.array([[-3.0, -2.0], [-1.0, -5.0]], dtype=np.float32)
    positive = np.array([[9.0, 9.0]], dtype=np.float32)
    documents = Ragged.from_matrices([positive, negative, positive], width=2)
    np.testing.assert_array_equal(maxsim(query, documents), [[18.0, -3.0, 18.0]])


@pytest.mark.usefixtures("path")
def test_the_sum_is_over_query_tokens():
    """Negative control: exchanging the arguments changes the score."""
    one, other = ragged([3]), ragged([5], seed=1)
    assert abs(maxsim(one, other)[0, 0] - maxsim(other, one)[0, 0]) > 0.1


@pytest.mark.usefixtures("path")
def test_empty_documents_rank_last_and_empty_queries_score_zero():
    queries, documents = ragged([2, 0]), ragged([0, 3, 0], seed=1)
    scores = maxsim(queries, documents)
    assert scores[0, 0] == scores[0, 2] == -np.inf
    assert np.isfinite(scores[0, 1])
    np.testing.assert_array_equal(scores[1], 0)
    np.testing.assert_array_equal(maxsim(queries, documents, top_k=3)[1], [[1, 0, 2], [0, 1, 2]])


@pytest.mark.usefixtures("path")
def test_equal_scores_keep_the_order_of_the_documents(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 40)
    query, document = ragged([4])[0], ragged([5], seed=1)[0]
    copies = Ragged.from_matrices([document] * 50, width=8)
    scores, indices = maxsim(Ragged.from_matrices([query], width=8), copies, top_k=7)
    assert len(set(scores[0].tolist())) == 1
    assert indices.tolist() == [list(range(7))]


@pytest.mark.usefixtures("path")
def test_a_document_longer_than_a_block(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 256)
    monkeypatch.setattr(exact, "_BLOCK", 256)
    queries, documents = ragged([300, 7]), ragged([2, 700, 3], seed=1)
    np.testing.assert_allclose(maxsim(queries, documents), naive(queries, documents), rtol=1e-5)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8])
def test_other_dtypes_are_computed_in_float32(dtype):
    queries, documents = ragged([3]), ragged([4, 5], seed=1)
    scaled = Ragged(flat=(documents.flat * 20).astype(dtype), offsets=documents.offsets)
    scores = maxsim(queries, scaled)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, naive(queries, scaled), rtol=1e-5)


@pytest.mark.usefixtures("path")
def test_read_only_rows_give_no_warning():
    queries, documents = ragged([3]), ragged([4, 5], seed=1)
    expected = maxsim(queries, documents)
    for matrix in (queries.flat, documents.flat):
        matrix.flags.writeable = False
    np.testing.assert_array_equal(maxsim(queries, documents), expected)


@pytest.mark.usefixtures("path")
def test_strided_rows_are_not_changed():
    queries, documents = ragged([3]), ragged([4, 5], width=16, seed=1)
    expected = maxsim(queries, Ragged(flat=documents.flat[:, :8].copy(), offsets=documents.offsets))
    before = documents.flat.copy()
    half = Ragged(flat=documents.flat[:, :8], offsets=documents.offsets)
    np.testing.assert_array_equal(maxsim(queries, half), expected)
    np.testing.assert_array_equal(documents.flat, before)


@pytest.mark.usefixtures("path")
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
def test_a_plain_matrix_is_refused(which):
    arguments = {"queries": ragged([3]), "documents": ragged([3]), which: ragged([3]).flat}
    with pytest.raises(TypeError, match=rf"{which} is of type ndarray; pass a Ragged"):
        maxsim(**arguments)


@pytest.mark.contract
def test_the_package_exports_lazily():
    assert sorted(millpond.late_interaction.__all__) == dir(millpond.late_interaction)
    with pytest.raises(AttributeError, match="nothing"):
        _ = millpond.late_interaction.nothing
    code = (
        "import sys, millpond.late_interaction as late; assert 'torch' not in sys.modules; "
        "import millpond.late_interaction.scoring.similarity; assert callable(late.maxsim), late.maxsim"
    )
    # With this process's sys.path: the package may be found by PYTHONPATH alone.
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"], check=True, timeout=120)
