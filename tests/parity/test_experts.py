"""Mixtures of experts: nomic-embed-text-v2-moe from its original files, in both backends; Qwen3-MoE natively."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.rotary_oracles import nomic
from tests.parity.test_backbones import TOLERANCE, VISIBLE, Matrices, difference, expected_of, ids_of, states
from tests.tiny import TEXTS, write_checkpoint

from millpond import Engine
from millpond.errors import ModelLoadError, UnsupportedArchitectureError, WeightMismatchError

BACKENDS = ("native", "torch")
AUTO_MAP = {
    "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
    "AutoModelForMaskedLM": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertForPreTraining",
}
# Experts wider than a piece of a feed forward, and columns that are no multiple of what the kernels compute.
WIDE = {"n_inner": 400, "n_embd": 72, "num_experts": 8}


def expected(folder: Path, **mistakes: Any) -> Matrices:
    reference = nomic(folder, json.loads((folder / "config.json").read_text()), **mistakes)
    with torch.inference_mode():
        return [reference(ids).numpy() for ids in ids_of(folder, TEXTS)]


def found(folder: Path, backend: Any, **options: Any) -> Matrices:
    with Engine(folder, backend=backend, dtype="float32", device="cpu", **options) as engine:
        return states(engine, TEXTS)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("experts")
    write_checkpoint(root / "tiny", "nomic-moe", config={"auto_map": AUTO_MAP})
    write_checkpoint(root / "wide", "nomic-moe", wrapped=True, config=WIDE)
    return root.joinpath


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", ["tiny", "wide"])
def test_a_row_is_the_weighted_sum_of_its_experts(size, backend, folder_of, record_property):
    own = found(folder_of(size), backend)
    worst = difference(own, expected(folder_of(size)))
    record_property("error", worst)
    assert worst <= TOLERANCE
    assert difference(own, expected(folder_of(size), renormalized=True)) > VISIBLE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "changed", [{"moe_normalize_expert_weights": True}, {"moe_top_k": 1}, {"moe_top_k": 5}], ids=str
)
def test_every_field_of_the_mixture_is_read(changed, backend, folder_of):
    folder = folder_of("tiny")
    own = found(folder, backend, hf_overrides=changed)
    config = json.loads((folder / "config.json").read_text()) | changed
    reference = nomic(folder, config, renormalized=config["moe_normalize_expert_weights"])
    with torch.inference_mode():
        right = [reference(ids).numpy() for ids in ids_of(folder, TEXTS)]
    assert difference(own, right) <= TOLERANCE
    assert difference(own, expected(folder)) > VISIBLE


QWEN = {
    "as published": {},
    "weights that do not add up to 1": {"norm_topk_prob": False},
    "a layer without experts": {"mlp_only_layers": [0]},
    "experts in every second layer": {"decoder_sparse_step": 2, "num_hidden_layers": 3},
    "a window": {"use_sliding_window": True, "sliding_window": 7},
    "one expert of six": {"num_experts": 6, "num_experts_per_tok": 1, "moe_intermediate_size": 40},
}


@pytest.mark.parametrize("name", QWEN)
def test_qwen3_moe_equals_transformers(name, tmp_path, record_property):
    folder = write_checkpoint(tmp_path / "model", "qwen3-moe", config=QWEN[name])
    right = expected_of(folder, TEXTS)
    own = found(folder, "native")
    worst = difference(own, right)
    record_property("error", worst)
    assert worst <= TOLERANCE
    if name == "as published":
        assert difference(found(folder, "native", hf_overrides={"norm_topk_prob": False}), right) > VISIBLE


def test_more_experts_of_a_token_than_there_are(folder_of):
    with pytest.raises(ModelLoadError, match="gives a token 6 experts, and there are 5"):
        Engine(folder_of("tiny"), hf_overrides={"moe_top_k": 6}, backend="native")


def test_half_precision_and_eight_bits_choose_the_same_experts(folder_of):
    """But for the rows whose second and third expert are as good as equal."""
    right = np.concatenate(expected(folder_of("wide")))
    for options in ({"dtype": "bfloat16"}, {"quantization": "int8"}, {"backend": "torch", "dtype": "bfloat16"}):
        with Engine(folder_of("wide"), device="cpu", **options) as engine:
            own = np.concatenate(states(engine, TEXTS))
        cosine = (own * right).sum(1) / np.linalg.norm(own, axis=1) / np.linalg.norm(right, axis=1)
        assert np.median(cosine) >= 0.999


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"activation_function": "swiglu"}, "'swiglu', which millpond does not run for NomicBert with experts"),
        ({"num_shared_experts": 1}, "num_shared_experts 1"),
        ({"expert_choice_router": True}, "expert_choice_router True"),
        ({"num_experts": 0}, "qkv_proj_bias True"),  # without experts it is another class
    ],
)
def test_another_mixture_is_refused(changed, message, folder_of):
    with pytest.raises(UnsupportedArchitectureError, match=message):
        Engine(folder_of("tiny"), hf_overrides=changed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_expert_is_named(backend, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "nomic-moe")
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layers.1.mlp.experts.bias"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightMismatchError, match=r"misses layers\.1\.mlp\.experts\.bias"):
        Engine(folder, backend=backend)
