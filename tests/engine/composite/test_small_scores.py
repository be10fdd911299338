"""A score of a few pairs by an embedder: both sides in one batch, run and put together in the caller's thread."""

import threading

import numpy as np
import pytest
import torch
from tests.tiny import SENTENCES, Layout, write_checkpoint

from millpond import Engine
from millpond.engine.schedule.intake import INLINE_TEXTS

HERE = threading.current_thread


@pytest.fixture
def engine(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "bert", sentence_transformers=Layout())
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = Engine(folder, dtype="float32", device="cpu")
    finally:
        torch.set_num_threads(before)
    with engine:
        while engine._dispatcher._scheduler._idle < len(engine._dispatcher.workers):  # a worker first looks for work
            threading.Event().wait(0.001)
        yield engine


@pytest.fixture
def batches(engine, monkeypatch):
    """Of each batch its thread and its number of texts."""
    seen = []
    run = engine._replicas.runner.run
    monkeypatch.setattr(engine._replicas.runner, "run", lambda batch: seen.append((HERE(), len(batch))) or run(batch))
    return seen


@pytest.mark.parametrize("method", ["cosine", "maxsim"])
def test_a_small_score_is_one_batch_in_the_callers_thread(engine, batches, method, monkeypatch):
    if len(engine._dispatcher.workers) < 2:
        pytest.skip("on one core two calls at once are left to the worker")
    handed_over = []
    monkeypatch.setattr(engine._dispatcher.threads, "submit", lambda *work: handed_over.append(work))
    scores = engine.score(SENTENCES[0], list(SENTENCES[1:4]), method=method).scores
    assert batches == [(threading.current_thread(), 4)] and not handed_over
    assert scores.shape == (3,) and np.isfinite(scores).all()


def test_a_large_score_is_left_to_the_threads(engine, batches):
    documents = [f"{SENTENCES[0]} {i}" for i in range(INLINE_TEXTS + 1)]
    assert len(engine.score(SENTENCES[1], documents).scores) == len(documents)
    assert batches and all(thread is not threading.current_thread() for thread, _ in batches)
