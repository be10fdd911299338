"""Published embedders with a class of their own on a decoder: the mask dropped, and what else the class does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.oracles import without_mask
from tests.parity.test_backbones import SHORT, TOLERANCE, VISIBLE, ids_of
from tests.tiny import Layout, Normalize, Pooling, edit_json, write_checkpoint
from transformers import LlamaConfig, LlamaModel

from millpond import Engine
from millpond.errors import UnsupportedArchitectureError

pytestmark = pytest.mark.contract

BACKENDS = pytest.mark.parametrize("backend", ["native", "torch"])
MEAN = Layout(modules=(Pooling(modes=("mean",)), Normalize()))


def engine(folder: Path, **options: Any) -> Engine:
    return Engine(folder, dtype="float32", device="cpu", **options)


def unit(rows: Any) -> np.ndarray:
    stacked = np.stack(rows)
    unit: np.ndarray = stacked / np.linalg.norm(stacked, axis=-1, keepdims=True)
    return unit


@torch.inference_mode()
def rows_of(folder: Path, texts: Any, states: Callable[[torch.Tensor], torch.Tensor]) -> list[np.ndarray]:
    return [states(ids).numpy() for ids in ids_of(folder, texts)]


@BACKENDS
@pytest.mark.parametrize(
    ("family", "claimed", "code"),
    [
        ("qwen2", "QZhouModel", "modeling_qzhou.QZhouModel"),
        ("qwen2", "QZhouModel", None),
        ("qwen2", "Qwen2Model", "modeling.QZhouModel"),
        ("llama", "ReasonIRModel", "modeling_reasonir_8b.ReasonIRModel"),
        ("llama", "LlamaEncoderModel", "McGill-NLP/somewhere--modeling_llama_encoder.LlamaEncoderModel"),
    ],
)
def test_a_mean_without_the_mask(family, claimed, code, backend, tmp_path, record_property):
    folder = write_checkpoint(tmp_path / "model", family)
    right, wrong = (unit([row.mean(0) for row in rows_of(folder, SHORT, way)]) for way in without_mask(folder))
    edit_json(folder / "config.json", architectures=[claimed], **({"auto_map": {"AutoModel": code}} if code else {}))
    with engine(folder, backend=backend) as loaded:
        assert (loaded.spec.pooling, loaded.spec.architecture) == (("mean",), claimed)
        found = loaded.embed(SHORT).embeddings
    worst = float(np.abs(found - right).max())
    record_property("error", worst)
    assert worst <= TOLERANCE
    assert np.abs(found - wrong).max() > VISIBLE
    with engine(folder, backend=backend, hf_overrides={"is_causal": True}) as loaded:  # config.json has precedence
        assert np.abs(loaded.embed(SHORT).embeddings - wrong).max() <= TOLERANCE


@BACKENDS
def test_reasonir_leaves_the_instruction_out_of_the_mean(backend, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "llama")
    prompt = "<|user|>\nA post\n<|embed|>\n"
    (lead,), (ids,) = ids_of(folder, [prompt]), ids_of(folder, [prompt + SHORT[1]])
    (row,) = rows_of(folder, [prompt + SHORT[1]], without_mask(folder)[0])
    first = next(i for i, (a, b) in enumerate(zip([*lead.tolist(), -1], ids.tolist(), strict=False)) if a != b)
    own = {"AutoModel": "modeling_reasonir_8b.ReasonIRModel"}
    edit_json(folder / "config.json", architectures=["ReasonIRModel"], auto_map=own)
    with engine(folder, backend=backend) as loaded:
        found = loaded.embed(SHORT[1:2], prompt=prompt).embeddings
    assert first > 3
    assert np.abs(found - unit([row[first:].mean(0)])).max() <= TOLERANCE
    assert np.abs(found - unit([row.mean(0)])).max() > VISIBLE


# --- MiniCPM-Embedding ----------------------------------------------------------------------------------------------


def minicpm(folder: Path, *, embedding: float = 12, depth: float = 1.4) -> LlamaModel:
    """Llama whose words, and what each half of a layer adds, are multiplied by numbers, as the paper has it."""
    content = json.loads((folder / "config.json").read_text())
    left_out = ("architectures", "model_type", "auto_map", "rope_scaling")
    config = LlamaConfig(**{key: value for key, value in content.items() if key not in left_out})
    model = LlamaModel.from_pretrained(folder, config=config, attn_implementation="eager", dtype=torch.float32).eval()
    scale = depth / math.sqrt(config.num_hidden_layers)
    model.embed_tokens.register_forward_hook(lambda module, inputs, out: out * embedding)
    for layer in model.layers:
        layer.self_attn.register_forward_hook(lambda module, inputs, out: (out[0] * scale, *out[1:]))
        layer.mlp.register_forward_hook(lambda module, inputs, out: out * scale)
    return model


def weighted(rows: list[np.ndarray]) -> np.ndarray:
    """The mean of rows that the class multiplied by their positions, which count from one."""
    return unit([(row * np.arange(1, len(row) + 1)[:, None]).mean(0) for row in rows])


@BACKENDS
@pytest.mark.parametrize("layout", [None, MEAN], ids=["plain", "modules"])
@pytest.mark.parametrize("published", [True, False])
def test_minicpms_embedder(published, layout, backend, tmp_path, record_property):
    """As the hub has it, without `model_type` and with `auto_map`'s other class; and with the one class alone."""
    folder = write_checkpoint(tmp_path / "model", "llama", sentence_transformers=layout)

    def states(model: LlamaModel, *, causal: bool) -> list[np.ndarray]:
        def way(ids: torch.Tensor) -> torch.Tensor:
            mask = None if causal else torch.zeros(1, 1, len(ids), len(ids))
            hidden: torch.Tensor = model(input_ids=ids[None], attention_mask=mask, use_cache=False).last_hidden_state
            return hidden[0]

        return rows_of(folder, SHORT, way)

    both = states(minicpm(folder), causal=False)
    mistakes = {
        "the mask": weighted(states(minicpm(folder), causal=True)),
        "a plain mean": unit([row.mean(0) for row in both]),
        "plain words": weighted(states(minicpm(folder, embedding=1), causal=False)),
        "whole branches": weighted(states(minicpm(folder, depth=1), causal=False)),
    }
    fields: dict[str, Any] = {"model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
    if published:
        own = {"AutoConfig": "configuration_minicpm.MiniCPMConfig", "AutoModel": "modeling_minicpm.MiniCPMModel"}
        fields |= {"model_type": None, "auto_map": own, "is_causal": False}
    edit_json(folder / "config.json", architectures=["MiniCPM"], rope_scaling=None, **fields)
    with engine(folder, backend=backend) as loaded:
        assert loaded.spec.pooling == ("weightedmean",)
        found = loaded.embed(SHORT).embeddings
    worst = float(np.abs(found - weighted(both)).max())
    record_property("error", worst)
    assert worst <= TOLERANCE
    for mistake, other in mistakes.items():
        assert np.abs(found - other).max() > VISIBLE, mistake
    with engine(folder, backend=backend, hf_overrides={"adapt_mean_pooling": False}) as loaded:
        assert np.abs(loaded.embed(SHORT).embeddings - mistakes["a plain mean"]).max() <= TOLERANCE


@pytest.mark.parametrize("claimed", ["MiniCPMForCausalLM", "MiniCPMModel", None])
def test_minicpms_language_model_is_not_its_embedder(claimed, tmp_path):
    folder = write_checkpoint(tmp_path / "MiniCPM-2B", "llama")
    own = {"AutoModel": "modeling_minicpm.MiniCPMModel", "AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM"}
    named = None if claimed is None else [claimed]
    edit_json(folder / "config.json", model_type="minicpm", architectures=named, auto_map=own)
    with pytest.raises(
        UnsupportedArchitectureError, match=f"({claimed or 'modeling_minicpm.MiniCPMModel'}).*is_causal"
    ):
        engine(folder)


# --- splade-code ----------------------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("lead", ["model.", "model.model."])
@pytest.mark.parametrize("code", ["splade.Splade", None])
def test_splade_code(code, lead, backend, tmp_path, record_property):
    """Qwen3 without the mask; the vocabulary's logits, whose head is the table of words."""
    folder = write_checkpoint(tmp_path / "model", "qwen3", config={"tie_word_embeddings": True})
    table = load_file(folder / "model.safetensors")["embed_tokens.weight"]

    @torch.inference_mode()
    def expected(states: Callable[[torch.Tensor], torch.Tensor], way: Any = torch.log1p) -> np.ndarray:
        rows = [way((states(ids) @ table.T).relu()).amax(0) for ids in ids_of(folder, SHORT)]
        return torch.stack(rows).numpy()

    ways = without_mask(folder)
    right, causal, unsaturated = expected(ways[0]), expected(ways[1]), expected(ways[0], lambda logits: logits)
    tensors = load_file(folder / "model.safetensors")
    save_file({lead + name: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    edit_json(folder / "config.json", architectures=["Splade"], **({"auto_map": {"AutoModel": code}} if code else {}))
    with engine(folder, backend=backend) as loaded:
        assert loaded.tasks == {"sparse_embed"}
        rows = loaded.sparse_embed(SHORT).embeddings
    found = np.zeros_like(right)
    for row, entries in zip(found, rows, strict=True):
        row[list(entries)] = list(entries.values())
    worst = float(np.abs(found - right).max() / right.max())
    record_property("error", worst)
    assert worst <= TOLERANCE
    for other in (causal, unsaturated):
        assert np.abs(found - other).max() / right.max() > VISIBLE
