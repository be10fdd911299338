"""The arguments of :class:`millpond.LLM` that take reading: conversions, tasks, and vLLM's resource knobs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from millpond.errors import InvalidRequestError

# vLLM's arguments about memory, parallelism and compilation: nothing here depends on them.
_KNOBS = frozenset(
    "block_size compilation_config cpu_offload_gb disable_custom_all_reduce disable_log_requests disable_log_stats "
    "distributed_executor_backend enable_chunked_prefill enable_prefix_caching enforce_eager gpu_memory_utilization "
    "kv_cache_dtype load_format max_num_batched_tokens max_num_seqs max_seq_len_to_capture model_impl "
    "pipeline_parallel_size seed swap_space tensor_parallel_size tokenizer_mode".split()
)
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size")
_DTYPES = {"half": "float16", "float": "float32"}
_CONVERSIONS = {"auto": "auto", "embed": "embed", "classify": "classify", "none": "auto", "reward": "auto"}
# ``task=`` of older versions: what it converted to.
_TASKS = {
    "auto": "auto",
    "embed": "embed",
    "embedding": "embed",
    "token_embed": "embed",
    "encode": "auto",
    "classify": "classify",
    "score": "classify",
    "reward": "auto",
    "token_classify": "auto",
}


def conversion(convert: str, task: str | None) -> str:
    """The engine's ``convert``, by vLLM's present or its older argument.

    Raises:
        InvalidRequestError: One that is unknown.
    """
    if convert not in _CONVERSIONS:
        raise InvalidRequestError(f"convert={convert!r} is unknown; choose auto, embed, classify or none")
    if task is not None and task not in _TASKS:
        raise InvalidRequestError(f"task={task!r} is unknown; choose one of {', '.join(_TASKS)}")
    return _TASKS[task] if convert == "auto" and task is not None else _CONVERSIONS[convert]


def dtype(name: str) -> str:
    """The engine's name for a precision."""
    return _DTYPES.get(name, name)


def check_flags(*, runner: str, trust_remote_code: bool) -> None:
    """Refuse what cannot be meant.

    Raises:
        InvalidRequestError: A runner that generates, or a flag that is none.
    """
    if runner not in ("auto", "pooling"):
        raise InvalidRequestError(f"runner={runner!r}: millpond pools; choose auto or pooling")
    if not isinstance(trust_remote_code, bool):
        raise InvalidRequestError(f"trust_remote_code={trust_remote_code!r} must be True or False")


def check_knobs(knobs: Mapping[str, Any]) -> None:
    """One warning that names the resource knobs among ``knobs``.

    Raises:
        TypeError: Any other argument.
        InvalidRequestError: Several devices for one model.
    """
    unknown = sorted(knobs.keys() - _KNOBS)
    if unknown:
        raise TypeError(f"LLM has no argument {unknown[0]!r}")
    for name in _PARALLEL:
        if knobs.get(name, 1) != 1:
            raise InvalidRequestError(f"{name}={knobs[name]!r} is not available: a model runs on one device; pass 1")
    if knobs:
        warnings.warn(f"no meaning here, and ignored: {', '.join(sorted(knobs))}", UserWarning, stacklevel=3)
