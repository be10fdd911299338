"""Engines on a GPU: with graphs and without, one caller and many, equal to float32 on the CPU; and the self-check.

Without a GPU the same engines run in float32 through a backend that only records, over a stand-in for the packed
kernel: what is tested then is everything but CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.tiny import SENTENCES, TEXTS, write_checkpoint

from millpond import Engine
from millpond.backends import kernel_check
from millpond.backends.kernel_check import KernelCheck
from millpond.backends.torch import backend as torch_backend
from millpond.backends.torch.attention import triton, varlen
from millpond.backends.torch.cuda.graphs import Graphs
from millpond.backends.torch.loading.load_check import check_graphs
from millpond.engine.loading import load
from millpond.values.config import EngineConfig
from tests import recording

CUDA = torch.cuda.is_available()

# The kernel that serves packed rows; the recording backend has a stand-in for torch's.
PACKED = triton if CUDA else varlen


needs_cuda = pytest.mark.skipif(not CUDA, reason="what is tested is CUDA's own")


Rows = npt.NDArray[np.float32]


# Plain, windows, grouped heads, causal windows, adapters; and without graphs: a softcap, a bias, attention by run.
FAMILIES = ("bert", "modernbert", "qwen3", "mistral", "jina", "gemma2", "mpnet", "deberta-v2")


WITH_GRAPHS = (
    ("bert", "modernbert", "qwen3", "mistral", "jina", "gemma2", "mpnet")
    if CUDA
    else ("bert", "modernbert", "qwen3", "mistral", "jina")
)


# Heads of 16: varlen takes multiples of 8.
SIZE = {"hidden_size": 64, "intermediate_size": 128, "pooler_hidden_size": 64}


MID = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "num_hidden_layers": 6}


# Batches of many shapes: single tokens, one long text, equal lengths, a growing mixture.
BATCHES: tuple[Sequence[str], ...] = (
    ["a"],
    ["a"] * 3 + ["b"] * 2,
    [" ".join(SENTENCES[1:8])],
    [f"{SENTENCES[0]} {i}" for i in range(40)],
    TEXTS,
    [*TEXTS, *(f"{text} {i}" for i, text in enumerate(TEXTS * 6))],
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root, written = tmp_path_factory.mktemp("gpu"), {}

    def plain(family: str) -> Path:
        if family not in written:
            if family == "mid":
                config = {**MID, "max_position_embeddings": 512}
                written[family] = write_checkpoint(root / family, "bert", config=config, tokenizer_limit=512)
            else:
                written[family] = write_checkpoint(root / family, family, config=SIZE)
        return written[family]

    return plain


@pytest.fixture(scope="module")
def reference(plain: Callable[..., Path]) -> Callable[[str], list[Rows]]:
    """Embeddings of each batch in float32 on the CPU."""
    made: dict[str, list[Rows]] = {}

    def reference(family: str) -> list[Rows]:
        if family not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch_backend, "_streams", lambda device: None)
                patch.setattr(varlen, "fits", lambda *call: False)
                with Engine(plain(family), device="cpu", dtype="float32") as engine:
                    made[family] = [engine.embed(batch).embeddings for batch in BATCHES]
        return made[family]

    return reference


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Graphs]:
    """The graphs of every engine made in the test; without a GPU, on a recording backend."""
    graphs: list[Graphs] = []
    right = Graphs.__init__

    def init(self: Graphs, *args: Any, **options: Any) -> None:
        right(self, *args, **options)
        graphs.append(self)

    monkeypatch.setattr(Graphs, "__init__", init)
    if not CUDA:
        recording.backends_of_engines(monkeypatch)
    return graphs


def engine_of(folder: Path, *, dtype: str = "bfloat16", **options: Any) -> Engine:
    device = "cuda" if CUDA else "cpu"
    return Engine(folder, device=device, dtype=dtype if CUDA else "float32", **options)


def cosines(found: Rows, expected: Rows) -> Rows:
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return (found * expected).sum(1) / norms


def close(found: Rows, expected: Rows, *, mean: float = 0.999, least: float = 0.99) -> bool:
    near = cosines(found, expected)
    return bool(near.mean() >= mean and near.min() >= least)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_shape_equals_the_cpu(family, dtype, made, plain, reference):
    if family == "gemma2" and dtype == "float16":
        pytest.skip("float16 is too narrow for it; millpond gives it bfloat16")
    with engine_of(plain(family), dtype=dtype) as engine:
        for _ in range(3):  # eager, captured, replayed
            for batch, expected in zip(BATCHES, reference(family), strict=True):
                assert close(engine.embed(batch).embeddings, expected)
    shapes = len(made[0].shapes)
    assert shapes >= 4 if family in WITH_GRAPHS else shapes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_mid_size_model_drifts_little(dtype, made, plain, reference):
    with engine_of(plain("mid"), dtype=dtype) as engine:
        for _ in range(3):
            for batch, expected in zip(BATCHES, reference("mid"), strict=True):
                assert close(engine.embed(batch).embeddings, expected)
    assert made[0].shapes


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_rows_of_tokens_equal_the_cpu(family, made, plain):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "_streams", lambda device: None)
        patch.setattr(varlen, "fits", lambda *call: False)
        with Engine(plain(family), device="cpu", dtype="float32") as engine:
            expected = engine.token_embed(TEXTS).embeddings.flat
    with engine_of(plain(family)) as engine:
        for _ in range(3):
            assert close(engine.token_embed(TEXTS).embeddings.flat, expected)
    assert made[0].shapes


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [None, 256], ids=["one batch", "many batches"])
def test_many_callers_get_what_one_gets(budget, made, plain):
    texts = [f"{SENTENCES[i % len(SENTENCES)]} {i}" for i in range(200)]
    with engine_of(plain("bert"), max_batch_tokens=budget) as engine:
        together = engine.embed(texts).embeddings
        with ThreadPoolExecutor(32) as callers:
            apart = np.concatenate([*callers.map(lambda text: engine.embed([text]).embeddings, texts)])
        calls = [engine.submit("embed", texts[i : i + 40]) for i in range(0, 200, 40)]
        queued = np.concatenate([call.result().embeddings for call in calls])
    assert close(apart, together, mean=0.9999, least=0.9995)
    assert close(queued, together, mean=0.9999, least=0.9995)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("graphs", ["0", "1"])
def test_a_batch_that_does_not_fit_is_halved(graphs, plain, monkeypatch):
    monkeypatch.setenv("MILLPOND_CUDA_GRAPHS", graphs)
    texts = [f"{' '.join(SENTENCES)} {i}" for i in range(400)]
    with engine_of(plain("mid"), max_batch_tokens=65536) as engine:
        expected = engine.embed(texts[:8]).embeddings
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (160 << 20)) / total)
        try:
            found = engine.embed(texts).embeddings
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert np.isfinite(found).all()
        assert close(found[:8], expected)
        assert close(engine.embed(texts).embeddings, found, mean=0.9999, least=0.9995)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("second", ["cuda:0", "cuda:1"])
def test_two_replicas_agree(second, plain, reference):
    """Two lanes with separate streams and graphs capture one at a time."""
    if second == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with Engine(plain("bert"), device=["cuda:0", second], dtype="bfloat16", max_batch_tokens=256) as engine:
        for _ in range(3):
            for batch, expected in zip(BATCHES, reference("bert"), strict=True):
                assert close(engine.embed(batch).embeddings, expected)


@pytest.mark.gpu
@needs_cuda
def test_nothing_waits_for_the_device_while_a_batch_is_sent(plain):
    """torch's synchronization check, around the launch of a replayed batch and of one without a graph."""
    with engine_of(plain("bert")) as engine:
        for _ in range(3):
            engine.embed(TEXTS)
        runner = engine._replicas.runner
        right = runner.start
        warned: list[str] = []

        def watched(requests: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return right(requests)
            except RuntimeError as error:
                warned.append(str(error))
                raise
            finally:
                torch.cuda.set_sync_debug_mode("default")

        runner.start = watched
        engine.embed(TEXTS)  # replayed
        engine.embed([f"{text} once" for text in TEXTS * 3])  # a new shape
    assert not warned


# The kernel that is to serve each family in half precision, and whether it is captured.
KERNEL_OF = {
    "bert": ("triton", True),
    "modernbert": ("triton", True),
    "qwen3": ("triton", True),
    "mistral": ("triton", True),
    "jina": ("triton", True),
    "gemma2": ("triton", True),
    "mpnet": ("triton", True),
    "deberta-v2": (None, False),
}


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel_check, "_disabled", {})
    monkeypatch.setattr(kernel_check, "cache_folder", lambda: tmp_path / "cache")
    if not CUDA:
        recording.backends_of_engines(monkeypatch)


