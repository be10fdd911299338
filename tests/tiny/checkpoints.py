"""Writes tiny checkpoints: config.json, weights and tokenizer, and the files of sentence-transformers around them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file
from tests.tiny.families import FAMILIES, MAX_TOKENS, Classification
from tests.tiny.layouts import Layout, save_weights, write_layout
from tests.tiny.noise import Noise
from tests.tiny.originals import ORIGINALS, Tensors
from tests.tiny.parameters import parameters
from tests.tiny.tokenizers import SENTENCES, write_tokenizer

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
    if isinstance(content.get("text_config"), dict):
        content["text_config"] = {"vocab_size": vocabulary, **content["text_config"]}
    (backbone / "config.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    save_weights(_tensors(family, json.dumps(content), wrapped=wrapped, head=head, seed=seed), backbone, weights)
    if layout is not None:
        width = next(int(content[name]) for name in ("hidden_size", "dim", "n_embd", "d_model") if content.get(name))
        write_layout(folder, layout, width=width, seed=seed + 1000)
    return folder


def _labelled(count: int) -> dict[str, Any]:
    """The label fields of config.json, as transformers writes them."""
    names = [f"level_{i}" for i in range(count)]
    return {"id2label": {str(i): name for i, name in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}


@lru_cache(maxsize=64)  # many tests write the same checkpoint, each into its own folder
def _tensors(
    family: str, config_json: str, *, wrapped: bool, head: Classification | None, seed: int
) -> Mapping[str, np.ndarray]:
    """Random weights for transformers' class, with the tensor names of the family's checkpoints."""
    row, content = FAMILIES[family], json.loads(config_json)
    native = row.native | {key: content[key] for key in _WIDTHS & row.native.keys() & content.keys()}
    fields = {key: value for key, value in content.items() if key not in ("architectures", "auto_map")} | native
    noise = Noise(seed)
    tensors: Tensors = {
        name: _random(name, shape, noise, shifted=row.shifted_norms)
        for name, shape in _shapes(row.native_class(wrapped=wrapped, head=head), fields).items()
    }
    if row.position_ids:
        name = next(name for name in tensors if name.endswith("word_embeddings.weight"))
        positions = np.arange(content["max_position_embeddings"])[None]
        tensors[name.replace("word_embeddings.weight", "position_ids")] = positions
    original = ORIGINALS.get(content["model_type"])
    return tensors if original is None else original(tensors, content)


def _shapes(architecture: str, fields: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """The parameters of transformers' class, which knows every field; without it, those of the usual fields."""
    if find_spec("transformers") is None:
        return parameters(architecture, fields)
    import transformers

    if getattr(transformers, architecture, None) is None:
        return parameters(architecture, fields)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[fields["model_type"]].from_dict(dict(fields))
    model = getattr(transformers, architecture)._from_config(config)
    tied = set(model.all_tied_weights_keys) if architecture.endswith(("LM", "LMHeadModel")) else set()
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    return {name: shape for name, shape in found.items() if name not in tied}


def _random(name: str, shape: tuple[int, ...], noise: Noise, *, shifted: bool) -> np.ndarray:
    numbers = noise.normal(*shape)
    if "relative_attention_bias" in name:
        return numbers  # added to attention scores, which have about this size
    if "embed" in name and len(shape) > 1:
        return numbers * np.float32(0.3)
    if len(shape) > 1:
        return numbers * np.float32(1.3) / np.float32(shape[-1] ** 0.5)
    if name.endswith("weight"):  # of a norm
        return numbers * np.float32(0.2) + np.float32(0.0 if shifted else 1.0)
    return numbers * np.float32(0.2)


def edit_json(path: Path, **fields: Any) -> None:
    """Replace fields of a JSON object on disk."""
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | fields, indent=2), encoding="utf-8")


def drop_tensor(folder: Path, name: str) -> None:
    """Remove one tensor from ``folder``'s model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_weights(tensors, folder)


def truncate_file(path: Path, *, keep: float = 0.5) -> None:
    """Truncate a file to a share of its bytes, as an interrupted download does."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def add_tokens(folder: Path, tokens: Sequence[str], *, added: bool) -> Tensors:
    """Append ``tokens`` to the vocabulary, as added tokens or as plain entries; returns the enlarged weights."""
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
    nested = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("text_config")
    more = {} if nested is None else {"text_config": nested | {"vocab_size": size + len(tokens)}}
    edit_json(folder / "config.json", vocab_size=size + len(tokens), **more)
    tensors = load_file(folder / "model.safetensors")
    noise = Noise(11)
    for name, tensor in tensors.items():
        if len(tensor) == size:
            more = noise.normal(len(tokens), *tensor.shape[1:]) * np.float32(0.3)
            tensors[name] = np.concatenate((tensor, more))
    return tensors


def token_id(folder: Path, token: str) -> int:
    """A token's id, read with the tokenizers library only."""
    from tokenizers import Tokenizer

    number: int | None = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(token)
    assert number is not None
    return number
