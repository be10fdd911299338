"""What the methods of :class:`millpond.LLM` return, named as vLLM names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class EmbeddingData:
    """A vector; ``embedding`` is a list of floats."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its width."""
        return len(self.embedding)


@dataclass(frozen=True, kw_only=True)
class ClassificationData:
    """Probabilities of the classes; ``probs`` is a list of floats."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many there are."""
        return len(self.probs)


@dataclass(frozen=True, kw_only=True)
class ScoringData:
    """A pair's score."""

    score: float


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolingData:
    """Whatever the task gives, as a float32 tensor on the CPU: ``[d]``, or ``[tokens, d]``."""

    data: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestOutput:
    """One prompt's result.

    Attributes:
        request_id: Unique within the :class:`~millpond.LLM`.
        outputs: The result itself.
        finished: Always True.
        num_cached_tokens: Always 0: no prompt shares another's computation.
    """

    request_id: str
    outputs: Any
    finished: bool = True
    num_cached_tokens: int = 0
    tokenize: Callable[[], list[int]] = field(repr=False)

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        """The token ids that were run; found when first asked for."""
        return self.tokenize()
