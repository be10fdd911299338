"""Demand: what a caller asks for, checked against the model before anything is queued."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from millpond import matryoshka
from millpond.engine.call import Plan
from millpond.errors import InvalidRequestError, UnsupportedTaskError
from millpond.params import PoolingParams
from millpond.spec import ModelSpec
from millpond.tasks import TASKS, Task

_COMMON = frozenset(
    "task dimensions normalize use_activation role prompt prompt_name truncate truncate_prompt_tokens".split()
)
_READS: dict[str, frozenset[str]] = {"embed": _COMMON | {"output_dtype"}, "token_embed": _COMMON}
# sentence-transformers' encode_document takes the first of these that a checkpoint has.
_ROLE_PROMPTS = {"query": ("query",), "document": ("document", "passage", "corpus")}


def check_texts(texts: Any, method: str) -> list[str]:
    """The texts as a list.

    Raises:
        TypeError: A bare str (or bytes, or a mapping), which would be read as its characters.
        InvalidRequestError: An element that is no str, or no valid Unicode.
    """
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable) or isinstance(texts, dict):
        raise TypeError(f"{method} takes a list of texts, not a {type(texts).__name__}; write {method}([text])")
    checked = list(texts)
    for i, text in enumerate(checked):
        if type(text) is not str and not isinstance(text, str):
            raise InvalidRequestError(f"the text at index {i} is a {type(text).__name__}, not a str; convert it first")
        if not text.isascii():
            _check_unicode(text, f"the text at index {i}")
    return checked


def _check_unicode(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{what} holds a lone surrogate (U+{ord(text[error.start]):04X} at {error.start}), which is no character; "
            'replace it, for example with text.encode("utf-8", "replace").decode()'
        ) from error


def check_task(task: Any, spec: ModelSpec) -> Task:
    """A task that the checkpoint serves.

    Raises:
        InvalidRequestError: No such task.
        UnsupportedTaskError: Not this checkpoint's.
    """
    if task not in TASKS:
        raise InvalidRequestError(f"task={task!r} is unknown; choose one of {', '.join(TASKS)}")
    if task not in spec.tasks:
        raise UnsupportedTaskError(
            f"{spec.name} serves {', '.join(sorted(spec.tasks))}, not {task}; load another model"
        )
    checked: Task = task
    return checked


def plan(task: Task, params: PoolingParams, spec: ModelSpec, *, texts: int) -> Plan:
    """Fill in every default of ``params`` for ``task``.

    ``skip`` is left at 0; it takes the tokenizer to know it.

    Raises:
        InvalidRequestError: An option the task does not read, an unknown prompt, or a limit above the model's.
        InvalidDimensionsError: A width that the checkpoint cannot be cut to.
    """
    if params.task is not None and params.task != task:
        raise InvalidRequestError(f"params.task={params.task!r} contradicts the task {task!r} of this call")
    unread = sorted(params.given() - _READS[task])
    if unread:
        raise InvalidRequestError(f"{unread[0]}={getattr(params, unread[0])!r} means nothing to {task}; leave it out")
    if params.output_dtype in ("int8", "uint8") and texts == 1:
        raise InvalidRequestError(
            f"output_dtype={params.output_dtype!r} finds each dimension's range among the texts of the call, and this "
            "call has 1; pass at least 2 texts, or choose float16 or binary"
        )
    return Plan(
        task=task,
        prompt=_prompt(params, spec),
        skip=0,
        limit=_limit(params, spec),
        truncate=params.truncate,
        width=_width(task, params, spec),
        normalize=_normalize(params, spec),
        output_dtype=params.output_dtype,
    )


def _prompt(params: PoolingParams, spec: ModelSpec) -> str:
    """The caller's prompt, else the named one, else the role's; without any of these the checkpoint's default."""
    if params.prompt is not None:
        _check_unicode(params.prompt, "prompt")
        return params.prompt
    if params.prompt_name is not None:
        if params.prompt_name not in spec.prompts:
            known = ", ".join(sorted(spec.prompts)) or "none"
            raise InvalidRequestError(f"prompt_name={params.prompt_name!r} is no prompt of {spec.name}; it has {known}")
        return spec.prompts[params.prompt_name]
    if params.role is not None:
        # A role without a prompt has none: the default may be the other role's.
        return next((spec.prompts[name] for name in _ROLE_PROMPTS[params.role] if name in spec.prompts), "")
    return spec.prompts.get(spec.default_prompt_name or "", "")


def _limit(params: PoolingParams, spec: ModelSpec) -> int:
    asked = params.truncate_prompt_tokens
    if asked is None or asked == -1:
        return spec.max_length
    if asked > spec.max_length:
        raise InvalidRequestError(
            f"truncate_prompt_tokens={asked} is more than {spec.name} reads ({spec.max_length}); "
            f"choose 1 to {spec.max_length}"
        )
    return asked


def _width(task: Task, params: PoolingParams, spec: ModelSpec) -> int:
    if task == "embed":
        return spec.check_dimensions(params.dimensions)
    return matryoshka.check(
        params.dimensions,
        native=spec.hidden_size,
        trained=spec.matryoshka,
        declared=spec.matryoshka_dimensions,
        model=spec.name,
        smallest=spec.matryoshka_smallest,
    )


def _normalize(params: PoolingParams, spec: ModelSpec) -> bool:
    given = {value for value in (params.normalize, params.use_activation) if value is not None}
    if len(given) == 2:
        raise InvalidRequestError(
            f"normalize={params.normalize} and use_activation={params.use_activation} contradict each other; pass one"
        )
    return given.pop() if given else spec.normalize
