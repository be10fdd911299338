"""Tiny late-interaction checkpoints in the file layouts of the hub, with the backbones of :mod:`tests.tiny`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.tiny import Dense, Layout, edit_json, write_checkpoint
from tests.tiny_families import FAMILIES

if TYPE_CHECKING:
    import torch

DIM = 24
QUERY_LENGTH, DOCUMENT_LENGTH = 12, 24


def write_stanford(folder: Path, family: str = "bert", *, weights: str = "safetensors", **metadata: Any) -> Path:
    """Write an ``HF_ColBERT``: markers are plain entries of the vocabulary, ``linear.weight`` lies beside ``bert.*``.

    ``family="jina"`` is jina-colbert-v2: its tensor names, no adapters, markers that are added tokens.
    ``metadata`` replaces fields of artifact.metadata; ``None`` leaves a field out.
    """
    import torch

    plain = {"lora_adaptations": None, "matryoshka_dimensions": None} if family == "jina" else {}
    write_checkpoint(folder, family, lowercase=family == "bert", config=plain)
    markers = ("[unused0]", "[unused1]") if family == "bert" else ("[QueryMarker]", "[DocumentMarker]")
    tensors = add_tokens(folder, markers, added=family != "bert")
    # The prefix of transformers' class; jina's tensors already have their own.
    prefix = f"{FAMILIES[family].config['model_type']}." if family == "bert" else ""
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    generator = torch.Generator().manual_seed(7)
    tensors["linear.weight"] = torch.randn(DIM, 48, generator=generator) / 48**0.5
    _save(tensors, folder, weights)
    edit_json(folder / "config.json", architectures=["HF_ColBERT"])
    content = {
        "query_token_id": markers[0],
        "doc_token_id": markers[1],
        "query_token": "[Q]",
        "doc_token": "[D]",
        "query_maxlen": QUERY_LENGTH,
        "doc_maxlen": DOCUMENT_LENGTH,
        "dim": 999,  # wrong on purpose: the tensor decides
        "mask_punctuation": True,
        "attend_to_mask_tokens": False,
        "similarity": "cosine",
        "interaction": "colbert",
        **metadata,
    }
    kept = {key: value for key, value in content.items() if value is not None}
    (folder / "artifact.metadata").write_text(json.dumps(kept), encoding="utf-8")
    return folder


def write_pylate(
    folder: Path, family: str = "modernbert", *, widths: Sequence[int] = (DIM,), residual: bool = False, **settings: Any
) -> Path:
    """Write a PyLate checkpoint: markers that end with a space, added after the vocabulary; one or more Dense layers.

    ``settings`` replaces keys of config_sentence_transformers.json; ``None`` leaves a key out.
    """
    modules = tuple(Dense(out_features=width, activation="Identity", bias=False, residual=residual) for width in widths)
    # PyLate's max_seq_length does not count the document's marker.
    layout = Layout(modules=modules, style="old", max_seq_length=DOCUMENT_LENGTH - 1, prompts={})
    # A window of 2 x 32: with a narrower one, some rows of the query expansion would have no key to attend to.
    config = {"local_attention": 64} if family == "modernbert" else {}
    write_checkpoint(folder, family, sentence_transformers=layout, config=config)
    _save(add_tokens(folder, ("[Q] ", "[D] "), added=True), folder, "safetensors")
    listed = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    for entry in listed[1:]:
        entry["type"] = "pylate.models.Dense.Dense"
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    path = folder / "config_sentence_transformers.json"
    content = {
        **json.loads(path.read_text(encoding="utf-8")),
        "model_type": "ColBERT",
        "similarity_fn_name": "MaxSim",
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": QUERY_LENGTH,
        "document_length": DOCUMENT_LENGTH,
        "do_query_expansion": True,
        "attend_to_expansion_tokens": False,
        "skiplist_words": [".", ",", "?", "!", ";", ":", "'"],
        **settings,
    }
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")
    return folder


def add_tokens(folder: Path, tokens: Sequence[str], *, added: bool) -> dict[str, torch.Tensor]:
    """Append ``tokens`` to the vocabulary, as added tokens or as plain entries; returns the enlarged weights."""
    import torch
    from safetensors.torch import load_file

    size = int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    for number, token in enumerate(tokens, start=size):
        if added:
            content["added_tokens"].append(
                {
                    "id": number,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            )
        else:
            content["model"]["vocab"][token] = number
            with (folder / "vocab.txt").open("a", encoding="utf-8") as file:
                file.write(f"{token}\n")
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    edit_json(folder / "config.json", vocab_size=size + len(tokens))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(11)
    for name, tensor in tensors.items():
        if len(tensor) == size:
            more = torch.randn(len(tokens), *tensor.shape[1:], generator=generator) * 0.3
            tensors[name] = torch.cat((tensor, more))
    return tensors


def _save(tensors: dict[str, torch.Tensor], folder: Path, kind: str) -> None:
    import torch
    from safetensors.torch import save_file

    (folder / "model.safetensors").unlink()
    if kind == "safetensors":
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
