"""Captured forwards: which families can be captured, with the results of a plain forward; and sparse weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.recording import Recording
from tests.tiny import FAMILIES, TEXTS, Layout, Normalize, Pooling, write_checkpoint
from tests.tiny.heads import write_m3, write_splade

from millpond import Engine
from millpond.backends.backend import OutputSpec
from millpond.backends.torch import backend as torch_backend
from millpond.backends.torch.attention import varlen
from millpond.backends.torch.cuda import graphs
from millpond.backends.torch.cuda.buckets import Bucket
from millpond.backends.torch.cuda.layout import BufferLayout
from millpond.backends.torch.device_batch import DeviceBatch
from millpond.backends.torch.model import TorchModel
from millpond.backends.torch.pooling import methods
from millpond.engine.loading import load
from millpond.errors import MillpondError
from millpond.tasks import Task
from millpond.values.config import EngineConfig
from tests import recording

# Their attention or mixers work run by run, and the host must know the lengths.
EAGER = (
    "mpnet",
    "deberta-v2",
    "gemma2",
    "jamba",
    "jina-bert",
    "jina-bert-code",
    "nomic-moe",
    "deberta",
    "t5",
    "mt5",
    "umt5",
    "qwen3.5",
)


SHORT = (TEXTS[0], TEXTS[3], TEXTS[1])


Rows = npt.NDArray[np.float32]


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """Engines capture a shape when it is first seen."""
    made = recording.backends_of_engines(monkeypatch)
    monkeypatch.setattr(graphs.Graphs.__init__, "__kwdefaults__", {"uses": 1, "most": 64, "most_bytes": 1 << 30})
    return made


@pytest.fixture(scope="module")
def expected() -> Callable[..., Rows]:
    """The results of an engine on the CPU with its own kernels and without graphs."""
    made: dict[tuple[Any, ...], Rows] = {}

    def expected(folder: Path, texts: Sequence[str], task: Task = "embed", **options: Any) -> Rows:
        key = (folder, tuple(texts), task, *sorted(options.items()))
        if key not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch_backend, "_streams", lambda device: None)
                patch.setattr(varlen, "fits", lambda *call: False)
                with Engine(folder, dtype="float32", device="cpu") as engine:
                    made[key] = read(engine, texts, task, **options)
        return made[key]

    return expected


def read(engine: Engine, texts: Sequence[str], task: Task = "embed", **options: Any) -> Rows:
    if task == "embed":
        return engine.embed(texts, normalize=False, **options).embeddings
    if task == "token_embed":
        return engine.token_embed(texts, normalize=False, **options).embeddings.flat
    return engine.score(list(texts), list(texts)[::-1], activation=False).scores[:, None]


def worst(found: Rows, reference: Rows) -> float:
    return float(np.abs(found - reference).max() / np.abs(reference).max())


def captures(backend: Recording) -> int:
    return backend.log.count("capture")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_equals_the_forward(family, backends, checkpoint_of, expected):
    with Engine(checkpoint_of(family), dtype="float32", device="cpu") as engine:
        for texts in (TEXTS, SHORT, TEXTS):
            assert worst(read(engine, texts), expected(checkpoint_of(family), texts)) <= 1e-5
    (backend,) = backends
    replays = backend.log.count("replay")
    assert (captures(backend), replays) == ((0, 0) if family in EAGER else (2, 3))


@pytest.mark.parametrize("modes", ["cls", "mean", "max", "mean_sqrt_len", "weightedmean", "lasttoken", "mean+cls"])
@pytest.mark.parametrize("include_prompt", [True, False])
def test_every_pooling_method_is_inside(modes, include_prompt, backends, expected, tmp_path):
    layout = Layout(modules=(Pooling(modes=tuple(modes.split("+")), include_prompt=include_prompt), Normalize()))
    folder = write_checkpoint(tmp_path / "model", "bert", sentence_transformers=layout)
    with Engine(folder, dtype="float32", device="cpu") as engine:
        for texts in (SHORT, TEXTS):
            found = read(engine, texts, prompt="query: ")
            assert worst(found, expected(folder, texts, prompt="query: ")) <= 1e-5
    assert captures(backends[0]) == 2


def test_an_empty_segment_taken_for_a_text_is_noticed(backends, checkpoint_of, monkeypatch):
    """The negative control: garbage in the padding is seen by code that reads it."""
    right = methods._lengths
    monkeypatch.setattr(methods, "_lengths", lambda segments: right(segments).roll(1))
    with (
        Engine(checkpoint_of("bert"), dtype="float32", device="cpu", pooling="mean") as engine,
        pytest.raises(MillpondError, match="not finite"),
    ):
        read(engine, TEXTS)


def test_lengths_of_the_capture_in_a_replay_are_noticed(backends, expected, checkpoint_of, monkeypatch):
    """The negative control: offsets that keep their captured values give other vectors."""
    right = recording.varlen_attn
    first: list[torch.Tensor] = []

    def stale(query, key, value, cu_seq_q, cu_seq_k, *args, **options):
        if len(cu_seq_q) > 4 and not first:
            first.append(cu_seq_q.clone())
        offsets = first[0] if first and len(first[0]) == len(cu_seq_q) else cu_seq_q
        return right(query, key, value, offsets, offsets, *args, **options)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stale)
    one, other = ["a", "the wheel", TEXTS[1]], [TEXTS[1], "the wheel", "the wheel"]
    with Engine(checkpoint_of("bert"), dtype="float32", device="cpu") as engine:
        assert worst(read(engine, one), expected(checkpoint_of("bert"), one)) <= 1e-5
        assert not worst(read(engine, other), expected(checkpoint_of("bert"), other)) <= 1e-3
    assert backends[0].log.count("replay") == 2 and captures(backends[0]) == 1


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_rows_of_tokens_are_read_from_a_graphs_states(family, backends, checkpoint_of, expected):
    with Engine(checkpoint_of(family), dtype="float32", device="cpu") as engine:
        for texts in (TEXTS, SHORT):
            reference = expected(checkpoint_of(family), texts, "token_embed")
            assert worst(read(engine, texts, "token_embed"), reference) <= 1e-5
    assert backends[0].log.count("replay") == 2


def test_a_graph_serves_every_adapter(backends, expected, checkpoint_of):
    with Engine(checkpoint_of("jina"), dtype="float32", device="cpu") as engine:
        names = [*engine.spec.adapters[:2]]
        for adapter in names:
            options = {"adapter": adapter, "prompt": ""}
            assert worst(read(engine, SHORT, **options), expected(checkpoint_of("jina"), SHORT, **options)) <= 1e-5
    assert len(names) == 2 and captures(backends[0]) == 1  # the adapter of a token is data, not shape


@pytest.mark.parametrize("bound", [{"most": 1}, {"most_bytes": 1}])
def test_the_least_recent_graphs_make_room(bound, backends, expected, checkpoint_of, monkeypatch):
    for name, value in bound.items():
        monkeypatch.setitem(graphs.Graphs.__init__.__kwdefaults__, name, value)
    with Engine(checkpoint_of("bert"), dtype="float32", device="cpu") as engine:
        for texts in (SHORT, TEXTS, SHORT, SHORT):
            assert worst(read(engine, texts), expected(checkpoint_of("bert"), texts)) <= 1e-5
    assert (captures(backends[0]), backends[0].log.count("replay")) == (3, 4)


@pytest.mark.parametrize(
    ("error", "attempts", "levels"),
    [
        (RuntimeError("operation not permitted"), 1, ["WARNING"]),
        (torch.OutOfMemoryError("no"), 2, []),  # perhaps for the moment only: it is tried again
    ],
)
def test_a_failed_capture_runs_the_batch_without_a_graph(
    error, attempts, levels, backends, expected, checkpoint_of, caplog
):
    def refuse() -> None:
        raise error

    with Engine(checkpoint_of("bert"), dtype="float32", device="cpu") as engine:
        backends[0].refuse = refuse
        for _ in range(2):
            assert worst(read(engine, SHORT), expected(checkpoint_of("bert"), SHORT)) <= 1e-5
    assert backends[0].forgotten == attempts and "replay" not in backends[0].log
    assert [record.levelname for record in caplog.records] == levels


def test_a_variable_switches_graphs_off(backends, expected, checkpoint_of, monkeypatch):
    monkeypatch.setenv("MILLPOND_CUDA_GRAPHS", "0")
    with Engine(checkpoint_of("bert"), dtype="float32", device="cpu") as engine:
        assert worst(read(engine, TEXTS), expected(checkpoint_of("bert"), TEXTS)) <= 1e-5
    assert backends[0].log == ["upload", "download 0", "wait 0"]


def on_meta(folder: Path, modes: str | None, monkeypatch: pytest.MonkeyPatch) -> tuple[TorchModel, DeviceBatch]:
    """A model and the input of a captured graph without data: code that reads data fails, as in a capture."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, *args, **options: query.clone())
    loaded = load(EngineConfig(model=str(folder), dtype="float32", device="cpu", pooling=modes))
    loaded.runner.model.backbone.to("meta")
    loaded.runner.model.pooler.to("meta")
    layout = BufferLayout(tokens=96, sequences=6, types=True, adapters=True, skip=True)
    buffer = torch.zeros(layout.size, dtype=torch.int32, device="meta")
    return loaded.runner.model, layout.static(buffer, Bucket(tokens=96, sequences=6, longest=64))


