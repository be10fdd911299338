"""Native encoders of checkpoints: texts in batches, shared prefixes, growing tables and adapters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.backbones import backbone, expected_states, states
from tests.native.models import PRECISIONS, TARGETS, compiled, marks_of
from tests.parity.rotary_oracles import jina as described_jina
from tests.tiny import write_checkpoint
from tests.tiny.families import JINA_TASKS
from tests.variants import (
    ADAPTED,
    ENCODERS,
    JINA,
    LENGTHS,
    TOLERANCE,
    VISIBLE,
    Rows,
    apart,
    assert_same_direction,
    native,
    native_states,
    some_ids,
)

from millpond import Engine
from millpond.backends.native.encoder import NativeEncoder, bounds_of
from millpond.backends.native.memory import Memory
from millpond.backends.native.packing.weight_packer import NotSupported
from millpond.backends.native.plans import rotation
from millpond.native import library

# --- The native forward of decoders: each family and setting compared with transformers' own class --------------------


SOME = (17, 1, 300, 2, 64, 31, 33)
EACH_PRECISION = [pytest.param(isa, dtype, marks=marks_of(isa)) for isa, dtype in PRECISIONS.items()]


def texts(lengths: Sequence[int] = SOME) -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.integers(5, 60, length).astype(np.int32) for length in lengths]


def encoded(encoder: NativeEncoder, pieces: Sequence[np.ndarray], **options: Any) -> Rows:
    return encoder.encode(np.concatenate(pieces), bounds_of([len(piece) for piece in pieces]), **options)


@pytest.mark.parametrize(("isa", "dtype"), EACH_PRECISION)
@pytest.mark.parametrize("name", ["qwen3-windows", "gemma2", "gemma3"])
def test_a_text_has_the_same_states_in_every_batch(name, isa, dtype, folder_of):
    encoder = native(folder_of(name), isa, dtype)
    together = encoded(encoder, texts())
    alone = np.concatenate([encoded(encoder, [text]) for text in texts()])
    assert np.array_equal(together, alone)
    encoder.block = 64
    for threads in (1, 2, 3):
        assert np.array_equal(encoded(encoder, texts(), threads=threads), together)
    last = encoded(encoder, texts(), rows="last")
    assert np.array_equal(last, together[np.cumsum(SOME) - 1])


# --- Texts that continue another one. ---------------------------------------------------------------------------------


LEADS = (-1, 0, 0, -1, -1, 4, 0, 4, 4)
SHARED = (70, 1, 9, 40, 17, 33, 130, 2, 64)  # tokens of each, those of its lead left out


def shared() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Texts as a call with leads takes them, and whole."""
    pieces = texts(SHARED)
    whole = [
        piece if lead < 0 else np.concatenate((pieces[lead], piece)) for piece, lead in zip(pieces, LEADS, strict=True)
    ]
    return pieces, whole


@pytest.mark.parametrize(("isa", "dtype"), EACH_PRECISION)
@pytest.mark.parametrize("name", ["qwen3-windows", "gemma2", "llama-one-key-head"])
def test_a_text_continues_another_one(name, isa, dtype, folder_of):
    encoder = native(folder_of(name), isa, dtype)
    pieces, whole = shared()
    rows = [encoded(encoder, [text])[-len(piece) :] for piece, text in zip(pieces, whole, strict=True)]
    leads = np.array(LEADS, dtype=np.int32)
    for encoder.block in (64, 100, 512):
        for threads in (1, 2):
            assert np.array_equal(encoded(encoder, pieces, leads=leads, threads=threads), np.concatenate(rows))
            last = encoded(encoder, pieces, leads=leads, threads=threads, rows="last")
            assert np.array_equal(last, np.stack([own[-1] for own in rows]))


@pytest.mark.parametrize(("isa", "dtype"), EACH_PRECISION)
@pytest.mark.parametrize("name", ["qwen3-windows", "gemma2", "llama-one-key-head"])
def test_a_later_batch_continues_the_prefix_of_an_earlier_one(name, isa, dtype, folder_of):
    encoder = native(folder_of(name), isa, dtype)
    lead, *pieces = texts(SHARED)
    whole = [encoded(encoder, [np.concatenate((lead, piece))])[len(lead) :] for piece in pieces]
    leads = np.array([-1, 0], dtype=np.int32)
    prefix = Memory(encoder.prefix_bytes(len(lead)))
    given = {"prefix": prefix, "prefix_tokens": len(lead)}
    for threads in (1, 2):
        prefix.bytes[:] = 255
        first = encoded(encoder, [lead, pieces[0]], leads=leads, rows="last", threads=threads, **given)
        assert np.array_equal(first[1], whole[0][-1])
        for encoder.block in (64, 100, 512):
            assert np.array_equal(encoded(encoder, pieces, threads=threads, **given), np.concatenate(whole))
            last = encoded(encoder, pieces, rows="last", threads=threads, **given)
            assert np.array_equal(last, np.stack([own[-1] for own in whole]))


