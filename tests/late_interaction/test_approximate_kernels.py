"""Approximate search, by numpy and by every instruction set of this processor: centroids, codes, residuals, scans."""

import numpy as np
import pytest
from tests.approximate_search import (
    QUERY_TOKENS,
    TOKENS_AND_WIDTHS,
    WIDTHS,
    clustered,
    guarded,
    lengths_of,
    maxsim,
    offsets_of,
    packed_bits,
    unit,
)

from millpond.late_interaction.codecs.kmeans import centroid_count, sample_count, train
from millpond.late_interaction.codecs.residual import Encoded, ResidualCodec, pack, unpack
from millpond.late_interaction.kernels import compiled
from millpond.late_interaction.kernels.centroids import TILE, Centroids, nearest, similarities
from millpond.late_interaction.kernels.scan import Codes, Table, best_first, candidates_of, table
from millpond.late_interaction.scoring.residuals import score
from millpond.native.library import ISAS, isa, kernel_table

# Rounding a unit row, or a unit query token, to int8 changes an inner product with a unit vector by less than this.
ROUNDING = 0.02
BITS = (2, 4)
CENTROIDS = 50


@pytest.fixture(
    params=[
        name if name in ("numpy", isa()) else pytest.param(name, marks=pytest.mark.slow) for name in ("numpy", *ISAS)
    ]
)
def kernels(request, monkeypatch):
    """The name of the kernels that the test runs with."""
    name = request.param
    best = isa()
    if name != "numpy" and (best is None or ISAS.index(name) > ISAS.index(best)):
        pytest.skip(f"no compiled kernels for {name} here")
    chosen = None if name == "numpy" else kernel_table(name)
    monkeypatch.setattr(compiled, "kernel_table", lambda: chosen)
    return name


# --- Centroids --------------------------------------------------------------------------------------------------------


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
    assert codes.dtype == np.uint16 and codes.shape == (77,)
    assert shortfall(rows, centroids, codes).max() < ROUNDING


def test_of_equal_centroids_the_first_is_taken(kernels):
    values = np.repeat(unit(np.random.default_rng(0).standard_normal((20, 24))), 3, axis=0)
    assert np.array_equal(nearest(values, Centroids.of(values)), np.repeat(np.arange(0, 60, 3), 3))


@pytest.mark.parametrize("count", [0, 1, 7, 2047, 2049])
def test_any_number_of_rows_and_threads_gives_the_codes_of_one_row_alone(kernels, count):
    centroids, rows = centroids_of(40, 24), clustered(count, 24)
    codes = nearest(rows, centroids, threads=1)
    assert np.array_equal(nearest(rows, centroids, threads=3), codes)
    for i in range(0, count, 613):
        assert nearest(rows[i : i + 1], centroids)[0] == codes[i]


def test_groups_find_the_nearest_of_almost_all_rows_and_a_near_one_of_the_rest(kernels):
    rows = clustered(6000, 48, clusters=800)
    centroids = Centroids.of(rows[:2500])
    groups = centroids.groups
    assert np.array_equal(np.sort(groups.members), np.arange(2500)) and (np.diff(groups.offsets) > 0).all()
    codes = nearest(rows, centroids, threads=2)
    worse = shortfall(rows[2500:], centroids, codes[2500:])
    assert (worse < ROUNDING).mean() > 0.95
    assert np.quantile(worse, 0.999) < 0.4
    assert [nearest(rows[i : i + 1], centroids)[0] for i in range(0, 6000, 371)] == list(codes[::371])


@pytest.mark.parametrize("make", [lambda x: x.astype(np.float16), lambda x: x.astype(np.float64), np.asfortranarray])
def test_rows_of_any_float_type_and_layout_are_read(kernels, make):
    centroids, rows = centroids_of(30, 20), clustered(50, 20).astype(np.float16).astype(np.float32)
    assert np.array_equal(nearest(make(rows), centroids), nearest(rows, centroids))


