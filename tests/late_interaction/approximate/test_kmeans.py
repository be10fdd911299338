"""Spherical k-means, and how many centroids a collection gets."""

import numpy as np
import pytest
from tests.approximate_search import clustered, unit

from millpond.late_interaction.codecs.kmeans import centroid_count, sample_count, train


@pytest.mark.parametrize(
    ("tokens", "count"),
    [
        *((0, 1), (1, 1), (2, 2), (10, 10), (63, 32), (64, 64), (65, 64), (1023, 128), (1024, 256)),
        *((246_935, 2048), (4_910_000, 16_384), (1 << 26, 65_536), (10**12, 65_536)),
    ],
    ids=str,
)
def test_the_number_of_centroids_grows_with_the_root_of_the_tokens(tokens, count):
    assert centroid_count(tokens) == count
    assert sample_count(tokens) == min(tokens, 32 * count)


def test_centroids_come_closer_to_the_points(kernels):
    sample = clustered(3000, 32, clusters=50)
    ways = [(sample @ train(sample, 60, rounds=rounds).T).max(axis=1).mean() for rounds in (0, 1, 3)]
    assert ways[0] < ways[1] < ways[2]


def test_centroids_have_length_one_and_their_number(kernels):
    centroids = train(clustered(500, 16), 40)
    assert centroids.shape == (40, 16)
    assert centroids.dtype == np.float32
    assert np.allclose(np.linalg.norm(centroids, axis=1), 1, atol=1e-5)


def test_a_seed_gives_the_same_centroids_with_any_threads(kernels):
    sample = clustered(5000, 16)
    assert np.array_equal(train(sample, 64, seed=5, threads=1), train(sample, 64, seed=5, threads=3))
    assert not np.array_equal(train(sample, 64, seed=5), train(sample, 64, seed=6))


def test_more_centroids_than_points_are_the_points(kernels):
    sample = unit(np.eye(5, 8))
    centroids = train(sample, 100)
    assert len(centroids) == 5
    assert np.allclose(np.sort(centroids @ sample.T, axis=1)[:, -1], 1, atol=1e-3)
    assert train(sample[:1], 3).shape == (1, 8)


def test_a_centroid_without_points_moves_to_a_point(kernels):
    sample = np.repeat(unit(np.eye(2, 8)), [50, 3], axis=0)  # of 20 centroids at most two have points
    centroids = train(sample, 20)
    assert np.allclose((centroids @ sample.T).max(axis=1), 1, atol=1e-3)


def test_equal_and_zero_rows_are_no_obstacle(kernels):
    assert np.isfinite(train(np.ones((30, 4), dtype=np.float32), 8)).all()
    assert np.isfinite(train(np.zeros((30, 4), dtype=np.float32), 8)).all()


def test_progress_is_told_after_each_round():
    told = []
    train(clustered(100, 8), 4, rounds=2, progress=lambda done, rounds: told.append((done, rounds)))
    assert told == [(1, 2), (2, 2)]


@pytest.mark.parametrize(("rows", "k"), [(0, 4), (5, 0)])
def test_nothing_to_train_on_is_an_error(rows, k):
    with pytest.raises(ValueError, match=f"{k} centroids cannot be trained on {rows} rows"):
        train(np.zeros((rows, 4), dtype=np.float32), k)
