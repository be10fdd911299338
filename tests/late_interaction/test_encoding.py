"""What becomes of token rows: projections, pooling of tokens, and MUVERA encodings, each against its definition."""

import hashlib
import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from millpond import Ragged
from millpond.errors import InvalidRequestError
from millpond.late_interaction.encoding import muvera, row_sums, token_pooling, ward
from millpond.late_interaction.encoding.muvera import Muvera
from millpond.late_interaction.encoding.projection import Projection, is_trained
from millpond.late_interaction.encoding.token_pooling import pool_tokens, pooled_rows

NATIVE, WIDTH = 24, 32


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def ragged(*matrices: np.ndarray, width: int = WIDTH) -> Ragged:
    return Ragged.from_matrices(list(matrices), width=width)


# --- Projection -------------------------------------------------------------------------------------------------------


def token_rows(count: int = 4000, seed: int = 0) -> np.ndarray:
    """Unit rows that lie off the origin, with a few strong directions."""
    mixing = np.random.default_rng(99).standard_normal((NATIVE, NATIVE)) * np.geomspace(1, 0.03, NATIVE)
    return unit((np.random.default_rng(seed).standard_normal((count, NATIVE)) + 0.5) @ mixing.T)


def test_pca_keeps_the_directions_of_the_largest_singular_values_without_centring():
    rows = token_rows()
    projection = Projection.fit(rows, 6)
    directions = np.linalg.svd(rows.astype(np.float64), full_matrices=False)[2][:6].T  # [d, 6]
    assert np.allclose(np.abs(projection.matrix.T @ directions), np.eye(6), atol=1e-4)
    assert (projection.matrix[np.abs(projection.matrix).argmax(axis=0), np.arange(6)] > 0).all()
    assert (projection.width, projection.native, projection.matrix.dtype) == (6, NATIVE, np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_projected_rows_are_normalized_products(dtype):
    rows = token_rows(50, seed=3).astype(dtype)
    rows[7] = 0
    documents = Ragged(flat=rows, offsets=np.array([0, 0, 4, 50]))
    for projection in (Projection.matryoshka(NATIVE, 5), Projection.fit(token_rows(), 5)):
        product = rows.astype(np.float32) @ projection.matrix
        projected = projection.apply(documents)
        expected = product / np.maximum(np.linalg.norm(product, axis=1, keepdims=True), 1e-9)
        assert np.allclose(projected.flat, expected, atol=1e-6) and not projected.flat[7].any()
        assert projected.flat.dtype == np.float32 and projected.offsets.tolist() == [0, 0, 4, 50]
    assert Projection.matryoshka(NATIVE, 5).cuts and not Projection.fit(token_rows(), 5).cuts


def test_a_sample_smaller_than_the_width_gives_an_orthonormal_projection_and_a_warning(caplog):
    rows = token_rows(3)
    with caplog.at_level(logging.WARNING):
        projection = Projection.fit(rows, 8)
    assert "fitted on 3 token rows" in caplog.text
    assert np.allclose(projection.matrix.T @ projection.matrix, np.eye(8), atol=1e-5)
    zeros = Projection.fit(np.zeros((500, NATIVE), dtype=np.float32), 4)
    assert np.allclose(zeros.matrix, np.eye(NATIVE, 4), atol=1e-6)  # the first columns


@pytest.mark.parametrize(
    ("fields", "trained"),
    [
        ({"matryoshka": True}, True),
        ({"matryoshka": True, "matryoshka_dimensions": (8, 16)}, True),
        ({"hidden_size": 8}, True),
        ({}, False),
        ({"matryoshka": True, "matryoshka_dimensions": (16,)}, False),
        ({"matryoshka": True, "matryoshka_smallest": 16}, False),
    ],
    ids=["trained", "declared", "its own", "untrained", "another width", "below the least"],
)
def test_a_checkpoint_trained_for_the_width_is_cut(fields, trained):
    plain = {"name": "tiny", "hidden_size": NATIVE, "matryoshka": False, "matryoshka_dimensions": None}
    assert is_trained(SimpleNamespace(**{**plain, "matryoshka_smallest": 1, **fields}), 8) == trained


@pytest.mark.parametrize(
    "matrix",
    [np.zeros((2, 3), np.float32), np.zeros(3, np.float32), np.eye(3), np.full((3, 2), np.nan, np.float32)],
    ids=["wider than its input", "one axis", "float64", "not finite"],
)
def test_a_damaged_matrix_is_refused(matrix):
    with pytest.raises(ValueError, match="matrix"):
        Projection(matrix)


# --- Pooling ----------------------------------------------------------------------------------------------------------


def tokens(count: int, seed: int = 0, *, width: int = WIDTH) -> np.ndarray:
    """Unit rows around centers, as a text's tokens lie."""
    random = np.random.default_rng((seed, count))
    centers = random.standard_normal((max(count // 6, 1), width))
    rows = centers[random.integers(len(centers), size=count)] + 0.7 * random.standard_normal((count, width))
    return unit(rows)


def sorted_rows(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(np.round(rows[:, :3], 4).T)]


def assert_clusters_of_scipy(matrix: np.ndarray, factor: int) -> None:
    """Those of the rows behind the first one."""
    rows, offsets = pooled_rows(ragged(matrix), factor)
    others = matrix[1:].astype(np.float64)
    distances = squareform(np.clip(1 - others @ others.T, 0, 2), checks=False)
    count = len(others) // factor
    labels = fcluster(linkage(distances, "ward"), count, "maxclust")
    assert offsets.tolist() == [0, count + 1]
    assert len({*zip(rows[1:].tolist(), labels.tolist(), strict=True)}) == count


@pytest.fixture(params=["compiled", "scipy"])
def kernel(request, monkeypatch):
    """With the compiled kernel, and with scipy."""
    if request.param == "scipy":
        monkeypatch.setattr(ward, "portable", lambda: None)
        monkeypatch.setattr(row_sums, "portable", lambda: None)
    elif ward.portable() is None:
        pytest.skip("the kernels are not built")


@pytest.mark.torch
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("factor", [2, 3, 7, 100])
def test_documents_of_every_length_are_pooled_as_sentence_transformers_pools_them(factor):
    import torch
    from sentence_transformers.multi_vector_encoder.modules.token_pooling import HierarchicalTokenPooling

    matrices = [tokens(count) for count in (5, 0, 1, 2, 3, 4, 180, 61, 60, 59, 7, 400)]
    reference = HierarchicalTokenPooling(factor, num_protected_tokens=1)
    pooled = pool_tokens(ragged(*matrices), factor)
    for matrix, rows in zip(matrices, pooled, strict=True):
        expected = reference.pool_one(torch.from_numpy(matrix)).numpy()
        assert rows.shape == expected.shape
        assert np.array_equal(rows[:1], matrix[:1])
        assert np.allclose(sorted_rows(rows[1:]), sorted_rows(expected[1:]), atol=1e-5)
        assert np.allclose(pool_tokens(ragged(matrix), factor).flat, rows, atol=1e-6)  # whatever stands beside it


@pytest.mark.usefixtures("kernel")
def test_long_documents_and_those_that_repeat_their_tokens_have_the_clusters_of_scipy():
    assert_clusters_of_scipy(tokens(1001), 4)
    assert_clusters_of_scipy(tokens(30)[np.random.default_rng(5).integers(30, size=401)], 20)


@pytest.mark.usefixtures("kernel")
def test_rows_are_the_normalized_means_of_the_tokens_that_are_named():
    documents = ragged(tokens(50), tokens(9))
    rows, _ = pooled_rows(documents, 3)
    pooled = pool_tokens(documents, 3)
    for row in range(len(pooled.flat)):
        mean = documents.flat[rows == row].mean(axis=0)
        assert np.allclose(pooled.flat[row], mean / np.linalg.norm(mean), atol=1e-6)
    assert np.all(np.diff(np.unique(rows, return_index=True)[1]) > 0)  # in the order of their first tokens


@pytest.mark.usefixtures("kernel")
def test_equal_tokens_are_merged_exactly_whatever_their_dot_product_rounds_to():
    pooled = pool_tokens(ragged(np.concatenate((tokens(1, seed=9), np.repeat(tokens(20), 50, axis=0)))), 2)
    assert pooled.lengths.tolist() == [21]  # of 501 at most: all merges of equal tokens have the height of the cut


@pytest.mark.usefixtures("kernel")
def test_tokens_of_every_kind_are_pooled():
    matrix = tokens(61)
    scale = np.random.default_rng(2).uniform(0.1, 9, size=(61, 1)).astype(np.float32)
    assert np.array_equal(pooled_rows(ragged(matrix * scale), 2)[0], pooled_rows(ragged(matrix), 2)[0])
    matrix[4:9] = 0
    halves = matrix.astype(np.float16)
    halves.flags.writeable = False
    pooled = pool_tokens(ragged(halves), 2)
    assert pooled.flat.dtype == np.float32 and np.isfinite(pooled.flat).all() and pooled.lengths.tolist() == [31]
    apart = pool_tokens(ragged(np.eye(257, dtype=np.float32), width=257), 2)  # all equally far
    assert 2 <= apart.lengths[0] <= 129
    assert pool_tokens(ragged(matrix[:0], matrix[:0]), 2).lengths.tolist() == [0, 0]


def test_longer_documents_are_clustered_in_runs(monkeypatch):
    matrix = tokens(121)
    parts = [np.concatenate((matrix[:1], matrix[start : start + 50])) for start in (1, 51, 101)]
    expected = [pooled_rows(ragged(part), 2)[0][1:] for part in parts]
    monkeypatch.setattr(token_pooling, "_LONGEST", 50)
    starts = np.cumsum([0, *(part.max() for part in expected)])
    rows, _ = pooled_rows(ragged(matrix), 2)
    assert rows.tolist() == np.concatenate([[0], *(e + s for e, s in zip(expected, starts, strict=False))]).tolist()


# --- MUVERA -----------------------------------------------------------------------------------------------------------


def matrices_of(lengths: list[int], *, width: int = 16) -> Ragged:
    rows = unit(np.random.default_rng(0).standard_normal((sum(lengths), width)))
    return Ragged(flat=rows, offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64))


def by_definition(encoding: Muvera, matrix: np.ndarray, *, document: bool) -> np.ndarray:
    """The paper's construction; an empty cell has the tokens of the nearest filled one."""
    width = min(encoding.width, 16)
    planes = encoding._planes.reshape(encoding.width, 20, 3)
    signs = encoding._signs.reshape(encoding.width, 20, width)
    blocks = np.zeros((20, 8, width))
    for repetition in range(20):
        tokens: dict[int, list[np.ndarray]] = {}
        for row in matrix.astype(np.float64):
            code = sum(1 << bit for bit in range(3) if row @ planes[:, repetition, bit] > 0)
            tokens.setdefault(code, []).append(row @ signs[:, repetition])
        for cell in range(8):
            if not document:
                blocks[repetition, cell] = np.sum(tokens.get(cell, [np.zeros(width)]), axis=0)
            elif tokens:
                distance = min((cell ^ code).bit_count() for code in tokens)
                nearest = [code for code in tokens if (cell ^ code).bit_count() == distance]
                means = [np.mean(tokens[code], axis=0) for code in nearest]
                blocks[repetition, cell] = means[0] if len(means) == 1 else np.nan  # any of them will do
    return blocks.ravel() / 20**0.5


@pytest.mark.parametrize("width", [40, 16, 7])
def test_encodings_are_those_of_the_definition(width, monkeypatch):
    encoding, matrices = Muvera(width), matrices_of([5, 0, 1, 40, 3, 0, 200], width=width)
    queries, documents = encoding.encode_queries(matrices), encoding.encode_documents(matrices)
    assert queries.shape == documents.shape == (7, 160 * min(width, 16)) and documents.dtype == np.float32
    for i, matrix in enumerate(matrices):
        assert np.allclose(queries[i], by_definition(encoding, matrix, document=False), atol=1e-5)
        expected = by_definition(encoding, matrix, document=True)
        known = ~np.isnan(expected)
        assert np.allclose(documents[i][known], expected[known], atol=1e-5)
    assert (
        not documents[1].any()
        and not queries[1].any()
        and len(encoding.encode_queries(matrices_of([], width=width))) == 0
    )
    monkeypatch.setattr(muvera, "_BLOCK", 20 * 19 * 30)  # about thirty tokens at a time
    assert np.allclose(encoding.encode_documents(matrices), documents, atol=1e-6)
    halves = Ragged(flat=matrices.flat.astype(np.float16), offsets=matrices.offsets)
    assert np.allclose(encoding.encode_queries(halves), encoding.encode_queries(matrices), atol=0.3)


def test_random_numbers_are_those_of_splitmix64_and_the_matrices_never_change():
    """An index holds encodings of these matrices: other ones would find nothing."""
    start = np.array([1234567], dtype=np.uint64)  # outputs of SplitMix64 for this seed are published
    counter = start + np.arange(1, 4, dtype=np.uint64) * muvera._GOLDEN
    assert muvera._mix(counter).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    encoding = Muvera(24)
    digest = hashlib.sha256()
    for matrix in (encoding._planes, np.sign(encoding._signs)):
        digest.update(np.ascontiguousarray(matrix).astype("<i8").tobytes())
    assert digest.hexdigest() == "61b3feeea9d2bd7b544fc7f82a9a7ffa797f480ba2380ef6167fac1943c9cac5"


def test_parameters_survive_json():
    stored = json.loads(json.dumps(Muvera(128).parameters()))
    assert Muvera.from_parameters(stored) == Muvera(128) and Muvera(128).output_dimensions == 2560
    with pytest.raises(ValueError, match="'bits': 4"):
        Muvera.from_parameters({**stored, "bits": 4})
    with pytest.raises(InvalidRequestError, match="rows have 16 columns, and this encoding is for 8"):
        Muvera(8).encode_documents(matrices_of([2]))


@pytest.mark.usefixtures("kernel")
def test_rows_are_added_in_their_order():
    """The sums of float32 depend on the order: those of both paths have the same bits."""
    random = np.random.default_rng(3)
    rows, places = random.standard_normal((500, 7)).astype(np.float32), random.integers(0, 9, 500)
    wanted = np.zeros((10, 7), dtype=np.float32)
    for row, place in zip(rows, places, strict=True):
        wanted[place] += row
    np.testing.assert_array_equal(row_sums.row_sums(rows, places, 10), wanted)
    backwards = row_sums.row_sums(rows[::-1], places[::-1], 10)
    assert not np.array_equal(backwards, wanted) and np.allclose(backwards, wanted, atol=1e-4)
