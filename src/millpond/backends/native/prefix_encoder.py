"""PrefixEncoder: batches whose texts all begin alike, of which the keys and values are kept for the next batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from millpond.backends.backend import Ints, Matrix, PackedBatch
from millpond.backends.native.encoder import NativeEncoder
from millpond.backends.native.memory import Memory

# 500 tokens of Qwen3-Reranker-0.6B. A longer prefix is computed once a batch.
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class _Kept:
    """What the last such batch had in common; never changed, so that any number of threads may read it."""

    ids: Ints
    memory: Memory  # its keys and values


class PrefixEncoder:
    """Encodes the last rows of batches, whose texts may continue one prefix; thread-safe."""

    def __init__(self, encoder: NativeEncoder) -> None:
        self._encoder = encoder
        self._kept: _Kept | None = None

    def drop(self) -> None:
        """Free the memory."""
        self._kept = None

    def encode(self, batch: PackedBatch, **options: Any) -> Matrix | None:
        """``[sequences, hidden]``, the prefix's own row unspecified; ``None``: they have no prefix that is kept.

        All but the first sequence continue that one. A single text is one that continues a prefix if it begins with
        the last one.
        """
        kept = self._kept
        if any(each is not None for each in (batch.types, batch.adapters, batch.keys, batch.skip)):
            return None
        if batch.prefixes is None:
            if kept is None or len(batch.bounds) != 2 or not _begins_with(batch.ids, kept.ids):
                return None
            return self._continued(batch.ids, batch.bounds, kept, **options)
        if batch.prefixes[0] >= 0 or any(batch.prefixes[1:]):
            return None
        tokens = int(batch.bounds[1])
        if kept is not None and np.array_equal(kept.ids, batch.ids[:tokens]):
            rows = self._continued(batch.ids, batch.bounds[1:], kept, **options)
            return np.concatenate((rows[:1], rows))
        size = self._encoder.prefix_bytes(tokens)
        if size > _MOST_BYTES:
            return None
        kept = _Kept(ids=batch.ids[:tokens].copy(), memory=Memory(size))
        leads = np.array(batch.prefixes, dtype=np.int32)
        rows = self._encoder.encode(
            batch.ids, batch.bounds, leads=leads, prefix=kept.memory, prefix_tokens=tokens, rows="last", **options
        )
        self._kept = kept
        return rows

    def _continued(self, ids: Ints, bounds: Ints, kept: _Kept, **options: Any) -> Matrix:
        """Of texts without their prefix, which is in front of them in ``ids``."""
        tokens = len(kept.ids)
        bounds = np.maximum(bounds - tokens, 0)
        return self._encoder.encode(
            ids[tokens:], bounds, prefix=kept.memory, prefix_tokens=tokens, rows="last", **options
        )


def _begins_with(ids: Ints, prefix: Ints) -> bool:
    return len(ids) > len(prefix) and np.array_equal(ids[: len(prefix)], prefix)
