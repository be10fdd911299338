"""A bridge fitted: linear maps between two models' spaces, chosen by what their questions find."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.collection import CollectionSink
from millpond.migrate.row_copy import RowCopy
from millpond.vectors import matryoshka
from millpond.vectors.linear_map import Bridge, LinearMap, Rows, procrustes, ridge

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

LEAST_RECALL = 0.9
_FITTED_ROWS = 20_000
_LEAST_ROWS = 100
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
    if len(ids) < _LEAST_ROWS:
        raise InvalidRequestError(
            f"a bridge needs {_LEAST_ROWS} rows, and the collection has {len(ids)}; run without --bridge"
        )
    chosen = random.Random(0).sample(ids, min(len(ids), _FITTED_ROWS))
    copy.fill(chosen)
    source, target, texts = _both(old, new, chosen)
    held = max(1, min(_HELD_OUT, int(len(texts) * _HELD_OUT_SHARE)))
    asked = [match[0] for text in texts[:held] if (match := _WORDS.search(text))]
    full = engine.embed(asked, role="query", dimensions=engine.spec.dimensions, normalize=False).embeddings
    questions = matryoshka.cut(full, target.shape[1], normalize=True)
    name, forward, recall = _chosen(target, source, held, questions)
    _, back, recall_back = _chosen(source, target, held, source[:held])
    if recall < least:
        raise InvalidRequestError(
            f"a bridge would find {recall:.2f} of the ten rows that {engine.spec.name} finds itself, measured with "
            f"{len(asked)} questions and {len(texts)} rows, and {least:g} are needed: the two models differ too much; "
            "run without --bridge, and search with the former model until the cut-over"
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
    if len(texts) < _LEAST_ROWS:
        raise InvalidRequestError(
            f"only {len(texts)} rows have readable vectors in both collections, and a bridge needs {_LEAST_ROWS}; run "
            "without --bridge"
        )
    mine, others = np.stack(first), np.stack(second)
    return (
        matryoshka.cut(mine, widths[0], normalize=True),
        matryoshka.cut(others, widths[1], normalize=True),
        texts,
    )


def _chosen(source: Rows, target: Rows, held: int, questions: Rows) -> tuple[str, LinearMap, float]:
    """The map from ``source`` to ``target`` by which the questions find most, its name, and the share that they find.

    Fitted on the rows behind the first ``held``; what a question finds is compared with what it finds in ``source``.
    """
    candidates = {"procrustes": procrustes(source[held:], target[held:])}
    candidates |= {f"ridge {weight:g}": ridge(source[held:], target[held:], weight) for weight in _WEIGHTS}
    own = _nearest(questions, source)
    found = {name: _recall(own, _nearest(each.apply(questions), target)) for name, each in candidates.items()}
    best = max(found, key=found.__getitem__)
    return best, _calibrated(candidates[best], source, target, questions, own), found[best]


def _nearest(questions: Rows, rows: Rows) -> Any:
    """The places of the ten rows nearest to each question, ``[q, 10]``."""
    unit = questions / np.maximum(np.linalg.norm(questions, axis=1, keepdims=True), 1e-12)
    count = min(_K, len(rows))
    return np.argpartition(-(unit @ rows.T), count - 1, axis=1)[:, :count]


def _recall(own: Any, found: Any) -> float:
    return float(np.mean([len(set(one) & set(other)) / len(one) for one, other in zip(own, found, strict=True)]))


def _calibrated(mapping: LinearMap, source: Rows, target: Rows, questions: Rows, own: Any) -> LinearMap:
    """The map with the line that turns the cosines of its hits into those of the questions' own model."""
    mapped = mapping.apply(questions)
    mapped /= np.maximum(np.linalg.norm(mapped, axis=1, keepdims=True), 1e-12)
    there = np.einsum("qd,qkd->qk", mapped, target[own]).ravel()
    here = np.einsum("qd,qkd->qk", questions, source[own]).ravel()
    scale, offset = np.polyfit(there, here, 1)
    if not (np.isfinite(scale) and scale > 0):  # cosines that do not vary tell nothing
        return mapping
    return replace(mapping, scale=float(scale), offset=float(offset))
