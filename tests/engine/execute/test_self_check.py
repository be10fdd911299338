"""The self-check at load: wrong kernels and wrong graphs serve nothing, and nothing else changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.recording import RecordedGraph, Recording
from tests.tiny import FAMILIES, SENTENCES
from tests.tiny.families import some

from millpond import Engine
from millpond.backends import kernel_check
from millpond.backends.kernel_check import KernelCheck
from millpond.backends.torch import backend as torch_backend
from millpond.backends.torch.attention import kernels, matmul_attention, sdpa, self_check, varlen
from millpond.backends.torch.cuda import graphs
from millpond.backends.torch.loading.load_check import check_graphs
from millpond.backends.torch.model import TorchModel
from millpond.engine.loading import load
from millpond.values.config import EngineConfig
from tests import recording

pytestmark = [pytest.mark.contract, pytest.mark.torch]  # engines are loaded with the check

TEXTS = ("a", *SENTENCES[:4])
Rows = npt.NDArray[np.float32]


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel_check, "_disabled", {})
    monkeypatch.setattr(kernel_check, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.delenv("MILLPOND_SELF_CHECK", raising=False)


def config(folder: Path, dtype: str = "bfloat16", **options: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), backend="torch", device="cpu", dtype=dtype, **options)


def embedded(folder: Path, dtype: str = "bfloat16", **options: Any) -> Rows:
    with Engine(folder, backend="torch", device="cpu", dtype=dtype, **options) as engine:
        return engine.embed(TEXTS).embeddings


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def plant(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Let the only kernel of the table that serves bfloat16, but for the last, ignore what it is told."""
    monkeypatch.setattr(kernels, "KERNELS", (matmul_attention, varlen, sdpa))
    right = matmul_attention.attend

    def attend(query: Any, key: Any, value: Any, segments: Any, masking: Any) -> Any:
        return right(query, key, value, segments, replace(masking, **changed))

    monkeypatch.setattr(matmul_attention, "attend", attend)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_machine_loads_without_a_warning_and_checks_once(dtype, checkpoint_of, caplog):
    first, again = (load(config(checkpoint_of("bert"), dtype)).checks for _ in range(2))
    assert not any(check.wrong for check in first), first
    assert "matmul" in {check.kernel for check in first} and again == ()
    assert load(config(checkpoint_of("qwen3"), dtype)).checks == ()  # of another model, too
    assert not any(record.name.startswith("millpond") for record in caplog.records)
    assert kernel_check._disabled == {}


def test_a_wrong_kernel_serves_no_engine_of_the_process(checkpoint_of, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "KERNELS", (sdpa,))
        expected = embedded(checkpoint_of("bert")), embedded(checkpoint_of("llama"))
    caplog.clear()
    plant(monkeypatch, scale=1.0)
    for _ in range(2):
        np.testing.assert_allclose(embedded(checkpoint_of("bert")), expected[0], atol=1e-6)
    np.testing.assert_allclose(embedded(checkpoint_of("llama")), expected[1], atol=1e-6)
    assert set(kernel_check._disabled) == {"matmul"}
    (message,) = warnings(caplog)
    assert "'matmul'" in message and "bfloat16" in message and torch.__version__ in message


def test_with_the_variable_a_wrong_kernel_serves(checkpoint_of, monkeypatch, caplog):
    right = embedded(checkpoint_of("bert"))
    plant(monkeypatch, scale=1.0)
    monkeypatch.setenv("MILLPOND_SELF_CHECK", "0")
    assert np.abs(embedded(checkpoint_of("bert")) - right).max() > 1e-2
    assert not kernel_check._disabled and not warnings(caplog)
    assert not load(config(checkpoint_of("bert"))).checks
    assert any(check.wrong for check in load(config(checkpoint_of("bert")), check=True).checks)


def test_engines_and_replicas_that_load_at_once_warn_once(checkpoint_of, monkeypatch, caplog):
    plant(monkeypatch, scale=1.0)
    pair = replace(config(checkpoint_of("bert")), device=["cpu", "cpu"])
    with ThreadPoolExecutor(4) as threads:
        loaded = list(threads.map(lambda _: load(pair), range(8)))
    assert len(loaded[0].runners) == 2
    assert len(warnings(caplog)) == 1 and set(kernel_check._disabled) == {"matmul"}


def test_a_check_that_cannot_run_lets_the_model_load(checkpoint_of, monkeypatch, caplog):
    monkeypatch.setattr(self_check, "reference", lambda *call: 1 / 0)
    monkeypatch.setattr(self_check, "_computes", lambda device: False)
    assert embedded(checkpoint_of("bert")).shape == (len(TEXTS), 48)
    assert not warnings(caplog) and not kernel_check._disabled


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    return recording.backends_of_engines(monkeypatch)


def check(folder: Path | Engine) -> tuple[TorchModel, list[KernelCheck]]:
    replicas = folder._replicas if isinstance(folder, Engine) else load(config(folder, "float32"))
    model = replicas.runner.model
    return model, check_graphs(model, vocabulary=100, longest=64)


def of(results: list[KernelCheck], kernel: str) -> list[KernelCheck]:
    return [one for one in results if one.kernel == kernel]


