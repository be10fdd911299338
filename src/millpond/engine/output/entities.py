"""Entities: labelled spans of a text from its tokens' probabilities, equal to transformers' pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millpond.tasks import Aggregation
from millpond.values.outputs import Entity

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_OUTSIDE = "O"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Units:
    """Tokens or words, each with one label."""

    best: IntArray  # int64 `[u]` column of the label
    scores: FloatArray  # float32 `[u]`
    starts: IntArray  # int64 `[u]` first character
    stops: IntArray  # int64 `[u]` the character after the last


def entities(
    probs: FloatArray,  # float32 `[tokens, labels]`
    offsets: npt.NDArray[np.int32],  # int32 `[tokens, 2]` each token's character span (code points), half open
    special: npt.NDArray[np.bool_],  # bool `[tokens]` tokens that stand for no text
    words: npt.NDArray[np.int32],  # int32 `[tokens]` number of each token's word; a token with -1 is a word by itself
    text: str,  # the text that the offsets refer to
    labels: Sequence[str],  # names of the columns
    aggregation: Aggregation,  # `none`, `simple`, `first`, `average` or `max`
) -> list[Entity]:
    """Turn the probabilities of a text's tokens into entities.

    ``none`` gives every token that is not special its likeliest label, ``O`` included. The others join neighbours of
    one kind (``B-X`` begins an entity, ``I-X`` or a bare ``X`` continues one) and leave ``O`` out; an entity's score is
    the mean score of the joined tokens or words. ``simple`` joins tokens. ``first``, ``average`` and ``max`` join
    words; a word has the label of its first token, of the mean of its tokens' probabilities, or of the token with the
    highest probability.

    Returns:
        Entities in the order of the text.
    """
    kept = np.flatnonzero(~special)
    if len(kept) == 0:
        return []
    spans = offsets[kept].astype(np.int64)
    if aggregation in ("none", "simple"):
        units = _tokens(probs[kept], spans)
    else:
        units = _words(probs[kept], spans, words[kept], aggregation)
    if aggregation == "none":
        return _named(units, labels, text)
    joined = _join(units, labels)
    groups = [label.split("-", 1)[-1] for label in labels]  # name of an entity that begins with each label
    inside = np.array([group != _OUTSIDE for group in groups])[joined.best]
    named = _Units(
        best=joined.best[inside],
        scores=joined.scores[inside],
        starts=joined.starts[inside],
        stops=joined.stops[inside],
    )
    return _named(named, groups, text)


def _tokens(probs: FloatArray, spans: IntArray) -> _Units:
    return _Units(best=probs.argmax(axis=1), scores=probs.max(axis=1), starts=spans[:, 0], stops=spans[:, 1])


def _words(probs: FloatArray, spans: IntArray, words: npt.NDArray[np.int32], aggregation: Aggregation) -> _Units:
    """Join tokens, of ``probs [t, labels]`` and ``spans [t, 2]``, to words."""
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
        _, first = np.unique(word[candidates], return_index=True)  # of equal ones, the first token
        chosen = probs[candidates[first]]
    lasts = np.append(firsts[1:], len(words)) - 1
    return _Units(best=chosen.argmax(axis=1), scores=chosen.max(axis=1), starts=spans[firsts, 0], stops=spans[lasts, 1])


def _join(units: _Units, labels: Sequence[str]) -> _Units:
    """Join neighbours of one kind; the result has the label of its first part."""
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