@pytest.mark.parametrize(("isa", "dtype"), EACH_PRECISION)
@pytest.mark.parametrize(("name", "block"), [("llama-biases", 64), ("gemma2", 96), ("eurobert", 128)])
def test_slices_of_a_long_text_change_nothing(name, isa, dtype, block, folder_of):
    encoder = native(folder_of(name), isa, dtype)
    text = texts([block * 3 + 1])
    for threads in (1, 2):
        for rows in ("all", "mean", "last"):
            encoder.block = 512
            whole = encoded(encoder, text, rows=rows)
            encoder.block = block
            assert np.array_equal(encoded(encoder, text, rows=rows, threads=threads), whole)


# --- Rotary angles. ---------------------------------------------------------------------------------------------------


def test_tables_grow_to_the_longest_text(folder_of, monkeypatch):
    folder = folder_of("llama-llama3")
    expected = encoded(native(folder, library.ISAS[0]), texts())
    monkeypatch.setattr(rotation, "_FIRST", 2)
    encoder = native(folder, library.ISAS[0])
    (table,) = encoder.plan.rotations
    sizes = []
    for text, rows in sorted(
        zip(texts(), np.split(expected, np.cumsum(SOME)[:-1]), strict=True), key=lambda pair: len(pair[0])
    ):
        assert np.array_equal(encoded(encoder, [text]), rows)
        sizes.append(table.positions)
    assert sizes == [2, 2, 17, 34, 34, 68, 300]


# --- Native plans of ModernBERT, NomicBert, GTE and jina-embeddings-v3: many lengths, against transformers' classes ---


@compiled
@pytest.mark.parametrize("variant", ["modernbert", "modernbert-window-128", "modernbert-biases", "nomic", "gte"])
@pytest.mark.parametrize("threads", [2])
def test_a_text_alone_has_the_same_states_to_the_bit(variant, threads, folder_of):
    encoder = native(folder_of(variant))
    ids, bounds = some_ids(LENGTHS), bounds_of(LENGTHS)
    together = encoder.encode(ids, bounds, threads=threads)
    for first, end in pairwise(bounds):
        alone = encoder.encode(ids[first:end].copy(), bounds_of([end - first]))
        assert np.array_equal(alone, together[first:end])


@compiled
@pytest.mark.parametrize("variant", ["nomic", "gte"])
def test_token_types(variant, tmp_path):
    family, config = ENCODERS[variant]
    folder = write_checkpoint(tmp_path / "model", family, config=config | {"type_vocab_size": 2})
    types = np.random.default_rng(6).integers(0, 2, sum(LENGTHS)).astype(np.int32)
    own, theirs = native_states(native(folder), types=types), backbone(folder, packed=False)
    assert apart(own, states(theirs, types=types)) <= TOLERANCE
    assert apart(own, states(theirs)) > VISIBLE


@compiled
@pytest.mark.parametrize("variant", ["modernbert", "gte"])
def test_tables_of_rotary_positions_grow_with_the_longest_text(variant, folder_of):
    folder = folder_of(variant)
    encoder = native(folder)
    lengths = (3, 2000, 600, 5)  # beyond max_position_embeddings, which a caller's max_length may be
    first = native_states(encoder, (3,))
    assert all(rotation.positions < 1000 for rotation in encoder.plan.rotations)
    own = native_states(encoder, lengths)
    assert apart(own, expected_states(folder, lengths)) <= 2 * TOLERANCE
    assert np.array_equal(native_states(encoder, (3,)), first)


# --- jina-embeddings-v3: an adapter for each text. -------------------------------------------------------------------


def adapters_of(count: int) -> np.ndarray:  # [texts]
    """Every adapter and none, so that neighbours differ."""
    return (np.arange(len(LENGTHS)) % (count + 1) - 1).astype(np.int32)


@lru_cache(maxsize=64)
@torch.inference_mode()
def described_states(folder: Path) -> Rows:
    """Those of the description, with each text's adapter merged into the weights; types are 0."""
    config = json.loads((folder / "config.json").read_text())
    tasks = config["lora_adaptations"]
    references = [described_jina(folder, config, task) for task in (*tasks, None)]  # the last one: index -1
    texts = torch.from_numpy(some_ids(LENGTHS)).long().split(LENGTHS)
    chosen = zip(adapters_of(len(tasks)), texts, strict=True)
    return torch.cat([references[index](text) for index, text in chosen]).numpy()


@pytest.mark.parametrize("variant", ADAPTED)
@pytest.mark.parametrize(("highest", "dtype"), TARGETS)
@pytest.mark.parametrize("threads", [2])
def test_each_text_has_its_adapter(variant, highest, dtype, threads, folder_of, record_property):
    folder = folder_of(variant)
    encoder = native(folder, highest, dtype)
    own = native_states(encoder, adapters=adapters_of(encoder.plan.adapters), threads=threads)
    expected = described_states(folder)
    if dtype == "float32":
        worst = apart(own, expected)
        record_property("error", worst)
        assert worst <= TOLERANCE
    else:
        assert_same_direction(own, expected)


