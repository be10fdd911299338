"""Pooler: hidden states to the float32 rows that callers read, before cuts, norms and activations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import nn

from millpond.backends.backend import Matrix, OutputSpec
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.pooling.classifier import ClassifierHead, VocabularyRows, head_rows
from millpond.backends.torch.pooling.heads import build_heads
from millpond.backends.torch.pooling.methods import pooled
from millpond.backends.torch.pooling.sparse import SparseCodeHead, SparseHead
from millpond.backends.torch.pooling.token_modules import BagHead, TokenModules
from millpond.checkpoints.layouts.static import StaticTable
from millpond.checkpoints.modules import Head, Pooling, TokenHead
from millpond.support.cached_property import cached_property

# Number of sets of vocabulary entries whose rows of the language-model head are kept.
_KEPT_ROWS = 64

T = TypeVar("T")


class Pooler(nn.Module):
    """The part of a checkpoint after its backbone: all of its heads.

    The Matryoshka cut and the final normalization are done later: the cache stores what this returns, so one row serves
    every width. Activations are applied later too, since callers choose them.
    """

    def __init__(
        self,
        pooling: Pooling,
        *,
        token_heads: Sequence[TokenHead],
        heads: Sequence[Head],
        device: torch.device,
        classifier: ClassifierHead | None = None,
        sparse: SparseHead | None = None,
        token_vectors: nn.Module | None = None,
        language_head: Path | None = None,
        vocabulary: int = 0,
        table: StaticTable | None = None,
    ) -> None:
        """``vocabulary``: ids that a token may have; ``table``: what takes the place of a backbone."""
        super().__init__()
        self.modes = pooling.modes
        nothing = None if table is None else vocabulary
        self.token_heads = TokenModules(token_heads, device, vocabulary=vocabulary, nothing=nothing)
        self.bag = None if table is None or table.bag is None else BagHead(table.bag)  # in the place of the pooling
        self.heads = build_heads(heads, device)
        self.classifier = classifier
        self.sparse = sparse
        self.token_vectors = token_vectors  # replaces the token heads, for ``token_embed`` only
        self.language_head = language_head
        self._lock = threading.Lock()
        self._rows: dict[tuple[int, ...], VocabularyRows] = {}
        self._columns: dict[tuple[int, ...], torch.Tensor] = {}

    def row_of(self, output: OutputSpec) -> Literal["cls", "lasttoken"] | None:
        """The one token of each text that an output reads, first or last; ``None`` if it reads more."""
        modes: tuple[str | None, ...] = ()
        if self.bag is not None or self.token_heads.reads_others:
            return None
        if output.kind == "pooled":
            modes = self.modes
        elif output.kind == "logits" and self.classifier is not None:
            modes = (self.classifier.description.pooling,)
        if modes == ("cls",):
            return "cls"
        return "lasttoken" if modes == ("lasttoken",) else None

    def tokens(self, hidden: torch.Tensor, ids: torch.Tensor, segments: Segments) -> torch.Tensor:
        """The rows of ``token_embed``: ``[tokens, backbone]`` to float32 ``[tokens, hidden]``."""
        out: torch.Tensor = self.token_heads(hidden.float(), ids, segments)
        return out

    def pool(
        self, tokens: torch.Tensor, ids: torch.Tensor, segments: Segments, skip: torch.Tensor | None
    ) -> torch.Tensor:
        """``tokens [tokens, hidden]`` to ``[n, d]``; ``skip [n]`` counts the prompt tokens to leave out."""
        if self.bag is not None:
            rows = self.bag(tokens, ids, segments)
        else:
            totals = self.token_heads.totals(ids, segments)
            rows = torch.cat([pooled(mode, tokens, segments, skip, totals) for mode in self.modes], dim=-1)
        out: torch.Tensor = self.heads(rows)
        return out

    def rows_of(self, tokens: tuple[int, ...], device: torch.device) -> VocabularyRows:
        """Rows of the language-model head, read from the files once."""
        folder = self.language_head
        assert folder is not None
        return self._kept(self._rows, tokens, lambda: head_rows(folder, tokens).to(device))

    def columns_of(self, columns: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """int64 ``[columns]`` on the device, copied once: an index in a Python list waits for the device every time."""
        return self._kept(self._columns, columns, lambda: torch.tensor(columns, device=device))

    def _kept(self, table: dict[tuple[int, ...], T], key: tuple[int, ...], make: Callable[[], T]) -> T:
        with self._lock:
            found = table.get(key)
            if found is None:
                found = table[key] = make()
                while len(table) > _KEPT_ROWS:  # drops the oldest; a queued call that needs it makes it again
                    del table[next(iter(table))]
        return found


class PoolerCall:
    """A batch's hidden states, read once for each different output; shared intermediate results are computed once."""

    def __init__(
        self,
        pooler: Pooler,
        hidden: torch.Tensor,  # [tokens, backbone]
        *,
        segments: Segments,
        skip: torch.Tensor | None,
        input_ids: torch.Tensor,  # [tokens]
    ) -> None:
        self._pooler = pooler
        self._hidden = hidden
        self._segments = segments
        self._skip = skip
        self._input_ids = input_ids

    @cached_property
    def _tokens(self) -> torch.Tensor:
        return self._pooler.tokens(self._hidden, self._input_ids, self._segments)

    def _pooled(self) -> torch.Tensor:
        return self._pooler.pool(self._tokens, self._input_ids, self._segments, self._skip)

    def read(self, output: OutputSpec) -> Sequence[Matrix]:
        """A result for each text: ``[d]``, ``[tokens, d]``, or for ``sparse`` ``[k, 2]`` (token id, weight)."""
        if output.kind == "sparse":
            assert self._pooler.sparse is not None
            return _sparse_rows(*self._pooler.sparse.read(self._weighed, self._segments, self._input_ids))
        rows = self.rows(output)
        return rows.split(rows.values.cpu().numpy())

    @property
    def _weighed(self) -> torch.Tensor:
        """The rows that the sparse head reads."""
        if isinstance(self._pooler.sparse, SparseCodeHead):
            return self._pooled()
        return self._hidden

    def launch_sparse(self) -> Callable[[], Sequence[Matrix]]:
        """What :meth:`read` returns for ``sparse``, computed as far as nothing waits for the device.

        The returned function waits for it, and may be called on another stream once this one has come so far.
        """
        assert self._pooler.sparse is not None
        finish = self._pooler.sparse.launch(self._weighed, self._segments, self._input_ids)
        return lambda: _sparse_rows(*finish())

    def rows(self, output: OutputSpec) -> OutputRows:
        """The same on the device, without waiting for it; all kinds but ``sparse``, whose size the device decides."""
        if output.kind == "pooled":
            return OutputRows(values=self._pooled(), counts=None)
        if output.kind == "tokens":
            projection = self._pooler.token_vectors
            return self._each(self._tokens if projection is None else projection(self._hidden.float()))
        if output.kind == "head_rows":
            rows = self._pooler.rows_of(output.token_ids, self._hidden.device)
            return self._each(rows(self._hidden.float()))
        assert self._pooler.classifier is not None
        if output.kind == "logits":
            return OutputRows(values=self._pooler.classifier.pool(self._hidden, self._segments), counts=None)
        logits = self._pooler.classifier.tokens(self._hidden.float())
        if output.token_ids:
            logits = logits.index_select(1, self._pooler.columns_of(output.token_ids, logits.device))
        return self._each(logits)

    def _each(self, values: torch.Tensor) -> OutputRows:
        return OutputRows(values=values, counts=self._segments.lengths)


def _sparse_rows(ids: torch.Tensor, weights: torch.Tensor, counts: Sequence[int]) -> Sequence[Matrix]:
    values = torch.stack((ids.float(), weights.float()), dim=1)  # ids are far below float32's 2^24
    return OutputRows(values=values, counts=counts).split(values.cpu().numpy())


@dataclass(frozen=True, kw_only=True, eq=False)
class OutputRows:
    """Result of an output for a batch."""

    values: torch.Tensor  # float32 `[rows, d]` on the device
    counts: Sequence[int] | None  # rows of each text, in order; `None`: one each

    def split(self, values: Matrix) -> Sequence[Matrix]:
        """``values``, copied to the host, by text: ``[d]`` each, or ``[count, d]``."""
        return list(values) if self.counts is None else np.split(values, np.cumsum(self.counts)[:-1])
