"""The options of one request in vLLM's way: its PoolingParams, the tokenization of the call, the pooler's defaults."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from millpond.errors import InvalidRequestError
from millpond.tasks import Task
from millpond.values import params as core
from millpond.values.spec import ModelSpec
from millpond.vllm.arguments import one_value
from millpond.vllm.pooler_config import PoolerConfig
from millpond.vllm.prompts import Tokenization

# vLLM's older names of two tasks.
_OLD_TASKS = {"embedding": "embed", "encode": "token_embed"}
# The fields that only vLLM has.
_SPELLINGS = ("use_activation", "softmax", "truncate_prompt_tokens")
# The tasks that a request may name for each task that runs: vLLM's older names, and the two names of a reward.
_NAMES_OF_TASK: dict[Task, tuple[Task, ...]] = {
    "reward": ("reward", "token_classify"),
    "token_classify": ("token_classify", "reward"),
    "score": ("score", "classify", "embed", "token_embed"),
    "classify": ("classify", "score"),
}
# Architectures whose logits vLLM does not activate by default, for any task: its ``MODELS_CONFIG_MAP`` sets
# ``use_activation=False`` for them, as if the pooler_config said so. They are its only two.
_RAW_LOGITS = frozenset({"JambaForSequenceClassification", "Qwen2ForRewardModel"})


@dataclass(frozen=True, kw_only=True)
class PoolingParams(core.PoolingParams):
    """:class:`millpond.PoolingParams` with vLLM's names beside the engine's own; for :class:`LLM` and the server.

    Attributes:
        task: Also vLLM's older ``embedding`` (``embed``) and ``encode`` (``token_embed``).
        use_activation: vLLM's newer name for ``normalize`` (embed tasks) and ``activation`` (the others).
        softmax: vLLM's older name for ``activation``.
        truncate_prompt_tokens: Cut to this many tokens instead of the model's maximum (-1 is the maximum).

    Raises:
        InvalidRequestError: An invalid value, or two names of one option that contradict each other.
    """

    use_activation: bool | None = None
    softmax: bool | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.task, str) and self.task in _OLD_TASKS:
            object.__setattr__(self, "task", _OLD_TASKS[self.task])
        if self.softmax is not None:
            object.__setattr__(self, "activation", option_of(self, "softmax", "activation"))
            object.__setattr__(self, "softmax", None)
        if not isinstance(self.use_activation, bool | None):
            raise InvalidRequestError(f"use_activation={self.use_activation!r} must be True, False or None")
        object.__setattr__(self, "truncate_prompt_tokens", _limit(self.truncate_prompt_tokens))
        super().__post_init__()

    @classmethod
    def of(cls, params: core.PoolingParams) -> PoolingParams:
        """The same options as vLLM's; a ``PoolingParams`` of this class is returned as it is.

        Args:
            params: The options, of this class or millpond's own.

        Returns:
            The options, of this class.
        """
        if isinstance(params, cls):
            return params
        return cls(**{field.name: getattr(params, field.name) for field in fields(params)})


def _limit(value: Any) -> int | None:
    """A number of tokens, also numpy's, as a Python int."""
    if value is None:
        return None
    limit = operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else 0
    if limit < -1 or limit == 0:
        raise InvalidRequestError(f"truncate_prompt_tokens={value!r} must be a positive int, or -1 for the maximum")
    return limit


Params = core.PoolingParams | Sequence[core.PoolingParams] | None
"""One request's options (the engine's or vLLM's), one for each prompt, or the defaults."""


def option_of(params: PoolingParams, *names: str) -> Any:
    """The value of an option that has several names in ``params``; ``None`` if it is not set."""
    return one_value({name: getattr(params, name) for name in names})


def per_prompt(params: Params, count: int) -> list[core.PoolingParams]:
    """The options of each of ``count`` prompts."""
    if params is None or isinstance(params, core.PoolingParams):
        return [params or core.PoolingParams()] * count
    listed = list(params) if isinstance(params, Sequence) else [params]
    for each in listed:
        if not isinstance(each, core.PoolingParams):
            raise TypeError(f"pooling_params has a {type(each).__name__}; pass millpond.PoolingParams(...)")
    if len(listed) != count:
        raise InvalidRequestError(f"{len(listed)} pooling_params for {count} prompts; pass one, or one for each prompt")
    return listed


def complete(
    task: Task, params: core.PoolingParams, tokenization: Tokenization, config: PoolerConfig, spec: ModelSpec
) -> core.PoolingParams:
    """``params`` as the engine takes them; options that are not set get the configured value."""
    params = PoolingParams.of(params)
    if params.task is not None and params.task not in _NAMES_OF_TASK.get(task, (task,)):
        raise InvalidRequestError(f"pooling_params.task={params.task!r} contradicts the task {task!r} of this call")
    if params.truncate_prompt_tokens is not None:
        tokenization = tokenization.cutting_to(params.truncate_prompt_tokens)
    truncate = tokenization.truncate if params.truncate == "auto" else params.truncate
    late = spec.score_type == "late-interaction"
    if late and params.truncate == "auto" and truncate == "error" and not tokenization.refuses:
        truncate = "auto"  # a ColBERT cuts queries and documents to its own lengths as part of its encoding
    changes: dict[str, Any] = {"task": None, "truncate": truncate, "truncate_prompt_tokens": tokenization.limit}
    if task == "sparse_embed":
        if params.given().isdisjoint({"role", "prompt", "prompt_name", "adapter"}):
            changes["prompt"] = ""
    elif task in ("embed", "token_embed"):
        changes |= _vector_options(task, params, config, spec, chunk=config.chunked and truncate == "error")
    else:
        changes |= _logit_options(task, params, config, spec)
    names = [field.name for field in fields(core.PoolingParams) if field.name not in _SPELLINGS]
    return core.PoolingParams(**{name: getattr(params, name) for name in names} | changes)


def _vector_options(
    task: Task, params: PoolingParams, config: PoolerConfig, spec: ModelSpec, *, chunk: bool
) -> dict[str, Any]:
    # Older versions of vLLM called the normalization of a vector activation, too.
    switch = option_of(params, "normalize", "use_activation", "activation")
    if isinstance(switch, str):
        raise InvalidRequestError(f"activation={switch!r} means nothing to a vector; pass normalize=True or False")
    changes: dict[str, Any] = {"normalize": config.use_activation if switch is None else switch, "activation": None}
    if params.dimensions is None:
        changes["dimensions"] = config.dimensions
    names_prompt = {params.role, params.prompt, params.prompt_name, params.adapter} != {None}
    if not names_prompt and spec.score_type != "late-interaction":
        changes["prompt"] = ""  # vLLM never adds a prompt of the checkpoint by itself
    if task == "embed" and chunk:
        changes |= {"long_texts": "mean", "truncate": "end"}
    return changes


def _logit_options(task: Task, params: PoolingParams, config: PoolerConfig, spec: ModelSpec) -> dict[str, Any]:
    switch = option_of(params, "activation", "use_activation", "normalize")
    if switch is None and (task != "score" or spec.score_type == "cross-encoder"):
        # These are raw unless the request or the configuration sets an activation.
        raw = task == "reward" or spec.architecture in _RAW_LOGITS
        switch = not raw if config.use_activation is None else config.use_activation
    changes: dict[str, Any] = {"activation": switch, "normalize": None}
    if task in ("token_classify", "reward"):
        if params.step_tag_id is None:
            changes["step_tag_id"] = spec.step_tag_id if config.step_tag_id is None else config.step_tag_id
        if params.returned_token_ids is None:
            changes["returned_token_ids"] = config.returned_token_ids
    return changes
