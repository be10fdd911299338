"""PoolingParams: what one request asks for, valid from construction."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from millpond.errors import InvalidDimensionsError, InvalidRequestError
from millpond.tasks import (
    ACTIVATIONS,
    AGGREGATIONS,
    OUTPUT_DTYPES,
    ROLES,
    TASKS,
    TRUNCATIONS,
    Activation,
    Aggregation,
    OutputDtype,
    Role,
    Task,
    Truncate,
)

# What vLLM called two tasks before: whichever of a task's several names a caller writes, it is one task.
_OLD_TASKS = {"embedding": "embed", "encode": "token_embed"}


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """The options of one request, for every task; which of them a task reads is checked by the engine.

    Attributes:
        task: The task, where the method does not already name it; vLLM's older ``embedding`` and ``encode`` are
            ``embed`` and ``token_embed``.
        dimensions: Matryoshka width; ``None`` is the checkpoint's own.
        normalize: L2-normalize; ``None`` is the checkpoint's own habit.
        activation: What is applied to logits: ``True`` is the checkpoint's own, ``False`` none, or one by name
            (``identity``, ``sigmoid``, ``softmax``); ``None`` is the task's habit (rewards raw, the rest activated).
        use_activation: vLLM's newer name for ``normalize`` (embed tasks) and ``activation`` (the others).
        softmax: vLLM's older name for ``activation``.
        step_tag_id: Step reward models: the token whose rows are kept.
        returned_token_ids: Step reward models: the columns that are kept.
        role: ``"query"`` or ``"document"``: applies the checkpoint's own prompt for it.
        prompt: Text put before every input; ``""`` switches a default prompt off.
        prompt_name: Name of one of the checkpoint's prompts.
        instruction: Fills an LLM reranker's template slot.
        aggregation: How ``token_classify`` joins tokens into entities, as transformers' pipeline names it.
        adapter: One of the checkpoint's adapters by name (jina-embeddings-v3: ``spec.adapters``); ``None`` is the
            role's.
        chunking: ``"mean"`` embeds an over-long text in windows and averages them, weighted by their tokens.
        truncate: Which end of an over-long text is cut, or ``"error"``.
        truncate_prompt_tokens: Cut to this many tokens instead of the model's maximum (-1 is the maximum).
        output_dtype: Type of the returned vectors.
    """

    task: Task | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    activation: bool | Activation | None = None
    use_activation: bool | None = None
    softmax: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    role: Role | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    instruction: str | None = None
    aggregation: Aggregation = "none"
    adapter: str | None = None
    chunking: Literal["mean"] | None = None
    truncate: Truncate = "end"
    truncate_prompt_tokens: int | None = None
    output_dtype: OutputDtype = "float32"

    def __post_init__(self) -> None:
        if isinstance(self.task, str) and self.task in _OLD_TASKS:
            object.__setattr__(self, "task", _OLD_TASKS[self.task])
        for name in ("dimensions", "step_tag_id", "truncate_prompt_tokens"):
            object.__setattr__(self, name, _plain_int(getattr(self, name)))
        if self.dimensions is not None and type(self.dimensions) is not int:
            raise InvalidDimensionsError(f"dimensions={self.dimensions!r} must be an int, or None for the checkpoint's")
        _one_of("task", self.task, TASKS)
        _one_of("role", self.role, ROLES)
        _one_of("truncate", self.truncate, TRUNCATIONS, optional=False)
        _one_of("output_dtype", self.output_dtype, OUTPUT_DTYPES, optional=False)
        _one_of("aggregation", self.aggregation, AGGREGATIONS, optional=False)
        _one_of("chunking", self.chunking, ("mean",))
        if self.softmax is not None:
            if self.activation is not None and self.activation != self.softmax:
                raise InvalidRequestError(
                    f"softmax={self.softmax!r} and activation={self.activation!r} are one thing; pass activation"
                )
            object.__setattr__(self, "activation", self.softmax)
            object.__setattr__(self, "softmax", None)
        if not isinstance(self.activation, bool):
            _one_of("activation", self.activation, ACTIVATIONS)
        self._check_steps()
        for name in ("normalize", "use_activation"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise InvalidRequestError(f"{name}={value!r} must be True, False or None")
        for name in ("prompt", "prompt_name", "instruction", "adapter"):
            if not isinstance(value := getattr(self, name), str | None):
                raise InvalidRequestError(f"{name}={value!r} must be a str or None")
        if self.prompt is not None and self.prompt_name is not None:
            raise InvalidRequestError(
                f"prompt={self.prompt!r} and prompt_name={self.prompt_name!r} exclude each other; pass one"
            )
        limit = self.truncate_prompt_tokens
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < -1 or limit == 0):
            raise InvalidRequestError(f"truncate_prompt_tokens={limit!r} must be a positive int, or -1 for the maximum")

    def _check_steps(self) -> None:
        step, returned = self.step_tag_id, self.returned_token_ids
        if step is not None and not _is_token_id(step):
            raise InvalidRequestError(f"step_tag_id={step!r} must be a token id, an int from 0")
        if returned is None:
            return
        if isinstance(returned, str | bytes) or not isinstance(returned, Iterable):
            raise InvalidRequestError(f"returned_token_ids={returned!r} must be a list of token ids")
        ids = tuple(_plain_int(token) for token in returned)
        if not ids or not all(_is_token_id(token) for token in ids):
            raise InvalidRequestError(f"returned_token_ids={returned!r} must hold token ids, ints from 0")
        object.__setattr__(self, "returned_token_ids", tuple(int(token) for token in ids))

    def given(self) -> frozenset[str]:
        """Names of the fields that differ from their defaults."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) != f.default)


def _plain_int(value: Any) -> Any:
    """numpy's and torch's whole numbers as Python's; anything else as it is."""
    if value is None or isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _one_of(name: str, value: object, choices: tuple[str, ...], *, optional: bool = True) -> None:
    if (value is None and optional) or (isinstance(value, str) and value in choices):
        return
    raise InvalidRequestError(f"{name}={value!r} is unknown; choose one of {', '.join(choices)}")
