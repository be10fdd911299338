"""A bridge fitted: linear maps between two models' spaces, chosen by what their questions find."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.collection import CollectionSink
from millpond.migrate.row_copy import RowCopy
from millpond.vectors import matryoshka
from millpond.vectors.linear_map import Bridge, LinearMap, Rows, procrustes, ridge

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

Places = npt.NDArray[np.int64]

LEAST_RECALL = 0.9
_FITTED_ROWS = 20_000
LEAST_ROWS = 64
_HELD_OUT_SHARE, _HELD_OUT = 0.1, 1000
_WEIGHTS = (1e-3, 1e-2, 1e-1, 1.0)
_PAGE = 512
_K = 10
# A question is about as long as this; longer texts of held-out rows are cut to it.
_WORDS = re.compile(r"(?:\S+\s+){0,11}\S+")


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedBridge:
    """A bridge, and how it was found.

    Attributes:
        bridge: The two maps.
        rows: How many rows they were fitted on.
        questions: How many beginnings of other rows were asked.
        form: What the map to the old space is: ``procrustes``, or ``ridge`` with its weight.
    """

    bridge: Bridge
    rows: int
    questions: int
    form: str

    @property
    def goes_back(self) -> bool:
        """Whether questions of the old model may use it, once the old vectors are gone."""
        return self.bridge.recall_back >= LEAST_RECALL


def fit_bridge(
    old: CollectionSink[Any], new: CollectionSink[Any], *, engine: Engine, copy: RowCopy, least: float = LEAST_RECALL
) -> FittedBridge:
    """Embed at most 20,000 rows by the new model, into its collection, and fit the bridge on them.

    Args:
        old: The collection of the old model.
        new: The collection of the new one, which the rows are written to.
        engine: The engine of the new model.
        copy: Writes the rows.
        least: The least expected recall.

    Returns:
        The bridge.

    Raises:
        InvalidRequestError: There are too few rows, or the recall is less.
    """
    ids = [row_id for row_id, _ in old.scan()]
    chosen = random.Random(0).sample(ids, min(len(ids), _FITTED_ROWS))
    copy.fill(chosen)
    source, target, texts = _both(old, new, chosen)
    held = max(1, min(_HELD_OUT, int(len(texts) * _HELD_OUT_SHARE)))
    beginnings = {place: match[0] for place, text in enumerate(texts[:held]) if (match := _WORDS.search(text))}
    asked = np.fromiter(beginnings, np.int64)
    full = engine.embed(
        list(beginnings.values()), role="query", dimensions=engine.spec.dimensions, normalize=False
    ).embeddings
    questions = matryoshka.cut(full, target.shape[1], normalize=True)
    name, forward, recall = _chosen(target, source, held, questions, asked)
    _, back, recall_back = _chosen(source, target, held, source[:held], np.arange(held))
    if recall < least:
        raise InvalidRequestError(
            f"by a bridge questions would find {recall:.2f} of what they find with the vectors of {engine.spec.name} "
            f"itself ({len(asked)} beginnings of texts, {len(texts)} rows), and {least:g} is needed: the two models "
            "differ too much; run without --bridge, and search with the former model until the cut-over"
        )
    bridge = Bridge(forward=forward, back=back, recall=recall, recall_back=recall_back)
    return FittedBridge(bridge=bridge, rows=len(texts) - held, questions=len(asked), form=name)


def _both(old: CollectionSink[Any], new: CollectionSink[Any], ids: list[str]) -> tuple[Rows, Rows, list[str]]:
    """The vectors of the rows that both collections have, ``[n, old]`` and ``[n, new]``, and their texts."""
    widths = old.own().dimensions[-1], new.own().dimensions[-1]
    first: list[Rows] = []
    second: list[Rows] = []
    texts: list[str] = []
    for start in range(0, len(ids), _PAGE):
        part = ids[start : start + _PAGE]
        ours, theirs = old.read_rows(part, widths=widths[:1]), new.read_rows(part, widths=widths[1:])
        for row_id in part:
            one, other = ours.get(row_id), theirs.get(row_id)
            if one is None or other is None or one.content_hash != other.content_hash:
                continue
            if widths[0] in one.vectors and widths[1] in other.vectors:
                first.append(one.vectors[widths[0]])
                second.append(other.vectors[widths[1]])
                texts.append(one.text or "")
    if len(texts) < LEAST_ROWS:
        raise InvalidRequestError(
            f"only {len(texts)} rows have readable vectors in both collections, and a bridge needs {LEAST_ROWS}; run "
            "without --bridge"
        )
    mine, others = np.stack(first), np.stack(second)
    return (
        matryoshka.cut(mine, widths[0], normalize=True),
        matryoshka.cut(others, widths[1], normalize=True),
        texts,
    )


def _chosen(source: Rows, target: Rows, held: int, questions: Rows, asked: Places) -> tuple[str, LinearMap, float]:
    """The map from ``source`` to ``target`` by which questions find their rows best, its name, and the share found.

    Fitted on the rows behind the first ``held``. Question ``i`` is the beginning of row ``asked[i]``, which it is to
    find among all rows. How many do is compared with how many do in ``source``, where the model is at home.
    """
    candidates = {"procrustes": procrustes(source[held:], target[held:])}
    candidates |= {f"ridge {weight:g}": ridge(source[held:], target[held:], weight) for weight in _WEIGHTS}
    ranks = {name: _ranks(each.apply(questions), target, asked) for name, each in candidates.items()}
    best = max(ranks, key=lambda name: float((1 / ranks[name]).mean()))
    # A model that finds less than half of its own rows is none that others are measured by.
    own = max(len(asked) / 2, int((_ranks(questions, source, asked) <= _K).sum()))
    recall = min(1.0, int((ranks[best] <= _K).sum()) / own)
    return best, _calibrated(candidates[best], source, target, questions), recall


def _ranks(questions: Rows, rows: Rows, asked: Places) -> npt.NDArray[np.float64]:
    """The rank of each question's row, from 1."""
    scores = _unit(questions) @ rows.T  # [q, n]
    own = np.take_along_axis(scores, asked[:, None], axis=1)
    ranks: npt.NDArray[np.float64] = 1.0 + (scores > own).sum(axis=1)
    return ranks


def _unit(rows: Rows) -> Rows:
    return matryoshka.cut(rows, rows.shape[1], normalize=True)


def _calibrated(mapping: LinearMap, source: Rows, target: Rows, questions: Rows) -> LinearMap:
    """The map with the line that turns the cosines of its hits into those of the questions' own model."""
    own = questions @ source.T  # [q, n]
    count = min(_K, len(source))
    nearest = np.argpartition(-own, count - 1, axis=1)[:, :count]
    here = np.take_along_axis(own, nearest, axis=1).ravel()
    there = np.take_along_axis(_unit(mapping.apply(questions)) @ target.T, nearest, axis=1).ravel()
    scale, offset = np.polyfit(there, here, 1)
    if not (np.isfinite(scale) and scale > 0):  # cosines that do not vary tell nothing
        return mapping
    return replace(mapping, scale=float(scale), offset=float(offset))
