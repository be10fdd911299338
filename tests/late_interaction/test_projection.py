"""The width cut of token rows: Matryoshka where trained, PCA where not."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from millpond import ModelSpec, Ragged
from millpond.errors import InvalidDimensionsError, InvalidRequestError
from millpond.late_interaction.encoding.projection import Projection, choose, is_trained

NATIVE = 24


def spec(**fields: object) -> ModelSpec:
    plain = ModelSpec(
        name="tiny",
        architecture="BertModel",
        model_type="bert",
        pooling=("mean",),
        normalize=True,
        dimensions=NATIVE,
        hidden_size=NATIVE,
        matryoshka=False,
        matryoshka_dimensions=None,
        prompts={},
        default_prompt_name=None,
        labels=(),
        max_length=128,
        tasks=frozenset({"token_embed"}),
        digest=lambda: "",
    )
    return replace(plain, **fields)  # type: ignore[arg-type]


def token_rows(count: int = 4000, seed: int = 0) -> np.ndarray:
    """Unit rows that lie off the origin, with a few strong directions."""
    random = np.random.default_rng(seed)
    mixing = np.random.default_rng(99).standard_normal((NATIVE, NATIVE)) * np.geomspace(1, 0.03, NATIVE)
    rows = (random.standard_normal((count, NATIVE)) + 0.5) @ mixing.T
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def test_pca_keeps_the_directions_of_the_largest_singular_values_without_centring():
    rows = token_rows()
    projection = Projection.fit(rows, 6)
    directions = np.linalg.svd(rows.astype(np.float64), full_matrices=False)[2][:6].T  # [d, 6]
    assert np.allclose(np.abs(projection.matrix.T @ directions), np.eye(6), atol=1e-4)
    assert (projection.width, projection.native, projection.matrix.dtype) == (6, NATIVE, np.float32)


def test_each_directions_largest_component_is_positive():
    matrix = Projection.fit(token_rows(), 10).matrix
    assert (matrix[np.abs(matrix).argmax(axis=0), np.arange(10)] > 0).all()


def test_projected_rows_are_normalized_products():
    rows = token_rows(50, seed=3)
    projection = Projection.fit(token_rows(), 8)
    product = rows @ projection.matrix
    assert np.allclose(projection.apply(rows), product / np.linalg.norm(product, axis=1, keepdims=True), atol=1e-6)


def test_pca_at_the_full_width_changes_no_similarity():
    rows = token_rows()
    projected = Projection.fit(rows, NATIVE).apply(rows)
    assert np.allclose(projected[:50] @ projected[:50].T, rows[:50] @ rows[:50].T, atol=1e-5)


def test_matryoshka_cuts_the_first_columns_and_normalizes():
    rows = token_rows(20)
    projection = Projection.matryoshka(NATIVE, 5)
    assert projection.cuts and not Projection.fit(token_rows(), 5).cuts
    expected = rows[:, :5] / np.linalg.norm(rows[:, :5], axis=1, keepdims=True)
    assert np.allclose(projection.apply(rows), expected, atol=1e-6)


def test_a_ragged_keeps_its_offsets_and_float16_is_read():
    rows = token_rows(9).astype(np.float16)
    documents = Ragged(flat=rows, offsets=np.array([0, 0, 4, 9]))
    for projection in (Projection.matryoshka(NATIVE, 5), Projection.fit(token_rows(), 5)):
        projected = projection.apply(documents)
        assert projected.offsets.tolist() == [0, 0, 4, 9]
        assert projected.flat.dtype == np.float32 and projected.flat.shape == (9, 5)


def test_the_callers_rows_stay_as_they_are():
    rows = token_rows(9) * 3
    before = rows.copy()
    for projection in (Projection.matryoshka(NATIVE, NATIVE), Projection.fit(token_rows(), NATIVE)):
        projection.apply(rows)
        assert np.array_equal(rows, before)


def test_a_zero_row_stays_zero():
    rows = np.zeros((2, NATIVE), dtype=np.float32)
    assert not Projection.fit(token_rows(), 5).apply(rows).any()


def test_a_projection_is_its_matrix(tmp_path):
    projection = Projection.fit(token_rows(), 7)
    np.save(tmp_path / "matrix.npy", projection.matrix)
    stored = Projection(np.load(tmp_path / "matrix.npy", allow_pickle=False))
    rows = token_rows(30, seed=4)
    assert np.array_equal(stored.apply(rows), projection.apply(rows))


def test_a_sample_smaller_than_the_width_gives_an_orthonormal_projection_and_a_warning(caplog):
    rows = token_rows(3)
    with caplog.at_level(logging.WARNING):
        projection = Projection.fit(rows, 8)
    assert "fitted on 3 token rows" in caplog.text
    assert np.allclose(projection.matrix.T @ projection.matrix, np.eye(8), atol=1e-5)
    assert np.allclose(projection.apply(rows) @ projection.apply(rows).T, rows @ rows.T, atol=1e-5)


def test_a_sample_of_zeros_keeps_the_first_columns():
    projection = Projection.fit(np.zeros((500, NATIVE), dtype=np.float32), 4)
    assert np.allclose(projection.matrix, np.eye(NATIVE, 4), atol=1e-6)


def test_a_huge_sample_is_read_evenly(monkeypatch):
    monkeypatch.setattr("millpond.late_interaction.encoding.projection._SAMPLE_ROWS", 100)
    rows = np.zeros((1000, NATIVE), dtype=np.float32)
    rows[:500, 2] = 1
    rows[500:, 7] = 2
    matrix = Projection.fit(rows, 2).matrix
    assert np.allclose(np.abs(matrix), np.eye(NATIVE)[:, [7, 2]], atol=1e-6)


def test_a_checkpoint_trained_for_the_width_is_cut():
    assert choose(spec(matryoshka=True), 8).cuts
    assert choose(spec(matryoshka=True, matryoshka_dimensions=(8, 16)), 16).cuts
    assert choose(spec(), NATIVE).cuts


@pytest.mark.parametrize(
    "fields",
    [{}, {"matryoshka": True, "matryoshka_dimensions": (16,)}, {"matryoshka": True, "matryoshka_smallest": 16}],
    ids=["untrained", "another width", "below the least"],
)
def test_a_checkpoint_not_trained_for_the_width_gets_pca(fields):
    assert not is_trained(spec(**fields), 8)
    projection = choose(spec(**fields), 8, token_rows())
    assert not projection.cuts and np.array_equal(projection.matrix, Projection.fit(token_rows(), 8).matrix)


def test_pca_without_a_sample_is_refused():
    with pytest.raises(InvalidRequestError, match=r"tiny was not trained for a width of 8.*keep its width of 24"):
        choose(spec(), 8)
    with pytest.raises(InvalidRequestError, match="needs token rows"):
        choose(spec(), 8, np.empty((0, NATIVE), dtype=np.float32))


@pytest.mark.parametrize("width", [0, -1, NATIVE + 1, 4.0, True, None, "8"])
def test_a_wrong_width_is_refused(width):
    for refused in (
        lambda: choose(spec(matryoshka=True), width, token_rows(30)),
        lambda: Projection.fit(token_rows(30), width),
        lambda: Projection.matryoshka(NATIVE, width),
    ):
        with pytest.raises(InvalidDimensionsError, match="must be an int from 1 to 24"):
            refused()


def test_rows_of_another_width_are_refused():
    with pytest.raises(InvalidRequestError, match="5 columns, and the projection was made for 24"):
        Projection.matryoshka(NATIVE, 3).apply(np.ones((2, 5), dtype=np.float32))
    with pytest.raises(InvalidRequestError, match="sample has 5 columns"):
        choose(spec(), 3, np.ones((100, 5), dtype=np.float32))
    with pytest.raises(TypeError, match="pass an array"):
        Projection.matryoshka(NATIVE, 3).apply([[1.0]])  # type: ignore[call-overload]


def test_a_sample_that_is_not_finite_is_refused():
    rows = token_rows(300)
    rows[7, 3] = np.inf
    with pytest.raises(InvalidRequestError, match="not finite"), np.errstate(invalid="ignore"):
        Projection.fit(rows, 3)


@pytest.mark.parametrize(
    "matrix",
    [np.zeros((2, 3), np.float32), np.zeros(3, np.float32), np.eye(3), np.full((3, 2), np.nan, np.float32)],
    ids=["wider than its input", "one axis", "float64", "not finite"],
)
def test_a_damaged_matrix_is_refused(matrix):
    with pytest.raises(ValueError, match="matrix"):
        Projection(matrix)
