"""PrefixEncoder: which batches continue the prefix that an earlier one had, with the bits that they have without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.native.models import compiled
from tests.variants import native

from millpond.backends.backend import PackedBatch
from millpond.backends.native import prefix_encoder
from millpond.backends.native.encoder import NativeEncoder, bounds_of
from millpond.backends.native.prefix_encoder import PrefixEncoder
from millpond.native import library

pytestmark = compiled
LEAD, *DOCUMENTS = (np.random.default_rng(n).integers(5, 60, n).astype(np.int32) for n in (20, 1, 30, 70, 9))


@pytest.fixture
def encoder(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> NativeEncoder:
    encoder = native(folder_of("qwen3-windows"), library.ISAS[0], "float32")
    encode = encoder.encode

    def counted(ids: Any, bounds: Any, **options: Any) -> Any:
        computed.append(len(ids))
        return encode(ids, bounds, **options)

    computed: list[int] = []
    monkeypatch.setattr(encoder, "encode", counted)
    monkeypatch.setattr(encoder, "computed", computed, raising=False)
    return encoder


def batch(pieces: Sequence[np.ndarray], prefixes: list[int] | None = None, **fields: Any) -> PackedBatch:
    ids, bounds = np.concatenate(pieces), bounds_of([len(piece) for piece in pieces])
    other: dict[str, Any] = dict.fromkeys(("types", "adapters", "skip", "keys"))
    return PackedBatch(ids=ids, bounds=bounds, positions=ids, prefixes=prefixes, **other | fields)


def continuing(lead: np.ndarray, documents: Sequence[np.ndarray]) -> PackedBatch:
    return batch([lead, *documents], [-1, *[0] * len(documents)])


def alone(encoder: NativeEncoder, text: np.ndarray) -> np.ndarray:
    return encoder.encode(text, bounds_of([len(text)]), rows="last")[0]


def expected(encoder: NativeEncoder, lead: np.ndarray, documents: Sequence[np.ndarray]) -> np.ndarray:
    return np.stack([alone(encoder, np.concatenate((lead, document))) for document in documents])


def test_a_prefix_is_computed_by_the_first_batch_only(encoder):
    prefixes = PrefixEncoder(encoder)
    rows = expected(encoder, LEAD, DOCUMENTS)
    encoder.computed.clear()
    for part in (slice(0, 2), slice(2, 4)):
        result = prefixes.encode(continuing(LEAD, DOCUMENTS[part]), threads=1)
        assert np.array_equal(result[1:], rows[part])
    single = prefixes.encode(batch([np.concatenate((LEAD, DOCUMENTS[3]))]), threads=1)
    assert np.array_equal(single, rows[3:])
    assert encoder.computed == [20 + 1 + 30, 70 + 9, 9]
    prefixes.drop()
    assert prefixes.encode(batch([np.concatenate((LEAD, DOCUMENTS[3]))]), threads=1) is None


def test_another_prefix_of_the_same_length_takes_its_place(encoder):
    prefixes, other = PrefixEncoder(encoder), LEAD.copy()
    other[-1] += 1
    for lead in (LEAD, other, LEAD):
        result = prefixes.encode(continuing(lead, DOCUMENTS), threads=1)
        assert np.array_equal(result[1:], expected(encoder, lead, DOCUMENTS))
    assert not np.array_equal(expected(encoder, LEAD, DOCUMENTS), expected(encoder, other, DOCUMENTS))
    assert prefixes.encode(batch([np.concatenate((other, DOCUMENTS[0]))]), threads=1) is None


def test_other_batches_are_not_its(encoder, monkeypatch):
    prefixes = PrefixEncoder(encoder)
    pair = np.concatenate((LEAD, DOCUMENTS[0]))
    prefixes.encode(continuing(LEAD, DOCUMENTS), threads=1)
    for other in (
        batch([LEAD]),  # nothing behind it
        batch([pair, pair]),
        batch([LEAD, *DOCUMENTS[:2]], [-1, 0, -1]),  # a text of another call
        batch([LEAD, LEAD, *DOCUMENTS[:2]], [-1, -1, 0, 1]),
        batch([pair], skip=np.array([2], dtype=np.int32)),
        batch([pair], keys=[3]),
        batch([pair], types=np.ones(len(pair), dtype=np.int32)),
        batch([pair], adapters=np.zeros(len(pair), dtype=np.int32)),
    ):
        assert prefixes.encode(other, threads=1) is None
    monkeypatch.setattr(prefix_encoder, "_MOST_BYTES", encoder.prefix_bytes(20) - 1)
    prefixes.drop()
    assert prefixes.encode(continuing(LEAD, DOCUMENTS), threads=1) is None
