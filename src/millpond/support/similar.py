"""The names that there are, for an error about one that there is not."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_SHOWN = 10


def list_names(wanted: str, names: Iterable[str]) -> str:
    """At most ten names as part of a sentence, those like ``wanted`` first; empty if there is none."""
    ordered = sorted(names)
    near = get_close_matches(wanted, ordered, n=_SHOWN)
    shown = [*near, *(name for name in ordered if name not in near)]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return f"{', '.join(map(repr, shown[:_SHOWN]))}{more}"