def test_rows_without_numbers_get_some_centroid(kernels):
    centroids = centroids_of(30, 20)
    rows = np.array([[0.0] * 20, [np.nan] * 20, [np.inf] * 20, [1e-30] * 20], dtype=np.float32)
    assert (nearest(rows, centroids) < 30).all()
    tiny = np.full((3, 20), 1e-42, dtype=np.float32)  # too small for a scale
    assert (Centroids.of(tiny).values == 0).all() and (similarities(tiny, centroids) == 0).all()


@pytest.mark.parametrize(("tokens", "dim"), TOKENS_AND_WIDTHS)
def test_similarities_are_the_products_with_the_rounded_query(kernels, tokens, dim, monkeypatch):
    centroids, query = centroids_of(45, dim), clustered(tokens, dim, seed=3) * np.float32(1.7)
    found = similarities(query, centroids, threads=2)
    assert found.shape == (45, -(-tokens // TILE) * TILE)
    assert found.dtype == np.float32 and (found[:, tokens:] == 0).all()
    steps = np.abs(query).max(axis=1, initial=0) / 127  # [tokens]
    rounded = np.rint(query / steps[:, None]) * steps[:, None].astype(np.float64)
    assert np.allclose(found[:, :tokens], centroids.values.astype(np.float64) @ rounded.T, atol=1e-6)
    # Half a step a number is all that rounding can change.
    bound = steps / 2 * np.abs(centroids.values).sum(axis=1)[:, None] + 1e-6
    assert (np.abs(found[:, :tokens] - centroids.values @ query.T) <= bound).all()
    monkeypatch.setattr(compiled, "kernel_table", lambda: None)
    assert np.array_equal(found, similarities(query, centroids))


@pytest.mark.parametrize(
    ("rows", "scales"),
    [
        (np.zeros((0, 4), dtype=np.int8), np.zeros(0, dtype=np.float32)),
        (np.zeros((65_537, 1), dtype=np.int8), np.ones(65_537, dtype=np.float32)),
        (np.zeros((3, 4), dtype=np.float32), np.ones(3, dtype=np.float32)),
        (np.zeros((3, 4), dtype=np.int8), np.ones(4, dtype=np.float32)),
        (np.zeros((3, 4), dtype=np.int8), np.ones(3, dtype=np.float64)),
    ],
    ids=["none", "too-many", "floats", "other-count", "float64-scales"],
)
def test_arrays_that_are_no_centroids_are_refused(rows, scales):
    with pytest.raises(ValueError, match="must be|not float32"):
        Centroids(rows=rows, scales=scales)


# --- k-means ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "count"),
    [(0, 1), (1, 1), (63, 32), (65, 64), (1023, 128), (1024, 256), (4_910_000, 16_384), (10**12, 65_536)],
    ids=str,
)
def test_the_number_of_centroids_grows_with_the_root_of_the_tokens(tokens, count):
    assert centroid_count(tokens) == count
    assert sample_count(tokens) == min(tokens, 32 * count)


def test_centroids_lie_among_the_points(kernels):
    sample = clustered(3000, 32, clusters=50)
    centroids = train(sample, 60, seed=5, threads=1)
    assert centroids.shape == (60, 32) and centroids.dtype == np.float32
    assert np.allclose(np.linalg.norm(centroids, axis=1), 1, atol=1e-5)
    assert (sample @ centroids.T).max(axis=1).mean() > (sample @ sample[:60].T).max(axis=1).mean() + 0.02
    assert np.array_equal(train(sample, 60, seed=5, threads=3), centroids)
    assert not np.array_equal(train(sample, 60, seed=6), centroids)


def test_few_equal_and_zero_points_are_no_obstacle(kernels):
    sample = unit(np.eye(5, 8))
    assert np.allclose(np.sort(train(sample, 100) @ sample.T, axis=1)[:, -1], 1, atol=1e-3)
    few = np.repeat(sample[:2], [50, 3], axis=0)  # of 20 centroids at most two have points; the others move to one
    assert np.allclose((train(few, 20) @ few.T).max(axis=1), 1, atol=1e-3)
    for rows in (np.ones((30, 4), dtype=np.float32), np.zeros((30, 4), dtype=np.float32)):
        assert np.isfinite(train(rows, 8)).all()


# --- Residuals --------------------------------------------------------------------------------------------------------


def decoded(codec, rows):
    """The rows that the encoding of rows stands for."""
    return decode(codec, codec.encode(rows))


def decode(codec, encoded):
    rows = codec.centroids.values[encoded.codes]
    if not codec.bits:
        return rows
    steps = codec.levels[unpack(encoded.residuals, codec.bits, codec.dim)] * np.float32(codec.level_scale) * codec.std
    return rows + encoded.scales.astype(np.float32)[:, None] * steps


def test_more_bits_leave_a_smaller_error(kernels):
    rows = clustered(4000, 64, clusters=100)
    errors = {bits: decoded(ResidualCodec.train(rows, bits=bits, k=80), rows) - rows for bits in (0, 2, 4)}
    sums = {bits: np.square(error).sum(axis=1).mean() for bits, error in errors.items()}
    # A Lloyd-Max quantizer leaves 0.1175 of a Gaussian's variance at 2 bits, and 0.0095 at 4.
    assert sums[2] < 0.16 * sums[0] and sums[4] < 0.015 * sums[0]
    for bits in BITS:  # the error along a row counts most
        assert np.square((errors[bits] * rows).sum(axis=1)).mean() < 0.5 * sums[bits] / 64


@pytest.mark.parametrize("bits", BITS)
def test_a_row_is_encoded_the_same_alone_and_among_others(kernels, bits):
    rows = clustered(2500, 24)
    codec = ResidualCodec.train(rows, bits=bits, k=32)
    together = codec.encode(rows, threads=3)
    assert (together.scales.dtype, together.residuals.dtype) == (np.float16, np.uint8)
    assert together.residuals.shape == (2500, 3 * bits)
    for i in range(0, 2500, 401):
        alone = codec.encode(rows[i : i + 1])
        assert (alone.codes[0], alone.scales[0]) == (together.codes[i], together.scales[i])
        assert np.array_equal(alone.residuals[0], together.residuals[i])
    assert decoded(codec, rows[:0]).shape == (0, 24)


@pytest.mark.parametrize(
    "rows",
    [
        unit(np.ones((1, 5))),
        unit(np.ones((40, 5))),
        np.zeros((6, 5), dtype=np.float32),
        unit(np.random.default_rng(0).standard_normal((3, 1))),
    ],
    ids=["one", "equal", "zeros", "width-1"],
)
@pytest.mark.parametrize("bits", BITS)
def test_few_equal_and_zero_rows_are_encoded(kernels, rows, bits):
    assert np.abs(decoded(ResidualCodec.train(rows, bits=bits, k=len(rows)), rows) - rows).max() < 0.02


def test_a_dimension_without_spread_in_the_sample_does_not_outweigh_the_others(kernels):
    sample = clustered(1000, 16)
    sample[:, 3] = 0
    codec = ResidualCodec.train(unit(sample), bits=4, k=16)
    row = unit(sample[:1])
    row[0, 3] = 0.05
    centroid = codec.centroids.values[codec.encode(row).codes]
    assert np.square(decoded(codec, row) - row).sum() < 0.1 * np.square(row - centroid).sum()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", WIDTHS)
def test_every_kernel_encodes_as_numpy_does(kernels, dim, bits, monkeypatch):
    rows = clustered(1500, dim)
    codec = ResidualCodec.train(rows, bits=bits, k=25)
    found = codec.encode(rows, threads=2)
    monkeypatch.setattr(compiled, "kernel_table", lambda: None)
    wanted = codec.encode(rows)
    # A centroid that is about as near, or a number on the border of two levels, may be chosen otherwise.
    same = found.codes == wanted.codes
    numbers = [unpack(encoded.residuals[same], bits, dim) for encoded in (found, wanted)]
    scales = [encoded.scales[same].astype(float) for encoded in (found, wanted)]
    assert same.mean() > 0.9 and (numbers[0] == numbers[1]).mean() > 0.999
    assert np.isclose(*scales, rtol=2e-3, atol=1e-6).mean() > 0.99
    assert np.array_equal(pack(numbers[0], bits), found.residuals[same])


def scored(codec, encoded, offsets, query, documents=None, threads=None):
    documents = np.arange(len(offsets) - 1) if documents is None else documents
    products = similarities(query, codec.centroids)
    return score(query, encoded, offsets, documents, codec, products, threads=threads)


def bound(codec, encoded, query):
    """Most by which rounding the query can change a MaxSim, as the docstring of ``score`` states it."""
    a = np.abs(query).max(axis=1, initial=0)
    b = np.abs(query * codec.std).max(axis=1, initial=0)
    centroid = np.abs(codec.centroids.values).sum(axis=1).max()
    levels = np.abs(codec.levels[unpack(encoded.residuals, codec.bits, codec.dim)].astype(float)).sum(axis=1)
    residual = (encoded.scales.astype(float) * codec.level_scale * levels).max(initial=0)
    return ((a * centroid + b * residual) / 254).sum() + 1e-4


def assert_scores(codec, encoded, offsets, query):
    wanted, found = maxsim(query, decode(codec, encoded), offsets), scored(codec, encoded, offsets, query)
    full = np.isfinite(wanted)
    assert found.dtype == np.float32 and np.array_equal(np.isfinite(found), full)
    error = np.abs(found[full] - wanted[full])
    assert error.max(initial=0) <= bound(codec, encoded, query)
    assert error.mean() <= bound(codec, encoded, query) / 10  # as a rule it is far smaller


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", WIDTHS)
def test_scores_are_those_of_the_decoded_rows_for_every_width(kernels, dim, bits):
    rows = clustered(600, dim)
    codec = ResidualCodec.train(rows, bits=bits, k=20)
    assert_scores(codec, codec.encode(rows), offsets_of(lengths_of(600, longest=11)), clustered(21, dim, seed=8))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("tokens", QUERY_TOKENS)
def test_scores_are_those_of_the_decoded_rows_for_any_query_length(kernels, tokens, bits):
    rows = clustered(700, 48)
    codec = ResidualCodec.train(rows, bits=bits, k=30)
    encoded, offsets = codec.encode(rows), offsets_of([*lengths_of(699, longest=30), 1])
    query = clustered(tokens, 48, seed=8)
    assert_scores(codec, encoded, offsets, query)
    alone = sum((scored(codec, encoded, offsets, query[i : i + 1]) for i in range(tokens)), np.zeros(len(offsets) - 1))
    np.testing.assert_allclose(scored(codec, encoded, offsets, query), alone, atol=2e-4)


@pytest.fixture(scope="module", params=BITS, ids=str)
def stored(request):
    """A codec and documents of 0 to 40 tokens."""
    rows = clustered(3000, 32, clusters=100)
    codec = ResidualCodec.train(rows, bits=request.param, k=64)
    return codec, codec.encode(rows), offsets_of(lengths_of(3000))


def test_documents_may_be_chosen_in_any_order_and_twice_by_any_threads(kernels, stored):
    codec, encoded, offsets = stored
    query = clustered(19, 32, seed=5)
    everything = scored(codec, encoded, offsets, query)
    chosen = np.random.default_rng(0).integers(0, len(offsets) - 1, size=900)
    one = scored(codec, encoded, offsets, query, chosen, threads=1)
    assert np.allclose(one, everything[chosen], atol=1e-5)
    assert np.array_equal(scored(codec, encoded, offsets, query, chosen, threads=4), one)
    assert scored(codec, encoded, offsets, query, chosen[:0]).shape == (0,)


def test_a_document_without_tokens_scores_minus_infinity_wherever_it_is(kernels, stored):
    codec, encoded, _ = stored
    query, offsets = clustered(3, 32), offsets_of([0, 2, 0, 0, 9, 0])
    found = scored(codec, encoded, offsets, query)
    assert list(np.isneginf(found)) == [True, False, True, True, False, True]
    assert list(np.isneginf(scored(codec, encoded, offsets, query, np.array([5, 0])))) == [True, True]
    assert list(scored(codec, encoded, offsets, query[:0])) == [0] * 6


@pytest.mark.parametrize("dim", [5, 20, 127, 128])
def test_nothing_behind_the_arrays_is_read(kernels, dim):
    rows, query, offsets = guarded(clustered(70, dim)), guarded(clustered(20, dim)), offsets_of([40, 0, 29, 1])
    plain = centroids_of(37, dim)
    behind = Centroids(rows=guarded(plain.rows), scales=guarded(plain.scales))
    assert np.array_equal(nearest(rows, behind), nearest(np.array(rows), plain))
    products = similarities(query, behind)
    assert np.array_equal(products, similarities(np.array(query), plain))
    codes = nearest(rows, plain)
    cells = table(products, query)
    whole = Table(cells=guarded(cells.cells), tokens=cells.tokens)
    segment = Codes(codes=guarded(codes), offsets=guarded(offsets), allowed=guarded(packed_bits(np.ones(4))))
    assert list(candidates_of(whole, [segment], 3)[0]) == [0, 2, 3]
    for bits in BITS:
        codec = ResidualCodec.train(np.array(rows), bits=bits, k=9)
        encoded = codec.encode(rows)
        arrays = [guarded(array) for array in (encoded.codes, encoded.scales, encoded.residuals)]
        products = guarded(similarities(query, codec.centroids))
        stored = Encoded(codes=arrays[0], scales=arrays[1], residuals=arrays[2])
        found = score(query, stored, guarded(offsets), np.arange(4), codec, products)
        assert np.array_equal(found, scored(codec, encoded, offsets, np.array(query)))


# --- Scans ------------------------------------------------------------------------------------------------------------


def table_of(tokens, *, levels=256, seed=0):
    """A table of random cells; few levels make many equal scores."""
    cells = np.zeros((CENTROIDS, -(-tokens // 16) * 16), dtype=np.uint8)
    random = np.random.default_rng(seed)
    cells[:, :tokens] = random.integers(0, levels, size=(CENTROIDS, tokens)) * (255 // (levels - 1))
    return Table(cells=cells, tokens=tokens)


def segment_of(lengths, *, seed=0, mask=None):
    codes = np.random.default_rng(seed).integers(0, CENTROIDS, size=sum(lengths)).astype(np.uint16)
    return Codes(codes=codes, offsets=offsets_of(lengths), allowed=None if mask is None else packed_bits(mask))


def expected(table, segment, keep, mask=None):
    """The definition: sort the documents with tokens by their score, the lower index first, and take the best."""
    rows = []
    for i in range(len(segment)):
        cells = table.cells[segment.codes[segment.offsets[i] : segment.offsets[i + 1]]].astype(int)
        if len(cells) and (mask is None or mask[i]):
            rows.append((-cells.max(axis=0).sum(), i))
    return sorted(i for _, i in sorted(rows)[:keep])


@pytest.mark.parametrize("tokens", QUERY_TOKENS)
@pytest.mark.parametrize("levels", [2, 256], ids=["ties", "few-ties"])
def test_the_best_documents_are_kept_for_any_query_length(kernels, tokens, levels):
    segment, cells = segment_of(lengths_of(3000)), table_of(tokens, levels=levels)
    for keep in (1, 2, 64, 10_000):
        assert list(candidates_of(cells, [segment], keep)[0]) == expected(cells, segment, keep)


@pytest.mark.parametrize("kind", ["none", "first", "last", "half", "few"])
def test_only_allowed_documents_are_candidates(kernels, kind):
    lengths = lengths_of(2000, longest=7)
    count, random = len(lengths), np.random.default_rng(1)
    mask = {
        "none": np.zeros(count, dtype=np.bool_),
        "first": np.arange(count) == 2,
        "last": np.arange(count) == count - 2,
        "half": random.random(count) < 0.5,
        "few": random.random(count) < 0.02,
    }[kind]
    segment, cells = segment_of(lengths, mask=mask), table_of(20, levels=4)
    for keep in (3, 10_000):
        assert list(candidates_of(cells, [segment], keep)[0]) == expected(cells, segment, keep, mask)


def test_few_empty_and_long_documents(kernels):
    for lengths in ([], [0, 0], [0, 1, 0], [1, 8192, 0, 8191]):
        segment, cells = segment_of(lengths), table_of(33)
        assert list(candidates_of(cells, [segment], 2)[0]) == expected(cells, segment, 2)


def test_the_smallest_and_the_largest_score_are_counted(kernels):
    for value, tokens, lengths, best in ((0, 3, [2, 0, 1], [0, 2]), (255, 112, [2, 2, 2], [0, 1])):
        cells = Table(cells=np.full((CENTROIDS, -(-tokens // 16) * 16), value, dtype=np.uint8), tokens=tokens)
        assert list(candidates_of(cells, [segment_of(lengths)], 2)[0]) == best


def test_segments_share_what_is_kept(kernels):
    lengths = [lengths_of(700, seed=seed) for seed in range(3)]
    cells = table_of(18, levels=3)
    mask = np.random.default_rng(0).random(len(lengths[1])) < 0.6
    segments = [segment_of(some, seed=i, mask=mask if i == 1 else None) for i, some in enumerate(lengths)]
    starts = np.cumsum([0, *map(len, lengths)])
    codes = np.concatenate([segment.codes for segment in segments])
    whole = Codes(codes=codes, offsets=offsets_of(np.concatenate(lengths)))
    masks = np.concatenate([np.ones(len(lengths[0])), mask, np.ones(len(lengths[2]))]) > 0
    found = candidates_of(cells, segments, 40, threads=3)
    assert [int(i + starts[k]) for k, some in enumerate(found) for i in some] == expected(cells, whole, 40, masks)
    assert candidates_of(cells, [], 10) == []


@pytest.mark.parametrize(
    ("tokens", "length"), [(tokens, (1.0, 0.2, 30.0)[place % 3]) for place, tokens in enumerate(QUERY_TOKENS)]
)
def test_a_cell_is_the_distance_to_the_best_centroid_in_255_steps(kernels, tokens, length):
    query = clustered(tokens, 24, seed=4) * np.float32(length)
    products = similarities(query, centroids_of(37, 24))
    cells = table(products, query)
    assert cells.tokens == tokens and cells.cells.shape == products.shape and (cells.cells[:, tokens:] == 0).all()
    used = products[:, :tokens].astype(np.float64)
    wanted = 255 * (1 - (used.max(axis=0, initial=0) - used) / length) if tokens else used
    assert np.abs(np.clip(wanted, 0, 255) - cells.cells[:, :tokens]).max(initial=0) <= 0.51
    assert (cells.cells[:, :tokens].max(axis=0, initial=0) == 255).all()
    zeros = np.zeros((3, 24), dtype=np.float32)
    assert (table(similarities(zeros, centroids_of(20, 24)), zeros).cells[:, :3] == 255).all()


@pytest.mark.parametrize("k", [1, 3, 7, 12, 13, 100])
def test_the_best_are_chosen_as_by_a_stable_sort(k):
    random = np.random.default_rng(k)
    for _ in range(50):
        scores = random.integers(-3, 3, size=12).astype(np.float32)
        np.testing.assert_array_equal(best_first(scores, k), np.argsort(-scores, kind="stable")[:k])
