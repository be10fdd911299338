"""Sparse weights over a recording backend: read when the batch has run, beside other outputs of the same batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.recording import Recording
from tests.tiny import TEXTS
from tests.tiny.heads import write_m3, write_splade

from millpond import Engine
from millpond.engine import loading
from millpond.engine.execute.cuda import worker as cuda_worker
from tests import recording

MANY = [f"{text} {i}" for i, text in enumerate(TEXTS * 3)]


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    recording.pretend_varlen(monkeypatch)
    monkeypatch.setattr(cuda_worker, "_AHEAD_TOKENS", 1)
    made: list[Recording] = []

    def backend(device: torch.device) -> Recording:
        made.append(Recording())
        return made[-1]

    monkeypatch.setattr(loading, "_backend", backend)
    return made


@pytest.mark.parametrize("kind", ["splade", "m3"])
def test_weights_are_those_of_a_plain_engine(kind, backends, tmp_path, monkeypatch):
    folder = (write_splade if kind == "splade" else write_m3)(tmp_path / "model")
    with Engine(folder, dtype="float32", device="cpu", max_batch_tokens=64) as engine:
        found = engine.sparse_embed(MANY)
        assert backends[0].log.count("upload") > 2
        if kind == "m3":  # in one batch with vectors
            dense, other = engine.submit("embed", TEXTS), engine.submit("sparse_embed", TEXTS)
            assert len(dense.result().embeddings) == len(TEXTS)
            assert len(other.result()) == len(TEXTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_backend", lambda device: None)
        with Engine(folder, dtype="float32", device="cpu") as engine:
            expected = engine.sparse_embed(MANY)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert np.allclose([*one.values()], [*other.values()], atol=1e-4, rtol=1e-4)


def test_memory_that_runs_out_while_weights_are_read_costs_no_result(backends, tmp_path):
    with Engine(write_splade(tmp_path / "model"), dtype="float32", device="cpu") as engine:
        failed = []

        def fault(operation: str) -> None:
            if operation == "copying" and len(failed) < 2:
                failed.append(operation)
                raise torch.OutOfMemoryError("CUDA out of memory")

        backends[0].fault = fault
        assert len(engine.sparse_embed(MANY)) == len(MANY) and len(failed) == 2
