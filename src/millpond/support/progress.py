"""Progress: the bar of a call, drawn in a terminal and in a notebook."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sized
from functools import cache
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tqdm import tqdm


class _Hidden:
    """No bar: even a disabled tqdm bar takes a noticeable part of a single text's call."""

    def update(self, n: float | None = 1) -> bool | None:
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


_HIDDEN = _Hidden()


def progress_bar(texts: object, *, show: bool) -> tqdm[Any] | _Hidden:
    """A bar over ``texts``; hidden unless ``show``, and where nobody would see it."""
    if not show:
        return _HIDDEN
    return draw_bar(show=True, total=len(texts) if isinstance(texts, Sized) else None, unit=" texts")


def draw_bar(*, show: bool, **options: Any) -> tqdm[Any]:
    """tqdm's bar with these ``options``: a widget in a notebook, else text on standard error if that is a terminal.

    Hidden elsewhere, and without ``show``.
    """
    if _has_no_width():
        options |= {"ncols": 80, "nrows": 24, "dynamic_ncols": False}
    # disable=None is tqdm's "only in a terminal", and a notebook's output is none.
    return _bar_class()(disable=(False if in_notebook() else None) if show else True, **options)


def _has_no_width() -> bool:
    """Whether standard error is a terminal that says it has no columns, in which tqdm would draw an empty line."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns == 0
    except (AttributeError, OSError, ValueError):  # no terminal
        return False


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook (Jupyter, Colab, VS Code)."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


@cache
def _bar_class() -> type[tqdm[Any]]:
    if not in_notebook():
        from tqdm import tqdm  # tqdm.auto imports asyncio

        return tqdm
    with warnings.catch_warnings():  # without ipywidgets a notebook gets a bar of text, which needs no advice
        warnings.filterwarnings("ignore", message="IProgress not found")
        from tqdm.auto import tqdm as widget
    return widget
