"""Exact MaxSim over residuals as they are stored, and the encoding of rows: every kernel against numpy."""

import numpy as np
import pytest
from tests.approximate_search import QUERY_TOKENS, WIDTHS, clustered, guarded, lengths_of, maxsim, offsets_of

from millpond.late_interaction.codecs.residual import ResidualCodec
from millpond.late_interaction.kernels import compiled, residuals
from millpond.late_interaction.kernels.centroids import similarities
from millpond.late_interaction.kernels.residuals import Stored, pack, score, unpack

BITS = (2, 4)


def as_stored(codes, scales, packed, offsets):
    return Stored(codes=codes, scales=scales, residuals=packed, offsets=offsets)


def scored(codec, encoded, offsets, query, documents=None, threads=None):
    documents = np.arange(len(offsets) - 1) if documents is None else documents
    rows = as_stored(encoded.codes, encoded.scales, encoded.residuals, offsets)
    return score(query, rows, documents, codec, similarities(query, codec.centroids), threads=threads)


def bound(codec, encoded, query):
    """Most by which rounding the query can change a MaxSim, as the docstring of ``score`` states it."""
    a = np.abs(query).max(axis=1, initial=0)
    b = np.abs(query * codec.std).max(axis=1, initial=0)
    centroid = np.abs(codec.centroids.values).sum(axis=1).max()
    levels = np.abs(codec.levels[unpack(encoded.residuals, codec.bits, codec.dim)].astype(float)).sum(axis=1)
    residual = (encoded.scales.astype(float) * codec.level_scale * levels).max(initial=0)
    return ((a * centroid + b * residual) / 254).sum() + 1e-4


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", WIDTHS)
def test_scores_are_those_of_the_decoded_rows_for_every_width(kernels, dim, bits):
    rows = clustered(600, dim)
    lengths = lengths_of(600, longest=11)
    codec = ResidualCodec.train(rows, bits=bits, k=20)
    encoded, offsets = codec.encode(rows), offsets_of(lengths)
    query = clustered(21, dim, seed=8)
    wanted = maxsim(query, codec.decode(encoded.codes, encoded.scales, encoded.residuals), offsets)
    found = scored(codec, encoded, offsets, query)
    assert found.dtype == np.float32
    assert np.array_equal(np.isinf(found), np.isinf(wanted))
    full = np.isfinite(wanted)
    assert np.abs(found[full] - wanted[full]).max() <= bound(codec, encoded, query)
    # As a rule the error is far smaller.
    assert np.abs(found[full] - wanted[full]).mean() <= bound(codec, encoded, query) / 10


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("tokens", QUERY_TOKENS)
def test_scores_are_those_of_the_rounded_query_for_any_query_length(kernels, tokens, bits):
    dim, rows = 48, clustered(700, 48)
    lengths = lengths_of(700, longest=30)
    codec = ResidualCodec.train(rows, bits=bits, k=30)
    encoded, offsets, query = codec.encode(rows), offsets_of(lengths), clustered(tokens, dim, seed=8)
    found = scored(codec, encoded, offsets, query)
    products = similarities(query, codec.centroids)[encoded.codes, :tokens].astype(np.float64)
    folded = (query * codec.std).astype(np.float32)
    steps = np.abs(folded).max(axis=1, initial=0) / 127
    rounded = np.rint(folded / steps[:, None]) * steps[:, None]
    numbers = codec.levels[unpack(encoded.residuals, bits, dim)] * codec.level_scale
    products += encoded.scales.astype(np.float64)[:, None] * (numbers @ rounded.T)
    for i in range(len(lengths)):
        part = products[offsets[i] : offsets[i + 1]]
        wanted = (part.max(axis=0).sum() if len(part) else -np.inf) if tokens else 0
        assert found[i] == pytest.approx(wanted, abs=2e-4)


@pytest.fixture(scope="module", params=BITS, ids=str)
def stored(request):
    """A codec and documents of 0 to 40 tokens."""
    rows = clustered(3000, 32, clusters=100)
    codec = ResidualCodec.train(rows, bits=request.param, k=64)
    return codec, codec.encode(rows), offsets_of(lengths_of(3000))


