"""Vectors that are known by a number, to fill a cache with and to find out what it kept; and fresh interpreters."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.testing import assert_array_equal  # now: an import that a fork cuts in half never ends in the child

import millpond.cache
from millpond.cache import VectorCache

FOLDERS = [str(Path(millpond.cache.__file__).parents[1]), str(Path(__file__).parents[1])]
WIDTH = 48
FloatArray = npt.NDArray[np.float32]


def names(*numbers: int, namespace: str = "test") -> list[bytes]:
    return VectorCache.keys(namespace, [f"text {number}" for number in numbers])


def vector(number: int, width: int = WIDTH) -> FloatArray:
    """The vector that belongs to ``names(number)``: another number's differs in every float."""
    return (np.arange(width, dtype=np.float32) + 1) / np.float32(7) * np.float32(number + 1)


def store(cache: VectorCache, *numbers: int, width: int = WIDTH) -> None:
    cache.put(
        names(*numbers),
        np.stack([vector(number, width) for number in numbers]),
        tokens=[number % 1000 for number in numbers],
        truncated=[number % 3 == 0 for number in numbers],
    )


def kept(cache: VectorCache, *numbers: int, width: int = WIDTH) -> list[int]:
    """The numbers that the cache still has; whatever it has must be right."""
    hits = cache.get(names(*numbers), width=width)
    for place, number in enumerate(numbers):
        if hits.found[place]:
            assert_array_equal(hits.rows[place], vector(number, width))
            assert hits.tokens[place] == number % 1000
            assert hits.truncated[place] == (number % 3 == 0)
        else:
            assert not hits.rows[place].any()
            assert hits.tokens[place] == 0
            assert not hits.truncated[place]
    return [number for place, number in enumerate(numbers) if hits.found[place]]


def script(body: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A fresh interpreter that runs ``body`` after this module's helpers."""
    helpers = textwrap.dedent(
        f"""
        import os, sys
        sys.path[:0] = {FOLDERS!r}
        from millpond.cache import VectorCache
        from millpond.errors import CacheError
        from tests.cached import kept, store
        """
    )
    return subprocess.Popen(
        [sys.executable, "-c", helpers + textwrap.dedent(body), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What a process printed; it has two minutes, and must end well."""
    try:
        output, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 0, errors
    return output
