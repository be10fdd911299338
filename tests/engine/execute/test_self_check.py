"""The self-check of a loaded model: planted mistakes in a kernel or in a graph, and that nothing else changes."""

from __future__ import annotations

import logging
import os
import signal
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
from tests.tiny import FAMILIES, SENTENCES, write_checkpoint
from tests.tiny.heads import write_stanford

from millpond import Engine
from millpond.attention import kernels, matmul_attention, sdpa, varlen
from millpond.attention import self_check as table_check
from millpond.attention.self_check import KernelCheck
from millpond.config import EngineConfig
from millpond.engine import loading
from millpond.engine.execute import self_check
from millpond.engine.execute.cuda import graphs
from millpond.engine.execute.runner import Runner
from millpond.engine.execute.self_check import check_runner
from millpond.engine.loading import load
from tests import recording

TEXTS = ("a", *SENTENCES[:4])
Rows = npt.NDArray[np.float32]


@pytest.fixture(autouse=True)
def whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_withdrawn", {})
    monkeypatch.setattr(table_check, "_told", set())
    monkeypatch.setattr(table_check, "_probed", set())
    monkeypatch.delenv("MILLPOND_SELF_CHECK", raising=False)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, folders = tmp_path_factory.mktemp("checked"), {}

    def written(family: str) -> Path:
        if family not in folders:
            folders[family] = write_checkpoint(root / family, family)
        return folders[family]

    return written


def config(folder: Path, dtype: str = "bfloat16", **options: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), device="cpu", dtype=dtype, **options)


