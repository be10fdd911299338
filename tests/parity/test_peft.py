"""Folders of PEFT with a LoRA only: equal to transformers' model with the products added to its layers in the test."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.comparison import TOLERANCE, VISIBLE, difference
from tests.tiny import TEXTS, edit_json, write_checkpoint
from transformers import AutoModel, AutoTokenizer

from millpond import Engine
from millpond.errors import ModelLoadError

RANK = 3
ST = "sentence_transformers.models"
LAYERS = {
    "bert": (r"attention\.self\.(query|value)", r"output\.dense"),
    "modernbert": (r"attn\.Wqkv", r"mlp\.Wi"),
    "qwen3": (r"self_attn\.(q|v)_proj", r"mlp\.down_proj"),
    "gpt2": (r"attn\.c_attn", r"mlp\.c_proj"),
}
# The pooling of each family's plain checkpoint.
ROWS = {"bert": 0, "modernbert": None, "qwen3": -1, "gpt2": -1}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))


def write_adapter(
    folder: Path, base: Path, family: str, *, prefix: str = "base_model.model.", seed: int = 7, **config: Any
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Write an adapter of ``base``; returns both factors by layer."""
    import re

    model = AutoModel.from_pretrained(base, local_files_only=True)
    random = torch.Generator().manual_seed(seed)
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if any(re.search(rf"{pattern}$", name) for pattern in LAYERS[family]):
            weight = module.weight.T if family == "gpt2" else module.weight
            down = torch.randn(RANK, weight.shape[1], generator=random) / 4
            up = torch.randn(weight.shape[0], RANK, generator=random) / 4
            factors[name] = (down, up)
            tensors |= {f"{prefix}{name}.lora_A.weight": down, f"{prefix}{name}.lora_B.weight": up}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "base_model_name_or_path": str(base)}
    content = {**fields, "task_type": "FEATURE_EXTRACTION", "target_modules": sorted(factors), **config}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return factors


def reference(base: Path, factors: Any, scale: float, row: int | None, texts: Sequence[str] = TEXTS) -> np.ndarray:
    """Unit vectors of the texts; each layer's output has its product added, nothing is merged."""
    model = AutoModel.from_pretrained(base, dtype=torch.float32, attn_implementation="eager", local_files_only=True)
    for name, (down, up) in factors.items():
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, out, down=down, up=up: out + scale * (inputs[0] @ down.T @ up.T)
        )
    tokenizer, rows = AutoTokenizer.from_pretrained(base, local_files_only=True), []
    for text in texts:
        with torch.inference_mode():
            states = model(**tokenizer(text, return_tensors="pt", truncation=True)).last_hidden_state[0]
        vector = states.mean(0) if row is None else states[row]
        rows.append((vector / vector.norm()).numpy())
    return np.stack(rows)


def embedded(folder: Path, **options: Any) -> np.ndarray:
    with Engine(folder, dtype="float32", device="cpu", **options) as engine:
        vectors: np.ndarray = engine.embed(TEXTS).embeddings
        return vectors


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        (family, backend)
        for family in LAYERS
        for backend in ("native", "torch")
        if (family, backend) != ("gpt2", "native")
    ],
)
def test_a_lora_is_merged_into_its_base(family: str, backend: Any, tmp_path: Path, record_property: Any) -> None:
    base = write_checkpoint(tmp_path / "base", family)
    # The adapter of a language model calls its layers by another prefix than the base's file does.
    prefix = "base_model.model.model." if family == "qwen3" else "base_model.model."
    factors = write_adapter(tmp_path / "adapter", base, family, prefix=prefix)
    expected = reference(base, factors, 6 / RANK, ROWS[family])
    pooling = {None: "mean", 0: "cls", -1: "lasttoken"}[ROWS[family]]
    actual = embedded(tmp_path / "adapter", backend=backend, pooling=pooling)
    worst = difference(actual, expected)
    record_property("error", worst)
    assert worst <= TOLERANCE
    assert difference(embedded(base, backend=backend, pooling=pooling), expected) > VISIBLE
    assert len(factors) >= 4


def test_rank_stabilized_and_by_layer(tmp_path: Path) -> None:
    """The scale is over the root of the rank; a wrong one is seen. Layers may have an alpha of their own."""
    base = write_checkpoint(tmp_path / "base", "bert")
    factors = write_adapter(tmp_path / "adapter", base, "bert", use_rslora=True)
    actual = embedded(tmp_path / "adapter", pooling="cls")
    assert difference(actual, reference(base, factors, 6 / math.sqrt(RANK), 0)) <= TOLERANCE
    assert difference(actual, reference(base, factors, 6 / RANK, 0)) > VISIBLE
    edit_json(tmp_path / "adapter" / "adapter_config.json", alpha_pattern={"query": 12.0, "layer": 99.0}, lora_alpha=3)
    turned = {name: (down, up * (12 if name.endswith("query") else 3)) for name, (down, up) in factors.items()}
    actual = embedded(tmp_path / "adapter", pooling="cls")
    assert difference(actual, reference(base, turned, 1 / math.sqrt(RANK), 0)) <= TOLERANCE