def config(folder: Path, dtype: str) -> EngineConfig:
    return EngineConfig(model=str(folder), device=("cuda" if CUDA else "cpu"), dtype=dtype if CUDA else "float32")


def checked(folder: Path, dtype: str = "bfloat16") -> list[KernelCheck]:
    """What is compared when a model is loaded; on the recording backend, graphs when it is asked for."""
    loaded = load(config(folder, dtype), check=True)
    return [*loaded.checks, *([] if CUDA else check_graphs(loaded.runner.model, vocabulary=100, longest=64))]


def embedded(folder: Path) -> Any:
    with Engine(folder, device=("cuda" if CUDA else "cpu"), dtype="bfloat16" if CUDA else "float32") as engine:
        return engine.embed(TEXTS).embeddings


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", KERNEL_OF)
def test_what_a_model_uses_agrees_with_float32(family, dtype, plain):
    if family == "gemma2" and dtype == "float16":
        pytest.skip("float16 is too narrow for it; millpond gives it bfloat16")
    found = checked(plain(family), dtype)
    assert not any(check.wrong for check in found), found
    assert kernel_check._disabled == {}
    kernel, captured = KERNEL_OF[family]
    if CUDA and kernel is not None and dtype != "float32":
        assert kernel in {check.kernel for check in found}
        (graphs,) = [check for check in found if check.kernel == "graphs"]
        assert (graphs.similarity is not None) == captured, graphs


