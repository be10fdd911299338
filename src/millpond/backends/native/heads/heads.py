"""Heads: hidden states to the float32 rows that callers read, before cuts, norms and activations."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from millpond.backends.backend import Matrix, OutputSpec
from millpond.backends.native.encoder import Rows
from millpond.backends.native.heads.bag import BagHead
from millpond.backends.native.heads.classifier import ClassifierHead
from millpond.backends.native.heads.kernels import Floats, Linear
from millpond.backends.native.heads.modules import Modules
from millpond.backends.native.heads.pooling import Ints, pool
from millpond.backends.native.heads.sparse_code import SparseCodeHead
from millpond.backends.native.heads.splade import SpladeHead
from millpond.backends.native.heads.token_modules import TokenModules
from millpond.backends.native.heads.token_presence import TokenPresenceHead
from millpond.backends.native.heads.token_weights import TokenWeightHead
from millpond.backends.native.heads.vocabulary_rows import VocabularyRows, head_rows
from millpond.support.cached_property import cached_property
from millpond.values.spec import PoolingMode

# Number of sets of vocabulary entries whose rows of the language-model head are kept.
_KEPT_ROWS = 64
# The rows of a text that some poolings read, as the encoder names them.
_ROWS: dict[tuple[PoolingMode, ...], Rows] = {("cls",): "first", ("lasttoken",): "last"}


@dataclass(kw_only=True, eq=False)
class Heads:
    """The part of a checkpoint after its backbone.

    The Matryoshka cut, the final normalization and activations of logits are the engine's.
    """

    modes: tuple[PoolingMode, ...]
    token_heads: TokenModules
    heads: Modules
    classifier: ClassifierHead | None = None
    sparse: SpladeHead | TokenWeightHead | TokenPresenceHead | SparseCodeHead | None = None
    token_vectors: Linear | None = None  # replaces the token heads, for `tokens` only
    bag: BagHead | None = None  # in the place of the pooling
    language_head: Path | None = None  # the folder of a decoder with the head of a language model

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, ...], VocabularyRows] = {}

    def rows_of(self, output: OutputSpec) -> Rows:
        """The rows of each text that an output reads."""
        if self.bag is not None or self.token_heads.reads_others:
            return "all"
        pooled = output.kind == "pooled" or (output.kind == "sparse" and isinstance(self.sparse, SparseCodeHead))
        if pooled and self.modes == ("mean",) and len(self.token_heads) == 0:
            return "mean"
        if pooled:
            return _ROWS.get(self.modes, "all")
        if output.kind == "logits" and self.classifier is not None and self.classifier.description.pooling is not None:
            return _ROWS.get((self.classifier.description.pooling,), "all")
        return "all"

    def is_plain(self, output: OutputSpec) -> bool:
        """Whether the pooled hidden states are already what an output reads: one way of pooling, and no heads."""
        plain = self.bag is None and len(self.modes) == 1
        return output.kind == "pooled" and plain and not (len(self.token_heads) or len(self.heads))

    def vocabulary_rows(self, tokens: tuple[int, ...]) -> VocabularyRows:
        """Rows of the language-model head, read from the files once."""
        assert self.language_head is not None
        with self._lock:
            found = self._kept.get(tokens)
            if found is None:
                found = self._kept[tokens] = head_rows(self.language_head, tokens)
                while len(self._kept) > _KEPT_ROWS:  # drops the oldest; a queued call that needs it reads it again
                    del self._kept[next(iter(self._kept))]
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """A batch's hidden states, read once for each different output; shared intermediate results are computed once."""

    heads: Heads
    hidden: Floats  # [tokens, backbone], or one row of each text
    bounds: Ints  # [texts + 1], where the rows of each text begin and end
    skip: Ints | None  # [texts], first rows that pooling leaves out
    ids: Ints  # [tokens], of the rows
    threads: int

    def read(self, output: OutputSpec) -> Sequence[Matrix]:
        """A result for each text: ``[d]``, ``[tokens, d]``, or for ``sparse`` ``[k, 2]`` (token id, weight)."""
        heads, threads = self.heads, self.threads
        if output.kind == "sparse":
            assert heads.sparse is not None
            if isinstance(heads.sparse, SparseCodeHead):
                return heads.sparse.read(self._pooled(), threads)
            return heads.sparse.read(self.hidden, self.bounds, self.ids, threads)
        if output.kind == "pooled":
            return list(self._pooled())
        if output.kind == "logits":
            assert heads.classifier is not None
            return list(heads.classifier.pool(self.hidden, self.bounds, threads))
        return np.split(self._each_token(output), self.bounds[1:-1])

    def _pooled(self) -> Floats:
        """``[texts, d]`` behind the heads."""
        heads = self.heads
        if heads.bag is not None:
            rows = heads.bag(self.hidden, self.bounds, self.ids)
        else:
            totals = heads.token_heads.totals(self.ids, self.bounds)
            rows = pool(heads.modes, self._tokens, self.bounds, self.skip, totals)
        return heads.heads(rows, self.threads)

    @cached_property
    def _tokens(self) -> Floats:
        """The rows behind the token heads."""
        return self.heads.token_heads(self.hidden, self.ids, self.bounds, self.threads)

    def _each_token(self, output: OutputSpec) -> Floats:
        """``[tokens, d]`` of an output with a row for each token."""
        heads, threads = self.heads, self.threads
        if output.kind == "tokens":
            return self._tokens if heads.token_vectors is None else heads.token_vectors(self.hidden, threads)
        if output.kind == "head_rows":
            return heads.vocabulary_rows(output.token_ids)(self.hidden, threads)
        assert heads.classifier is not None
        logits = heads.classifier.tokens(self.hidden, threads)
        return logits[:, list(output.token_ids)] if output.token_ids else logits
