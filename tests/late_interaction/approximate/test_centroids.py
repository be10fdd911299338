"""The nearest centroid of each row, and the similarities of all centroids to a query."""

import numpy as np
import pytest
from tests.approximate_search import TOKENS_AND_WIDTHS, WIDTHS, clustered, guarded, unit

from millpond.late_interaction.kernels.centroids import LANES, Centroids, nearest, similarities

# Rounding a unit row, or a unit query token, to int8 changes an inner product with a unit vector by less than this.
ROUNDING = 0.02


def centroids_of(count, dim, seed=1):
    return Centroids.of(clustered(count, dim, clusters=max(1, count // 3), seed=seed))


def shortfall(rows, centroids, codes):
    """How much less similar the chosen centroid of each row is than the most similar one."""
    products = np.asarray(rows, dtype=np.float64) @ centroids.values.T.astype(np.float64)
    return products.max(axis=1) - products[np.arange(len(rows)), codes]


@pytest.mark.parametrize(("dim", "count"), list(zip(WIDTHS, (16, 2, 15, 1, 17, 33, 300, 16, 300), strict=True)))
def test_the_nearest_centroid_is_found_for_every_width_and_number(kernels, dim, count):
    centroids, rows = centroids_of(count, dim), clustered(77, dim, seed=2)
    codes = nearest(rows, centroids)
    assert codes.dtype == np.uint16
    assert codes.shape == (77,)
    assert shortfall(rows, centroids, codes).max() < ROUNDING


def test_a_row_that_is_a_centroid_gets_that_one(kernels):
    values = unit(np.random.default_rng(0).standard_normal((500, 64)))
    assert np.array_equal(nearest(values, Centroids.of(values)), np.arange(500))


def test_of_equal_centroids_the_first_is_taken(kernels):
    values = np.repeat(unit(np.random.default_rng(0).standard_normal((20, 24))), 3, axis=0)
    assert np.array_equal(nearest(values, Centroids.of(values)), np.repeat(np.arange(0, 60, 3), 3))


@pytest.mark.parametrize("count", [0, 1, 7, 2047, 2048, 2049, 5000])
def test_any_number_of_rows_and_threads_gives_the_codes_of_one_row_alone(kernels, count):
    centroids, rows = centroids_of(40, 24), clustered(count, 24)
    codes = nearest(rows, centroids, threads=1)
    assert np.array_equal(nearest(rows, centroids, threads=3), codes)
    for i in range(0, count, 613):
        assert nearest(rows[i : i + 1], centroids)[0] == codes[i]


def test_groups_find_the_nearest_of_almost_all_rows_and_a_near_one_of_the_rest(kernels):
    rows = clustered(6000, 48, clusters=800)
    centroids = Centroids.of(rows[:2500])
    assert centroids.groups is not None
    worse = shortfall(rows[2500:], centroids, nearest(rows[2500:], centroids))
    assert (worse < ROUNDING).mean() > 0.95
    assert np.quantile(worse, 0.999) < 0.4
    assert shortfall(rows[2500:], centroids, nearest(rows[2500:], centroids, exhaustive=True)).max() < ROUNDING


def test_a_row_gets_the_same_code_from_groups_alone_and_among_others(kernels):
    rows = clustered(3000, 16, clusters=900)
    centroids = Centroids.of(rows[:2100])
    codes = nearest(rows, centroids, threads=2)
    assert [nearest(rows[i : i + 1], centroids)[0] for i in range(0, 3000, 171)] == list(codes[::171])


def test_groups_hold_every_centroid_once(kernels):
    centroids = Centroids.of(np.repeat(clustered(700, 8), 3, axis=0))  # many of them equal
    groups = centroids.groups
    assert np.array_equal(np.sort(groups.members), np.arange(2100))
    assert (np.diff(groups.offsets) > 0).all()
    assert len(groups.centers) == len(groups.offsets) - 1


@pytest.mark.parametrize("make", [lambda x: x.astype(np.float16), lambda x: x.astype(np.float64), np.asfortranarray])
def test_rows_of_any_float_type_and_layout_are_read(kernels, make):
    centroids, rows = centroids_of(30, 20), clustered(50, 20).astype(np.float16).astype(np.float32)
    assert np.array_equal(nearest(make(rows), centroids), nearest(rows, centroids))


def test_rows_without_numbers_get_some_centroid(kernels):
    centroids = centroids_of(30, 20)
    rows = np.array([[0.0] * 20, [np.nan] * 20, [np.inf] * 20, [1e-30] * 20], dtype=np.float32)
    assert (nearest(rows, centroids) < 30).all()


@pytest.mark.parametrize("dim", [5, 64, 127])
def test_nothing_behind_the_arrays_is_read(kernels, dim):
    rows, query = guarded(clustered(33, dim)), guarded(clustered(17, dim))
    plain = centroids_of(37, dim)
    centroids = Centroids(rows=guarded(plain.rows), scales=guarded(plain.scales))
    assert np.array_equal(nearest(rows, centroids), nearest(np.array(rows), plain))
    assert np.array_equal(similarities(query, centroids), similarities(np.array(query), plain))


@pytest.mark.parametrize(("tokens", "dim"), TOKENS_AND_WIDTHS)
def test_similarities_are_the_products_with_the_rounded_query(kernels, tokens, dim):
    centroids, query = centroids_of(45, dim), clustered(tokens, dim, seed=3) * np.float32(1.7)
    found = similarities(query, centroids)
    assert found.shape == (45, -(-tokens // LANES) * LANES)
    assert found.dtype == np.float32
    assert (found[:, tokens:] == 0).all()
    steps = np.abs(query).max(axis=1, initial=0) / 127  # [tokens]
    rounded = np.rint(query / steps[:, None]) * steps[:, None].astype(np.float64)
    assert np.allclose(found[:, :tokens], centroids.values.astype(np.float64) @ rounded.T, atol=1e-6)
    # Half a step a number is all that rounding can change.
    bound = steps / 2 * np.abs(centroids.values).sum(axis=1)[:, None] + 1e-6
    assert (np.abs(found[:, :tokens] - centroids.values @ query.T) <= bound).all()


def test_threads_do_not_change_similarities(kernels):
    centroids, query = centroids_of(9000, 12), clustered(20, 12)
    assert np.array_equal(similarities(query, centroids, threads=1), similarities(query, centroids, threads=3))


def test_every_kernel_gives_the_similarities_of_torch(kernels, monkeypatch):
    centroids, query = centroids_of(70, 33), clustered(40, 33)
    found = similarities(query, centroids)
    monkeypatch.setattr("millpond.late_interaction.kernels.compiled.kernel_table", lambda: None)
    assert np.array_equal(found, similarities(query, centroids))


def test_numbers_too_small_for_a_scale_are_zeros(kernels):
    centroids = Centroids.of(np.full((2, 5), 1e-42, dtype=np.float32))
    assert (centroids.values == 0).all()
    assert (similarities(np.full((3, 5), 1e-42, dtype=np.float32), centroids_of(4, 5)) == 0).all()


@pytest.mark.parametrize(
    ("rows", "scales"),
    [
        (np.zeros((0, 4), dtype=np.int8), np.zeros(0, dtype=np.float32)),
        (np.zeros((65_537, 1), dtype=np.int8), np.ones(65_537, dtype=np.float32)),
        (np.zeros((3, 4), dtype=np.float32), np.ones(3, dtype=np.float32)),
        (np.zeros((3, 4), dtype=np.int8), np.ones(4, dtype=np.float32)),
        (np.zeros((3, 4), dtype=np.int8), np.ones(3, dtype=np.float64)),
        (np.zeros((4, 3), dtype=np.int8).T, np.ones(3, dtype=np.float32)),
    ],
    ids=["none", "too-many", "floats", "other-count", "float64-scales", "not-contiguous"],
)
def test_arrays_that_are_no_centroids_are_refused(rows, scales):
    with pytest.raises(ValueError, match="must be|not float32"):
        Centroids(rows=rows, scales=scales)


def test_centroids_of_zeros_stay_zeros():
    centroids = Centroids.of(np.zeros((2, 3), dtype=np.float32))
    assert (centroids.values == 0).all()
    assert not centroids.values.flags.writeable
