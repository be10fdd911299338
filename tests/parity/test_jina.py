"""jina-embeddings-v3 from its original files: adapters by token, its layouts, and mistakes that must be detected."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.parity.rotary_oracles import jina as description
from tests.parity.rotary_oracles import merged
from tests.tiny import MAX_TOKENS, TEXTS, Layout, Normalize, Pooling, edit_json, write_checkpoint
from tests.tiny.families import FAMILIES, JINA_TASKS

from millpond import Engine, PoolingParams
from millpond.attention.segments import Segments
from millpond.checkpoints.architectures import find
from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.checkpoints.native_config import translate
from millpond.engine.execute.runner import Runner
from millpond.errors import ModelLoadError, UnsupportedArchitectureError, WeightMismatchError
from millpond.models import adapters as adapting
from millpond.models.load import load_backbone

TOLERANCE = 1e-5
VISIBLE = 1e-3
QUERY, PASSAGE, _, _, MATCHING = range(5)
# A text for every task and one without; texts of one token, of several and of the maximum length.
MIXED = (-1, *range(5), -1, *range(5))


@pytest.fixture(scope="module")
def folder(plain: Callable[[str], Path]) -> Path:
    return plain("jina")


@pytest.fixture(scope="module")
def ids(folder: Path) -> list[torch.Tensor]:
    """Token ids of the texts; the first has one token, the last one the maximum."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = (*TEXTS, *TEXTS[1:3])
    encoded = [torch.tensor(tokenizer(text, truncation=True, max_length=MAX_TOKENS)["input_ids"]) for text in texts]
    return [encoded[0][1:2], *encoded]


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def task(index: int) -> str | None:
    return None if index < 0 else JINA_TASKS[index]


@torch.inference_mode()
def expected_of(folder: Path, ids: Sequence[torch.Tensor], choice: Sequence[int]) -> list[torch.Tensor]:
    """The states of each text alone, with merged weights."""
    config = config_of(folder)
    references = {index: description(folder, config, task(index)) for index in set(choice)}
    return [references[index](one) for one, index in zip(ids, choice, strict=True)]


