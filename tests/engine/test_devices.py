"""One engine on several devices: a replica on each, one queue for all."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.recording import Recording
from tests.tiny import TEXTS, write_checkpoint

from millpond import Engine
from millpond.engine import dispatcher, loading
from millpond.engine.execute.cores import Cores
from millpond.engine.execute.cuda.pipeline import PendingBatch
from millpond.engine.execute.runner import Runner
from millpond.engine.schedule.request import Request
from millpond.engine.shared import close_shared, get_engine
from millpond.errors import InvalidRequestError, ModelLoadError
from millpond.models.placement import resolve_devices
from tests import recording

TWO = ["cpu", "cpu"]
MANY = [f"{text} {i}" for i, text in enumerate(TEXTS * 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("devices") / "model", "bert")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[Any]:
    with Engine(folder, device="cpu", dtype="float32") as engine:
        yield engine.embed(MANY).embeddings


@pytest.fixture(params=["cpu", "streams"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> set[Runner]:
    """Each replica holds its first batch until the other one has a batch; returns the runners that ran."""
    # A lane of each replica needs a core while it waits for the other one.
    monkeypatch.setattr(dispatcher, "process_cores", lambda: Cores(16))
    if request.param == "streams":
        recording.pretend_varlen(monkeypatch)
        monkeypatch.setattr(loading, "_backend", lambda device: Recording())
    method = "start" if request.param == "streams" else "run"
    right, used, all_used = getattr(Runner, method), set[Runner](), threading.Event()

    def run(runner: Runner, requests: Sequence[Request]) -> Any:
        used.add(runner)
        if len(used) == 2:
            all_used.set()
        assert all_used.wait(timeout=60)
        return right(runner, requests)

    monkeypatch.setattr(Runner, method, run)
    return used


def test_replicas_share_the_work_and_agree(both, folder, expected):
    with Engine(folder, device=TWO, dtype="float32", max_batch_tokens=64) as engine:
        found = engine.embed(MANY).embeddings
        assert len(engine._replicas.runners) == 2
    assert len(both) == 2
    assert np.abs(found - expected).max() <= 1e-6


def test_replicas_have_weights_of_their_own(folder):
    with Engine(folder, device=TWO, dtype="float32") as engine:
        first, second = (dict(runner.backbone.named_parameters()) for runner in engine._replicas.runners)
        assert first.keys() == second.keys()
        assert not {one.data_ptr() for one in first.values()} & {one.data_ptr() for one in second.values()}


@pytest.mark.parametrize("streams", [False, True], ids=["cpu", "streams"])
def test_a_batch_that_fails_on_one_harms_nobody_else(streams, folder, expected, monkeypatch):
    if streams:
        recording.pretend_varlen(monkeypatch)
        monkeypatch.setattr(loading, "_backend", lambda device: Recording())
    right_start, right_run = Runner.start, Runner.run

    def refuse(requests: Sequence[Request]) -> None:
        if any(request.call.items[request.slot] == "bad" for request in requests):
            raise RuntimeError("odd shape")

    def start(runner: Runner, requests: Sequence[Request]) -> PendingBatch:
        refuse(requests)
        return right_start(runner, requests)

    def run(runner: Runner, requests: Sequence[Request]) -> Any:
        refuse(requests)
        return right_run(runner, requests)

    monkeypatch.setattr(Runner, "start", start)
    monkeypatch.setattr(Runner, "run", run)
    with Engine(folder, device=TWO, dtype="float32", max_batch_tokens=256) as engine:
        good = engine.submit("embed", MANY)
        bad = engine.submit("embed", ["bad", *TEXTS])
        with pytest.raises(RuntimeError, match="odd shape"):
            bad.result()
        assert np.abs(good.result().embeddings - expected).max() <= 1e-6
        assert np.abs(engine.embed(MANY).embeddings - expected).max() <= 1e-6


def test_a_list_and_its_spelling_are_one_shared_engine(folder):
    try:
        engine = get_engine(folder, device=TWO, dtype="float32")
        assert engine.device == "cpu,cpu"
        for spelling in ("cpu,cpu", ("cpu", "cpu"), "cpu, cpu", engine.device):
            assert get_engine(folder, device=spelling, dtype="float32") is engine
        assert get_engine(folder, device="cpu", dtype="float32") is not engine
    finally:
        close_shared()


@pytest.mark.parametrize("device", [[], 3, None, ["cpu", 1], [["cpu"]]])
def test_what_names_no_devices_is_refused(device, folder):
    with pytest.raises(InvalidRequestError, match="device="):
        Engine(folder, device=device)


@pytest.mark.parametrize("device", ["cpu,", ["cpu", "meta"], "cpu,nonsense", ["auto", "nonsense"]])
def test_devices_that_cannot_be_used_together_are_refused(device, folder):
    with pytest.raises(ModelLoadError, match="device"):
        Engine(folder, device=device)


def test_auto_is_one_device():
    assert len(resolve_devices("auto")) == 1
    assert resolve_devices("cpu") == (torch.device("cpu"),)


@pytest.mark.contract
def test_a_child_of_a_process_that_used_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)  # also after a mere look for GPUs
    assert resolve_devices("auto") == resolve_devices("cpu") == (torch.device("cpu"),)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ModelLoadError, match="forked from one that had used the GPU.*spawn"):
        resolve_devices("auto")
    assert resolve_devices("cpu") == (torch.device("cpu"),)