# Without numbers torch multiplies the experts of transformers' class in bfloat16 only.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in (*EAGER, "qwen3-moe")])
def test_nothing_inside_waits_for_the_device(family, backends, checkpoint_of, monkeypatch):
    runner, batch = on_meta(checkpoint_of(family), "cls+mean+max+mean_sqrt_len+weightedmean+lasttoken", monkeypatch)
    with torch.inference_mode():
        states = runner.states(batch)
        values = runner.pooler_call(batch, states).rows(OutputSpec(kind="pooled")).values
    assert values.shape == (6, 6 * states.shape[1]) and values.device.type == "meta"


def test_a_wait_for_the_device_is_noticed(backends, checkpoint_of, monkeypatch):
    """The negative control: lengths read on the host."""
    runner, batch = on_meta(checkpoint_of("bert"), "mean", monkeypatch)
    monkeypatch.setattr(methods, "_lengths", lambda segments: torch.tensor(segments.cu_seqlens.diff().tolist()))
    with torch.inference_mode(), pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)meta"):
        runner.pooler_call(batch, runner.states(batch)).rows(OutputSpec(kind="pooled"))


def test_memory_that_runs_out_at_every_point_of_a_batch_costs_no_result(backends, expected, checkpoint_of):
    """At the upload, in a capture, in a replay, at the download and at the wait for it."""
    with Engine(checkpoint_of("bert"), dtype="float32", device="cpu") as engine:
        for operation in ("upload", "capture", "replay", "download", "wait"):
            reached = []

            def fault(name: str, operation: str = operation, reached: list[str] = reached) -> None:
                if name == operation and not reached:
                    reached.append(name)
                    raise torch.OutOfMemoryError("CUDA out of memory")

            backends[0].fault = fault
            assert worst(read(engine, TEXTS), expected(checkpoint_of("bert"), TEXTS)) <= 1e-5
            assert reached == [operation]
            backends[0].fault = lambda name: None
            engine._replicas.runner.model._pipeline._graphs.clear()