@pytest.mark.gpu
@pytest.mark.parametrize("changed", [{"scale": 1.0}, {"causal": True}], ids=["scale", "causality"])
def test_a_wrong_kernel_is_taken_out(changed, plain, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(kernel_check, "cache_folder", lambda: plain("bert") / "right")
        expected = embedded(plain("bert"))
    right = PACKED.attend

    def attend(query: Any, key: Any, value: Any, segments: Any, masking: Any) -> Any:
        return right(query, key, value, segments, replace(masking, **changed))

    monkeypatch.setattr(PACKED, "attend", attend)
    found = embedded(plain("bert"))
    assert set(kernel_check._disabled) == {PACKED.NAME}
    assert (found * expected).sum(1).min() > 0.999
    assert len([record for record in caplog.records if PACKED.NAME in record.getMessage()]) == 1


@pytest.mark.gpu
def test_a_kernel_that_raises_is_taken_out(plain, monkeypatch):
    def missing(*call: Any) -> Any:
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(PACKED, "attend", missing)
    assert np.isfinite(embedded(plain("modernbert"))).all()
    assert "no kernel image" in kernel_check._disabled[PACKED.NAME]


@pytest.mark.gpu
@needs_cuda
def test_the_table_of_the_machine_has_the_gpus_kernels():
    from millpond.cli.output.kernel_checks import of_machine, table

    found = of_machine()
    print("\n".join(table(found)))
    assert not any(check.wrong for check in found), found
    ran = {check.kernel for check in found if check.similarity is not None and "cuda" in check.call}
    assert {"triton", "varlen", "sdpa"} <= ran


@pytest.mark.gpu
@needs_cuda
def test_a_graph_is_compared_when_a_model_is_loaded(plain, monkeypatch):
    (graphs,) = [check for check in checked(plain("bert")) if check.kernel == "graphs"]
    assert graphs.similarity is not None and graphs.similarity > 0.999
    right = torch.cuda.CUDAGraph.replay
    replays = []

    class Spoiled(torch.cuda.CUDAGraph):
        def replay(self) -> None:
            right(self)
            replays.append(self)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Spoiled)
    checked(plain("bert"))
    assert len(replays) == 3  # twice with the captured batch, once with another
