"""The options of one request in vLLM's way: its PoolingParams, the tokenization of the call, the pooler's defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from millpond.errors import InvalidRequestError
from millpond.params import PoolingParams, option_of
from millpond.spec import ModelSpec
from millpond.tasks import Task
from millpond.vllm_dialect.pooler_config import PoolerConfig
from millpond.vllm_dialect.prompts import Tokenization

Params = PoolingParams | Sequence[PoolingParams] | None

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


def per_prompt(params: Params, count: int) -> list[PoolingParams]:
    """The options of each of ``count`` prompts.

    Raises:
        TypeError: Anything but PoolingParams.
        InvalidRequestError: Their number is neither one nor that of the prompts.
    """
    if params is None or isinstance(params, PoolingParams):
        return [params or PoolingParams()] * count
    listed = list(params) if isinstance(params, Sequence) else [params]
    for each in listed:
        if not isinstance(each, PoolingParams):
            raise TypeError(f"pooling_params has a {type(each).__name__}; pass millpond.PoolingParams(...)")
    if len(listed) != count:
        raise InvalidRequestError(f"{len(listed)} pooling_params for {count} prompts; pass one, or one for each prompt")
    return listed


def complete(
    task: Task, params: PoolingParams, tokenization: Tokenization, config: PoolerConfig, spec: ModelSpec
) -> PoolingParams:
    """``params`` as the engine takes them; options that are not set get the configured value.

    Raises:
        InvalidRequestError: They contradict the task, each other or the tokenization.
    """
    if params.task is not None and params.task not in _NAMES_OF_TASK.get(task, (task,)):
        raise InvalidRequestError(f"pooling_params.task={params.task!r} contradicts the task {task!r} of this call")
    if params.truncate_prompt_tokens is not None:
        tokenization = tokenization.cutting_to(params.truncate_prompt_tokens)
    # "end" is the default of PoolingParams, so the tokenization decides.
    truncate = tokenization.truncate if params.truncate == "end" else params.truncate
    late = spec.score_type == "late-interaction"
    if late and params.truncate == "end" and truncate == "error" and not tokenization.refuses:
        truncate = "end"  # a ColBERT cuts queries and documents to its own lengths as part of its encoding
    changes: dict[str, Any] = {"task": None, "truncate": truncate, "truncate_prompt_tokens": tokenization.limit}
    if task == "sparse_embed":
        if params.given().isdisjoint({"role", "prompt", "prompt_name", "adapter"}):
            changes["prompt"] = ""
    elif task in ("embed", "token_embed"):
        changes |= _vector_options(task, params, config, spec, chunk=config.chunked and truncate == "error")
    else:
        changes |= _logit_options(task, params, config, spec)
    return replace(params, **changes)


def _vector_options(
    task: Task, params: PoolingParams, config: PoolerConfig, spec: ModelSpec, *, chunk: bool
) -> dict[str, Any]:
    # Older versions of vLLM called the normalization of a vector activation, too.
    switch = option_of(params, "normalize", "use_activation", "activation")
    if isinstance(switch, str):
        raise InvalidRequestError(f"activation={switch!r} means nothing to a vector; pass normalize=True or False")
    changes: dict[str, Any] = {"normalize": config.use_activation if switch is None else switch}
    changes |= {"use_activation": None, "activation": None}
    if params.dimensions is None:
        changes["dimensions"] = config.dimensions
    names_prompt = {params.role, params.prompt, params.prompt_name, params.adapter} != {None}
    if not names_prompt and spec.score_type != "late-interaction":
        changes["prompt"] = ""  # vLLM never adds a prompt of the checkpoint by itself
    if task == "embed" and chunk:
        changes |= {"chunking": "mean", "truncate": "end"}
    return changes


def _logit_options(task: Task, params: PoolingParams, config: PoolerConfig, spec: ModelSpec) -> dict[str, Any]:
    switch = option_of(params, "activation", "use_activation", "normalize")
    if switch is None and (task != "score" or spec.score_type == "cross-encoder"):
        # These are raw unless the request or the configuration sets an activation.
        raw = task == "reward" or spec.architecture in _RAW_LOGITS
        switch = not raw if config.use_activation is None else config.use_activation
    changes: dict[str, Any] = {"activation": switch, "use_activation": None, "normalize": None}
    if task in ("token_classify", "reward"):
        if params.step_tag_id is None:
            changes["step_tag_id"] = spec.step_tag_id if config.step_tag_id is None else config.step_tag_id
        if params.returned_token_ids is None:
            changes["returned_token_ids"] = config.returned_token_ids
    return changes