def test_its_own_files_and_tensors_count(tmp_path: Path) -> None:
    """A pipeline beside the adapter, a path relative to it, and a tensor that was trained whole."""
    base = write_checkpoint(tmp_path / "base", "bert")
    factors = write_adapter(tmp_path / "adapter", base, "bert", base_model_name_or_path="../base")
    with Engine(tmp_path / "adapter", dtype="float32", device="cpu") as engine:
        first = engine.spec.fingerprint
    (tmp_path / "adapter" / "1_Pooling").mkdir()
    (tmp_path / "adapter" / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    listed = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(listed)
    ]
    (tmp_path / "adapter" / "modules.json").write_text(json.dumps(modules))
    assert difference(embedded(tmp_path / "adapter"), reference(base, factors, 2, None)) <= TOLERANCE
    with Engine(tmp_path / "adapter", dtype="float32", device="cpu") as engine:
        assert engine.spec.fingerprint != first
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    bias = torch.linspace(-1, 1, AutoModel.from_pretrained(base).config.hidden_size)
    layer = "base_model.model.encoder.layer.1.output"  # peft keeps a bias of an adapted layer in its base_layer
    save_file({f"{layer}.LayerNorm.bias": bias, f"{layer}.dense.base_layer.bias": -bias}, path)
    expected = AutoModel.from_pretrained(base)
    expected.encoder.layer[1].output.LayerNorm.bias.data = bias
    expected.encoder.layer[1].output.dense.bias.data = -bias
    expected.save_pretrained(tmp_path / "changed")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "changed")
    found = embedded(tmp_path / "changed", pooling="mean")
    assert difference(embedded(tmp_path / "adapter"), found) <= TOLERANCE


