"""Tiny tables of token vectors, in the folders of model2vec and of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tests.tiny.tokenizers import write_tokenizer

WIDTH = 24
_MODULES = "sentence_transformers.models"


def write_model2vec(
    folder: Path, *, dtype: str = "float32", mapped: bool = False, weighted: bool = False, **config: Any
) -> Path:
    """A folder of model2vec: `mapped` tokens share rows, `weighted` ones have a weight each."""
    folder.mkdir(parents=True, exist_ok=True)
    count = write_tokenizer(folder, "bert", limit=None, lowercase=True)
    random = np.random.default_rng(7)
    tensors = {"embeddings": (random.normal(size=(count, WIDTH)) * 20).astype(dtype)}
    if mapped:
        tensors["embeddings"] = tensors["embeddings"][:40].copy()
        tensors["mapping"] = random.integers(0, 40, count)
    if weighted:
        tensors["weights"] = random.random(count).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    fields = {"model_type": "model2vec", "architectures": ["StaticModel"], "normalize": True, "hidden_dim": 256}
    (folder / "config.json").write_text(json.dumps(fields | config))
    return folder


def write_static(folder: Path, *, path: str = "0_StaticEmbedding", truncation: int | None = None) -> Path:
    """A StaticEmbedding and a Normalize of sentence-transformers; the first in ``path``."""
    table = folder / path
    table.mkdir(parents=True, exist_ok=True)
    count = write_tokenizer(table, "bert", limit=None, lowercase=True)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        (table / name).unlink()
    if truncation is not None:
        file = table / "tokenizer.json"
        settings = {"direction": "Right", "max_length": truncation, "strategy": "LongestFirst", "stride": 0}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation": settings}))
    rows = np.random.default_rng(8).normal(size=(count, WIDTH)).astype(np.float32)
    save_file({"embedding.weight": rows}, table / "model.safetensors")
    modules = [("0", path, "StaticEmbedding"), ("1", "1_Normalize", "Normalize")]
    entries = [
        {"idx": i, "name": name, "path": where, "type": f"{_MODULES}.{kind}"}
        for i, (name, where, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    return folder