@pytest.mark.parametrize(("family", "pooling"), [("bert", "cls"), ("modernbert", "lasttoken"), ("qwen3", "lasttoken")])
@pytest.mark.parametrize("graphs_on", [True, False], ids=["graph", "eager"])
def test_only_the_rows_that_are_read_pass_the_last_layer(
    graphs_on, pooling, family, backends, checkpoint_of, monkeypatch, tmp_path
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "_streams", lambda device: None)
        with Engine(checkpoint_of(family), dtype="float32", device="cpu", pooling=pooling) as engine:
            reference = read(engine, TEXTS)
    if not graphs_on:
        monkeypatch.setenv("MILLPOND_CUDA_GRAPHS", "0")
    rows_of: list[int | None] = []
    right = TorchModel.states

    def states(self: TorchModel, batch: Any, rows: torch.Tensor | None = None) -> torch.Tensor:
        rows_of.append(None if rows is None else len(rows))
        return right(self, batch, rows)

    monkeypatch.setattr(TorchModel, "states", states)
    with Engine(checkpoint_of(family), dtype="float32", device="cpu", pooling=pooling) as engine:
        found = read(engine, TEXTS)
        assert worst(found, reference) <= 1e-5
        seen = [*rows_of]
        assert None not in seen and max(filter(None, seen)) < 64  # of texts, dummies and empty ones, not of tokens
        if family != "bert":  # the other output needs every token
            return
        mixed = [engine.submit("embed", TEXTS), engine.submit("token_embed", TEXTS)]
        assert [len(each.result()) for each in mixed] == [len(TEXTS)] * 2
        assert None in rows_of


@pytest.mark.parametrize(
    ("tokens", "total", "wasted"),
    [(8192, 4097, False), (9216, 8640, False), (9216, 8639, True), (18432, 16900, True), (32768, 31000, False)],
)
def test_a_large_batch_with_much_padding_has_no_graph(tokens: int, total: int, wasted: bool) -> None:
    bucket = Bucket(tokens=tokens, sequences=4, longest=8192)
    assert graphs._wastes(bucket, total) is wasted


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_batch_without_memory_takes_that_of_the_graphs(kind, backends, expected, checkpoint_of):
    with Engine(checkpoint_of("bert"), dtype="float32", device="cpu") as engine:
        read(engine, TEXTS)
        captured = engine._replicas.runner.model._pipeline._graphs
        assert len(captured.shapes) == 1
        seen = []

        def fault(operation: str) -> None:
            if operation == "replay" and not seen:
                seen.append(len(captured.shapes))
                raise kind("CUDA error: out of memory")
            if operation == "upload" and len(seen) == 1:
                seen.append(len(captured.shapes))

        backends[0].fault = fault
        assert worst(read(engine, TEXTS), expected(checkpoint_of("bert"), TEXTS)) <= 1e-5
    assert seen == [1, 0]


MANY = [f"{text} {i}" for i, text in enumerate(TEXTS * 3)]


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
        patch.setattr(torch_backend, "_streams", lambda device: None)
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