@pytest.mark.parametrize("family", some(FAMILIES))
def test_a_right_device_passes_with_graphs_and_without(family, checkpoint_of, backends, caplog):
    _, results = check(checkpoint_of(family))
    assert not any(one.wrong for one in results), results
    assert not any(record.levelno >= logging.WARNING for record in caplog.records if record.name.startswith("millpond"))
    (captured,) = of(results, "graphs")
    if captured.similarity is None:
        assert "without graphs" in captured.finding and not backends[0].graphs
    else:
        assert captured.similarity > 0.999999
        assert backends[0].log.count("capture") == 1 and backends[0].log.count("replay") == 3


def wider(*args: Any, window_size: tuple[int, int], **options: Any) -> torch.Tensor:
    left, after = window_size
    return recording.varlen_attn(*args, window_size=(left + 1 if left >= 0 else left, after), **options)


def too_old(*args: Any, **options: Any) -> torch.Tensor:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


@pytest.mark.parametrize(("kernel", "said"), [(wider, "other results"), (too_old, "Ampere")])
def test_a_wrong_varlen_is_disabled_and_sdpa_serves(kernel, said, checkpoint_of, backends, monkeypatch, caplog):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "_streams", lambda device: None)
        patch.setattr(kernels, "KERNELS", (sdpa,))
        expected = embedded(checkpoint_of("modernbert"), "float32")
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    with Engine(checkpoint_of("modernbert"), device="cpu", dtype="float32") as engine:  # its load finds it
        for _ in range(3):
            np.testing.assert_allclose(engine.embed(TEXTS).embeddings, expected, atol=1e-5)
        model = engine._replicas.runner.model
        assert not model.graphs or not model.graphs.shapes  # sdpa is not captured
    (message,) = warnings(caplog)
    assert "'varlen'" in message and said in message and kernel_check.disabled("varlen")


def replayed(change: Callable[[RecordedGraph], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that does something more."""
    right = RecordedGraph.replay

    def replay(self: RecordedGraph) -> None:
        right(self)
        change(self)

    monkeypatch.setattr(RecordedGraph, "replay", replay)


def results_of(graph: RecordedGraph) -> list[torch.Tensor]:
    return recording._tensors(graph._out)


def shifted(graph: RecordedGraph) -> None:
    for tensor in results_of(graph):
        tensor.copy_(tensor.roll(1, 0))


def pooled_only(graph: RecordedGraph) -> None:
    results_of(graph)[0].mul_(2)


def unwritten(graph: RecordedGraph) -> None:
    results_of(graph)[-1][7] = float("nan")


def raising(graph: RecordedGraph) -> None:
    raise RuntimeError("CUDA error: invalid argument")


@pytest.mark.parametrize("change", [shifted, pooled_only, unwritten, raising])
def test_a_wrong_replay_switches_graphs_off_for_this_engine(change, checkpoint_of, backends, monkeypatch, caplog):
    expected = embedded(checkpoint_of("bert"), "float32")
    monkeypatch.setattr(graphs.Graphs.__init__, "__kwdefaults__", {"uses": 1, "most": 64, "most_bytes": 1 << 30})
    with monkeypatch.context() as patch:
        replayed(change, patch)
        engine = Engine(checkpoint_of("bert"), device="cpu", dtype="float32")
        _, results = check(engine)
    assert [one.wrong for one in results] == [True]
    backend = backends[-1]
    before = list(backend.log)
    np.testing.assert_allclose(engine.embed(TEXTS).embeddings, expected, atol=1e-5)
    engine.close()
    assert "replay" not in backend.log[len(before) :]
    (message,) = warnings(caplog)
    assert "CUDA graph" in message and ("invalid argument" in message) == (change is raising)
    _, results = check(checkpoint_of("bert"))  # another engine, whose graphs are right
    assert of(results, "graphs")[0].similarity > 0.999999


def test_a_graph_that_keeps_what_it_was_captured_with_is_noticed(checkpoint_of, backends, monkeypatch, caplog):
    right = recording.varlen_attn
    captured: list[torch.Tensor] = []

    def stale(query: Any, key: Any, value: Any, ends: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if len(ends) > 6:  # of a graph, with its empty sequences
            captured.append(ends.clone())
            ends = captured[0]
        return right(query, key, value, ends, ends, *rest[1:], **options)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stale)
    _, results = check(checkpoint_of("bert"))
    assert of(results, "graphs")[0].wrong and captured
    assert len(warnings(caplog)) == 1


def test_no_memory_for_a_graph_says_nothing_about_it(checkpoint_of, backends, caplog):
    model = load(config(checkpoint_of("bert"), "float32")).runner.model

    def refuse() -> None:
        raise torch.OutOfMemoryError("none")

    backends[0].refuse = refuse
    results = check_graphs(model, vocabulary=100, longest=64)
    assert not any(one.wrong for one in results) and not warnings(caplog)


def test_a_device_that_is_lost_is_no_fault_of_a_graph(checkpoint_of, backends, monkeypatch, caplog):
    """Loading goes on, and the first batch says what it is."""

    def lost(graph: RecordedGraph) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runner = load(config(checkpoint_of("bert"), "float32")).runner.model
    replayed(lost, monkeypatch)
    assert check_graphs(runner, vocabulary=100, longest=64) == [] and not warnings(caplog)
