"""jina-embeddings-v3 from its original files: adapters by text, its layouts, and what does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.parity.rotary_oracles import jina as description
from tests.parity.rotary_oracles import merged
from tests.parity.test_backbones import difference, ids_of
from tests.tiny import MAX_TOKENS, TEXTS, Layout, Normalize, Pooling, edit_json, write_checkpoint
from tests.tiny.families import FAMILIES, JINA_TASKS

from millpond import Engine, PoolingParams
from millpond.errors import ModelLoadError, UnsupportedArchitectureError, WeightMismatchError

TOLERANCE = 1e-5
VISIBLE = 1e-3
MIXED = tuple(JINA_TASKS[i % 5] for i in range(len(TEXTS)))  # texts of one token, of several and of the maximum length
SIZE = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}


@pytest.fixture(scope="module")
def folder(plain: Callable[[str], Path]) -> Path:
    return plain("jina")


@torch.inference_mode()
def described(folder: Path, ids: Sequence[torch.Tensor], tasks: Sequence[str]) -> list[np.ndarray]:
    """The states of each text alone, with merged weights."""
    config = json.loads((folder / "config.json").read_text())
    references = {task: description(folder, config, task) for task in set(tasks)}
    return [references[task](one).numpy() for one, task in zip(ids, tasks, strict=True)]


def states(folder: Path, tasks: Sequence[str | None], **options: Any) -> list[np.ndarray]:
    """Those of the engine, where the calls of all texts share a batch."""
    with Engine(folder, dtype="float32", device="cpu", **options) as engine:
        calls = [PoolingParams(adapter=task, normalize=False, prompt="") for task in tasks]
        futures = [engine.submit("token_embed", [text], call) for text, call in zip(TEXTS, calls, strict=True)]
        return [future.result(60).embeddings[0] for future in futures]


def native(**fields: Any) -> Any:
    return transformers.JinaEmbeddingsV3Config(**SIZE, max_position_embeddings=66, **fields)


# --- Parity -----------------------------------------------------------------------------------------------------------


def test_texts_of_all_tasks_in_one_batch(folder, record_property):
    worst = difference(states(folder, MIXED), described(folder, ids_of(folder, TEXTS), MIXED))
    record_property("error", worst)
    assert worst <= TOLERANCE


@pytest.mark.parametrize("index", range(5))
def test_each_adapter_equals_transformers_over_merged_weights(index, folder, tmp_path):
    """transformers' class reads the original names; only the sum of weight and adapter is computed here."""
    config = json.loads((folder / "config.json").read_text())
    save_file(merged(folder, config, JINA_TASKS[index]), tmp_path / "model.safetensors", metadata={"format": "pt"})
    settings = native(vocab_size=config["vocab_size"], rope_parameters={"rope_type": "default", "rope_theta": 20000.0})
    model = transformers.JinaEmbeddingsV3Model
    reference = model.from_pretrained(tmp_path, config=settings, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = [reference(input_ids=ids[None]).last_hidden_state[0].numpy() for ids in ids_of(folder, TEXTS)]
    assert difference(states(folder, [JINA_TASKS[index]] * len(TEXTS)), expected) <= TOLERANCE
    assert difference(states(folder, [JINA_TASKS[index - 1]] * len(TEXTS)), expected) > VISIBLE


def test_transformers_own_layout(tmp_path, folder):
    """The ``-hf`` repositories: transformers' config.json and tensor names, no adapters."""
    shutil.copytree(folder, tmp_path / "model")
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    settings = native(vocab_size=vocabulary, rope_parameters={"rope_type": "default", "rope_theta": 700.0})
    torch.manual_seed(0)
    model = transformers.JinaEmbeddingsV3Model(settings).eval()
    for parameter in model.parameters():
        parameter.data.mul_(10 if parameter.dim() == 2 else 1)
    model.save_pretrained(tmp_path / "model")
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = [model(input_ids=ids[None]).last_hidden_state[0].numpy() for ids in ids_of(folder, TEXTS)]
    assert difference(states(tmp_path / "model", [None] * len(TEXTS)), expected) <= TOLERANCE


@pytest.mark.parametrize(
    "changed",
    [{"rotary_emb_base": 10000.0}, {"lora_alpha": 2}, {"layer_norm_eps": 0.1}, {"hidden_act": "relu"}],
    ids=lambda changed: next(iter(changed)),
)
def test_every_field_is_read(changed, folder):
    actual = states(folder, MIXED, hf_overrides=changed)
    assert difference(actual, described(folder, ids_of(folder, TEXTS), MIXED)) > VISIBLE


# --- Roles, prompts, widths -------------------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    """The complete repository: a custom Transformer in modules.json, and prompts with the tasks' names."""
    place = write_checkpoint(
        tmp_path / "model",
        "jina",
        sentence_transformers=Layout(
            style="old",
            modules=(Pooling(modes=("mean",)), Normalize()),
            prompts=FAMILIES["jina"].config["task_instructions"],
        ),
        tokenizer_limit=MAX_TOKENS,
    )
    modules = json.loads((place / "modules.json").read_text())
    modules[0] |= {"type": "custom_st.Transformer", "kwargs": ["task"]}
    (place / "modules.json").write_text(json.dumps(modules))
    with Engine(place, dtype="float32", device="cpu") as made:
        yield made


@pytest.mark.parametrize(
    ("options", "task", "prompt"),
    [
        ({"role": "query"}, "retrieval.query", FAMILIES["jina"].config["task_instructions"]["retrieval.query"]),
        ({"role": "document"}, "retrieval.passage", FAMILIES["jina"].config["task_instructions"]["retrieval.passage"]),
        ({}, "text-matching", ""),
        ({"adapter": "classification"}, "classification", ""),
        ({"adapter": "retrieval.query", "prompt": ""}, "retrieval.query", ""),
    ],
)
def test_the_role_chooses_the_adapter_and_the_prompt(options, task, prompt, engine, tmp_path):
    place = tmp_path / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, local_files_only=True)
    ids = [torch.tensor(tokenizer(prompt + text, truncation=True, max_length=64)["input_ids"]) for text in TEXTS]
    rows = torch.stack([torch.from_numpy(rows).mean(0) for rows in described(place, ids, [task] * len(ids))])
    expected = torch.nn.functional.normalize(rows, dim=-1).numpy()
    assert engine.spec.adapters == JINA_TASKS
    actual = engine.embed(TEXTS, **options).embeddings
    assert np.abs(actual - expected).max() <= TOLERANCE
    cut = engine.embed(TEXTS, dimensions=16, **options).embeddings
    short = expected[:, :16] / np.linalg.norm(expected[:, :16], axis=1, keepdims=True)
    assert np.abs(cut - short).max() <= TOLERANCE


