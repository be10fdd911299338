"""The residual codec: training, encoding, decoding, and its files."""

import numpy as np
import pytest
from tests.approximate_search import clustered, maxsim, offsets_of, unit

from millpond.late_interaction.codecs.residual import ResidualCodec


def decoded(codec, rows):
    encoded = codec.encode(rows)
    return codec.decode(encoded.codes, encoded.scales, encoded.residuals)


def test_more_bits_leave_a_smaller_error(kernels):
    rows = clustered(4000, 64, clusters=100)
    errors = {
        bits: np.square(decoded(ResidualCodec.train(rows, bits=bits, k=80), rows) - rows).sum(axis=1).mean()
        for bits in (0, 2, 4)
    }
    # A Lloyd-Max quantizer leaves 0.1175 of a Gaussian's variance at 2 bits, and 0.0095 at 4.
    assert errors[2] < 0.16 * errors[0]
    assert errors[4] < 0.015 * errors[0]


@pytest.mark.parametrize("bits", [2, 4])
def test_the_error_along_a_row_is_far_smaller_than_across(kernels, bits):
    rows = clustered(2000, 64, clusters=60)
    error = decoded(ResidualCodec.train(rows, bits=bits, k=50), rows) - rows
    along = np.square((error * rows).sum(axis=1)).mean()
    assert along < 0.5 * np.square(error).sum(axis=1).mean() / 64


def test_bytes_of_a_token(kernels):
    rows = clustered(300, 128)
    for bits, size in ((4, 68), (2, 36)):
        codec = ResidualCodec.train(rows, bits=bits, k=16)
        encoded = codec.encode(rows)
        assert (encoded.codes.dtype, encoded.scales.dtype, encoded.residuals.dtype) == (np.uint16, np.float16, np.uint8)
        assert (encoded.codes.nbytes + encoded.scales.nbytes + encoded.residuals.nbytes) / len(encoded) == size
        assert encoded.residuals.shape == (300, codec.width)


def test_a_row_is_encoded_the_same_alone_and_among_others(kernels):
    rows = clustered(2500, 24)
    codec = ResidualCodec.train(rows, bits=4, k=32)
    together = codec.encode(rows, threads=3)
    for i in range(0, 2500, 401):
        alone = codec.encode(rows[i : i + 1])
        assert alone.codes[0] == together.codes[i]
        assert alone.scales[0] == together.scales[i]
        assert np.array_equal(alone.residuals[0], together.residuals[i])
    assert len(codec.encode(rows[:0])) == 0
    assert decoded(codec, rows[:0]).shape == (0, 24)


def test_without_residuals_a_row_is_its_centroid(kernels):
    rows = clustered(200, 12)
    codec = ResidualCodec.train(rows, bits=0, k=8)
    encoded = codec.encode(rows)
    assert encoded.residuals.shape == (200, 0)
    assert np.array_equal(decoded(codec, rows), codec.centroids.values[encoded.codes])


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
@pytest.mark.parametrize("bits", [2, 4])
def test_few_equal_and_zero_rows_are_encoded(kernels, rows, bits):
    codec = ResidualCodec.train(rows, bits=bits)
    assert np.abs(decoded(codec, rows) - rows).max() < 0.02


def test_a_dimension_without_spread_in_the_sample_does_not_outweigh_the_others(kernels):
    sample = clustered(1000, 16)
    sample[:, 3] = 0
    codec = ResidualCodec.train(unit(sample), bits=4, k=16)
    row = unit(sample[:1])
    row[0, 3] = 0.05
    assert (
        np.square(decoded(codec, row) - row).sum()
        < 0.1 * np.square(row - codec.centroids.values[codec.encode(row).codes]).sum()
    )


def test_rows_of_any_length_are_encoded(kernels):
    rows = clustered(500, 32) * np.float32(7)
    codec = ResidualCodec.train(rows, bits=4, k=16)
    assert np.square(decoded(codec, rows) - rows).sum(axis=1).mean() < 0.02 * 49
    assert np.isfinite(decoded(codec, rows * np.float32(1e4))).all()


def test_the_best_documents_by_decoded_rows_are_the_best_by_the_rows(kernels):
    rows = clustered(3000, 48, clusters=300)
    offsets, query = offsets_of([30] * 100), rows[600:612] + np.float32(0.01)
    exact = maxsim(query, rows, offsets)
    close = maxsim(query, decoded(ResidualCodec.train(rows, bits=4, k=64), rows), offsets)
    assert exact.argmax() == close.argmax() == 20
    assert np.abs(exact - close).max() < 0.2


def test_a_codec_is_the_same_from_its_arrays(kernels):
    rows = clustered(400, 20)
    codec = ResidualCodec.train(rows, bits=2, k=16)
    loaded = ResidualCodec.from_arrays(codec.arrays())
    assert loaded.bits == 2
    for name, array in codec.arrays().items():
        assert np.array_equal(loaded.arrays()[name], array)
        assert loaded.arrays()[name].dtype == array.dtype
    assert np.array_equal(decoded(loaded, rows), decoded(codec, rows))


def test_a_file_that_lacks_an_array_or_has_another_shape_is_an_error():
    arrays = ResidualCodec.train(clustered(50, 8), bits=4, k=4).arrays()
    with pytest.raises(KeyError):
        ResidualCodec.from_arrays({name: array for name, array in arrays.items() if name != "std"})
    with pytest.raises(ValueError, match="std is float32"):
        ResidualCodec.from_arrays({**arrays, "std": arrays["std"][:3]})
    with pytest.raises(ValueError, match="bits is 3"):
        ResidualCodec.from_arrays({**arrays, "bits": np.array(3)})


def test_training_is_repeatable_and_told(kernels):
    told = []
    rows = clustered(300, 8)
    first = ResidualCodec.train(rows, bits=4, k=8, seed=1, progress=lambda *step: told.append(step))
    again = ResidualCodec.train(rows, bits=4, k=8, seed=1)
    assert all(np.array_equal(array, again.arrays()[name]) for name, array in first.arrays().items())
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert len(ResidualCodec.train(rows, bits=4).centroids) == 128
    with pytest.raises(ValueError, match="cannot be trained on 0 rows"):
        ResidualCodec.train(rows[:0], bits=4)