def embedded(folder: Path, dtype: str = "bfloat16", **options: Any) -> Rows:
    with Engine(folder, device="cpu", dtype=dtype, **options) as engine:
        return engine.embed(TEXTS).embeddings


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def plant(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Let the only kernel of the table that serves bfloat16, but for the last, ignore what it is told."""
    monkeypatch.setattr(kernels, "KERNELS", (matmul_attention, varlen, sdpa))
    right = matmul_attention.attend

    def attend(query: Any, key: Any, value: Any, segments: Any, masking: Any) -> Any:
        masking = replace(masking, **{name: value(masking) for name, value in changed.items()})
        return right(query, key, value, segments, masking)

    monkeypatch.setattr(matmul_attention, "attend", attend)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_model_loads_without_a_warning(family, dtype, written, caplog):
    loaded = load(config(written(family), dtype))
    assert not any(check.wrong for check in loaded.checks), loaded.checks
    assert not any(record.name.startswith("millpond") for record in caplog.records)
    table = {check.kernel for check in loaded.checks if not check.kernel.startswith("encoder")}
    own = family.startswith("deberta")  # attention of its own
    if dtype == "bfloat16" and not own:
        assert table and (table <= {"native", "matmul"} or not table)
    assert kernels._withdrawn == {}


MISTAKES = {
    "scale": ("bert", {"scale": lambda masking: 1.0}),
    "window": ("modernbert", {"window": lambda masking: masking.window and masking.window + 1}),
    "causality": ("qwen3", {"causal": lambda masking: False}),
    "softcap": ("gemma2", {"softcap": lambda masking: None}),
    "bias": ("mpnet", {"bias": lambda masking: None}),
}


@pytest.mark.parametrize(("family", "changed"), MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_kernel_serves_no_engine_of_the_process(family, changed, written, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "KERNELS", (sdpa,))
        expected = embedded(written(family)), embedded(written("llama"))
    caplog.clear()
    plant(monkeypatch, **changed)
    for _ in range(2):
        np.testing.assert_allclose(embedded(written(family)), expected[0], atol=1e-6)
    np.testing.assert_allclose(embedded(written("llama")), expected[1], atol=1e-6)
    assert set(kernels._withdrawn) == {"matmul"}
    (message,) = warnings(caplog)
    assert "'matmul'" in message and "bfloat16" in message and torch.__version__ in message


def test_with_the_variable_a_wrong_kernel_serves(written, monkeypatch, caplog):
    right = embedded(written("bert"))
    plant(monkeypatch, **MISTAKES["scale"][1])
    monkeypatch.setenv("MILLPOND_SELF_CHECK", "0")
    assert np.abs(embedded(written("bert")) - right).max() > 1e-2
    assert not kernels._withdrawn and not warnings(caplog)
    assert not load(config(written("bert"))).checks
    assert any(check.wrong for check in load(config(written("bert")), check=True).checks)


def test_limited_keys_are_compared_for_colbert_only(written, monkeypatch, tmp_path):
    folder = write_stanford(tmp_path / "model")
    assert not any("limited keys" in check.call for check in load(config(written("bert"))).checks)
    assert any("limited keys" in check.call for check in load(config(folder)).checks)


def test_several_replicas_warn_once(written, monkeypatch, caplog):
    plant(monkeypatch, **MISTAKES["scale"][1])
    loaded = load(replace(config(written("bert")), device=["cpu", "cpu"]))
    assert len(loaded.runners) == 2 and len(warnings(caplog)) == 1


def test_engines_that_load_at_once_warn_once(written, monkeypatch, caplog):
    plant(monkeypatch, **MISTAKES["scale"][1])
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: load(config(written("bert"))), range(8)))
    assert len(warnings(caplog)) == 1 and set(kernels._withdrawn) == {"matmul"}


def test_an_engine_that_runs_goes_on_while_another_takes_its_kernel_out(written, monkeypatch):
    expected = embedded(written("bert"))
    with Engine(written("bert"), device="cpu", dtype="bfloat16") as engine, ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(engine.embed, TEXTS) for _ in range(20)]
        kernels.withdraw(matmul_attention, "wrong")
        for call in calls:
            cosines = (call.result().embeddings * expected).sum(1)
            assert cosines.min() > 0.999


def test_a_forked_child_loads_and_compares_on_its_own(written, monkeypatch):
    load(config(written("bert")))
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        code = 1
        try:
            signal.alarm(60)
            plant(monkeypatch, **MISTAKES["scale"][1])
            load(config(written("bert")))
            code = 0 if "matmul" in kernels._withdrawn else 3
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not kernels._withdrawn  # of the parent


@pytest.mark.parametrize("fault", ["forward", "segments"])
def test_a_check_that_cannot_run_lets_the_model_load(fault, written, monkeypatch, caplog):
    if fault == "forward":
        right = Runner.forward
        calls: list[int] = []

        def forward(self: Runner, batch: Any, rows: Any = None) -> Any:
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("no")
            return right(self, batch, rows)

        monkeypatch.setattr(Runner, "forward", forward)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(self_check.DeviceBatch, "segments", property(lambda self: 1 / 0), raising=False)
            load(config(written("bert")))
    assert embedded(written("bert")).shape == (len(TEXTS), 48)
    assert not warnings(caplog) and not kernels._withdrawn


def test_the_time_is_bounded(written, monkeypatch):
    monkeypatch.setattr(self_check, "_CPU_SECONDS", 0.0)
    some = load(config(written("modernbert"))).checks
    monkeypatch.setattr(self_check, "_CPU_SECONDS", 100.0)
    monkeypatch.setattr(table_check, "_probed", set())
    assert 0 < len(some) < len(load(config(written("modernbert"))).checks)


# ---------------------------------------------------------------- a GPU's path, on the backend that only records


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """Models that are loaded from here on have a recording backend, and varlen serves them."""
    recording.pretend_varlen(monkeypatch)
    made: list[Recording] = []

    def backend(device: torch.device) -> Recording:
        made.append(Recording())
        return made[-1]

    monkeypatch.setattr(loading, "_backend", backend)
    return made


def check(folder: Path | Engine, *, limited_keys: bool = False) -> tuple[Runner, list[KernelCheck]]:
    runner = folder._replicas.runner if isinstance(folder, Engine) else load(config(folder, "float32")).runner
    results = check_runner(runner, dtype=torch.float32, vocabulary=100, longest=64, limited_keys=limited_keys)
    return runner, results


def of(results: list[KernelCheck], kernel: str) -> list[KernelCheck]:
    return [one for one in results if one.kernel == kernel]


EAGER = ("mpnet", "deberta-v2", "deberta-v2-convolution", "gemma2", "jamba")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_device_passes_with_graphs_and_without(family, written, backends, caplog):
    _, results = check(written(family), limited_keys=True)
    assert not any(one.wrong for one in results), results
    assert not any(record.levelno >= logging.WARNING for record in caplog.records if record.name.startswith("millpond"))
    (captured,) = of(results, "graphs")
    if captured.similarity is None:
        assert "without graphs" in captured.finding and not backends[0].graphs
    else:
        assert captured.similarity > 0.999999
        assert backends[0].log.count("capture") == 1 and backends[0].log.count("replay") == 3


def test_models_that_are_captured_are_checked_with_graphs(written, backends):
    names = ("bert", "modernbert", "qwen3", "jina")
    assert all(of(check(written(name))[1], "graphs")[0].similarity for name in names)
    assert of(check(written("mpnet"))[1], "graphs")[0].obstacle == "this model runs without graphs"


def test_a_stand_in_for_a_device_is_not_checked_when_a_model_is_loaded(written, backends):
    assert not load(config(written("bert"), "float32")).checks
    assert not backends[0].log


def test_a_wrong_varlen_is_taken_out_and_sdpa_serves(written, backends, monkeypatch, caplog):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_backend", lambda device: None)
        patch.setattr(kernels, "KERNELS", (sdpa,))
        expected = embedded(written("modernbert"), "float32")
    right = recording.varlen_attn

    def wider(*args: Any, window_size: tuple[int, int], **options: Any) -> torch.Tensor:
        left, after = window_size
        return right(*args, window_size=(left + 1 if left >= 0 else left, after), **options)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", wider)
    with Engine(written("modernbert"), device="cpu", dtype="float32") as engine:
        wrong = engine.embed(TEXTS).embeddings
        _, results = check(engine)
        for _ in range(3):
            np.testing.assert_allclose(engine.embed(TEXTS).embeddings, expected, atol=1e-5)
    assert np.abs(wrong - expected).max() > 1e-4
    assert of(results, "varlen")[-1].wrong and kernels.withdrawn(varlen)
    (message,) = warnings(caplog)
    assert "'varlen'" in message
    assert not engine._replicas.runner.graphs or not engine._replicas.runner.graphs.shapes  # sdpa is not captured


def test_a_varlen_that_raises_is_taken_out(written, backends, monkeypatch, caplog):
    def missing(*args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", missing)
    with Engine(written("bert"), device="cpu", dtype="float32") as engine:
        check(engine)
        assert np.isfinite(engine.embed(TEXTS).embeddings).all()
    (message,) = warnings(caplog)
    assert "Ampere" in message and kernels.withdrawn(varlen)


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
def test_a_wrong_replay_switches_graphs_off_for_this_engine(change, written, backends, monkeypatch, caplog):
    expected = embedded(written("bert"), "float32")
    monkeypatch.setattr(graphs.Graphs.__init__, "__kwdefaults__", {"uses": 1, "most": 64, "most_bytes": 1 << 30})
    with monkeypatch.context() as patch:
        replayed(change, patch)
        engine = Engine(written("bert"), device="cpu", dtype="float32")
        _, results = check(engine)
    (captured,) = of(results, "graphs")
    assert captured.wrong and not any(one.wrong for one in results if one is not captured)
    backend = backends[-1]
    before = list(backend.log)
    np.testing.assert_allclose(engine.embed(TEXTS).embeddings, expected, atol=1e-5)
    engine.close()
    assert "replay" not in backend.log[len(before) :]
    (message,) = warnings(caplog)
    assert "CUDA graph" in message and ("invalid argument" in message) == (change is raising)
    _, results = check(written("bert"))  # another engine, whose graphs are right
    assert of(results, "graphs")[0].similarity > 0.999999


def test_a_graph_that_keeps_what_it_was_captured_with_is_noticed(written, backends, monkeypatch, caplog):
    right = recording.varlen_attn
    captured: list[torch.Tensor] = []

    def stale(query: Any, key: Any, value: Any, ends: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if len(ends) > 6:  # of a graph, with its empty sequences
            captured.append(ends.clone())
            ends = captured[0]
        return right(query, key, value, ends, ends, *rest[1:], **options)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stale)
    _, results = check(written("bert"))
    assert of(results, "graphs")[0].wrong and captured
    assert len(warnings(caplog)) == 1


def test_graphs_that_are_switched_off_by_the_variable_are_not_checked(written, backends, monkeypatch):
    monkeypatch.setenv("MILLPOND_CUDA_GRAPHS", "0")
    _, results = check(written("bert"))
    assert of(results, "varlen") and not of(results, "graphs")


def test_no_memory_for_a_graph_says_nothing_about_it(written, backends, caplog):
    runner = load(config(written("bert"), "float32")).runner

    def refuse() -> None:
        raise torch.OutOfMemoryError("none")

    backends[0].refuse = refuse
    results = check_runner(runner, dtype=torch.float32, vocabulary=100, longest=64)
    assert not of(results, "graphs")[0].wrong and not warnings(caplog)


def test_a_device_that_is_lost_is_no_fault_of_a_graph(written, backends, monkeypatch, caplog):
    """Loading goes on, and the first batch says what it is."""

    def lost(graph: RecordedGraph) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runner = load(config(written("bert"), "float32")).runner
    replayed(lost, monkeypatch)
    results = check_runner(runner, dtype=torch.float32, vocabulary=100, longest=64)
    assert of(results, "varlen") and not of(results, "graphs") and not warnings(caplog)