def test_a_transformer_of_its_own_without_adapters_is_code(tmp_path):
    place = write_checkpoint(tmp_path / "model", "bert", sentence_transformers=Layout())
    modules = json.loads((place / "modules.json").read_text())
    modules[0]["type"] = "custom_st.Transformer"
    (place / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelLoadError, match=r"custom_st\.Transformer, which is code of the checkpoint's own"):
        Engine(place)


# --- Refusals ---------------------------------------------------------------------------------------------------------


def without(name: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if name not in key}


@pytest.mark.parametrize(
    ("fields", "change", "message"),
    [
        ({}, without("layers.1.mlp.fc2.parametrizations.weight.0.lora_B"), r"misses encoder\.layers\.1\.mlp\.fc2\S+B;"),
        ({}, without("lora_"), r"misses embeddings\.word_embeddings\S+lora_A"),
        ({}, without("layers.1.mlp.fc2.parametrizations.weight.original"), r"misses layers\.1\.mlp\.fc2\.weight"),
        (
            {"lora_adaptations": list(JINA_TASKS[:4])},
            None,
            r"word_embeddings\S+ has shape \[5, \d+, 4\], and 4 lora_adaptations and lora_rank 4 make it \[4, \d+, 4\]",
        ),
        ({"lora_rank": 8}, None, r"has shape \[5, \d+, 4\], and 5 lora_adaptations and lora_rank 8"),
        ({"lora_adaptations": None}, None, "does not know embeddings"),
        ({"num_hidden_layers": 1}, None, r"does not know (encoder\.)?layers\.1"),
    ],
)
def test_adapters_that_do_not_fit_are_named(fields, change, message, tmp_path):
    place = write_checkpoint(tmp_path / "model", "jina")
    edit_json(place / "config.json", **fields)
    if change is not None:
        save_file(change(load_file(place / "model.safetensors")), place / "model.safetensors")
    with pytest.raises(WeightMismatchError, match=message):
        Engine(place)


def test_a_scaling_of_the_positions_is_refused(folder):
    with pytest.raises(UnsupportedArchitectureError, match="rope_scaling"):
        Engine(folder, hf_overrides={"rope_scaling": {"type": "linear", "factor": 2.0}})