def test_documents_may_be_chosen_in_any_order_and_twice(kernels, stored):
    codec, encoded, offsets = stored
    query = clustered(19, 32, seed=5)
    everything = scored(codec, encoded, offsets, query)
    chosen = np.random.default_rng(0).integers(0, len(offsets) - 1, size=90)
    assert np.allclose(scored(codec, encoded, offsets, query, chosen), everything[chosen], atol=1e-5)
    assert scored(codec, encoded, offsets, query, chosen[:0]).shape == (0,)


def test_threads_do_not_change_scores(kernels, stored):
    codec, encoded, offsets = stored
    query = clustered(40, 32, seed=5)
    documents = np.tile(np.arange(len(offsets) - 1), 4)
    one = scored(codec, encoded, offsets, query, documents, threads=1)
    assert np.array_equal(scored(codec, encoded, offsets, query, documents, threads=4), one)


def test_a_document_without_tokens_scores_minus_infinity_wherever_it_is(kernels, stored):
    codec, encoded, _ = stored
    query = clustered(3, 32)
    offsets = offsets_of([0, 2, 0, 0, 9, 0])
    found = scored(codec, encoded, offsets, query)
    assert list(np.isneginf(found)) == [True, False, True, True, False, True]
    assert list(np.isneginf(scored(codec, encoded, offsets, query, np.array([5, 0])))) == [True, True]
    assert list(scored(codec, encoded, offsets, query[:0])) == [0] * 6


def test_a_document_of_8192_tokens_beside_one_of_one(kernels):
    rows = clustered(8193, 16)
    codec = ResidualCodec.train(rows[:2000], bits=4, k=50)
    encoded, offsets = codec.encode(rows), np.array([0, 8192, 8193])
    query = clustered(12, 16, seed=3)
    wanted = maxsim(query, codec.decode(encoded.codes, encoded.scales, encoded.residuals), offsets)
    assert np.abs(scored(codec, encoded, offsets, query) - wanted).max() <= bound(codec, encoded, query)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [5, 20, 127, 128])
def test_nothing_behind_the_arrays_is_read(kernels, dim, bits, tmp_path):
    rows = guarded(clustered(70, dim))
    codec = ResidualCodec.train(np.array(rows), bits=bits, k=9)
    encoded, offsets, query = codec.encode(rows), offsets_of([40, 0, 29, 1]), clustered(20, dim)
    plain = scored(codec, encoded, offsets, query)
    arrays = [guarded(a) for a in (encoded.codes, encoded.scales, encoded.residuals, offsets, np.arange(4))]
    products = guarded(similarities(query, codec.centroids))
    assert np.array_equal(
        score(
            guarded(query),
            as_stored(*arrays[:4]),
            arrays[4],
            codec,
            products,
        ),
        plain,
    )
    encoded.residuals.tofile(tmp_path / "residuals")
    arrays[2] = np.memmap(tmp_path / "residuals", dtype=np.uint8, mode="r", shape=encoded.residuals.shape)
    assert np.array_equal(
        score(
            query,
            as_stored(*arrays[:4]),
            arrays[4],
            codec,
            products,
        ),
        plain,
    )


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", WIDTHS)
def test_every_kernel_encodes_as_numpy_does(kernels, dim, bits, monkeypatch):
    rows = clustered(1500, dim)
    codec = ResidualCodec.train(rows, bits=bits, k=25)
    codes = codec.encode(rows).codes
    scales, packed = residuals.encode(rows, codes, codec.centroids.values, codec, threads=2)
    monkeypatch.setattr(compiled, "kernel_table", lambda: None)
    wanted_scales, wanted = residuals.encode(rows, codes, codec.centroids.values, codec)
    # A number on the border of two levels may fall on either side.
    assert (unpack(packed, bits, dim) == unpack(wanted, bits, dim)).mean() > 0.999
    assert np.isclose(scales.astype(float), wanted_scales.astype(float), rtol=2e-3, atol=1e-6).mean() > 0.99


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", WIDTHS)
def test_packing_is_undone(dim, bits):
    numbers = np.random.default_rng(0).integers(0, 1 << bits, size=(9, dim)).astype(np.uint8)
    packed = pack(numbers, bits)
    assert packed.shape == (9, -(-dim * bits // 8))
    assert np.array_equal(unpack(packed, bits, dim), numbers)
