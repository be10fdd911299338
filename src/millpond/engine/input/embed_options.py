"""EmbedOptions: the options of ``embed`` for the methods that take them as keywords."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypedDict, TypeVar, cast

from millpond.tasks import OutputDtype, Role, Truncate
from millpond.values.params import PoolingParams

Method = TypeVar("Method", bound=Callable[..., Any])


class EmbedOptions(TypedDict, total=False):
    """The options of ``embed``, for ``embed_iter`` and its asynchronous twin."""

    role: Role | None
    prompt: str | None
    prompt_name: str | None
    dimensions: int | None
    normalize: bool | None
    output_dtype: OutputDtype
    adapter: str | None
    long_texts: Literal["mean"] | None
    truncate: Truncate
    show_progress: bool


def embed_params(name: str, options: EmbedOptions) -> tuple[PoolingParams, bool]:
    """The options of ``embed`` as PoolingParams, and ``show_progress``."""
    unknown = sorted(options.keys() - EmbedOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"{name}() got an unexpected keyword argument {unknown[0]!r}")
    params = cast("dict[str, Any]", options)
    show_progress: bool = params.pop("show_progress", False)
    return PoolingParams(**params), show_progress


def shows_options_of(method: Callable[..., Any]) -> Callable[[Method], Method]:
    """Let ``help`` and ``inspect`` show the options of ``method`` in the place of ``**options``."""
    options = [
        parameter
        for parameter in inspect.signature(method).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]

    def show(function: Method) -> Method:
        signature = inspect.signature(function)
        own = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return function

    return show
