"""ModelSpec: what a checkpoint is, as plain data. No torch, no weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from millpond import matryoshka
from millpond.tasks import Activation, ScoreType, Task

PoolingMode = Literal["cls", "mean", "max", "mean_sqrt_len", "weightedmean", "lasttoken"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A checkpoint, resolved: everything a caller may want to know before the first forward.

    Attributes:
        name: The hub id or folder the engine was given.
        architecture: The checkpoint's own ``architectures[0]`` (or the row's, where the config names none).
        model_type: transformers' ``model_type``, the key of the architecture table.
        pooling: Pooling modes, concatenated in order; one for nearly every checkpoint.
        normalize: Whether the checkpoint L2-normalizes its vectors.
        dimensions: Width of a vector of ``embed``.
        hidden_size: Width of a row of ``token_embed``.
        default_dimensions: Width that ``embed`` gives unless it is asked for another (``truncate_dim`` of
            sentence-transformers); ``None`` is ``dimensions``, which can be asked for in any case.
        matryoshka: Whether ``dimensions`` may be cut.
        matryoshka_dimensions: The widths it was trained for; ``None`` if it declares no list.
        matryoshka_smallest: The least width, where it declares no list.
        prompts: The checkpoint's own prompts by name.
        default_prompt_name: The prompt used when the caller names none.
        labels: Class names by index; empty for an embedder.
        activation: What the checkpoint applies to its logits.
        score_type: What ``score`` and ``rerank`` compute: a cross-encoder's score, MaxSim (``late-interaction``) or
            the cosine of two vectors (``bi-encoder``); ``None`` where a pair has no one score.
        step_tag_id: Process reward models: the token whose rows are rewards.
        adapters: Names of the adapters that a request may choose.
        max_length: Most tokens per text, special tokens and prompt included.
        tasks: What the checkpoint serves.
    """

    name: str
    architecture: str
    model_type: str
    pooling: tuple[PoolingMode, ...]
    normalize: bool
    dimensions: int
    hidden_size: int
    matryoshka: bool
    matryoshka_dimensions: tuple[int, ...] | None
    matryoshka_smallest: int = 1
    default_dimensions: int | None = None
    prompts: Mapping[str, str] = field(hash=False)
    default_prompt_name: str | None
    labels: tuple[str, ...]
    activation: Activation = "identity"
    score_type: ScoreType | None = None
    step_tag_id: int | None = None
    adapters: tuple[str, ...] = ()
    max_length: int
    tasks: frozenset[Task]
    digest: Callable[[], str] = field(repr=False, compare=False)  # picklable, as all of a spec is

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides a text's vector, up to precision: weights, tokenizer, pooling, length.

        Computed on first use, since it reads every weight file (a hub checkpoint is known by its revision instead).

        Raises:
            ModelLoadError: A file has changed since the checkpoint was read, so that none of this can be known.
        """
        return self.digest()

    def check_dimensions(self, dimensions: int | None) -> int:
        """The width ``embed`` will return, or :class:`~millpond.errors.InvalidDimensionsError`."""
        return matryoshka.check(
            dimensions,
            native=self.dimensions,
            trained=self.matryoshka,
            declared=self.matryoshka_dimensions,
            model=self.name,
            smallest=self.matryoshka_smallest,
            default=self.default_dimensions,
        )
