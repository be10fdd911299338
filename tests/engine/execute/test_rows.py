"""Batches of which one row per text is read: the last layer computes only these, with the same results."""

import numpy as np
import pytest
from tests.tiny import TEXTS, write_checkpoint

from millpond import Engine, PoolingParams
from millpond.engine.execute.runner import Runner
from millpond.engine.input import resolve
from millpond.engine.output.assemble import assemble
from millpond.engine.schedule.call import Call
from millpond.engine.schedule.request import Request

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
    states = Runner.states

    def recording(self, batch, rows=None):
        seen.append(rows is not None)
        return states(self, batch, rows)

    monkeypatch.setattr(Runner, "states", recording)
    return seen


@pytest.mark.parametrize(("family", "pooling"), CASES)
def test_a_row_read_alone_is_the_same(family, pooling, tmp_path, row_reads, monkeypatch):
    folder = write_checkpoint(tmp_path / family, family)
    with Engine(folder, pooling=pooling, convert="embed", dtype="float32", device="cpu") as engine:
        alone = engine.embed(list(TEXTS), normalize=False).embeddings
        assert row_reads
        assert all(row_reads)
        monkeypatch.setattr(Runner, "_call_of_rows", lambda self, batch, outputs: None)
        whole = engine.embed(list(TEXTS), normalize=False).embeddings
        assert not row_reads[-1]
    np.testing.assert_allclose(alone, whole, atol=1e-5 * np.abs(whole).max())
    with Engine(folder, pooling="mean", convert="embed", dtype="float32", device="cpu") as engine:
        assert np.abs(engine.embed(list(TEXTS), normalize=False).embeddings - whole).max() > 1e-3


@pytest.mark.parametrize("pooling", ["mean", "cls+mean", "max"])
def test_other_poolings_compute_all_rows(pooling, tmp_path, row_reads):
    with Engine(write_checkpoint(tmp_path / "bert"), pooling=pooling, dtype="float32", device="cpu") as engine:
        engine.embed(list(TEXTS))
    assert row_reads
    assert not any(row_reads)


def test_a_per_token_call_in_the_batch_gets_its_rows(tmp_path, row_reads):
    with Engine(write_checkpoint(tmp_path / "bert"), pooling="cls", dtype="float32", device="cpu") as engine:
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
