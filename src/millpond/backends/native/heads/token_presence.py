"""The weights of a text's tokens, each once: what inference-free SPLADE gives for a query."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from millpond.backends.native.heads.kernels import Floats
from millpond.backends.native.heads.pooling import Ints


class TokenPresenceHead:
    """Each token of a text with its weight, however often it occurs."""

    weights = 0  # numbers that every token is multiplied with

    def read(self, hidden: Floats, bounds: Ints, ids: Ints, threads: int) -> Sequence[Floats]:
        """Of each text ``[k, 2]``: its tokens with a weight, ascending, and the weights ``hidden [tokens, 1]``."""
        used = hidden[:, 0] != 0
        texts = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        span = int(ids.max()) + 1
        entries, first = np.unique(texts[used] * span + ids[used], return_index=True)
        pairs = np.stack(((entries % span).astype(np.float32), hidden[used, 0][first]), axis=1)
        return np.split(pairs, np.searchsorted(entries // span, np.arange(1, len(bounds) - 1)))
