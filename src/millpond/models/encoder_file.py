"""A BERT-like encoder's modules made straight from its tensors, without transformers, which takes seconds to import.

Only a checkpoint that is exactly what its config.json says is read here: every tensor that the class has, in its
shape, under today's name, and none that it does not know. Any other is left to transformers' class, which renames old
spellings, fills in, and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from millpond.checkpoints.weights import read_tensors, tensor_shapes
from millpond.errors import ModelLoadError
from millpond.models.encoder import FAMILIES, Names
from millpond.models.linear import PlainLinear

# Fields whose meaning is not built here when they say anything but this.
_PLAIN = {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """A config.json in one vocabulary."""

    layers: int
    heads: int
    hidden: int
    embedding: int
    inner: int
    words: int
    positions: int
    types: int  # 0: the family has none
    buckets: int  # of relative distances; 0: the family has none
    epsilon: float
    activation: str


def read_encoder(
    folder: Path, config: Mapping[str, Any], model_type: str, *, dtype: torch.dtype, unread: Any
) -> nn.Module | None:
    """The modules that :class:`millpond.models.encoder.PackedEncoder` takes; ``None`` where transformers must read.

    Args:
        folder: The transformer's folder.
        config: Its config.json.
        model_type: The family.
        dtype: Precision of the weights.
        unread: Pattern of names that a backbone rightly leaves alone.
    """
    names, shape = FAMILIES.get(model_type), _shape(config, model_type)
    if names is None or shape is None:
        return None
    if not any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        return None
    expected = _expected(names, shape, model_type)
    try:
        held = tensor_shapes(folder)
        prefix = _prefix(model_type) if next(iter(expected)) not in held else ""
        wanted = {prefix + name: size for name, size in expected.items()}
        if any(held.get(name) != size for name, size in wanted.items()):
            return None
        if any(name not in wanted and not unread.search(name) for name in held):
            return None
        tensors = read_tensors(folder, only=tuple(wanted))
    except ModelLoadError:
        return None
    backbone = _modules({name: tensors.pop(prefix + name).to(dtype) for name in expected}, shape)
    backbone.config = SimpleNamespace(num_attention_heads=shape.heads, hidden_act=shape.activation)  # type: ignore[assignment]
    return backbone


def _shape(config: Mapping[str, Any], model_type: str) -> _Shape | None:
    """The sizes, if config.json names them all and nothing unusual."""
    if any(config.get(field, plain) != plain for field, plain in _PLAIN.items()) or config.get("pruned_heads"):
        return None
    if "quantization_config" in config:
        return None
    distil, mpnet = model_type == "distilbert", model_type == "mpnet"
    fields = {
        "layers": "n_layers" if distil else "num_hidden_layers",
        "heads": "n_heads" if distil else "num_attention_heads",
        "hidden": "dim" if distil else "hidden_size",
        "inner": "hidden_dim" if distil else "intermediate_size",
        "words": "vocab_size",
        "positions": "max_position_embeddings",
        **({} if distil or mpnet else {"types": "type_vocab_size"}),
        **({"embedding": "embedding_size"} if model_type == "electra" else {}),
        **({"buckets": "relative_attention_num_buckets"} if mpnet else {}),
    }
    sizes = {name: size for name, field in fields.items() if type(size := config.get(field)) is int and size > 0}
    activation = config.get("activation" if distil else "hidden_act")
    epsilon = 1e-12 if distil else config.get("layer_norm_eps")
    if sizes.keys() != fields.keys():
        return None
    if sizes["hidden"] % sizes["heads"] or not isinstance(activation, str) or not isinstance(epsilon, float):
        return None
    whole = {"types": 0, "buckets": 0, "embedding": sizes["hidden"], **sizes}
    return _Shape(epsilon=epsilon, activation=activation, **whole)


def _prefix(model_type: str) -> str:
    """What a class with a head puts before the backbone's names."""
    return {"xlm-roberta": "roberta"}.get(model_type, model_type) + "."


def _expected(names: Names, shape: _Shape, model_type: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of the class with its shape."""
    hidden, narrow = shape.hidden, shape.embedding
    expected: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (shape.words, narrow),
        "embeddings.position_embeddings.weight": (shape.positions, narrow),
        **({"embeddings.token_type_embeddings.weight": (shape.types, narrow)} if shape.types else {}),
        **_norm("embeddings.LayerNorm", narrow),
        **(_linear("embeddings_project", hidden, narrow) if narrow != hidden else {}),
    }
    if shape.buckets:
        expected["encoder.relative_attention_bias.weight"] = (shape.buckets, shape.heads)
    for i in range(shape.layers):
        layer = f"{names.layers}.{i}."
        for part in (names.query, names.key, names.value, names.attention_out):
            expected |= _linear(layer + part, hidden, hidden)
        expected |= _linear(layer + names.up, shape.inner, hidden) | _linear(layer + names.down, hidden, shape.inner)
        expected |= _norm(layer + names.attention_norm, hidden) | _norm(layer + names.norm, hidden)
    return expected


def _linear(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _modules(tensors: Mapping[str, torch.Tensor], shape: _Shape) -> nn.Module:
    """The tree of modules that the tensors' names spell."""
    root = nn.Module()
    root.embeddings = Embeddings(typed=shape.types > 0)
    for name, weight in tensors.items():
        path, _, kind = name.rpartition(".")
        if kind == "weight":
            parent, _, own = path.rpartition(".")
            _child(root, parent).add_module(own, _leaf(weight, tensors.get(f"{path}.bias"), shape.epsilon))
    return root


def _child(root: nn.Module, path: str) -> nn.Module:
    """The module at ``path``, made on the way where there is none."""
    for step in path.split(".") if path else ():
        if getattr(root, step, None) is None:
            root.add_module(step, nn.Module())
        root = getattr(root, step)
    return root


def _leaf(weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float) -> nn.Module:
    """The module of a weight: a norm, a linear layer or, without a bias, a table."""
    if bias is None:
        table: nn.Module = nn.Embedding.from_pretrained(weight)
        return table
    if weight.dim() == 2:
        return PlainLinear(weight, bias, None)
    norm = nn.LayerNorm(len(weight), eps=epsilon, elementwise_affine=False)  # makes no weights to throw away
    norm.weight, norm.bias = (nn.Parameter(part, requires_grad=False) for part in (weight, bias))
    return norm


class Embeddings(nn.Module):
    """Words, then types, then positions, summed in transformers' order, and a norm."""

    word_embeddings: nn.Embedding
    position_embeddings: nn.Embedding
    token_type_embeddings: nn.Embedding
    LayerNorm: nn.LayerNorm

    def __init__(self, *, typed: bool) -> None:
        super().__init__()
        self.typed = typed

    def forward(
        self,
        *,
        input_ids: torch.Tensor,  # [1, tokens]
        position_ids: torch.Tensor,  # [1, tokens]
        token_type_ids: torch.Tensor | None = None,  # [1, tokens]
    ) -> torch.Tensor:  # [1, tokens, embedding]
        """The rows before the first layer."""
        rows = self.word_embeddings(input_ids)
        if self.typed:
            types = self.token_type_embeddings
            rows = rows + (types.weight[0] if token_type_ids is None else types(token_type_ids))
        normed: torch.Tensor = self.LayerNorm(rows + self.position_embeddings(position_ids))
        return normed