def write_jina_v5(folder: Path, base: Path, family: str) -> dict[str, Any]:
    """The files of jina-embeddings-v5-text-small and -nano; returns the factors by task."""
    factors = {}
    (folder / "adapters").mkdir(parents=True)
    for number, task in enumerate(("retrieval", "text-matching")):
        own = {"base_model_name_or_path": "jinaai/jina-embeddings-v5-text", "bias": "none", "use_dora": False}
        factors[task] = write_adapter(folder / "adapters" / task, base, "qwen3", seed=number, **own)
    for path in base.iterdir():
        shutil.copyfile(path, folder / path.name)
    code = {
        "AutoConfig": "configuration_jina_embeddings_v5.JinaEmbeddingsV5Config",
        "AutoModel": "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model",
    }
    named = {"model_type": "jina_embeddings_v5", "architectures": ["JinaEmbeddingsV5Model"], "auto_map": code}
    edit_json(folder / "config.json", **named, task_names=list(factors))
    if family == "eurobert":
        edit_json(folder / "config.json", is_decoder=False)
    module = {"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer", "kwargs": ["task"]}
    (folder / "modules.json").write_text(json.dumps([module]))
    prompts = {"query": "Query: ", "document": "Document: "}
    settings = {"prompts": prompts, "default_prompt_name": "document", "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return factors


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("family", ["qwen3", "eurobert"])
def test_jina_v5_has_an_adapter_for_each_task(family: str, backend: Any, tmp_path: Path, record_property: Any) -> None:
    """Code of its own in the files, which is not run; the task is chosen when the model is loaded."""
    base, model = write_checkpoint(tmp_path / "base", family), tmp_path / "jina-embeddings-v5-text-small"
    factors = write_jina_v5(model, base, family)
    prompted = {
        role: [lead + text for text in TEXTS] for role, lead in (("document", "Document: "), ("query", "Query: "))
    }
    expected = {task: reference(base, factors[task], 2, -1, prompted["document"]) for task in factors}
    queries = reference(base, factors["retrieval"], 2, -1, prompted["query"])
    plain = reference(base, factors["retrieval"], 2, -1)
    with Engine(model, dtype="float32", device="cpu", backend=backend) as engine:
        assert (engine.spec.pooling, engine.spec.normalize) == (("lasttoken",), True)
        assert (engine.spec.matryoshka, engine.spec.matryoshka_smallest) == (True, 32)
        assert engine.spec.model_type == family
        found = engine.embed(TEXTS).embeddings
        worst = max(
            difference(found, expected["retrieval"]), difference(engine.embed(TEXTS, role="query").embeddings, queries)
        )
        assert difference(engine.embed(TEXTS, prompt="").embeddings, plain) <= TOLERANCE
    record_property("error", worst)
    assert worst <= TOLERANCE
    for wrong in (expected["text-matching"], queries, plain, reference(base, factors["retrieval"], 1, -1, TEXTS)):
        assert difference(found, wrong) > VISIBLE
    others = embedded(model, backend=backend, hf_overrides={"jina_task": "text-matching"})
    assert difference(others, expected["text-matching"]) <= TOLERANCE
    with pytest.raises(ModelLoadError, match="no adapter for 'clustering'; choose retrieval, text-matching by"):
        Engine(model, hf_overrides={"jina_task": "clustering"})


def test_jina_v5_with_the_modules_listed(tmp_path: Path) -> None:
    """Another list keeps its modules behind the one of the code's own, which is a Transformer then."""
    base, model = write_checkpoint(tmp_path / "base", "qwen3"), tmp_path / "model"
    factors = write_jina_v5(model, base, "qwen3")
    edit_json(model / "config.json", model_type="qwen3")
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    kinds = (("", "custom_st.Transformer"), ("1_Pooling", f"{ST}.Pooling"), ("2_Normalize", f"{ST}.Normalize"))
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(kinds)]
    (model / "modules.json").write_text(json.dumps(modules))
    documents = [f"Document: {text}" for text in TEXTS]
    assert difference(embedded(model), reference(base, factors["retrieval"], 2, None, documents)) <= TOLERANCE


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_an_adapter_with_a_config_of_its_own_is_what_that_says(backend: Any, tmp_path: Path) -> None:
    """splade-code-8B: an adapter of Qwen3, and the class of its own code."""
    base = write_checkpoint(tmp_path / "base", "qwen3", wrapped=True, config={"tie_word_embeddings": False})
    factors = write_adapter(tmp_path / "adapter", base, "qwen3", prefix="base_model.model.model.")
    shutil.copyfile(base / "config.json", tmp_path / "adapter" / "config.json")
    edit_json(tmp_path / "adapter" / "config.json", architectures=["Splade"], auto_map={"AutoModel": "splade.Splade"})
    model = AutoModel.from_pretrained(base, dtype=torch.float32, attn_implementation="eager", local_files_only=True)
    for name, (down, up) in factors.items():
        model.get_submodule(name).weight.data += 2 * up @ down
    head, tokenizer = load_file(base / "model.safetensors")["lm_head.weight"], AutoTokenizer.from_pretrained(base)

    @torch.inference_mode()
    def weights(text: str, mask: bool) -> torch.Tensor:
        ids = tokenizer(text, return_tensors="pt", truncation=True)["input_ids"]
        size = ids.shape[1]
        states = model(ids, attention_mask=None if mask else torch.zeros(1, 1, size, size)).last_hidden_state[0]
        rows: torch.Tensor = (states @ head.T).relu().log1p().amax(0)
        return rows

    with Engine(tmp_path / "adapter", dtype="float32", device="cpu", backend=backend) as engine:
        assert engine.tasks == {"sparse_embed"}
        found = engine.sparse_embed(TEXTS[2:4]).embeddings
    for text, entries in zip(TEXTS[2:4], found, strict=True):
        right, wrong, row = weights(text, False), weights(text, True), torch.zeros(len(head))
        row[list(entries)] = torch.tensor(list(entries.values()), dtype=torch.float32)
        assert (row - right).abs().max() <= TOLERANCE * right.max()
        assert (row - wrong).abs().max() > VISIBLE * right.max()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora .* is DoRA"),
        ({"peft_type": "IA3"}, "of type IA3, and millpond merges LoRA"),
        ({"task_type": "SEQ_CLS"}, "brings a head"),
        ({"base_model_name_or_path": None}, "names no base_model_name_or_path"),
        ({"base_model_name_or_path": "/nowhere/base"}, "base model, /nowhere/base, is not at hand"),
        ({"target_parameters": ["a"]}, "no layers"),
    ],
)
def test_other_adapters_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "bert")
    write_adapter(tmp_path / "adapter", base, "bert", **config)
    with pytest.raises(ModelLoadError, match=message):
        Engine(tmp_path / "adapter")


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    base, other = write_checkpoint(tmp_path / "base", "bert"), write_checkpoint(tmp_path / "other", "modernbert")
    write_adapter(tmp_path / "adapter", base, "bert", base_model_name_or_path=str(other))
    with pytest.raises(ModelLoadError, match="no such tensor"):
        Engine(tmp_path / "adapter")
