"""vLLM's arguments translated: conversions, tasks, and the resource arguments that are ignored."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from millpond.errors import InvalidRequestError, UnsupportedTaskError
from millpond.tasks import Task
from millpond.values.replacements import instead_of

# vLLM's arguments about memory, parallelism and compilation, which mean nothing here.
IGNORED_ARGS = frozenset(
    "block_size compilation_config cpu_offload_gb disable_custom_all_reduce disable_log_requests disable_log_stats "
    "distributed_executor_backend enable_chunked_prefill enable_prefix_caching enforce_eager gpu_memory_utilization "
    "kv_cache_dtype load_format max_num_batched_tokens max_num_seqs max_seq_len_to_capture model_impl "
    "pipeline_parallel_size seed swap_space tensor_parallel_size tokenizer_mode".split()
)
# The same for its server.
SERVER_IGNORED_ARGS = IGNORED_ARGS | frozenset(
    "api_server_count data_parallel_size disable_uvicorn_access_log generation_config max_log_len "
    "uvicorn_log_level".split()
)
# Those that take no value on its command line.
SWITCHES = frozenset(
    "disable_custom_all_reduce disable_log_stats disable_uvicorn_access_log enable_chunked_prefill "
    "enable_prefix_caching enforce_eager".split()
)
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "api_server_count")
_DTYPES = {"half": "float16", "float": "float32"}
# The arguments that the engine has, by its own names.
_ENGINE_ARGS = {
    **{name: name for name in ("dtype", "revision", "device", "quantization", "hf_overrides")},
    "max_model_len": "max_length",
}
_CONVERSIONS = {"auto": "auto", "embed": "embed", "classify": "classify", "none": "auto", "reward": "auto"}
# ``task=`` of older versions: the conversion that it meant.
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
_PREFERENCE: tuple[Task, ...] = ("embed", "classify", "token_embed", "token_classify", "reward")
# The preference for a checkpoint with a reward head: it could embed, too, which is not its purpose.
_REWARD_PREFERENCE: tuple[Task, ...] = ("classify", "token_classify", "reward")
# The tasks of ``encode`` by each of their names; the first that the model serves is meant.
POOLING_TASKS: dict[str, tuple[Task, ...]] = {
    "embed": ("embed",),
    "classify": ("classify",),
    "token_embed": ("token_embed",),
    "token_classify": ("token_classify",),
    "reward": ("reward",),
    "embedding": ("embed",),
    "score": ("classify",),
    "encode": ("token_embed", "token_classify"),
}


def one_value(values: Mapping[str, Any], *, owner: str = "") -> Any:
    """The value of an option by its several names; ``None`` if none of them is set."""
    given = {name: value for name, value in values.items() if value is not None}
    first = next(iter(given.values()), None)
    if any(value != first for value in given.values()):
        listed = " and ".join(f"{name}={value!r}" for name, value in given.items())
        raise InvalidRequestError(f"{owner}{listed} are names of one option and contradict each other; pass one")
    return first


def conversion(convert: str, task: str | None) -> str:
    """The engine's ``convert``, from vLLM's ``convert`` or its older ``task``."""
    if convert not in _CONVERSIONS:
        raise InvalidRequestError(f"convert={convert!r} is unknown; choose auto, embed, classify or none")
    if task is not None and task not in _TASKS:
        raise InvalidRequestError(f"task={task!r} is unknown; choose one of {', '.join(_TASKS)}")
    return _TASKS[task] if convert == "auto" and task is not None else _CONVERSIONS[convert]


def dtype(name: str) -> str:
    """The engine's name for a precision."""
    return _DTYPES.get(name, name)


def check_flags(*, runner: str, trust_remote_code: bool) -> None:
    """Refuse values that millpond cannot follow."""
    if runner not in ("auto", "pooling"):
        raise InvalidRequestError(f"runner={runner!r}: millpond pools; choose auto or pooling")
    if not isinstance(trust_remote_code, bool):
        raise InvalidRequestError(f"trust_remote_code={trust_remote_code!r} must be True or False")


def check_parallel(ignored_args: Mapping[str, Any]) -> None:
    """Refuse arguments that spread one model over several devices."""
    for name in _PARALLEL:
        if ignored_args.get(name, 1) not in (1, "1"):
            raise InvalidRequestError(
                f"{name}={ignored_args[name]!r} is not available: one process runs a model; pass 1"
            )


def engine_args(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an engine from those of vLLM's class; a warning names the resource arguments, once per call."""
    ignored = options.keys() & IGNORED_ARGS
    unknown = sorted(options.keys() - IGNORED_ARGS - _ENGINE_ARGS.keys())
    if unknown:
        raise TypeError(f"LLM has no argument {unknown[0]!r}; {instead_of(unknown[0], frozenset(_ENGINE_ARGS))}")
    check_parallel(options)
    if ignored:
        warnings.warn(f"no meaning here, and ignored: {', '.join(sorted(ignored))}", UserWarning, stacklevel=4)
    passed = {_ENGINE_ARGS[name]: value for name, value in options.items() if name in _ENGINE_ARGS}
    return passed | {"dtype": dtype(passed.get("dtype", "auto"))}


def pooling_task(name: str | None, served: frozenset[Task], *, model: str) -> Task:
    """The task of an ``encode`` call by vLLM's present or older name; without a name, the model's first task."""
    if name is not None and name not in POOLING_TASKS:
        raise InvalidRequestError(f"pooling_task={name!r} is unknown; choose one of {', '.join(POOLING_TASKS)}")
    default = _REWARD_PREFERENCE if "reward" in served else _PREFERENCE
    choices = default if name is None else POOLING_TASKS[name]
    chosen = next((task for task in choices if task in served), None)
    if chosen is None and name is None:
        raise UnsupportedTaskError(
            f"{model} serves {', '.join(sorted(served))}, none of which vLLM has; use millpond.Engine"
        )
    return chosen or choices[0]  # the engine refuses it and names the tasks that it serves
