"""Matryoshka: check a requested width, and cut vectors to it. No other module does either."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidDimensionsError


def widths(native: int, declared: tuple[int, ...] | None) -> tuple[int, ...]:
    """The widths that a checkpoint declares, ascending, with its native width."""
    return tuple(sorted({*(declared or ()), native}))


def check(
    dimensions: int | None,
    *,
    native: int,
    trained: bool,
    declared: tuple[int, ...] | None,
    model: str,
    smallest: int = 1,
    default: int | None = None,
) -> int:
    """Return the width for a request, or raise.

    Args:
        dimensions: The requested width; ``None``: the default.
        native: Full width of the checkpoint.
        trained: Whether the checkpoint was trained for Matryoshka cuts (or the user forced it).
        declared: The widths it was trained for, or ``None`` if it declares no list.
        model: Name of the checkpoint, for messages.
        smallest: Smallest width it was trained for, if it declares no list.
        default: Default width of the checkpoint; ``None``: the native width.

    Raises:
        InvalidDimensionsError: The width is not a positive int, exceeds the native width, or was not trained for.
    """
    if dimensions is None:
        return native if default is None else default
    choices = "one of " + ", ".join(map(str, widths(native, declared))) if declared else f"{smallest} to {native}"
    if isinstance(dimensions, bool) or not isinstance(dimensions, (int, np.integer)):
        raise InvalidDimensionsError(f"dimensions={dimensions!r} is not an int; choose {choices}")
    if dimensions in (native, default):
        return int(dimensions)
    refusal = partial(
        InvalidDimensionsError,
        dimensions=int(dimensions),
        native=native,
        declared=declared,
        smallest=smallest,
        trained=trained,
    )
    if not trained:
        raise refusal(
            f"dimensions={dimensions} cuts {model} ({native} wide), which does not say that it was trained for "
            f'Matryoshka; leave dimensions out, or force it with hf_overrides={{"is_matryoshka": True}}'
        )
    if dimensions > native:
        raise refusal(f"dimensions={dimensions} is more than {model} has ({native}); choose {choices}")
    if dimensions < smallest or (declared and dimensions not in declared):
        raise refusal(f"dimensions={dimensions} is not a width of {model}; choose {choices}")
    return int(dimensions)


def cut(
    rows: npt.NDArray[np.float32], dimensions: int, *, normalize: bool, own: bool = False
) -> npt.NDArray[np.float32]:
    """Cut ``rows [n, d]`` to ``[n, dimensions]``, then divide them by their L2 norms if ``normalize``.

    A zero row stays zero. With ``own`` the caller gives up ``rows``, and they may be normalized in place, which saves
    holding them twice. Otherwise normalized rows are a copy.
    """
    head = rows[:, :dimensions]
    if not normalize:
        return np.ascontiguousarray(head)
    norms = np.sqrt(np.einsum("nd,nd->n", head, head, dtype=np.float32))
    np.maximum(norms, 1e-12, out=norms)
    in_place = own and head.shape == rows.shape
    result: npt.NDArray[Any] = np.divide(head, norms[:, None], out=head if in_place else None)
    return result
