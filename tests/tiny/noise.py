"""Normally distributed numbers: those of ``torch.randn``, up to the last bit, without torch."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_BLOCK = 16  # torch draws fewer numbers one at a time, in double precision


class Noise:
    """A seeded generator, as ``torch.Generator`` is one."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.RandomState(seed)
        self._second: float | None = None  # of the last pair of single numbers

    def normal(self, *shape: int) -> npt.NDArray[np.float32]:
        """Numbers with mean 0 and variance 1."""
        count = math.prod(shape)
        if count < _BLOCK:
            return np.array([self._single() for _ in range(count)], np.float32).reshape(shape)
        values = self._uniform(count)
        whole = count // _BLOCK * _BLOCK
        values[:whole] = _pairs(values[:whole])
        if whole < count:
            values[-_BLOCK:] = _pairs(self._uniform(_BLOCK))
        return values.reshape(shape)

    def _words(self, count: int) -> npt.NDArray[np.uint32]:
        return self._bits.randint(0, 1 << 32, size=count, dtype=np.uint32)

    def _uniform(self, count: int) -> npt.NDArray[np.float32]:
        return (self._words(count) & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)

    def _single(self) -> float:
        if self._second is not None:
            value, self._second = self._second, None
            return value
        angle, length = 2 * math.pi * self._double(), math.sqrt(-2 * math.log1p(-self._double()))
        self._second = length * math.sin(angle)
        return length * math.cos(angle)

    def _double(self) -> float:
        high, low = (int(word) for word in self._words(2))
        return ((high << 32 | low) & (1 << 53) - 1) * 2.0**-53


def _pairs(uniform: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Box and Muller's method, over blocks of eight lengths and eight angles."""
    blocks = uniform.reshape(-1, 2, _BLOCK // 2)
    lengths = np.sqrt(np.float32(-2) * np.log(np.float32(1) - blocks[:, 0]))
    angles = np.float32(2 * math.pi) * blocks[:, 1]
    return np.stack((lengths * np.cos(angles), lengths * np.sin(angles)), axis=1).reshape(-1)
