"""Entities: labelled stretches of a text from its tokens' probabilities, equal to transformers' pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millpond.outputs import Entity
from millpond.tasks import Aggregation

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_OUTSIDE = "O"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Units:
    """What gets one label: tokens, or words.

    Attributes:
        best: int64 ``[u]`` the label's column.
        scores: float32 ``[u]``.
        starts: int64 ``[u]`` first characters.
        stops: int64 ``[u]`` the characters behind the last.
    """

    best: IntArray
    scores: FloatArray
    starts: IntArray
    stops: IntArray


def entities(
    probs: FloatArray,
    offsets: npt.NDArray[np.int32],
    special: npt.NDArray[np.bool_],
    words: npt.NDArray[np.int32],
    text: str,
    labels: Sequence[str],
    aggregation: Aggregation,
) -> list[Entity]:
    """Turn the probabilities of a text's tokens into entities.

    ``none`` gives every token that is not special its likeliest label, ``O`` too. The others join neighbours of one
    kind (``B-X`` begins an entity, ``I-X`` or a bare ``X`` continues one) and leave ``O`` out; their score is the mean
    of what was joined. ``simple`` joins tokens. ``first``, ``average`` and ``max`` join words, whose label is that of
    the first token, of the mean of the tokens' probabilities, or of the token that is surest of its own.

    Args:
        probs: float32 ``[tokens, labels]``.
        offsets: int32 ``[tokens, 2]`` each token's characters (code points), half open.
        special: bool ``[tokens]`` tokens that stand for no text.
        words: int32 ``[tokens]`` the word that each token belongs to; -1 for none, which is a word of its own.
        text: What the offsets count in.
        labels: The names of the columns.
        aggregation: One of the five.

    Returns:
        In the order of the text.
    """
    own = np.flatnonzero(~special)
    if len(own) == 0:
        return []
    spans = offsets[own].astype(np.int64)
    if aggregation in ("none", "simple"):
        units = _tokens(probs[own], spans)
    else:
        units = _words(probs[own], spans, words[own], aggregation)
    if aggregation == "none":
        return _named(units, labels, text)
    joined = _join(units, labels)
    groups = [label.split("-", 1)[-1] for label in labels]  # of an entity that begins with such a label
    kept = np.array([group != _OUTSIDE for group in groups])[joined.best]
    found = _Units(
        best=joined.best[kept], scores=joined.scores[kept], starts=joined.starts[kept], stops=joined.stops[kept]
    )
    return _named(found, groups, text)


def _tokens(probs: FloatArray, spans: IntArray) -> _Units:
    return _Units(best=probs.argmax(axis=1), scores=probs.max(axis=1), starts=spans[:, 0], stops=spans[:, 1])


def _words(probs: FloatArray, spans: IntArray, words: npt.NDArray[np.int32], aggregation: Aggregation) -> _Units:
    """``probs [t, labels]`` and ``spans [t, 2]`` of tokens as those of the words they make."""
    begins = np.ones(len(words), dtype=np.bool_)
    begins[1:] = (words[1:] != words[:-1]) | (words[1:] < 0)
    firsts = np.flatnonzero(begins)  # [u]
    if aggregation == "first":
        chosen = probs[firsts]
    elif aggregation == "average":
        sizes = np.diff(firsts, append=len(words))[:, None]
        chosen = (np.add.reduceat(probs, firsts, axis=0, dtype=np.float64) / sizes).astype(np.float32)
    else:
        surest = probs.max(axis=1)  # [t]
        word = np.cumsum(begins) - 1  # [t]
        candidates = np.flatnonzero(surest == np.maximum.reduceat(surest, firsts)[word])
        _, first = np.unique(word[candidates], return_index=True)  # of equally sure tokens the first
        chosen = probs[candidates[first]]
    lasts = np.append(firsts[1:], len(words)) - 1
    return _Units(best=chosen.argmax(axis=1), scores=chosen.max(axis=1), starts=spans[firsts, 0], stops=spans[lasts, 1])


def _join(units: _Units, labels: Sequence[str]) -> _Units:
    """Neighbours of one kind as one; each has the label of its first part."""
    kinds: dict[str, int] = {}
    kind_of = np.array([kinds.setdefault(_kind(label), len(kinds)) for label in labels])  # [labels]
    opens = np.array([label.startswith("B-") for label in labels])  # [labels]
    kind = kind_of[units.best]  # [u]
    begins = np.ones(len(kind), dtype=np.bool_)
    begins[1:] = (kind[1:] != kind[:-1]) | opens[units.best[1:]]
    firsts = np.flatnonzero(begins)
    sizes = np.diff(firsts, append=len(kind))
    scores = np.add.reduceat(units.scores, firsts, dtype=np.float64) / sizes
    return _Units(
        best=units.best[firsts],
        scores=scores.astype(np.float32),
        starts=units.starts[firsts],
        stops=units.stops[firsts + sizes - 1],
    )


def _kind(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label


def _named(units: _Units, names: Sequence[str], text: str) -> list[Entity]:
    columns = (units.best.tolist(), units.scores.tolist(), units.starts.tolist(), units.stops.tolist())
    return [
        Entity(label=names[best], score=score, start=start, end=stop, text=text[start:stop])
        for best, score, start, stop in zip(*columns, strict=True)
    ]
