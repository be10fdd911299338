"""The plan of a two-stage search: candidates by the shortest vectors, ranked by the longest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.batch import storable
from millpond.vectors import matryoshka

if TYPE_CHECKING:
    from millpond.engine.engine import Engine
    from millpond.vectors.linear_map import LinearMap

MAX_RESULTS = 2**31 - 1
"""Most results of a search: clients of databases take 32 or 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One result of a search.

    Attributes:
        id: The record's own id.
        score: Cosine at the largest width searched that the row has, higher is closer; of a hybrid search the fused
            score.
        text: The record's text.
        metadata: The record's metadata.
    """

    id: str
    score: float
    text: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchPlan:
    """A question's vectors, and the stages of its search."""

    k: int  # how many results
    candidates: int  # how many rows the first stage selects
    coarse: int | None  # width of the first stage; `None` if there is only one stage
    full: int  # width of the stage that scores
    # Of each width [width] float32 of length 1; a width between these two only where the question has a direction.
    vectors: Mapping[int, npt.NDArray[np.float32]]
    sparse: Mapping[int, float] | None = None  # token ids and weights; fused by 1 / (60 + rank) of each ranking
    hybrid: bool = False  # whether the search is hybrid; without `sparse` the database ranks by `question` itself
    question: str = ""  # the question's text


def plan_search(
    engine: Engine,
    question: str,
    *,
    widths: Sequence[int],
    k: int,
    coarse_to_fine: bool,
    candidates: int | None,
    sparse_engine: Engine | None = None,
    hybrid: bool | None = None,
    mapping: LinearMap | None = None,
) -> SearchPlan:
    """Check the arguments of a search, embed its question with the role ``query``, and cut the vector.

    ``mapping`` takes the vector to the space of the model that filled the collection.
    """
    if not isinstance(question, str):
        raise InvalidRequestError(f"question is of type {type(question).__name__}; pass one str")
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise InvalidRequestError(f"k={k!r} must be an int from 1")
    for name, value in (("k", k), ("candidates", candidates)):
        if isinstance(value, int) and value > MAX_RESULTS:
            raise InvalidRequestError(f"{name}={value} is more than a database can count; pass {MAX_RESULTS} at most")
    if candidates is None:
        candidates = min(max(100, 10 * k), MAX_RESULTS)
    elif isinstance(candidates, bool) or not isinstance(candidates, int) or candidates < k:
        raise InvalidRequestError(
            f"candidates={candidates!r} must be an int from k={k}; leave it out for max(100, 10 k)"
        )
    full = widths[-1]
    coarse = widths[0] if coarse_to_fine and len(widths) > 1 else None
    row = engine.embed(  # at full width; every other width is cut from it
        [question], role="query", dimensions=engine.spec.dimensions, normalize=False
    ).embeddings  # [1, d]
    if mapping is not None:
        row = mapping.apply(matryoshka.cut(row, mapping.source, normalize=True))
    cuts = {width: matryoshka.cut(row, width, normalize=True) for width in widths}  # each [1, width]
    vectors = {width: cut[0] for width, cut in cuts.items() if storable(cut).all()}
    if not {full, full if coarse is None else coarse} <= vectors.keys():
        raise InvalidRequestError("the question's vector is not finite, or all zero, so nothing is nearest to it")
    sparse = None if sparse_engine is None else sparse_engine.sparse_embed([question], role="query")[0]
    return SearchPlan(
        k=k,
        candidates=candidates,
        coarse=coarse,
        full=full,
        vectors=vectors,
        sparse=sparse,
        hybrid=sparse is not None if hybrid is None else hybrid,
        question=question,
    )