def backbone(folder: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> torch.nn.Module:
    checkpoint = read_checkpoint(folder, hf_overrides=overrides)
    row = find(checkpoint.config, "jina")
    checkpoint = replace(checkpoint, config=translate(row, checkpoint.config, "jina"))
    return load_backbone(checkpoint, row, device=torch.device("cpu"), dtype=dtype)


@torch.inference_mode()
def packed(model: torch.nn.Module, ids: Sequence[torch.Tensor], choice: Sequence[int] | None) -> list[torch.Tensor]:
    """All texts in one row, each with its adapter."""
    lengths = [len(one) for one in ids]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    chosen = None
    if choice is not None:
        chosen = torch.tensor(list(choice)).repeat_interleave(torch.tensor(lengths))[None]
    out = model(
        input_ids=torch.cat(list(ids))[None],
        position_ids=positions,
        segments=Segments.of(lengths),
        adapter_ids=chosen,
    )
    return list(out.last_hidden_state[0].float().split(lengths))


def difference(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    assert [one.shape for one in actual] == [other.shape for other in expected]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(actual, expected, strict=True))


# --- Parity -----------------------------------------------------------------------------------------------------------


def test_texts_of_all_tasks_in_one_row(folder, ids, record_property):
    worst = difference(packed(backbone(folder), ids, MIXED), expected_of(folder, ids, MIXED))
    record_property("error", worst)
    assert worst <= TOLERANCE
    lengths = [len(one) for one in ids]
    assert min(lengths) == 1
    assert max(lengths) == MAX_TOKENS


@pytest.mark.parametrize("index", [-1, *range(5)])
def test_each_adapter_equals_transformers_over_merged_weights(index, folder, ids, tmp_path):
    """transformers' class reads the original names; only the sum of weight and adapter is computed here."""
    config = config_of(folder)
    save_file(merged(folder, config, task(index)), tmp_path / "model.safetensors", metadata={"format": "pt"})
    size = {key: config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    settings = transformers.JinaEmbeddingsV3Config(
        **size,
        intermediate_size=96,
        vocab_size=config["vocab_size"],
        max_position_embeddings=66,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
    )
    reference = transformers.JinaEmbeddingsV3Model.from_pretrained(
        tmp_path, config=settings, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        expected = [reference(input_ids=one[None]).last_hidden_state[0] for one in ids]
    choice = [index] * len(ids)
    worst = difference(packed(backbone(folder), ids, choice), expected)
    other = difference(packed(backbone(folder), ids, [(index + 2) % 6 - 1] * len(ids)), expected)
    assert worst <= TOLERANCE
    assert other > VISIBLE


def test_a_text_does_not_depend_on_its_neighbours_or_on_their_tasks(folder, ids):
    model = backbone(folder)
    alone = [packed(model, [one], [index])[0] for one, index in zip(ids, MIXED, strict=True)]
    worst = difference(packed(model, ids, MIXED), alone)
    assert worst <= 1e-6


def test_no_adapter_for_all_is_the_same_as_none_for_each(folder, ids):
    model = backbone(folder)
    assert difference(packed(model, ids, None), packed(model, ids, [-1] * len(ids))) == 0


def test_without_a_choice_no_adapter_is_touched(folder, ids):
    model = backbone(folder)
    expected = packed(model, ids, None)
    for name, buffer in model.named_buffers():
        if "adapter" in name:
            buffer.fill_(float("nan"))
    assert difference(packed(model, ids, None), expected) == 0
    assert not torch.isfinite(packed(model, ids, MIXED)[1]).all()


def test_half_precision_points_the_same_way(folder, ids):
    actual = torch.cat(packed(backbone(folder, dtype=torch.bfloat16), ids, MIXED))
    right = torch.cat(expected_of(folder, ids, MIXED))
    cosine = torch.cosine_similarity(actual, right, dim=-1)
    assert float(cosine.mean()) >= 0.999
    assert float(cosine.min()) >= 0.99


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
    ("options", "index", "prompt"),
    [
        ({"role": "query"}, QUERY, FAMILIES["jina"].config["task_instructions"]["retrieval.query"]),
        ({"role": "document"}, PASSAGE, FAMILIES["jina"].config["task_instructions"]["retrieval.passage"]),
        ({}, MATCHING, ""),
        ({"adapter": "classification"}, 3, ""),
        ({"adapter": "retrieval.query", "prompt": ""}, QUERY, ""),
    ],
)
def test_the_role_chooses_the_adapter_and_the_prompt(options, index, prompt, engine, tmp_path):
    place = tmp_path / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, local_files_only=True)
    ids = [torch.tensor(tokenizer(prompt + text, truncation=True, max_length=64)["input_ids"]) for text in TEXTS]
    rows = torch.stack([states.mean(0) for states in expected_of(place, ids, [index] * len(ids))])
    expected = torch.nn.functional.normalize(rows, dim=-1).numpy()
    assert engine.spec.adapters == JINA_TASKS
    actual = engine.embed(TEXTS, **options).embeddings
    assert np.abs(actual - expected).max() <= TOLERANCE
    cut = engine.embed(TEXTS, dimensions=16, **options).embeddings
    short = expected[:, :16] / np.linalg.norm(expected[:, :16], axis=1, keepdims=True)
    assert np.abs(cut - short).max() <= TOLERANCE


def test_callers_with_different_tasks_share_a_batch(engine, monkeypatch):
    right, queued, adapters = Runner.states, threading.Event(), []

    def forward(runner, batch, rows=None):
        queued.wait(20)
        adapters.append(set() if batch.adapter_ids is None else set(batch.adapter_ids[0].tolist()))
        return right(runner, batch, rows)

    requests = [(TEXTS[i % len(TEXTS)], JINA_TASKS[i % 5]) for i in range(30)]
    monkeypatch.setattr(Runner, "states", forward)
    futures = [engine.submit("embed", [text], PoolingParams(adapter=name)) for text, name in requests]
    queued.set()
    actual = [future.result(20).embeddings for future in futures]
    assert max(map(len, adapters)) > 1, adapters  # which calls share a batch depends on timing
    for (text, name), vector in zip(requests, actual, strict=True):
        assert np.abs(vector - engine.embed([text], adapter=name).embeddings).max() <= 1e-6


def test_a_transformer_of_its_own_without_adapters_is_code(tmp_path):
    place = write_checkpoint(tmp_path / "model", "bert", sentence_transformers=Layout())
    modules = json.loads((place / "modules.json").read_text())
    modules[0]["type"] = "custom_st.Transformer"
    (place / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelLoadError, match=r"custom_st\.Transformer, which is code of the checkpoint's own"):
        Engine(place)


# --- Other layouts ----------------------------------------------------------------------------------------------------


def test_without_adapters_and_beside_a_projection(tmp_path):
    """jina-colbert-v2's backbone."""
    changed = {"lora_adaptations": None, "architectures": ["HF_ColBERT"], "rotary_emb_base": 500.0}
    place = write_checkpoint(tmp_path / "model", "jina", config=changed)
    tensors = load_file(place / "model.safetensors")
    assert not any("lora" in name or "parametrizations" in name for name in tensors)
    save_file({**tensors, "linear.weight": torch.randn(16, 48)}, place / "model.safetensors")
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, local_files_only=True)
    ids = [torch.tensor(tokenizer(text, truncation=True, max_length=64)["input_ids"]) for text in TEXTS]
    with torch.inference_mode():
        reference = description(place, config_of(place), None)
        expected = [reference(one) for one in ids]
    worst = difference(packed(backbone(place), ids, None), expected)
    moved = difference(packed(backbone(place, rotary_emb_base=20000.0), ids, None), expected)
    assert worst <= TOLERANCE
    assert moved > VISIBLE


