"""What one request of an LLM asks for: its PoolingParams, the call's tokenization, the configured pooler."""

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

# The tasks that a request may name when this one runs: vLLM's older words, and the two names of a reward.
_SAME: dict[Task, tuple[Task, ...]] = {
    "reward": ("reward", "token_classify"),
    "token_classify": ("token_classify", "reward"),
    "score": ("score", "classify", "embed", "token_embed"),
    "classify": ("classify", "score"),
}
# Architectures whose rewards vLLM leaves as they are, by any of the task's names.
_RAW = frozenset({"Qwen2ForRewardModel"})


def per_prompt(params: Params, count: int) -> list[PoolingParams]:
    """A request's options for each of ``count`` prompts.

    Raises:
        TypeError: Anything but PoolingParams.
        InvalidRequestError: As many as there are prompts are needed, or one.
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
    task: Task, params: PoolingParams, how: Tokenization, config: PoolerConfig, spec: ModelSpec
) -> PoolingParams:
    """``params`` as the engine takes them, with the configured options where they leave a question open.

    Raises:
        InvalidRequestError: They contradict the task, each other or the tokenization.
    """
    if params.task is not None and params.task not in _SAME.get(task, (task,)):
        raise InvalidRequestError(f"pooling_params.task={params.task!r} contradicts the task {task!r} of this call")
    if params.truncate_prompt_tokens is not None:
        how = how.cutting_to(params.truncate_prompt_tokens)
    truncate = how.truncate if params.truncate == "end" else params.truncate  # "end" is what nobody asked for
    if spec.score_type == "late-interaction" and params.truncate == "end" and truncate == "error" and not how.refuses:
        truncate = "end"  # the lengths of a ColBERT's queries and documents are how it encodes
    changes: dict[str, Any] = {"task": None, "truncate": truncate, "truncate_prompt_tokens": how.limit}
    if task == "sparse_embed":
        if params.given().isdisjoint({"role", "prompt", "prompt_name", "adapter"}):
            changes["prompt"] = ""
    elif task in ("embed", "token_embed"):
        changes |= _of_vectors(task, params, config, spec, chunk=config.chunked and truncate == "error")
    else:
        changes |= _of_logits(task, params, config, spec)
    return replace(params, **changes)


def _of_vectors(
    task: Task, params: PoolingParams, config: PoolerConfig, spec: ModelSpec, *, chunk: bool
) -> dict[str, Any]:
    # activation is what older versions called the normalization of a vector, too.
    switch = option_of(params, "normalize", "use_activation", "activation")
    if isinstance(switch, str):
        raise InvalidRequestError(f"activation={switch!r} means nothing to a vector; pass normalize=True or False")
    changes: dict[str, Any] = {"normalize": config.use_activation if switch is None else switch}
    changes |= {"use_activation": None, "activation": None}
    if params.dimensions is None:
        changes["dimensions"] = config.dimensions
    asked = {params.role, params.prompt, params.prompt_name, params.adapter} != {None}
    if not asked and spec.score_type != "late-interaction":
        changes["prompt"] = ""  # vLLM never adds a checkpoint's prompts by itself
    if task == "embed" and chunk:
        changes |= {"chunking": "mean", "truncate": "end"}
    return changes


def _of_logits(task: Task, params: PoolingParams, config: PoolerConfig, spec: ModelSpec) -> dict[str, Any]:
    switch = option_of(params, "activation", "use_activation", "normalize")
    if switch is None and (task != "score" or spec.score_type == "cross-encoder"):
        # A reward is raw unless activation is asked for in so many words.
        raw = task == "reward" or (task == "token_classify" and spec.architecture in _RAW)
        switch = not raw if config.use_activation is None else config.use_activation
    changes: dict[str, Any] = {"activation": switch, "use_activation": None, "normalize": None}
    if task in ("token_classify", "reward"):
        if params.step_tag_id is None:
            changes["step_tag_id"] = spec.step_tag_id if config.step_tag_id is None else config.step_tag_id
        if params.returned_token_ids is None:
            changes["returned_token_ids"] = config.returned_token_ids
    return changes
