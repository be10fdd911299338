"""Encoders built directly from their tensors, compared with transformers; and files that are loaded by transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import write_checkpoint

from millpond.attention.segments import Segments
from millpond.checkpoints.architectures import find
from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.errors import WeightMismatchError
from millpond.models import load
from millpond.models.encoder_file import read_encoder

pytestmark = pytest.mark.contract  # two engines for each case, one of them a peer's

DIRECT = ("bert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta")
LENGTHS = (1, 7, 7, 30)


def states(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Hidden states ``[tokens, hidden]`` of some token ids in the packed forward."""
    checkpoint = read_checkpoint(str(folder))
    architecture = find(checkpoint.config, str(folder))
    backbone = load.load_backbone(checkpoint, architecture, device=torch.device("cpu"), dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 100, (1, sum(LENGTHS)), generator=generator)
    offset = architecture.position_offset(checkpoint.config)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None] + offset
    options: dict[str, Any] = {"token_type_ids": ids % 2} if architecture.token_types else {}
    with torch.inference_mode():
        out = backbone(input_ids=ids, position_ids=positions, segments=Segments.of(LENGTHS), **options)
    result: torch.Tensor = out.last_hidden_state[0]
    return result


def is_direct(folder: Path) -> bool:
    checkpoint = read_checkpoint(str(folder))
    row = find(checkpoint.config, str(folder))
    if row.encoder is None:
        return False
    backbone = read_encoder(
        checkpoint.layout.transformer,
        checkpoint.config,
        row.encoder,
        dtype=torch.float32,
        is_head_tensor=partial(load.is_head_tensor, architecture=row),
    )
    return backbone is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("family", DIRECT)
def test_direct_reading_equals_transformers_to_the_last_bit(family, wrapped, dtype, tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "model", family, wrapped=wrapped)
    assert is_direct(folder)
    direct = states(folder, dtype)
    monkeypatch.setattr(load, "read_encoder", lambda *_, **__: None)
    assert torch.equal(direct, states(folder, dtype))


def test_one_other_weight_is_another_result(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "bert")
    before = states(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings.token_type_embeddings.weight"][1] += 1e-2
    save_file(tensors, folder / "model.safetensors")
    assert not torch.equal(before, states(folder))


@pytest.mark.parametrize("shape", [{"embedding_size": 16}, {"num_attention_heads": 2}])
def test_electra_with_other_sizes(shape, tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "model", "electra", config=shape)
    direct = states(folder)
    monkeypatch.setattr(load, "read_encoder", lambda *_, **__: None)
    assert torch.equal(direct, states(folder))


@pytest.mark.parametrize(
    "field",
    [
        {"is_decoder": True},
        {"position_embedding_type": "relative_key"},
        {"pruned_heads": {"0": [1]}},
        {"hidden_size": "64"},
        {"layer_norm_eps": None},
        {"num_attention_heads": 5},
        {"num_hidden_layers": 3},
        {"vocab_size": 7},
    ],
)
def test_an_unusual_config_is_left_to_transformers(field, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "bert")
    assert is_direct(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | field), encoding="utf-8")
    assert not is_direct(folder)


@pytest.mark.parametrize("change", ["missing", "extra", "old name", "shape", "head"])
def test_other_tensors_than_the_config_says(change, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "bert")
    tensors = load_file(folder / "model.safetensors")
    name = "encoder.layer.1.output.LayerNorm.weight"
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        tensors["encoder.layer.1.output.LayerNorm.scale"] = tensors[name].clone()
    elif change == "old name":
        tensors[name.replace("weight", "gamma")] = tensors.pop(name)
    elif change == "shape":
        tensors[name] = tensors[name][:-1].clone()
    else:
        tensors["cls.predictions.bias"] = tensors[name].clone()
    save_file(tensors, folder / "model.safetensors")
    assert is_direct(folder) == (change == "head")
    if change in ("head", "old name"):
        states(folder)
    else:
        with pytest.raises(WeightMismatchError):
            states(folder)


def test_pickled_weights_are_left_to_transformers(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "bert", weights="bin")
    assert not is_direct(folder)
    assert states(folder).isfinite().all()


_START = """
import sys
from millpond import Engine
for folder in sys.argv[1:]:
    with Engine(folder, device="cpu") as engine:
        assert engine.embed(["a"]).embeddings.shape == (1, engine.spec.dimensions)
    print(*sorted({"transformers", "torch._dynamo", "sympy", "scipy", "huggingface_hub"} & set(sys.modules)))
"""


def test_a_bert_starts_without_transformers(tmp_path):
    """Its import takes longer than all other steps together. A family that needs it is the negative control."""
    folders = [write_checkpoint(tmp_path / family, family) for family in ("bert", "qwen3")]
    command = [sys.executable, "-c", _START, *map(str, folders)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    after_bert, after_qwen3 = run.stdout.splitlines()
    assert after_bert == ""
    assert "transformers" in after_qwen3.split()
