"""Arguments of an index's methods, checked before anything is encoded or stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypedDict

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidRequestError, UnsupportedTaskError
from millpond.late_interaction.index.documents import Search
from millpond.support.blank import is_blank
from millpond.support.filters import Condition, check_filter
from millpond.support.metadata import check_str, describe, json_object
from millpond.tasks import Role
from millpond.values.outputs import TokenEmbeddingOutput, TokenSpans
from millpond.values.spec import ModelSpec
from millpond.vectors.ragged import Ragged

Filter = Mapping[str, object]

_BLOCK = 1 << 16  # rows checked at a time


class SearchOptions(TypedDict, total=False):
    """The options of a search in an index.

    Attributes:
        k: Most hits for each query, 10 by default; fewer if fewer documents match.
        filter: For each metadata key a value, a list of which one must match, or a range like ``{"gte": 2020}``.
        ids: Search among these documents only: candidates of another search. Unknown ids are ignored.
        candidates: Documents that the first stage keeps for exact scoring; ``None`` is the index's own number.
        exact: Score every document that matches, without a first stage.
    """

    k: int
    filter: Filter | None
    ids: Sequence[str] | None
    candidates: int | None
    exact: bool


class TokenEngine(Protocol):
    """The part of :class:`millpond.Engine` that an index needs; ``token_spans`` only for ``explain``."""

    @property
    def spec(self) -> ModelSpec:
        """The description of the checkpoint."""

    def token_embed(
        self, texts: Sequence[str], *, role: Role | None = None, normalize: bool | None = None
    ) -> TokenEmbeddingOutput:
        """As :meth:`millpond.Engine.token_embed`."""

    def token_spans(self, texts: Sequence[str], *, role: Role | None = None) -> list[TokenSpans]:
        """As :meth:`millpond.Engine.token_spans`."""


def checked_engine(engine: TokenEngine | None) -> TokenEngine | None:
    """The engine of an index; of an AsyncEngine its Engine."""
    if engine is None:
        return None
    inner = getattr(engine, "engine", engine)  # an AsyncEngine has its engine there
    if not hasattr(inner, "spec") or not hasattr(inner, "token_embed"):
        raise TypeError(
            f"engine is of type {type(engine).__name__}; pass a millpond.Engine (Engine('model') makes one), "
            "or None for an index that is given embeddings only"
        )
    checked: TokenEngine = inner
    if "token_embed" not in checked.spec.tasks:
        raise UnsupportedTaskError(
            f"{checked.spec.name} has no token vectors (it serves {', '.join(sorted(checked.spec.tasks))}); "
            "use an embedder or a ColBERT checkpoint"
        )
    return checked


def check_count(name: str, value: object, *, optional: bool = False) -> None:
    """Raise InvalidRequestError for anything but an int from 1 (and None, where it is optional)."""
    if not (value is None and optional) and (type(value) is not int or value < 1):
        raise InvalidRequestError(f"{name}={value!r} must be an int from 1")


def check_queries(queries: Sequence[str]) -> None:
    """Raise for anything but a sequence of texts that are not blank."""
    if isinstance(queries, str | bytes) or not isinstance(queries, Sequence):
        raise TypeError(f"queries is of type {type(queries).__name__}; pass a list of str")
    for index, query in enumerate(queries):
        check_str(f"the query at index {index}", query)
        if is_blank(query):
            raise InvalidRequestError(f"the query at index {index} is blank; leave it out")


def checked_strings(name: str, values: Iterable[str]) -> list[str]:
    """The values of a list as plain str; ``name`` is ``"id"``, which may not be empty, or ``"text"``."""
    if isinstance(values, str | bytes):
        shown = repr(values) if len(values) <= 60 else f"{values[:60]!r}..."
        raise TypeError(f"{name}s={shown} is one {type(values).__name__}; pass a list")
    if not isinstance(values, Iterable) or isinstance(values, Mapping):
        raise TypeError(f"{name}s is of type {type(values).__name__}; pass a list of str")
    checked = list(values)
    for index, value in enumerate(checked):
        check_str(f"the {name} at index {index}", value)
        if name == "id" and not value:
            raise InvalidRequestError(f"the id at index {index} is empty; every document needs one")
    return [value if type(value) is str else str.__str__(value) for value in checked]  # numpy has a str of its own


def checked_metadata(metadata: Sequence[Mapping[str, Any] | None] | None, count: int) -> list[dict[str, Any]]:
    """The metadata of ``count`` documents, as JSON objects of their own."""
    if metadata is None:
        return [{} for _ in range(count)]
    if isinstance(metadata, Mapping | str | bytes) or not isinstance(metadata, Iterable):
        raise InvalidRequestError(f"metadata must be a list of {count} mappings, one for each id")
    items = list(metadata)
    if len(items) != count:
        raise InvalidRequestError(f"metadata must be a list of {count} mappings, one for each id, not of {len(items)}")
    objects = []
    for index, item in enumerate(items):
        if item is not None and not isinstance(item, Mapping):
            raise InvalidRequestError(f"metadata[{index}] is {describe(item)}; it must be a mapping or None")
        objects.append(json_object(f"metadata[{index}]", item) if item is not None else {})
    return objects


def check_candidates(candidates: object, k: int) -> None:
    """Raise InvalidRequestError for anything but an int from ``k``, and None."""
    if candidates is not None and (type(candidates) is not int or candidates < k):
        raise InvalidRequestError(
            f"candidates={candidates!r} must be an int from k={k}; leave it out for the index's own number"
        )


def checked_filter(filter: Filter | None) -> dict[str, Condition]:
    """For each metadata key its accepted values, or its range; empty for no filter."""
    if filter is None:
        return {}
    if not isinstance(filter, Mapping):
        raise InvalidRequestError(f"filter is of type {type(filter).__name__}; pass a dict of metadata values")
    return check_filter(filter)


def checked_search(
    *,
    k: int = 10,
    filter: Filter | None = None,
    ids: Sequence[str] | None = None,
    candidates: int | None = None,
    exact: bool = False,
) -> Search:
    """:class:`SearchOptions`, or their defaults, in a checked form."""
    check_count("k", k)
    check_candidates(candidates, k)
    if not isinstance(exact, bool):
        raise InvalidRequestError(f"exact={exact!r} must be True or False")
    named = None if ids is None else list(dict.fromkeys(checked_strings("id", ids)))
    return Search(k=k, conditions=checked_filter(filter), ids=named, candidates=candidates, exact=exact)


def check_matrices(name: str, matrices: Ragged) -> None:
    """Raise for anything but a Ragged of finite floats."""
    if not isinstance(matrices, Ragged):
        raise TypeError(
            f"{name} are of type {type(matrices).__name__}; pass a Ragged, as token_embed(...).embeddings is "
            "(or build one with Ragged.from_matrices)"
        )
    flat = matrices.flat
    if flat.dtype.kind != "f":
        raise InvalidRequestError(f"{name} hold {flat.dtype}; pass floats")
    if flat.shape[1] == 0:
        raise InvalidRequestError(f"{name} are 0 wide; every row needs a column")
    for start in range(0, len(flat), _BLOCK):
        finite = np.isfinite(flat[start : start + _BLOCK]).all(axis=1)  # [rows]
        if not finite.all():
            row = start + int(np.argmin(finite))
            index = int(np.searchsorted(matrices.offsets, row, side="right")) - 1
            raise InvalidRequestError(f"the matrix at index {index} of {name} holds NaN or infinity; leave it out")


def unit_rows(rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """A float32 copy of rows ``[n, d]`` with rows of length 1; a row of zeros stays one."""
    wide = rows.astype(np.float32) if rows.dtype.itemsize < 4 else rows
    # Divided by its largest value first, a row has squares that float32 can hold.
    largest = np.abs(wide).max(axis=1, keepdims=True, initial=0)
    unit: npt.NDArray[np.float32] = (wide / np.where(largest > 0, largest, 1)).astype(np.float32, copy=False)
    unit /= np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return unit
