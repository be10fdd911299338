"""Numbered vectors to fill a cache and to check what it stored; and scripts run in new interpreters."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.testing import assert_array_equal  # imported here: a fork during an import deadlocks the child

import millpond
from millpond import VectorCache

FOLDERS = [str(Path(millpond.__file__).parents[1]), str(Path(__file__).parents[1])]
WIDTH = 48
FloatArray = npt.NDArray[np.float32]


def names(*numbers: int, namespace: str = "test") -> list[bytes]:
    return VectorCache.keys(namespace, [f"text {number}" for number in numbers])


def vector(number: int, width: int = WIDTH) -> FloatArray:
    """The vector of ``names(number)``; vectors of different numbers differ in every float."""
    return (np.arange(width, dtype=np.float32) + 1) / np.float32(7) * np.float32(number + 1)


def store(cache: VectorCache, *numbers: int, width: int = WIDTH) -> None:
    cache.put(
        names(*numbers),
        np.stack([vector(number, width) for number in numbers]),
        tokens=[number % 1000 for number in numbers],
        truncated=[number % 3 == 0 for number in numbers],
    )


def kept(cache: VectorCache, *numbers: int, width: int = WIDTH) -> list[int]:
    """The numbers whose vectors the cache still has, after checking every stored value."""
    hits = cache.get(names(*numbers), width=width)
    for index, number in enumerate(numbers):
        if hits.found[index]:
            assert_array_equal(hits.rows[index], vector(number, width))
            assert hits.tokens[index] == number % 1000
            assert hits.truncated[index] == (number % 3 == 0)
        else:
            assert not hits.rows[index].any()
            assert hits.tokens[index] == 0
            assert not hits.truncated[index]
    return [number for index, number in enumerate(numbers) if hits.found[index]]


def script(body: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A new interpreter that imports this module's helpers and runs ``body``."""
    helpers = textwrap.dedent(
        f"""
        import os, sys
        sys.path[:0] = {FOLDERS!r}
        from millpond import VectorCache
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
    """The standard output of a process, which must exit with 0 within two minutes."""
    try:
        output, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 0, errors
    return output
