"""Texts to embed, and faults to put into a collection of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.tiny import SENTENCES

from millpond import Engine, PoolingParams
from millpond.ingest import Record
from millpond.ingest.record import point_id

ROWS = 160


def records(count: int = ROWS, *, seed: int = 0) -> list[Record]:
    """Texts of one to eight sentences in different orders, with a title."""
    chosen = random.Random(seed)
    found = []
    for number in range(count):
        sentences = chosen.sample(SENTENCES, chosen.randint(1, 8))
        words = sentences[0].split()
        chosen.shuffle(words)
        text = " ".join([" ".join(words), *sentences[1:]])
        found.append(Record(f"doc-{number}", f"{text} Part {number}.", {"title": f"Volume {number}"}))
    return found


@dataclass(frozen=True, kw_only=True)
class Damage:
    """What is put into a collection: vectors (``None``: none) and texts by row ids."""

    vectors: Mapping[str, Any]
    texts: Mapping[str, str]


Vectors = np.ndarray
Maker = Callable[["Bench", Sequence[Record]], Damage]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The engines that make vectors: of the collection, and of the faults."""

    engine: Engine
    other: Engine  # another model
    pooled: Engine  # the same model with another pooling

    def embed(self, texts: Sequence[str], engine: Engine | None = None, **options: Any) -> Vectors:
        """Vectors as documents, unless the options say otherwise."""
        limit = options.pop("limit", None)
        options = {"role": "document", **options} if "prompt" not in options else options
        params = PoolingParams(truncate_prompt_tokens=limit, normalize=True, **options)
        return np.array((engine or self.engine).submit("embed", list(texts), params).result().embeddings)


def ids(rows: Sequence[Record]) -> list[str]:
    return [point_id(row.id, row.chunk) for row in rows]


def _of(rows: Sequence[Record], vectors: Sequence[Any]) -> Damage:
    return Damage(vectors=dict(zip(ids(rows), vectors, strict=True)), texts={})


def _texts(rows: Sequence[Record]) -> list[str]:
    return [row.text for row in rows]


def _stale(bench: Bench, rows: Sequence[Record]) -> Damage:
    return _of(rows, bench.embed(_texts(records(len(rows), seed=9))))


def _stale_text(bench: Bench, rows: Sequence[Record]) -> Damage:
    return Damage(
        vectors={}, texts={row_id: f"{row.text} And more." for row_id, row in zip(ids(rows), rows, strict=True)}
    )


def _longest(rows: Sequence[Record], count: int) -> list[Record]:
    return sorted(rows, key=lambda row: -len(row.text))[:count]


def _int8(rows: Vectors) -> Vectors:
    return np.rint(rows / np.abs(rows).max(axis=1, keepdims=True) * 127) / 127 * np.abs(rows).max(axis=1, keepdims=True)


def _bfloat16(rows: Vectors) -> Vectors:
    return (np.ascontiguousarray(rows).view(np.uint32) & 0xFFFF0000).view(np.float32)


def _padded(rows: Vectors) -> Vectors:
    rows = rows.copy()
    rows[:, rows.shape[1] // 2 :] = 0
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def _swapped(bench: Bench, rows: Sequence[Record]) -> Damage:
    return _of(rows, np.roll(bench.embed(_texts(rows)), 1, axis=0))


def _duplicate(bench: Bench, rows: Sequence[Record]) -> Damage:
    return _of(rows[1:], [bench.embed(_texts(rows[:1]))[0]] * (len(rows) - 1))


def _no_text(bench: Bench, rows: Sequence[Record]) -> Damage:
    return Damage(vectors={}, texts=dict.fromkeys(ids(rows), ""))


def _nan(bench: Bench, rows: Sequence[Record]) -> Damage:
    vectors = bench.embed(_texts(rows))
    vectors[:, 3] = np.nan
    return _of(rows, vectors)


def _titled(bench: Bench, rows: Sequence[Record]) -> Damage:
    return _of(rows, bench.embed([f"{row.metadata['title']} {row.text}" for row in rows]))


# The name that each fault must get, and what puts it into some rows.
FAULTS: Mapping[str, tuple[str, Maker]] = {
    "stale vector": ("stale", _stale),
    "stale text": ("stale hash", _stale_text),
    "another model": ("model", lambda bench, rows: _of(rows, bench.embed(_texts(rows), bench.other))),
    "another pooling": ("pooling", lambda bench, rows: _of(rows, bench.embed(_texts(rows), bench.pooled))),
    "the query prompt": ("prompt", lambda bench, rows: _of(rows, bench.embed(_texts(rows), role="query"))),
    "no prompt": ("prompt", lambda bench, rows: _of(rows, bench.embed(_texts(rows), prompt=""))),
    "truncated": (
        "truncation",
        lambda bench, rows: _of(
            _longest(rows, len(rows)), bench.embed([row.text for row in _longest(rows, len(rows))], limit=32)
        ),
    ),
    "lower case": ("text", lambda bench, rows: _of(rows, bench.embed([row.text.lower() for row in rows]))),
    "title and text": ("text", _titled),
    "zero": ("zero", lambda bench, rows: _of(rows, np.zeros_like(bench.embed(_texts(rows))))),
    "not a number": ("not finite", _nan),
    "not normalized": ("length", lambda bench, rows: _of(rows, 1.7 * bench.embed(_texts(rows)))),
    "padded": ("padded", lambda bench, rows: _of(rows, _padded(bench.embed(_texts(rows))))),
    "int8": ("precision", lambda bench, rows: _of(rows, _int8(bench.embed(_texts(rows))))),
    "bfloat16": ("precision", lambda bench, rows: _of(rows, _bfloat16(bench.embed(_texts(rows))))),
    "swapped": ("swapped", _swapped),
    "duplicate": ("duplicate", _duplicate),
    "no text": ("stale hash", _no_text),
    "missing": ("missing", lambda bench, rows: _of(rows, [None] * len(rows))),
}
