"""Weights that are stored quantized, or not finite: what was found, and what to do, in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file
from tests.tiny import TEXTS, Layout, edit_json, write_checkpoint
from tests.tiny.static import write_static

from millpond import Engine
from millpond.errors import MillpondError, ModelLoadError, UnsupportedArchitectureError, WeightMismatchError

Tensors = dict[str, npt.NDArray[Any]]


def altered(folder: Path, alter: Callable[[Tensors], Tensors]) -> Path:
    path = folder / "model.safetensors"
    save_file(alter(load_file(path)), path)
    return folder


def packed(name: str, weight: npt.NDArray[Any]) -> Tensors:
    """GPTQ's and AWQ's tensors of a linear layer."""
    into, out = weight.shape[1] // 8, weight.shape[0]
    return {f"{name}.qweight": np.zeros((into, out), np.int32), f"{name}.scales": np.ones((1, out), np.float16)}


def bitsandbytes(name: str, weight: npt.NDArray[Any]) -> Tensors:
    return {f"{name}.weight": weight.astype(np.int8), f"{name}.SCB": np.ones(len(weight), np.float32)}


def four_bits(name: str, weight: npt.NDArray[Any]) -> Tensors:
    state = {f"{name}.weight.quant_state.bitsandbytes__nf4": np.zeros(8, np.uint8)}
    return {f"{name}.weight": np.zeros((weight.size // 2, 1), np.uint8), **state}


def mlx(name: str, weight: npt.NDArray[Any]) -> Tensors:
    scales = np.ones((len(weight), 1), np.float16)
    codes = np.zeros((len(weight), weight.shape[1] // 8), np.uint32)
    return {f"{name}.weight": codes, f"{name}.scales": scales, f"{name}.biases": scales}


def int8(name: str, weight: npt.NDArray[Any]) -> Tensors:
    return {f"{name}.weight": np.clip(weight * 20, -127, 127).astype(np.int8)}


def int8_bias(name: str, weight: npt.NDArray[Any]) -> Tensors:
    return {f"{name}.weight": weight, f"{name}.bias": np.ones(len(weight), np.int8)}


def model_opt(name: str, weight: npt.NDArray[Any]) -> Tensors:
    codes = np.zeros((len(weight), weight.shape[1] // 2), np.uint8)
    return {f"{name}.weight": codes, f"{name}.weight_scale_2": np.ones(1, np.float32)}


def linears(stored: Callable[[str, npt.NDArray[Any]], Tensors]) -> Callable[[Tensors], Tensors]:
    def alter(tensors: Tensors) -> Tensors:
        result: Tensors = {}
        for name, tensor in tensors.items():
            linear = tensor.ndim == 2 and "embed" not in name
            result |= stored(name.removesuffix(".weight"), tensor) if linear else {name: tensor}
        return result

    return alter


METHODS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "compressed-tensors": "compressed-tensors",
    "torchao": "torchao",
    "newest": "newest",
}


@pytest.mark.parametrize("method", METHODS)
def test_a_config_that_names_a_method_is_refused_and_can_be_overridden(method: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "bert")
    with Engine(folder, dtype="float32") as engine:
        expected = engine.embed(TEXTS).embeddings
    edit_json(folder / "config.json", quantization_config={"quant_method": method, "bits": 4})
    said = rf"{folder} has weights that are quantized by {METHODS[method]} \(quantization_config in config.json\).*load"
    with pytest.raises(ModelLoadError, match=said):
        Engine(folder)
    with Engine(folder, dtype="float32", hf_overrides={"quantization_config": None}) as engine:  # they are whole
        np.testing.assert_array_equal(engine.embed(TEXTS).embeddings, expected)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quantization_config": {"load_in_8bit": True, "llm_int8_threshold": 6.0}}, "by bitsandbytes .quantization_c"),
        # As mlx_lm writes it, under both keys
        ({key: {"group_size": 64, "bits": 4} for key in ("quantization", "quantization_config")}, "by MLX"),
        ({"compression_config": {"format": "pack-quantized"}}, "by compressed-tensors .compression_config"),
    ],
)
def test_a_config_that_does_not_name_its_method(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "bert")
    edit_json(folder / "config.json", **fields)
    with pytest.raises(ModelLoadError, match=said):
        Engine(folder)


MARKS: Mapping[str, tuple[Callable[[str, npt.NDArray[Any]], Tensors], str]] = {
    "gptq": (packed, r"GPTQ or AWQ \(it has .*qweight\)"),
    "bitsandbytes": (bitsandbytes, r"bitsandbytes \(it has .*SCB\)"),
    "bitsandbytes in 4 bits": (four_bits, r"bitsandbytes \(it has .*nf4\)"),
    "mlx": (mlx, r"MLX \(it has .*scales\)"),
    "int8 alone": (int8, "weight as int8 and says nowhere by which scales"),
    "int8 of a bias": (int8_bias, "bias as int8 and says nowhere by which scales"),
    "modelopt": (model_opt, r"ModelOpt \(it has .*weight_scale_2\)"),
}


@pytest.mark.parametrize("kind", MARKS)
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_tensors_that_are_quantized_are_told_by_their_names_and_types(family: str, kind: str, tmp_path: Path) -> None:
    """Also with the override: codes are never read as numbers."""
    stored, said = MARKS[kind]
    folder = altered(write_checkpoint(tmp_path / "model", family), linears(stored))
    for overrides in ({}, {"quantization_config": None}):
        with pytest.raises(ModelLoadError, match=said) as raised:
            Engine(folder, hf_overrides=overrides)
        assert "damaged" not in str(raised.value)


@pytest.mark.parametrize("kind", ["F4", "F8_E8M0"])
def test_a_type_of_quantized_weights_is_not_called_damage(kind: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", "bert") / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["encoder.layer.0.output.dense.weight"]["dtype"] = kind
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    with pytest.raises(
        ModelLoadError, match=rf"output.dense.weight is stored as {kind}, a type of quantized"
    ) as raised:
        Engine(path.parent)
    assert "damaged" not in str(raised.value)


def test_whole_numbers_that_are_no_weights_are_no_quantization(tmp_path: Path) -> None:
    """Position ids, and a static table of int8 rows, whose scale its mean does not need."""
    ids = {"embeddings.position_ids": np.arange(64)[None]}
    with Engine(altered(write_checkpoint(tmp_path / "model", "bert"), lambda tensors: tensors | ids)) as engine:
        assert np.isfinite(engine.embed(TEXTS).embeddings).all()
    masks = {"layers.0.attention.bias": np.tril(np.ones((1, 1, 32, 32), np.uint8))}
    with Engine(altered(write_checkpoint(tmp_path / "causal", "gpt-neox"), lambda tensors: tensors | masks)) as engine:
        assert np.isfinite(engine.embed(TEXTS).embeddings).all()
    folder = write_static(tmp_path / "table")
    with Engine(folder) as engine:
        assert len(engine.embed(TEXTS).embeddings) == len(TEXTS)


def test_a_result_that_is_not_finite_names_the_tensor(tmp_path: Path) -> None:
    name = "encoder.layer.0.intermediate.dense.weight"

    def poisoned(tensors: Tensors) -> Tensors:
        tensors[name][0, 0] = np.nan
        return tensors

    folder = altered(write_checkpoint(tmp_path / "model", "bert"), poisoned)
    with Engine(folder) as engine, pytest.raises(MillpondError, match=f"not finite: {name} in .* holds NaN.*fetch"):
        engine.embed(TEXTS)


def test_an_overflow_of_finite_weights_is_called_one(tmp_path: Path) -> None:
    def large(tensors: Tensors) -> Tensors:
        return {name: tensor * np.float32(1e30 if "dense" in name else 1) for name, tensor in tensors.items()}

    folder = altered(write_checkpoint(tmp_path / "model", "bert"), large)
    with Engine(folder, dtype="float32") as engine, pytest.raises(MillpondError, match="weights are finite.*even in"):
        engine.embed(TEXTS)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": None}, ("no model_type", "BertModel", 'hf_overrides={"model_type": "bert"}')),
        ({"model_type": None, "architectures": None}, ("no model_type", "no architectures either", "hf_overrides")),
        ({"architectures": ["BertForQuestionAnswering"]}, ("a BertForQuestionAnswering", '{"architectures": ["BertM')),
        ({"model_type": "roberta2"}, ("of model_type 'roberta2'", "it runs roberta", "`millpond models`")),
        ({"model_type": "zyx"}, ("of model_type 'zyx'", "`millpond models`")),
    ],
)
def test_a_family_that_is_not_run_is_named_in_one_sentence(
    changes: dict[str, Any], parts: tuple[str, ...], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "model", "bert", sentence_transformers=Layout())
    edit_json(folder / "config.json", **changes)
    with pytest.raises(UnsupportedArchitectureError) as raised:
        Engine(folder)
    message = str(raised.value)
    assert [part for part in parts if part not in message] == []
    assert len(message.removeprefix(str(folder))) < 300


@pytest.mark.parametrize("backend", ["native", pytest.param("torch", marks=pytest.mark.torch)])
@pytest.mark.parametrize("family", ["bert", "qwen3", "deberta-v2"])
def test_tensors_beside_the_model_are_named_once_and_parts_of_it_refused(
    family: str, backend: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path / "model", family)
    with Engine(folder, dtype="float32", backend=backend) as engine:
        expected = engine.embed(TEXTS).embeddings
    beside = {f"quality_head.{i}.weight": np.ones((2, 2), np.float32) for i in range(5)}
    altered(folder, lambda tensors: tensors | beside)
    with Engine(folder, dtype="float32", backend=backend) as engine:
        np.testing.assert_array_equal(engine.embed(TEXTS).embeddings, expected)
    lines = [record.getMessage() for record in caplog.records if "quality_head" in record.getMessage()]
    assert len(lines) == 1 and lines[0].endswith("quality_head.2.weight and 2 more tensors")
    part = "layers.0.self_attn.sink" if family == "qwen3" else "encoder.layer.0.attention.sink"
    altered(folder, lambda tensors: tensors | {f"{part}.weight": np.ones(4, np.float32)})
    with pytest.raises(WeightMismatchError, match=f"does not know {part}.weight;"):
        Engine(folder, dtype="float32", backend=backend)
