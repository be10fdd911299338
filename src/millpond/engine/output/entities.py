"""Entities: labelled spans of a text from its tokens' probabilities, equal to transformers' pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from millpond.engine.tokenize.tokenized import TokenAlignment
from millpond.tasks import Aggregation
from millpond.values.outputs import Entity

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_OUTSIDE = "O"


class _Units(NamedTuple):
    """Tokens or words, ``[u]``, each with one label."""

    best: IntArray  # column of the label
    scores: FloatArray
    starts: IntArray  # first character
    stops: IntArray  # the character after the last


def entities(
    probs: FloatArray,  # [tokens, labels]
    alignment: TokenAlignment,  # a token whose word is -1 is a word by itself
    text: str,
    labels: Sequence[str],  # of the columns
    aggregation: Aggregation,
) -> list[Entity]:
    """Turn the probabilities of a text's tokens into entities.

    ``none`` gives every token that is not special its likeliest label, ``O`` included. The others join neighbours of
    one kind (``B-X`` begins an entity, ``I-X`` or a bare ``X`` continues one) and leave ``O`` out; an entity's score is
    the mean score of the joined tokens or words. ``simple`` joins tokens. ``first``, ``average`` and ``max`` join
    words; a word has the label of its first token, of the mean of its tokens' probabilities, or of the token with the
    highest probability.
    """
    kept = np.flatnonzero(~alignment.special)
    if len(kept) == 0:
        return []
    spans = alignment.offsets[kept].astype(np.int64)
    if aggregation in ("none", "simple"):
        units = _units(probs[kept], spans[:, 0], spans[:, 1])
    else:
        units = _words(probs[kept], spans, alignment.words[kept], aggregation)
    if aggregation == "none":
        return _named(units, labels, text)
    joined = _join(units, labels)
    groups = [label.split("-", 1)[-1] for label in labels]  # name of an entity that begins with each label
    inside = np.array([group != _OUTSIDE for group in groups])[joined.best]
    return _named(_Units(*(column[inside] for column in joined)), groups, text)


def _units(probs: FloatArray, starts: IntArray, stops: IntArray) -> _Units:
    return _Units(probs.argmax(axis=1), probs.max(axis=1), starts, stops)


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
    return _units(chosen, spans[firsts, 0], spans[lasts, 1])


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
    return _Units(units.best[firsts], scores.astype(np.float32), units.starts[firsts], units.stops[firsts + sizes - 1])


def _kind(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label


def _named(units: _Units, names: Sequence[str], text: str) -> list[Entity]:
    return [
        Entity(label=names[best], score=score, start=start, end=stop, text=text[start:stop])
        for best, score, start, stop in zip(*(column.tolist() for column in units), strict=True)
    ]
