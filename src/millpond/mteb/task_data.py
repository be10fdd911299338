"""Reading a task's data: an error that names it, and no bars of datasets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import datasets
from mteb.abstasks.abstask import AbsTask

from millpond.errors import MillpondError, SourceNotFoundError


def parts_of(task: AbsTask) -> list[AbsTask]:
    """The task, or those that it is the mean of."""
    return list(task.metadata.tasks) if task.is_aggregate else [task]


@contextmanager
def reading(task: AbsTask) -> Iterator[None]:
    """Data that is read within is forgotten at the end, and an error of it is a SourceNotFoundError."""
    parts = parts_of(task)
    hidden = datasets.utils.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # of the maps over texts, each drawn for a moment
    for part in parts:
        part.load_data = _Load(part)
    try:
        yield
    finally:
        if not hidden:
            datasets.enable_progress_bars()
        for part in parts:
            del part.load_data
            if part.data_loaded:
                part.unload_data()


class _Load:
    """A task's ``load_data``."""

    def __init__(self, task: AbsTask) -> None:
        self._task = task
        self._load = type(task).load_data

    def __call__(self, *args: Any, **options: Any) -> None:
        try:
            self._load(self._task, *args, **options)
        except MillpondError:
            raise
        except Exception as error:  # of datasets, of the hub, of the network
            metadata, reason = self._task.metadata, f"{type(error).__name__}: {error}".splitlines()[0]
            raise SourceNotFoundError(
                f"{metadata.name}: its data {metadata.dataset['path']!r} is not on this machine, or damaged, and could "
                f"not be fetched ({reason})"
            ) from error
