"""jina-reranker-v2-base-multilingual: XLM-RoBERTa under the names of jina's flash implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.tiny import TEXTS, write_checkpoint

from millpond import Engine
from millpond.errors import UnsupportedArchitectureError

TOLERANCE, VISIBLE = 1e-5, 1e-3
QUERIES, DOCUMENTS = list(TEXTS[1:4]), list(TEXTS[4:7])
NAMES = {
    "encoder.layer.": "encoder.layers.",
    "embeddings.LayerNorm": "emb_ln",
    "attention.output.dense": "mixer.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "norm2",
}
AUTO_MAP = {
    "AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig",
    "AutoModel": "modeling_xlm_roberta.XLMRobertaModel",
    "AutoModelForSequenceClassification": "modeling_xlm_roberta.XLMRobertaForSequenceClassification",
}


def flash(folder: Path, order: str = "qkv") -> Path:
    """A classifier of XLM-RoBERTa as on the hub: one tensor for queries, keys and values, and no ``model_type``."""
    tensors: dict[str, np.ndarray] = {}
    held = load_file(folder / "model.safetensors")
    letters = {"q": "query", "k": "key", "v": "value"}
    for name, tensor in held.items():
        renamed = name
        for own, other in NAMES.items():
            renamed = renamed.replace(own, other)
        if ".attention.self.query." in name:
            parts = [held[name.replace("query", letters[letter])] for letter in order]
            tensors[renamed.replace("attention.self.query", "mixer.Wqkv")] = np.concatenate(parts)
        elif ".attention.self." not in name and "position_ids" not in name:
            tensors[renamed] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    content = {key: value for key, value in json.loads(path.read_text()).items() if key != "model_type"}
    path.write_text(json.dumps(content | {"auto_map": AUTO_MAP, "use_flash_attn": True}))
    return folder


def write(folder: Path) -> Path:
    return write_checkpoint(folder, "xlm-roberta", head="SequenceClassification", labels=1)


def scores(folder: Path, backend: Any) -> np.ndarray:
    with Engine(folder, backend=backend, dtype="float32", device="cpu") as engine:
        return engine.score(QUERIES, DOCUMENTS).scores


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """transformers' class over the same weights under its own names."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = write(tmp_path_factory.mktemp("plain"))
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    logits = []
    with torch.inference_mode():
        for pair in zip(QUERIES, DOCUMENTS, strict=True):
            logits.append(model(**tokenizer(*pair, truncation=True, max_length=64, return_tensors="pt")).logits[0, 0])
    numbers: np.ndarray = torch.stack(logits).sigmoid().numpy()
    return numbers


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_reranker_equals_transformers_over_the_same_weights(backend, expected, tmp_path, record_property):
    found = scores(flash(write(tmp_path / "model")), backend)
    record_property("error", float(np.abs(found - expected).max()))
    assert np.abs(found - expected).max() <= TOLERANCE
    wrong = scores(flash(write(tmp_path / "wrong"), order="kqv"), backend)
    assert np.abs(wrong - expected).max() > VISIBLE


def test_a_config_of_other_code_without_a_family_is_refused(tmp_path):
    folder = flash(write(tmp_path / "model"))
    content = json.loads((folder / "config.json").read_text())
    content["auto_map"]["AutoConfig"] = "configuration_mine.MineConfig"
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedArchitectureError, match="no model_type"):
        Engine(folder)