def test_transformers_own_layout(tmp_path, folder, ids):
    """The ``-hf`` repositories: transformers' config.json and tensor names, no adapters."""
    config = config_of(folder)
    native = transformers.JinaEmbeddingsV3Config(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        vocab_size=config["vocab_size"],
        max_position_embeddings=66,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )
    torch.manual_seed(0)
    model = transformers.JinaEmbeddingsV3Model(native).eval()
    for parameter in model.parameters():
        parameter.data.mul_(10 if parameter.dim() == 2 else 1)
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = [model(input_ids=one[None]).last_hidden_state[0] for one in ids]
    worst = difference(packed(backbone(tmp_path), ids, None), expected)
    assert worst <= TOLERANCE


# --- Mistakes and refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [{"rotary_emb_base": 10000.0}, {"lora_alpha": 2}, {"layer_norm_eps": 0.1}, {"hidden_act": "relu"}],
    ids=lambda changed: next(iter(changed)),
)
def test_notices_that_a_field_is_read_wrongly(changed, folder, ids):
    moved = difference(packed(backbone(folder, **changed), ids, MIXED), expected_of(folder, ids, MIXED))
    assert moved > VISIBLE


@pytest.mark.parametrize("wrong", [None, [-1] * 12, [*MIXED[1:], -1]], ids=["none", "off", "the neighbour's"])
def test_notices_the_wrong_adapter(wrong, folder, ids):
    moved = difference(packed(backbone(folder), ids, wrong), expected_of(folder, ids, MIXED))
    assert moved > VISIBLE


@pytest.mark.parametrize("part", ["embeddings.word", "embeddings.token_type", "Wqkv", "out_proj", "fc1", "fc2"])
def test_notices_that_an_adapter_is_left_out(part, folder, ids, monkeypatch):
    right = adapting.Adapters._placed
    names = []
    take = adapting.Adapters._take

    def remembering(self, key, shape):
        names.append(key)
        return take(self, key, shape)

    def placed(self, down, up):
        return right(self, down * (0 if part in names[-1] else 1), up)

    monkeypatch.setattr(adapting.Adapters, "_take", remembering)
    monkeypatch.setattr(adapting.Adapters, "_placed", placed)
    moved = difference(packed(backbone(folder), ids, MIXED), expected_of(folder, ids, MIXED))
    assert any(part in name for name in names)
    assert moved > VISIBLE


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
        ({"num_hidden_layers": 1}, None, r"does not know layers\.1"),
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
