"""Rows of a batch filled up to one of few sizes by tokens that belong to no request."""

import numpy as np
import pytest
import torch
from tests.tiny import SENTENCES, Layout, write_checkpoint

from millpond import Engine
from millpond.engine.execute.packing import PackedRequests, rounded_up
from millpond.engine.input.plan import Plan
from millpond.engine.output.assemble import assemble
from millpond.engine.schedule.call import Call
from millpond.engine.schedule.request import Request
from millpond.pooling.pooler import OutputSpec

PLAN = Plan(task="embed", output=OutputSpec(kind="pooled"), limit=512, truncate="end", width=4)
TEXTS = [" ".join(SENTENCES[i : i + 1 + i % 4]) for i in range(12)]


def packed(lengths, **fields):
    call = Call([str(i) for i in range(len(lengths))], PLAN, assemble=assemble, native_width=4)
    requests = [
        Request(call=call, slot=i, ids=np.arange(1, n + 1, dtype=np.int32), **fields) for i, n in enumerate(lengths)
    ]
    return PackedRequests.of(requests, position_offset=2)


def test_rounded_sizes_are_few_and_close():
    sizes = [rounded_up(tokens) for tokens in range(1, 4097)]
    assert all(tokens <= size for tokens, size in enumerate(sizes, 1))
    assert max(size / tokens for tokens, size in enumerate(sizes, 1) if tokens > 512) < 1.07
    assert len({size for size in sizes if size > 64}) < 80
    assert sizes == sorted(sizes) and rounded_up(4096) == 4096
    assert [rounded_up(tokens) for tokens in (1, 7, 64)] == [1, 7, 64]  # a single short text is not padded


def test_filling_adds_one_sequence_and_changes_no_other():
    plain = packed([5, 3, 7])
    filled = plain.filled(20, 2)
    assert filled.requests == plain.requests and filled.lead == plain.lead
    assert filled.lengths.tolist() == [3, 5, 7, 5]
    np.testing.assert_array_equal(filled.ids[:15], plain.ids)
    np.testing.assert_array_equal(filled.positions[:15], plain.positions)
    assert filled.ids[15:].tolist() == [0] * 5
    assert filled.positions[15:].tolist() == [2] * 5  # a valid position of every model
    assert plain.filled(15, 2) is plain


def test_fields_that_only_some_models_have_are_filled_too():
    filled = packed([5, 3], attended=2, types=None).filled(12, 0)
    assert filled.keys == [2, 2, 4]
    typed = packed([3], types=np.ones(3, dtype=np.int8)).filled(5, 0)
    assert typed.types is not None and typed.types.tolist() == [1, 1, 1, 0, 0]


def rounding(engine, rounded):
    for runner in engine._replicas.runners:
        runner._rounded = rounded


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_results_do_not_change(family, task, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family, sentence_transformers=Layout())
    with Engine(folder, dtype="float32", device="cpu") as engine:
        found = []
        for rounded in (False, True):
            rounding(engine, rounded)
            output = engine.submit(task, TEXTS).result().embeddings
            found.append(output if task == "embed" else output.flat)
    assert sum(len(text.split()) for text in TEXTS) > 64  # fewer would not be rounded
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)
    assert np.abs(np.roll(found[0], 1, axis=0) - found[1]).max() > 1e-2


def test_rounding_does_not_change_a_classifier(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "bert", head="SequenceClassification", labels=3)
    with Engine(folder, dtype="float32", device="cpu") as engine:
        found = []
        for rounded in (False, True):
            rounding(engine, rounded)
            found.append(engine.classify(TEXTS).probs)
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)


@pytest.mark.parametrize(("dtype", "expected"), [("float32", False), ("bfloat16", True)])
def test_only_onednn_needs_it(dtype, expected, tmp_path):
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout())
    with Engine(folder, dtype=dtype, device="cpu") as engine:
        assert engine._replicas.runner._rounded is expected
        sizes = []
        states = engine._replicas.runner.states
        engine._replicas.runner.states = lambda batch: sizes.append(batch.input_ids.shape[1]) or states(batch)
        rows = engine.embed(TEXTS * 3).embeddings
    assert torch.from_numpy(rows).isfinite().all()
    assert all(size == rounded_up(size) for size in sizes) or not expected
