"""Matryoshka: the one place that decides which widths vectors may be cut to, and cuts them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidDimensionsError


def widths(native: int, declared: tuple[int, ...] | None) -> tuple[int, ...]:
    """The widths that a checkpoint declares and its native width, ascending."""
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
    """Resolve a requested width (``None``: the default one), or raise InvalidDimensionsError.

    ``trained`` says whether the checkpoint was trained for cuts (or the user forced it), ``declared`` for which widths,
    ``smallest`` down to which one if it declares none; ``model`` is its name in errors.
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
    if dimensions < 1 or (dimensions > native and not trained):
        reason = "is no width" if dimensions < 1 else f"is more than {model} has ({native})"
        raise refusal(
            f"dimensions={dimensions} {reason}; "
            + (f"choose {choices}" if trained else f"leave it out: {model} is {native} wide, and not trained for cuts")
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
    """``rows [n, d]`` cut to ``[n, dimensions]``, then divided by their L2 norm if ``normalize``.

    A zero row stays zero. With ``own`` the caller gives ``rows`` away: they are normalized in place, if their width
    stays, so that a million of them are not in memory twice.
    """
    head = rows[:, :dimensions]
    if not normalize:
        return np.ascontiguousarray(head)
    norms = np.sqrt(np.einsum("nd,nd->n", head, head, dtype=np.float32))
    np.maximum(norms, 1e-12, out=norms)
    in_place = own and head.shape == rows.shape
    result: npt.NDArray[Any] = np.divide(head, norms[:, None], out=head if in_place else None)
    return result
