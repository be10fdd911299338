"""PoolingParams: the options of one request, valid from construction."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, fields
from numbers import Real
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


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """The options of one request, for every task; the engine checks that the task reads them.

    Attributes:
        task: The task, if the method does not name it.
        dimensions: Matryoshka width; ``None`` is the checkpoint's own.
        normalize: L2-normalize; ``None`` is as the checkpoint does.
        activation: The activation of logits: ``True`` is the checkpoint's own, ``False`` none, or a name
            (``identity``, ``sigmoid``, ``softmax``); ``None`` is the task's default (rewards raw, the rest activated).
        step_tag_id: Step reward models: the token whose rows are kept.
        returned_token_ids: Step reward models: the columns that are kept.
        role: ``"query"`` or ``"document"``: applies the checkpoint's own prompt for that role.
        prompt: Text put before every input; ``""`` switches a default prompt off.
        prompt_name: Name of one of the checkpoint's prompts.
        instruction: Text for the instruction slot of an LLM reranker's template.
        labels: Labels of the caller's own, for ``classify`` by a model of natural language inference and
            ``token_classify`` by a GLiNER.
        template: The hypothesis of a label, which takes the place of ``{}``; ``None`` is ``This example is {}.``
        multi_label: Whether several of ``labels`` may be true, each with a probability of its own.
        threshold: The probability that an entity by ``labels`` must exceed; ``None`` is 0.5.
        nested: Whether an entity by ``labels`` may be inside another.
        aggregation: How ``token_classify`` joins tokens into entities, as transformers' pipeline names it.
        adapter: The name of one of the checkpoint's adapters (jina-embeddings-v3: ``spec.adapters``); ``None`` is the
            role's adapter.
        long_texts: ``"mean"`` embeds an over-long text in windows and averages them, weighted by their tokens;
            ``"windows"`` pools spans of an over-long text from windows of it.
        truncate: The end at which an over-long text is cut (``"auto"``: the one that the checkpoint names), or
            ``"error"``.
        truncate_prompt_tokens: Cut to this many tokens instead of the model's maximum (-1 is the maximum).
        output_dtype: Type of the returned vectors.
    """

    task: Task | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    activation: bool | Activation | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    role: Role | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    instruction: str | None = None
    labels: tuple[str, ...] | None = None
    template: str | None = None
    multi_label: bool = False
    threshold: float | None = None
    nested: bool = False
    aggregation: Aggregation = "none"
    adapter: str | None = None
    long_texts: Literal["mean", "windows"] | None = None
    truncate: Truncate = "auto"
    truncate_prompt_tokens: int | None = None
    output_dtype: OutputDtype = "float32"

    def __post_init__(self) -> None:
        for name in ("dimensions", "step_tag_id", "truncate_prompt_tokens"):
            object.__setattr__(self, name, plain_int(getattr(self, name)))
        if self.dimensions is not None and type(self.dimensions) is not int:
            raise InvalidDimensionsError(f"dimensions={self.dimensions!r} must be an int, or None for the checkpoint's")
        for name, choices in _CHOICES.items():
            if name != "activation" or not isinstance(self.activation, bool):
                check_choice(name, getattr(self, name), choices)
        self._check_steps()
        self._check_labels()
        if not isinstance(self.normalize, bool | None):
            raise InvalidRequestError(f"normalize={self.normalize!r} must be True, False or None")
        for name in ("prompt", "prompt_name", "instruction", "adapter", "template"):
            if not isinstance(value := getattr(self, name), str | None):
                raise InvalidRequestError(f"{name}={value!r} must be a str or None")
        if self.prompt is not None and self.prompt_name is not None:
            raise InvalidRequestError(
                f"prompt={self.prompt!r} and prompt_name={self.prompt_name!r} exclude each other; pass one"
            )
        limit = self.truncate_prompt_tokens
        if limit is not None and limit != -1 and not (_is_token_id(limit) and limit):
            raise InvalidRequestError(f"truncate_prompt_tokens={limit!r} must be a positive int, or -1 for the maximum")

    def _check_steps(self) -> None:
        tag, columns = self.step_tag_id, self.returned_token_ids
        if tag is not None and not _is_token_id(tag):
            raise InvalidRequestError(f"step_tag_id={tag!r} must be a token id, an int from 0")
        if columns is None:
            return
        if isinstance(columns, str | bytes) or not isinstance(columns, Iterable):
            raise InvalidRequestError(f"returned_token_ids={columns!r} must be a list of token ids")
        ids = tuple(plain_int(token) for token in columns)
        if not ids or not all(map(_is_token_id, ids)):
            raise InvalidRequestError(f"returned_token_ids={columns!r} must hold token ids, ints from 0")
        object.__setattr__(self, "returned_token_ids", ids)

    def _check_labels(self) -> None:
        labels, template = self.labels, self.template
        for name in ("multi_label", "nested"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidRequestError(f"{name}={value!r} must be True or False")
        threshold = self.threshold
        if threshold is not None and (
            isinstance(threshold, bool) or not isinstance(threshold, Real) or not 0 <= threshold <= 1
        ):
            raise InvalidRequestError(f"threshold={threshold!r} must be a number from 0 to 1")
        if isinstance(template, str) and template.count("{}") != 1:
            raise InvalidRequestError(f"template={template!r} must have one {{}}, the place of the label")
        if labels is None:
            return
        if isinstance(labels, str | bytes) or not isinstance(labels, Iterable):
            raise InvalidRequestError(f"labels={labels!r} must be a list of labels")
        listed = tuple(labels)
        for label in listed:
            if not isinstance(label, str) or not label.strip():
                raise InvalidRequestError(f"labels holds {label!r}; each label must be a str that is not blank")
        if not listed or len(set(listed)) < len(listed):
            raise InvalidRequestError(f"labels={list(listed)!r} must have at least one label, and none of them twice")
        object.__setattr__(self, "labels", listed)

    def given(self) -> frozenset[str]:
        """Names of the fields that differ from their defaults."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) != f.default)


_CHOICES: dict[str, tuple[str | None, ...]] = {
    "task": (None, *TASKS),
    "role": (None, *ROLES),
    "truncate": TRUNCATIONS,
    "output_dtype": OUTPUT_DTYPES,
    "aggregation": AGGREGATIONS,
    "long_texts": (None, "mean", "windows"),
    "activation": (None, *ACTIVATIONS),
}


def check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    """Refuse a value that is not in ``choices``, which ``None`` may be."""
    if not isinstance(value, str | None) or value not in choices:
        raise InvalidRequestError(f"{name}={value!r} is unknown; choose one of {', '.join(filter(None, choices))}")


def plain_int(value: Any) -> Any:
    """A whole number of numpy or torch as a Python int; any other value unchanged."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
