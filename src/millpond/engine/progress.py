"""The progress bar of a call: drawn on a terminal, absent anywhere else."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from tqdm import tqdm


def progress_bar(texts: object, *, show: bool) -> tqdm[Any]:
    """A bar over ``texts``; hidden unless ``show`` and the output is a terminal."""
    total = len(texts) if isinstance(texts, Sized) else None
    return tqdm(total=total, unit=" texts", disable=None if show else True)
