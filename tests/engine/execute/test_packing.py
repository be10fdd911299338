"""Batches as rows of tokens: packed, filled up, run, and of some only one row for each text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.tiny import SENTENCES, TEXTS, write_checkpoint
from tests.tiny.layouts import Dense, Layout, Normalize, Pooling

from millpond import Engine, PoolingParams
from millpond.backends.backend import OutputSpec
from millpond.backends.torch.device_batch import DeviceBatch, rounded_up
from millpond.backends.torch.model import TorchModel
from millpond.engine.execute.packing import pack
from millpond.engine.input import resolve
from millpond.engine.input.plan import Plan
from millpond.engine.output.assemble import assemble
from millpond.engine.schedule.call import Call
from millpond.engine.schedule.request import Prefix, Request
from millpond.native import library

pytestmark = pytest.mark.torch

PLAN = Plan(task="embed", output=OutputSpec(kind="pooled"), limit=512, truncate="end", width=4, skip=2, adapter=1)


def batch_of(fields, *, rounded=False, plan=PLAN):
    call = Call([str(i) for i in range(len(fields))], plan, assemble=assemble, native_width=4)
    requests = [Request(call=call, slot=i, **each) for i, each in enumerate(fields)]
    packed = pack(requests, position_offset=2)
    tokens = rounded_up(len(packed.batch.ids)) if rounded else len(packed.batch.ids)
    batch = DeviceBatch(packed=packed.batch.filled(tokens, 2), device=torch.device("cpu"))
    return packed, batch


def ids(*tokens):
    return np.array(tokens, dtype=np.int32)


TYPED = [
    {"ids": ids(5, 6, 7), "types": np.array([0, 1, 1], dtype=np.int8)},
    {"ids": ids(8)},
    {"ids": ids(9, 10, 11, 12), "attended": 3},
]


def test_the_tensors_have_the_numbers_of_the_arrays():
    packed, batch = batch_of(TYPED)
    assert [request.slot for request in packed.requests] == [1, 0, 2] and packed.lead == 0
    assert batch.input_ids.tolist() == [[8, 5, 6, 7, 9, 10, 11, 12]]
    assert batch.position_ids.tolist() == [[2, 2, 3, 4, 2, 3, 4, 5]]
    assert batch.token_types is not None and batch.token_types.tolist() == [[0, 0, 1, 1, 0, 0, 0, 0]]
    assert batch.adapter_ids is not None and batch.adapter_ids.tolist() == [[1] * 8]
    assert batch.skip is not None and batch.skip.tolist() == [0, 2, 2]  # a text keeps a token to pool
    tensors = (batch.input_ids, batch.position_ids, batch.token_types, batch.adapter_ids)
    assert [tensor.dtype for tensor in tensors] == [torch.int64] * 4 and batch.skip.dtype == torch.int32
    assert batch.segments.cu_seqlens.tolist() == batch.packed.bounds.tolist()
    assert batch.segments.keys == (1, 3, 3) and batch.segments.seqused_k is not None


def test_positions_go_on_after_a_shared_prefix():
    prefix = Prefix(length=2)
    fields = [{"ids": ids(1, 2, 3), "prefix": prefix}, {"ids": ids(1, 2, 4, 5), "prefix": prefix}, {"ids": ids(7, 8)}]
    packed = batch_of(fields, plan=Plan(task="score", output=PLAN.output, limit=9, truncate="end", width=1))[0]
    assert packed.lead == 1
    packed = packed.batch
    assert packed.prefixes == [-1, 0, -1, 0]
    assert packed.ids.tolist() == [1, 2, 3, 7, 8, 4, 5]
    assert packed.bounds.tolist() == [0, 2, 3, 5, 7]
    assert packed.positions.tolist() == [2, 3, 4, 2, 3, 4, 5]
    assert packed.types is packed.adapters is packed.skip is packed.keys is None


def test_a_forward_that_reads_the_arrays_has_no_tensors_made():
    _, batch = batch_of(TYPED)
    assert batch.packed.ids.tolist() and vars(batch).keys() == {"packed", "device"}
    segments = batch.segments
    assert vars(segments).keys().isdisjoint({"cu_seqlens", "seqused_k", "runs"})
    assert batch.input_ids is batch.input_ids and segments.cu_seqlens is segments.cu_seqlens


PASSAGES = [" ".join(SENTENCES[i : i + 1 + i % 4]) for i in range(12)]


def test_rounded_sizes_are_few_and_close():
    sizes = [rounded_up(tokens) for tokens in range(1, 4097)]
    assert all(tokens <= size for tokens, size in enumerate(sizes, 1))
    assert max(size / tokens for tokens, size in enumerate(sizes, 1) if tokens > 512) < 1.07
    assert len({size for size in sizes if size > 64}) < 80
    assert sizes == sorted(sizes) and rounded_up(4096) == 4096
    assert [rounded_up(tokens) for tokens in (1, 7, 64)] == [1, 7, 64]  # a single short text is not padded


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_results_do_not_change(family, task, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family, sentence_transformers=Layout())
    with Engine(folder, dtype="float32", device="cpu", backend="torch") as engine:
        found = []
        for rounded in (False, True):
            engine._replicas.runner.model._rounded = rounded
            output = engine.submit(task, PASSAGES).result().embeddings
            found.append(output if task == "embed" else output.flat)
    assert sum(len(text.split()) for text in PASSAGES) > 64  # fewer would not be rounded
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)
    assert np.abs(np.roll(found[0], 1, axis=0) - found[1]).max() > 1e-2


@pytest.mark.parametrize(("dtype", "expected"), [("float32", False), ("bfloat16", True)])
def test_only_onednn_needs_it(dtype, expected, tmp_path):
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout())
    with Engine(folder, dtype=dtype, device="cpu", backend="torch") as engine:
        assert engine._replicas.runner.model._rounded is expected
        sizes = []
        states = engine._replicas.runner.model.states
        engine._replicas.runner.model.states = lambda batch: sizes.append(batch.input_ids.shape[1]) or states(batch)
        rows = engine.embed(PASSAGES * 3).embeddings
    assert torch.from_numpy(rows).isfinite().all()
    assert all(size == rounded_up(size) for size in sizes) or not expected


# Each family with one pooling here, and all with both in the second ring.
FAST = {"bert": "cls", "modernbert": "lasttoken", "qwen3": "lasttoken", "gemma2": "cls"}


FAMILIES = ["bert", "mpnet", "electra", "modernbert", "nomic", "gte", "qwen3", "gemma2", "llama"]


CASES = [
    pytest.param(family, pooling, marks=() if FAST.get(family) == pooling else pytest.mark.contract)
    for family in FAMILIES
    for pooling in ("cls", "lasttoken")
]


@pytest.fixture
def row_reads(monkeypatch):
    """Of each forward, whether it computed some rows only."""
    seen = []
    states = TorchModel.states

    def recording(self, batch, rows=None):
        seen.append(rows is not None)
        return states(self, batch, rows)

    monkeypatch.setattr(TorchModel, "states", recording)
    return seen


@pytest.mark.parametrize(("family", "pooling"), CASES)
def test_a_row_read_alone_is_the_same(family, pooling, tmp_path, row_reads, monkeypatch):
    folder = write_checkpoint(tmp_path / family, family)
    with Engine(folder, pooling=pooling, convert="embed", dtype="float32", device="cpu", backend="torch") as engine:
        alone = engine.embed(list(TEXTS), normalize=False).embeddings
        assert row_reads and all(row_reads)
        monkeypatch.setattr(TorchModel, "call_of_rows", lambda self, batch, outputs: None)
        whole = engine.embed(list(TEXTS), normalize=False).embeddings
        assert not row_reads[-1]
    np.testing.assert_allclose(alone, whole, atol=1e-5 * np.abs(whole).max())
    with Engine(folder, pooling="mean", convert="embed", dtype="float32", device="cpu", backend="torch") as engine:
        assert np.abs(engine.embed(list(TEXTS), normalize=False).embeddings - whole).max() > 1e-3


@pytest.mark.parametrize("pooling", ["mean", "cls+mean", "max"])
def test_other_poolings_compute_all_rows(pooling, tmp_path, row_reads):
    with Engine(
        write_checkpoint(tmp_path / "bert"), pooling=pooling, dtype="float32", device="cpu", backend="torch"
    ) as engine:
        engine.embed(list(TEXTS))
    assert row_reads and not any(row_reads)


def test_a_per_token_call_in_the_batch_gets_its_rows(tmp_path, row_reads):
    with Engine(
        write_checkpoint(tmp_path / "bert"), pooling="cls", dtype="float32", device="cpu", backend="torch"
    ) as engine:
        expected = engine.embed(["a river"]).embeddings[0], engine.token_embed(["a river"]).embeddings[0]
        row_reads.clear()
        requests = [a_request(engine, task) for task in ("embed", "token_embed")]
        rows = {request.call.plan.task: found for request, found in engine._replicas.runner.run(requests)}
    assert row_reads == [False]
    np.testing.assert_allclose(unit(rows["embed"]), unit(expected[0]), atol=1e-6)
    np.testing.assert_allclose(unit(rows["token_embed"]), unit(expected[1]), atol=1e-6)


def unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def a_request(engine, task):
    """The request of one text, as the engine queues it."""
    loaded = engine._loaded
    plan = resolve.plan(task, PoolingParams(), loaded, count=1)
    call = Call(["a river"], plan, assemble=assemble, native_width=loaded.width(plan.output))
    ids = loaded.encoder.encode(["a river"], plan, index_of=lambda i: i)[0].ids
    return Request(call=call, slot=0, ids=ids)


NATIVE_TEXTS = [*SENTENCES[:6], "a", " ".join(SENTENCES[:5])]


LAYOUTS = {
    "mean": Layout(modules=(Pooling(),)),
    "cls": Layout(modules=(Pooling(modes=("cls",)),)),
    "max": Layout(modules=(Pooling(modes=("max",)),)),
    "cls and mean": Layout(modules=(Pooling(modes=("cls", "mean")),)),
    "mean without prompt": Layout(modules=(Pooling(include_prompt=False),)),
    "cls without prompt": Layout(modules=(Pooling(modes=("cls",), include_prompt=False),)),
    "dense": Layout(modules=(Pooling(), Dense(out_features=12))),
    "cls, normalized, dense": Layout(modules=(Pooling(modes=("cls",)), Normalize(), Dense(out_features=12))),
    "tokens dense": Layout(modules=(Dense(out_features=12, stage="token_embeddings"), Pooling())),
}


# Widths that the kernels have.
SIZE = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}


def vectors(folder, backend):
    """Of all texts in one batch, and of one alone; with a prompt and without; and the texts' token vectors."""
    with Engine(folder, backend=backend, dtype="float32", device="cpu") as engine:
        return [
            engine.embed(NATIVE_TEXTS, normalize=False).embeddings,
            engine.embed(NATIVE_TEXTS[:1], normalize=False).embeddings,
            engine.embed(NATIVE_TEXTS, prompt="find the river: ", normalize=False).embeddings,
            engine.token_embed(NATIVE_TEXTS, normalize=False).embeddings.flat,
        ]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.skipif(library.absent() is not None, reason="the compiled kernels are not available")
def test_rows_of_a_native_forward_equal_those_of_torch(name, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "bert", sentence_transformers=LAYOUTS[name], config=SIZE)
    found, expected = vectors(folder, "native"), vectors(folder, "torch")
    for rows, same in zip(found, expected, strict=True):
        np.testing.assert_allclose(rows, same, atol=2e-5)
    assert np.abs(np.roll(found[0], 1, axis=0) - expected[0]).max() > 1e-3
