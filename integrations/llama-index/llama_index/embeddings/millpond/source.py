"""LlamaIndexSource: what every adapter of LlamaIndex adds to the fields that all frameworks share."""

from __future__ import annotations

import logging
import multiprocessing
import os
from functools import cache
from typing import Any

from millpond.compat.adapter import EngineSource

_logger = logging.getLogger(__name__)


@cache
def _tell_worker(process: int) -> None:
    """Log once in a worker process, such as those of a pipeline's ``num_workers``, what it costs."""
    if multiprocessing.parent_process() is not None:
        _logger.warning(
            "process %d is a worker process and loads a model of its own; one process with one engine uses the whole "
            "machine, so leave out num_workers",
            process,
        )


class LlamaIndexSource(EngineSource):
    """Positional arguments, and what ``model_dump()`` of LlamaIndex adds."""

    replaced = "HuggingFaceEmbedding"

    @classmethod
    def _translated(cls, options: dict[str, Any], own: set[str]) -> dict[str, Any]:
        return super()._translated({name: options[name] for name in options if name != "class_name"}, own)

    @classmethod
    def _with_positional(cls, positional: tuple[Any, ...], options: dict[str, Any], *names: str) -> dict[str, Any]:
        """The options with the positional arguments under their names, of which the first is the model's.

        Raises:
            TypeError: More positional arguments than names, or one that was also passed by name.
        """
        if len(positional) > len(names):
            raise TypeError(
                f"{cls.__name__} takes {' and '.join(names)} without their names, and got {len(positional)} "
                f"positional arguments: {positional!r}; pass the others by name"
            )
        for name, value in zip(names, positional, strict=False):
            for spelling in ("model", "model_name") if name == cls.named else (name,):
                if spelling in options:
                    raise TypeError(
                        f"{cls.__name__} got {name} twice: {value!r} and {spelling}={options[spelling]!r}; pass one"
                    )
            options[name] = value
        return options

    def _configuration(self) -> dict[str, Any]:
        _tell_worker(os.getpid())
        return super()._configuration()
