"""Writes tiny checkpoints: config.json, weights and tokenizer, and the files of sentence-transformers around them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from tests.tiny.families import FAMILIES, MAX_TOKENS, Classification
from tests.tiny.layouts import Layout, write_layout
from tests.tiny.originals import ORIGINALS
from tests.tiny.tokenizers import SENTENCES, write_tokenizer

if TYPE_CHECKING:
    import torch

# Texts of one token, of several and of more than the limit; a duplicate; scripts with many unknown tokens.
TEXTS = (
    "a",
    SENTENCES[0],
    " ".join(SENTENCES[1:8]),
    "How deep is it?",
    SENTENCES[4] + " " + SENTENCES[5],
    "Ein Teich, une étang, 池。",
    SENTENCES[0],
    "The wheel.",
    " ".join(SENTENCES[8:11]),
)

# Fields of transformers' config that a caller may override, also for families whose config.json has other names.
_WIDTHS = frozenset(("hidden_size", "num_attention_heads", "intermediate_size"))


def write_checkpoint(
    folder: Path,
    family: str = "bert",
    *,
    sentence_transformers: Layout | None = None,  # the pipeline around the backbone; None: a plain repository
    config: Mapping[str, Any] | None = None,  # fields that replace or extend the family's config.json
    wrapped: bool = False,  # save the language model: its head, and tensors with its prefix
    head: Classification | None = None,  # save the classifier of this kind, as the family's checkpoints have it
    labels: int = 3,  # number of its classes
    weights: Literal["safetensors", "bin"] = "safetensors",
    lowercase: bool = False,  # WordPiece only: the tokenizer folds case
    tokenizer_limit: int | None = MAX_TOKENS,  # None: no limit
    template: str | None = None,  # of the tokenizer's special tokens; "$A": none
    seed: int = 0,
) -> Path:
    """Write a checkpoint into ``folder``, which is created if it does not exist, and return the folder."""
    row = FAMILIES[family]
    if row.native_class(wrapped=False) == "GteModel":
        pytest.importorskip("transformers.models.gte", reason="GTE needs transformers 5.19")
    layout = sentence_transformers
    folder.mkdir(parents=True, exist_ok=True)
    backbone = folder if layout is None else folder / layout.transformer_folder
    backbone.mkdir(exist_ok=True)
    if layout is not None and layout.style == "new" and layout.max_seq_length is not None:
        tokenizer_limit = layout.max_seq_length
    vocabulary = write_tokenizer(backbone, row.tokenizer, limit=tokenizer_limit, lowercase=lowercase, template=template)
    content = {
        "architectures": [row.claimed(wrapped=wrapped, head=head)],
        **row.config,
        **({} if head is None else _labelled(labels)),
        "torch_dtype": "float32",
        "transformers_version": "4.44.2",
        "vocab_size": vocabulary,
        **(config or {}),
    }
    (backbone / "config.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    save_weights(_tensors(family, json.dumps(content), wrapped=wrapped, head=head, seed=seed), backbone, weights)
    if layout is not None:
        width = int(content.get("hidden_size") or content.get("dim") or content.get("n_embd") or 0)
        write_layout(folder, layout, width=width, seed=seed + 1000)
    return folder


def _labelled(count: int) -> dict[str, Any]:
    """The label fields of config.json, as transformers writes them."""
    names = [f"level_{i}" for i in range(count)]
    return {"id2label": {str(i): name for i, name in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}


@lru_cache(maxsize=64)  # many tests write the same checkpoint, each into its own folder
def _tensors(
    family: str, config_json: str, *, wrapped: bool, head: Classification | None, seed: int
) -> Mapping[str, torch.Tensor]:
    """Random weights for transformers' class, with the tensor names of the family's checkpoints."""
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    row, content = FAMILIES[family], json.loads(config_json)
    native = row.native | {key: content[key] for key in _WIDTHS & row.native.keys() & content.keys()}
    fields = {key: value for key, value in content.items() if key not in ("architectures", "auto_map")} | native
    config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    model = getattr(transformers, row.native_class(wrapped=wrapped, head=head))._from_config(config)
    generator = torch.Generator().manual_seed(seed)
    tied = set(model.all_tied_weights_keys) if wrapped else set()
    tensors = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in tied:
            tensors[name] = _random(name, tuple(parameter.shape), generator, shifted=row.shifted_norms)
    if row.position_ids:
        prefix = model.base_model_prefix + "." if wrapped or head else ""
        tensors[f"{prefix}embeddings.position_ids"] = torch.arange(content["max_position_embeddings"])[None]
    original = ORIGINALS.get(content["model_type"])
    return tensors if original is None else original(tensors, content)


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator, *, shifted: bool) -> torch.Tensor:
    import torch

    noise = torch.randn(shape, generator=generator)
    if "relative_attention_bias" in name:
        return noise  # added to attention scores, which have about this size
    if "embed" in name and len(shape) > 1:
        return noise * 0.3
    if len(shape) > 1:
        return noise * 1.3 / shape[-1] ** 0.5
    if name.endswith("weight"):  # of a norm
        return noise * 0.2 + (0.0 if shifted else 1.0)
    return noise * 0.2


def save_weights(
    tensors: Mapping[str, torch.Tensor], folder: Path, kind: Literal["safetensors", "bin"] = "safetensors"
) -> None:
    """Replace the weights in ``folder``."""
    import torch
    from safetensors.torch import save_file

    for name in ("model.safetensors", "pytorch_model.bin"):
        (folder / name).unlink(missing_ok=True)
    if kind == "safetensors":
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(dict(tensors), folder / "pytorch_model.bin")


def edit_json(path: Path, **fields: Any) -> None:
    """Replace fields of a JSON object on disk."""
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | fields, indent=2), encoding="utf-8")


def drop_tensor(folder: Path, name: str) -> None:
    """Remove one tensor from ``folder``'s model.safetensors."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_weights(tensors, folder)


def truncate_file(path: Path, *, keep: float = 0.5) -> None:
    """Truncate a file to a share of its bytes, as an interrupted download does."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def add_tokens(folder: Path, tokens: Sequence[str], *, added: bool) -> dict[str, torch.Tensor]:
    """Append ``tokens`` to the vocabulary, as added tokens or as plain entries; returns the enlarged weights."""
    import torch
    from safetensors.torch import load_file

    size = int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    for number, token in enumerate(tokens, start=size):
        if added:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            content["added_tokens"].append({"id": number, "content": token, **flags, "special": True})
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


def token_id(folder: Path, token: str) -> int:
    """A token's id, read with the tokenizers library only."""
    from tokenizers import Tokenizer

    number: int | None = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(token)
    assert number is not None
    return number
