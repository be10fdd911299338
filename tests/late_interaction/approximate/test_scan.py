"""Candidates by centroid codes: the best documents of an 8-bit table, filters, ties and segments."""

import numpy as np
import pytest
from tests.approximate_search import QUERY_TOKENS, clustered, guarded, lengths_of, offsets_of, packed_bits

from millpond.late_interaction.kernels.centroids import Centroids, similarities
from millpond.late_interaction.kernels.scan import Codes, Table, candidates, candidates_of, table

CENTROIDS = 50


def table_of(tokens, *, levels=256, seed=0):
    """A table of random cells; few levels make many equal scores."""
    cells = np.zeros((CENTROIDS, -(-tokens // 16) * 16), dtype=np.uint8)
    random = np.random.default_rng(seed)
    cells[:, :tokens] = random.integers(0, levels, size=(CENTROIDS, tokens)) * (255 // (levels - 1))
    return Table(cells=cells, tokens=tokens)


def codes_of(lengths, seed=0):
    return np.random.default_rng(seed).integers(0, CENTROIDS, size=sum(lengths)).astype(np.uint16)


def expected(table, codes, offsets, keep, mask=None):
    """The definition: sort the documents with tokens by their score, the lower index first, and take the best."""
    rows = []
    for i in range(len(offsets) - 1):
        cells = table.cells[codes[offsets[i] : offsets[i + 1]]].astype(int)
        if len(cells) and (mask is None or mask[i]):
            rows.append((-cells.max(axis=0).sum(), i))
    return sorted(i for _, i in sorted(rows)[: max(keep, 0)])


@pytest.mark.parametrize("tokens", QUERY_TOKENS)
@pytest.mark.parametrize("levels", [2, 256], ids=["ties", "few-ties"])
def test_the_best_documents_are_kept_for_any_query_length(kernels, tokens, levels):
    lengths = lengths_of(3000)
    codes, offsets, cells = codes_of(lengths), offsets_of(lengths), table_of(tokens, levels=levels)
    for keep in (1, 10, 64):
        assert list(candidates(cells, codes, offsets, keep)) == expected(cells, codes, offsets, keep)


@pytest.mark.parametrize("keep", [-1, 0, 1, 2, 30, 10_000])
def test_any_number_to_keep_is_served(kernels, keep):
    lengths = lengths_of(300, longest=9)
    codes, offsets, cells = codes_of(lengths), offsets_of(lengths), table_of(5, levels=3)
    found = candidates(cells, codes, offsets, keep)
    assert list(found) == expected(cells, codes, offsets, keep)
    assert found.dtype == np.int64


@pytest.mark.parametrize("kind", ["all", "none", "first", "last", "half", "few"])
def test_only_allowed_documents_are_candidates(kernels, kind):
    lengths = lengths_of(2000, longest=7)
    count = len(lengths)
    random = np.random.default_rng(1)
    mask = {
        "all": np.ones(count, dtype=np.bool_),
        "none": np.zeros(count, dtype=np.bool_),
        "first": np.arange(count) == 2,
        "last": np.arange(count) == count - 2,
        "half": random.random(count) < 0.5,
        "few": random.random(count) < 0.02,
    }[kind]
    codes, offsets, cells = codes_of(lengths), offsets_of(lengths), table_of(20, levels=4)
    for keep in (3, 10_000):
        found = candidates(cells, codes, offsets, keep, allowed=packed_bits(mask))
        assert list(found) == expected(cells, codes, offsets, keep, mask)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1], [0, 1, 0], [8192], [1, 8192, 0, 8191]], ids=str)
def test_few_empty_and_long_documents(kernels, lengths):
    codes, offsets, cells = codes_of(lengths), offsets_of(lengths), table_of(33)
    assert list(candidates(cells, codes, offsets, 2)) == expected(cells, codes, offsets, 2)


def test_a_document_whose_cells_are_all_zero_is_still_a_candidate(kernels):
    cells = Table(cells=np.zeros((CENTROIDS, 16), dtype=np.uint8), tokens=3)
    assert list(candidates(cells, codes_of([2, 0, 1]), offsets_of([2, 0, 1]), 5)) == [0, 2]


def test_the_largest_score_is_counted(kernels):
    cells = Table(cells=np.full((CENTROIDS, 112), 255, dtype=np.uint8), tokens=112)
    assert list(candidates(cells, codes_of([2, 2, 2]), offsets_of([2, 2, 2]), 2)) == [0, 1]


def test_segments_share_what_is_kept(kernels):
    lengths = [lengths_of(700, seed=seed) for seed in range(3)]
    cells = table_of(18, levels=3)
    masks = [None, np.random.default_rng(0).random(len(lengths[1])) < 0.6, None]
    segments = [
        Codes(
            codes=codes_of(some, seed=i),
            offsets=offsets_of(some),
            allowed=None if masks[i] is None else packed_bits(masks[i]),
        )
        for i, some in enumerate(lengths)
    ]
    starts = np.cumsum([0, *map(len, lengths)])
    together = offsets_of(np.concatenate(lengths))
    mask = np.concatenate(
        [np.ones(len(s), dtype=np.bool_) if masks[i] is None else masks[i] for i, s in enumerate(lengths)]
    )
    best = expected(cells, np.concatenate([segment.codes for segment in segments]), together, 40, mask)
    found = candidates_of(cells, segments, 40)
    assert [int(i + starts[k]) for k, some in enumerate(found) for i in some] == best
    assert candidates_of(cells, [], 10) == []


def test_threads_do_not_change_the_candidates(kernels):
    lengths = [300] * 2000  # enough for several threads
    codes, offsets, cells = codes_of(lengths), offsets_of(lengths), table_of(20)
    one = candidates(cells, codes, offsets, 50, threads=1)
    assert np.array_equal(candidates(cells, codes, offsets, 50, threads=4), one)
    assert len(one) == 50


def test_nothing_behind_the_arrays_is_read(kernels, tmp_path):
    lengths = [3, 1, 5, 0, 7]
    codes, offsets, cells = codes_of(lengths), offsets_of(lengths), table_of(40)
    whole = Table(cells=guarded(cells.cells), tokens=40)
    found = candidates(whole, guarded(codes), guarded(offsets), 3, allowed=guarded(packed_bits(np.ones(5))))
    assert list(found) == expected(cells, codes, offsets, 3)
    codes.tofile(tmp_path / "codes")
    mapped = np.memmap(tmp_path / "codes", dtype=np.uint16, mode="r")
    assert list(candidates(cells, mapped, offsets, 3)) == list(found)


@pytest.mark.parametrize(
    ("tokens", "length"), [(tokens, (1.0, 0.2, 30.0)[place % 3]) for place, tokens in enumerate(QUERY_TOKENS)]
)
def test_a_cell_is_the_distance_to_the_best_centroid_in_255_steps(kernels, tokens, length):
    centroids = Centroids.of(clustered(37, 24))
    query = clustered(tokens, 24, seed=4) * np.float32(length)
    products = similarities(query, centroids)
    cells = table(products, query)
    assert cells.tokens == tokens
    assert cells.cells.shape == products.shape
    assert (cells.cells[:, tokens:] == 0).all()
    used = products[:, :tokens].astype(np.float64)
    wanted = 255 * (1 - (used.max(axis=0, initial=0) - used) / length) if tokens else used
    assert np.abs(np.clip(wanted, 0, 255) - cells.cells[:, :tokens]).max(initial=0) <= 0.51
    if tokens:
        assert (cells.cells[:, :tokens].max(axis=0) == 255).all()


def test_a_query_of_zeros_has_a_table(kernels):
    centroids = Centroids.of(clustered(20, 8))
    query = np.zeros((3, 8), dtype=np.float32)
    assert (table(similarities(query, centroids), query).cells[:, :3] == 255).all()
