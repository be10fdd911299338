"""PooledText: the vector of one text in one call of the kernels, whose buffers and arguments are made before."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import numpy.typing as npt

from millpond.backends.native import structs
from millpond.backends.native.encoder import READINGS, Ints, NativeEncoder, Rows
from millpond.backends.native.memory import Memory
from millpond.native.library import portable
from millpond.vectors import matryoshka

_MOST_TEXTS = 16
_MOST_TOKENS = 512  # a longer text takes so long that what is around its forward does not matter


class _Arguments:
    """Those of a call, and the buffers that they point to."""

    def __init__(self, encoder: NativeEncoder, *, rows: Rows, offset: int, width: int, unit: bool, most: int) -> None:
        """``most``: tokens of a call."""
        self.ids = np.zeros(most, dtype=np.int32)
        self.bounds = np.array([0, most] + [0] * (_MOST_TEXTS - 1), dtype=np.int32)
        self.skip = np.zeros(_MOST_TEXTS, dtype=np.int32)
        self.out = np.empty((_MOST_TEXTS, width), dtype=np.float32)
        self.call = structs.EncodeCall(model=encoder.model, texts=1, offset=offset, reading=READINGS[rows])
        for name in ("ids", "bounds", "skip", "out"):
            setattr(self.call, name, getattr(self, name).ctypes.data)
        self.call.block, self.call.vocabulary = encoder.block, encoder.plan.vocabulary
        self.call.width, self.call.unit = width, unit
        self.address = ctypes.addressof(self.call)
        self._workspace_of = encoder.plan.kernels.workspace
        self._threads = 0

    def run_on(self, threads: int) -> None:
        """Let the next call run on so many threads."""
        if threads > self._threads:
            # Neither fewer tokens nor more texts need more room.
            self.call.texts, self.bounds[1] = 1, len(self.ids)
            self.workspace = Memory(threads * int(self._workspace_of(self.address)))
            self.call.workspace = self.workspace.address
            self._threads = threads
        self.call.threads = threads


class PooledText:
    """The vector of one text; any number of threads may call it at once.

    A forward of a short text leaves nothing of Python in the caches of its core, so that each line around it is read
    from memory again: what counts here is how few there are.
    """

    def __init__(self, encoder: NativeEncoder, *, rows: Rows, offset: int, width: int, unit: bool, skip: int) -> None:
        """``skip``: first tokens that pooling leaves out; ``unit``: whether the vector is divided by its length."""
        plan = encoder.plan
        self.most_texts = _MOST_TEXTS
        self.most_tokens = min(_MOST_TOKENS, plan.positions - offset if plan.positions else _MOST_TOKENS)
        for rotation in plan.rotations:
            rotation.cover(offset + self.most_tokens)
        self._encode = plan.kernels.encode
        self._make = partial(
            _Arguments, encoder, rows=rows, offset=offset, width=width, unit=unit, most=self.most_tokens
        )
        library = portable()
        assert library is not None  # the kernels are of it
        self.wake: Callable[[int], None] = library.millpond_wake_workers
        self._skip = skip
        self._free: list[_Arguments] = []

    def __call__(self, ids: Sequence[Ints], threads: int) -> npt.NDArray[np.float32] | None:
        """float32 ``[texts, width]`` of texts of up to ``most_tokens`` ids; ``None``: one of them is not finite."""
        arguments = self._free.pop() if self._free else self._make()
        arguments.run_on(threads)
        end, texts = 0, len(ids)
        for index, text in enumerate(ids):
            begin, end = end, end + len(text)
            arguments.ids[begin:end] = text
            arguments.bounds[index + 1] = end
            if self._skip:
                arguments.skip[index] = min(self._skip, len(text) - 1)
        arguments.call.texts = texts
        failure = self._encode(arguments.address)
        rows = None if failure else arguments.out[:texts].copy()
        self._free.append(arguments)
        if failure == structs.BAD_TOKEN:
            raise IndexError(f"a token of {[text.tolist() for text in ids]} is outside of the vocabulary")
        return rows


@cache
def finishes_as_numpy() -> bool:
    """Whether the kernels cut and normalize rows to the same bits as :func:`~millpond.vectors.matryoshka.cut`.

    They add squares in the order of numpy's builds so far, which no later one has promised.
    """
    library = portable()
    if library is None:
        return False
    for width in (1, 30, 384, 1000):
        row = np.random.default_rng(width).standard_normal((1, width), dtype=np.float32)
        expected = matryoshka.cut(row, width, normalize=True)
        library.millpond_finish_rows(row.ctypes.data, 1, width, 1)
        if row.tobytes() != expected.tobytes():
            return False
    return True
