"""bfloat16 and floats of 8 bits: rounded to the nearest number of the format, as IEEE 754 rounds."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.vectors.small_floats import from_bfloat16, to_8_bits, to_bfloat16


def numbers_of(mantissa: int, bias: int, largest: int) -> np.ndarray:
    """The positive numbers of a format in ascending order, by its definition."""
    bits = np.arange(largest + 1)
    exponent, fraction = bits >> mantissa, (bits & ((1 << mantissa) - 1)) / 2**mantissa
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))


@pytest.mark.parametrize(
    ("name", "numbers"), [("e4m3", numbers_of(3, 7, 0x7E)), ("e5m2", numbers_of(2, 15, 0x7B))], ids=["e4m3", "e5m2"]
)
def test_each_number_becomes_the_nearest_of_the_format(name: str, numbers: np.ndarray) -> None:
    codes = np.arange(len(numbers))
    np.testing.assert_array_equal(to_8_bits(numbers, name), codes)
    np.testing.assert_array_equal(to_8_bits(-numbers, name), codes + 128)
    middles = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)  # exact in float32
    np.testing.assert_array_equal(to_8_bits(middles, name), codes[1:] - codes[1:] % 2)  # of two the even one
    np.testing.assert_array_equal(to_8_bits(np.nextafter(middles, np.float32(0)), name), codes[:-1])
    np.testing.assert_array_equal(to_8_bits(np.nextafter(middles, np.float32(np.inf)), name), codes[1:])


def test_numbers_that_a_format_does_not_hold() -> None:
    beyond = np.array([[1e9, -np.inf], [np.nan, 1e-30]], dtype=np.float32)
    assert to_8_bits(beyond, "e4m3").tolist() == [[0x7E, 0xFE], [0x7F, 0]]  # no infinity: the largest number
    assert to_8_bits(beyond, "e5m2").tolist() == [[0x7C, 0xFC], [0x7F, 0]]
    assert to_bfloat16(beyond)[0].tolist() == [0x4E6E, 0xFF80] and np.isnan(from_bfloat16(to_bfloat16(beyond))[1, 0])


def test_bfloat16_is_the_upper_half_of_a_float32_rounded_to_even() -> None:
    bits = np.arange(0x7F80, dtype=np.uint16)  # all that are finite
    exact = from_bfloat16(bits)
    np.testing.assert_array_equal(exact.view(np.uint32), bits.astype(np.uint32) << 16)
    np.testing.assert_array_equal(to_bfloat16(exact), bits)
    middles = (exact.view(np.uint32) | 0x8000).view(np.float32)
    np.testing.assert_array_equal(to_bfloat16(middles), bits + bits % 2)
    np.testing.assert_array_equal(to_bfloat16(np.nextafter(middles, np.float32(0))), bits)
