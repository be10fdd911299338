"""The outputs of the methods of :class:`millpond.LLM`, with vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from millpond.support.cached_property import cached_property

if TYPE_CHECKING:
    import torch

_SHOWN_NUMBERS = 4  # of a vector, in its repr


@dataclass(frozen=True, kw_only=True, repr=False)
class EmbeddingData:
    """A vector: the numbers of its ``embedding``."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The width of the vector."""
        return len(self.embedding)

    def __repr__(self) -> str:
        return f"EmbeddingData(hidden_size={self.hidden_size}, embedding={_short(self.embedding)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class ClassificationData:
    """Probabilities of the classes: ``probs`` has one for each."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.probs)

    def __repr__(self) -> str:
        return f"ClassificationData(num_classes={self.num_classes}, probs={_short(self.probs)})"


@dataclass(frozen=True, kw_only=True)
class ScoringData:
    """The ``score`` of a pair."""

    score: float


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolingData:
    """The result of any task: ``data`` is float32 on the CPU, ``[d]`` or ``[tokens, d]``."""

    data: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestOutput:
    """The result of one prompt.

    Attributes:
        request_id: Unique within the :class:`~millpond.LLM`.
        outputs: The result itself.
        finished: Always True.
        num_cached_tokens: Always 0: prompts share no cached prefix.
    """

    request_id: str
    outputs: Any
    finished: bool = True
    num_cached_tokens: int = 0
    tokenize: Callable[[], list[int]] = field(repr=False)

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        """The token ids that were run; computed at the first access."""
        return self.tokenize()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("request_id", "outputs", "finished", "num_cached_tokens", "prompt_token_ids")  # all but the engine
        return {name: getattr(self, name) for name in kept}


def _short(numbers: Sequence[float]) -> str:
    more = ", ..." if len(numbers) > _SHOWN_NUMBERS else ""
    return f"[{', '.join(f'{number:.4g}' for number in numbers[:_SHOWN_NUMBERS])}{more}]"
