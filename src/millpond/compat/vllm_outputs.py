"""Results of :class:`millpond.LLM`, with vLLM's attribute names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

_MAX_SHOWN = 4  # numbers of a vector in its repr


@dataclass(frozen=True, kw_only=True, repr=False)
class EmbeddingData:
    """A vector.

    Attributes:
        embedding: Elements of the vector.
    """

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Width of the vector."""
        return len(self.embedding)

    def __repr__(self) -> str:
        return f"EmbeddingData(hidden_size={self.hidden_size}, embedding={_short(self.embedding)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class ClassificationData:
    """Probabilities of the classes.

    Attributes:
        probs: One probability per class.
    """

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)

    def __repr__(self) -> str:
        return f"ClassificationData(num_classes={self.num_classes}, probs={_short(self.probs)})"


@dataclass(frozen=True, kw_only=True)
class ScoringData:
    """Score of a pair.

    Attributes:
        score: The score.
    """

    score: float


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolingData:
    """Result of any task.

    Attributes:
        data: float32, on the CPU: ``[d]``, or ``[tokens, d]``.
    """

    data: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestOutput:
    """Result of one prompt.

    Attributes:
        request_id: Unique within the :class:`~millpond.LLM`.
        outputs: One of the classes above.
        finished: Always True.
        num_cached_tokens: Always 0.
    """

    request_id: str
    outputs: Any
    finished: bool = True
    num_cached_tokens: int = 0
    tokenize: Callable[[], list[int]] = field(repr=False)

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt as the model read it; computed on first access."""
        return self.tokenize()

    def __getstate__(self) -> dict[str, Any]:
        pickled = (
            "request_id",
            "outputs",
            "finished",
            "num_cached_tokens",
            "prompt_token_ids",
        )  # without the engine behind `tokenize`
        return {name: getattr(self, name) for name in pickled}


def _short(numbers: Sequence[float]) -> str:
    more = ", ..." if len(numbers) > _MAX_SHOWN else ""
    return f"[{', '.join(f'{number:.4g}' for number in numbers[:_MAX_SHOWN])}{more}]"
