"""Token pooling against sentence-transformers' own, and against scipy's linkage."""

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from millpond import Ragged
from millpond.errors import InvalidRequestError
from millpond.late_interaction.encoding import token_pooling, ward
from millpond.late_interaction.encoding.token_pooling import pool_tokens, pooled_rows

WIDTH = 32


def tokens(count: int, seed: int = 0, *, width: int = WIDTH) -> np.ndarray:
    """Unit rows around centers, as a text's tokens lie."""
    random = np.random.default_rng((seed, count))
    centers = random.standard_normal((max(count // 6, 1), width))
    rows = centers[random.integers(len(centers), size=count)] + 0.7 * random.standard_normal((count, width))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def ragged(*matrices: np.ndarray) -> Ragged:
    return Ragged.from_matrices(list(matrices), width=WIDTH)


def sorted_rows(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(np.round(rows[:, :3], 4).T)]


def scipy_labels(rows: np.ndarray, clusters: int) -> np.ndarray:
    distances = np.clip(1 - rows.astype(np.float64) @ rows.T.astype(np.float64), 0, 2)
    return fcluster(linkage(squareform(distances, checks=False), "ward"), clusters, "maxclust")


@pytest.fixture(params=["compiled", "scipy"], autouse=True)
def kernel(request, monkeypatch):
    """Every test runs with the compiled kernel and with scipy."""
    if request.param == "scipy":
        monkeypatch.setattr(ward, "portable", lambda: None)
    elif ward.portable() is None:
        pytest.skip("the kernels are not built")


@pytest.mark.parametrize(("factor", "protected"), [(1.5, 0), (2, 1), (3, 3), (7, 1), (100, 0)])
def test_documents_of_every_length_are_pooled_as_sentence_transformers_pools_them(factor, protected):
    from sentence_transformers.multi_vector_encoder.modules.token_pooling import HierarchicalTokenPooling

    matrices = [tokens(count) for count in (5, 0, 1, 2, 3, 4, 180, 61, 60, 59, 7, 400)]
    reference = HierarchicalTokenPooling(factor, num_protected_tokens=protected)
    pooled = pool_tokens(ragged(*matrices), factor, protected=protected)
    assert len(pooled) == len(matrices)
    for matrix, rows in zip(matrices, pooled, strict=True):
        expected = reference.pool_one(torch.from_numpy(matrix)).numpy()
        assert rows.shape == expected.shape
        assert np.array_equal(rows[:protected], matrix[:protected])
        assert np.allclose(sorted_rows(rows[protected:]), sorted_rows(expected[protected:]), atol=1e-5)


def test_a_document_of_a_thousand_tokens_has_the_clusters_of_scipy():
    matrix = tokens(1000)
    rows, offsets = pooled_rows(ragged(matrix), 4, protected=0)
    labels = scipy_labels(matrix, 250)
    assert offsets.tolist() == [0, 250]
    assert len({*zip(rows.tolist(), labels.tolist(), strict=True)}) == 250


def test_a_document_is_pooled_alike_whatever_stands_beside_it():
    matrices = [tokens(count, seed) for seed, count in enumerate((40, 41, 3, 90, 40))]
    together = pool_tokens(ragged(*matrices), 2)
    for matrix, rows in zip(matrices, together, strict=True):
        assert np.allclose(pool_tokens(ragged(matrix), 2).flat, rows, atol=1e-6)


def test_scipy_and_the_compiled_kernel_find_the_same_clusters(monkeypatch):
    random = np.random.default_rng(8)
    documents = ragged(*(tokens(int(count), seed) for seed, count in enumerate(random.integers(0, 300, size=40))))
    for factor in (1.3, 2, 5):
        rows, _ = pooled_rows(documents, factor)
        with monkeypatch.context() as patch:
            patch.setattr(ward, "portable", lambda: None)
            assert np.array_equal(pooled_rows(documents, factor)[0], rows)


def test_rows_are_the_normalized_means_of_the_tokens_that_are_named():
    matrix = tokens(50)
    documents = ragged(matrix, tokens(9))
    rows, _ = pooled_rows(documents, 3)
    pooled = pool_tokens(documents, 3)
    for row in range(len(pooled.flat)):
        mean = documents.flat[rows == row].mean(axis=0)
        assert np.allclose(pooled.flat[row], mean / np.linalg.norm(mean), atol=1e-6)


def test_clusters_come_in_the_order_of_their_first_tokens():
    rows, _ = pooled_rows(ragged(tokens(80), tokens(30)), 3)
    first = np.unique(rows, return_index=True)[1]
    assert np.all(np.diff(first) > 0)


def test_factor_1_gives_the_documents_back():
    documents = ragged(tokens(7))
    assert pool_tokens(documents, 1) is documents
    assert pooled_rows(documents, 1.0)[0].tolist() == list(range(7))


def test_no_documents_and_empty_documents_stay():
    assert len(pool_tokens(ragged(), 2)) == 0
    empty = pool_tokens(ragged(tokens(0), tokens(0)), 2)
    assert empty.lengths.tolist() == [0, 0] and empty.flat.shape == (0, WIDTH)


def test_equal_tokens_become_one_however_many_they_are():
    row = tokens(1)
    pooled = pool_tokens(ragged(np.repeat(row, 2000, axis=0)), 2)
    assert pooled.lengths.tolist() == [2]  # the protected one, and the others
    assert np.allclose(pooled.flat, row, atol=1e-5)


def test_equal_tokens_are_merged_exactly_whatever_their_dot_product_rounds_to():
    pooled = pool_tokens(ragged(np.repeat(tokens(20), 50, axis=0)), 2, protected=0)
    assert pooled.lengths.tolist() == [20]  # of 500 at most: all merges of equal tokens have the height of the cut


def test_clusters_of_texts_that_repeat_their_tokens_are_those_of_scipy():
    random = np.random.default_rng(5)
    matrix = tokens(30)[random.integers(30, size=400)]
    rows, offsets = pooled_rows(ragged(matrix), 20, protected=0)
    labels = scipy_labels(matrix, 20)
    assert offsets[-1] == 20
    assert len({*zip(rows.tolist(), labels.tolist(), strict=True)}) == 20


def test_tokens_that_are_all_equally_far_apart_are_pooled():
    pooled = pool_tokens(Ragged.from_matrices([np.eye(256, dtype=np.float32)], width=256), 2, protected=0)
    assert 1 <= pooled.lengths[0] <= 128


def test_rows_of_any_length_are_compared_by_their_direction():
    matrix = tokens(60)
    scale = np.random.default_rng(2).uniform(0.1, 9, size=(60, 1)).astype(np.float32)
    expected, _ = pooled_rows(ragged(matrix), 2)
    assert np.array_equal(pooled_rows(ragged(matrix * scale), 2)[0], expected)


def test_zero_rows_do_no_harm():
    matrix = tokens(20)
    matrix[4:9] = 0
    pooled = pool_tokens(ragged(matrix), 2)
    assert np.isfinite(pooled.flat).all() and pooled.lengths.tolist() == [10]


def test_longer_documents_are_clustered_in_runs(monkeypatch):
    monkeypatch.setattr(token_pooling, "_LONGEST", 50)
    matrix = tokens(121)
    rows, offsets = pooled_rows(ragged(tokens(5), matrix), 2)
    parts = [matrix[:1], *(matrix[start : start + 50] for start in (1, 51, 101))]
    expected = [pooled_rows(ragged(part), 2, protected=0)[0] for part in parts]
    starts = np.cumsum([offsets[1], *(part.max() + 1 for part in expected)])
    assert rows[5:].tolist() == np.concatenate([e + s for e, s in zip(expected, starts, strict=False)]).tolist()


def test_float16_and_read_only_rows_are_pooled():
    matrix = tokens(40).astype(np.float16)
    matrix.flags.writeable = False
    pooled = pool_tokens(ragged(matrix), 2)
    assert pooled.flat.dtype == np.float32 and matrix.dtype == np.float16


@pytest.mark.parametrize("factor", [0.5, 0, -1, float("nan"), float("inf"), True, "2", None])
def test_a_factor_below_1_is_refused(factor):
    with pytest.raises(InvalidRequestError, match="must be a finite number from 1"):
        pool_tokens(ragged(tokens(3)), factor)


@pytest.mark.parametrize("protected", [-1, 1.0, True, None])
def test_a_wrong_number_of_protected_rows_is_refused(protected):
    with pytest.raises(InvalidRequestError, match="must be an int from 0"):
        pool_tokens(ragged(tokens(3)), 2, protected=protected)


def test_a_list_of_matrices_is_a_type_error():
    with pytest.raises(TypeError, match="pass a Ragged"):
        pool_tokens([tokens(3)], 2)  # type: ignore[arg-type]


def test_a_row_that_is_not_finite_is_refused_by_the_number_of_its_document():
    bad = tokens(4)
    bad[2, 0] = np.nan
    with pytest.raises(InvalidRequestError, match="document 1 is not finite"):
        pool_tokens(ragged(tokens(3), bad), 2)