@compiled
@pytest.mark.parametrize("variant", ["jina", "jina-rank-16", "jina-wide-feed"])
@pytest.mark.parametrize("threads", [2])
def test_neighbours_with_other_adapters_change_no_bit(variant, threads, folder_of):
    encoder = native(folder_of(variant))
    chosen = adapters_of(encoder.plan.adapters)
    ids, bounds = some_ids(LENGTHS), bounds_of(LENGTHS)
    together = encoder.encode(ids, bounds, adapters=chosen, threads=threads)
    for i, (first, end) in enumerate(pairwise(bounds)):
        for adapters in (chosen[i : i + 1], None) if chosen[i] < 0 else (chosen[i : i + 1],):
            alone = encoder.encode(ids[first:end].copy(), bounds_of([end - first]), adapters=adapters)
            assert np.array_equal(alone, together[first:end])


@compiled
@pytest.mark.parametrize("variant", ["jina", "jina-rank-16", "jina-wide-feed"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_text_longer_than_a_block_keeps_its_adapter(variant, threads, folder_of):
    """Such a text runs in slices, which add its adapter's products row by row."""
    encoder = native(folder_of(variant))
    lengths = [33, 3 * 64 + 1, 1, 2 * 64, 5 * 64 + 40]
    chosen = np.array([1, 0, -1, 2, 1], dtype=np.int32) % encoder.plan.adapters
    chosen[2] = -1
    ids, bounds = some_ids(tuple(lengths)), bounds_of(lengths)
    for rows in ("all", "first", "last", "mean"):
        encoder.block = 512
        whole = encoder.encode(ids, bounds, adapters=chosen, rows=rows)
        encoder.block = 64
        assert np.array_equal(encoder.encode(ids, bounds, adapters=chosen, rows=rows, threads=threads), whole)
    assert not np.array_equal(whole, encoder.encode(ids, bounds, rows="mean"))  # without any adapter


@compiled
def test_types_of_each_adapter(folder_of):
    """The types are merged with the adapters; torch's operators add both to each token."""
    module, encoder = backbone(folder_of("jina-types")), native(folder_of("jina-types"))
    chosen = adapters_of(encoder.plan.adapters)
    types = np.random.default_rng(6).integers(0, 2, sum(LENGTHS)).astype(np.int32)
    own = native_states(encoder, types=types, adapters=chosen)
    assert apart(own, states(module, types=types, adapters=chosen)) <= TOLERANCE
    assert apart(own, states(module, types=1 - types, adapters=chosen)) > VISIBLE


@compiled
def test_jina_without_adapters(tmp_path):
    """As jina-colbert-v2."""
    folder = write_checkpoint(tmp_path / "model", "jina", config=JINA | {"lora_adaptations": []})
    encoder = native(folder)
    assert encoder.plan.adapters == 0
    assert apart(native_states(encoder), states(backbone(folder))) <= TOLERANCE


@compiled
def test_the_engine_gives_each_text_its_adapter(folder_of):
    folder = folder_of("jina")
    texts = ["The pond is deep.", "a", " ".join(["How deep is it?"] * 20)]
    options = {"dtype": "float32", "device": "cpu"}
    with Engine(folder, backend="native", **options) as engine, Engine(folder, backend="torch", **options) as reference:
        for adapter in (None, *JINA_TASKS):
            own, theirs = (one.embed(texts, adapter=adapter).embeddings for one in (engine, reference))
            assert abs(own - theirs).max() <= TOLERANCE


@compiled
@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [({"lora_rank": 40}, {}, "5 adapters of rank 40"), ({}, {"int8": "feeds"}, "adapters of weights in eight bits")],
)
def test_adapters_without_kernels_are_named(config, options, reason, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "jina", config=JINA | config)
    with pytest.raises(NotSupported, match=reason):
        native(folder, **options)


@compiled
@pytest.mark.parametrize("adapter", [5, -2])
def test_an_adapter_that_there_is_not(adapter, folder_of):
    encoder = native(folder_of("jina"))
    with pytest.raises(IndexError, match="outside of the model's 5"):
        native_states(encoder, (3, 2), adapters=np.array([0, adapter], dtype=np.int32))


@pytest.mark.contract
@compiled
def test_calls_of_several_threads_while_the_tables_grow(folder_of):
    folder = folder_of("modernbert")
    lengths = [(5, 40), (700, 3), (9,), (1500,), (64, 64), (3000, 1)] * 2
    expected = [native_states(native(folder), one) for one in lengths]
    encoder = native(folder)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda one: native_states(encoder, one), lengths))
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(encoder.plan.rotations) == 2
    assert np.diff([rotation.positions for rotation in encoder.plan.rotations]) == [0]
