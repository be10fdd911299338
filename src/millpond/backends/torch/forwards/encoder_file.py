"""A BERT-like encoder's modules made straight from its tensors, without transformers, which takes seconds to import.

Only a checkpoint with every tensor of the family, in its shape, under today's name, and no unknown one. Any other is
left to transformers' class, which renames old spellings, fills in missing tensors and reports errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from millpond.backends.torch.forwards.linear import PlainLinear
from millpond.backends.torch.weights import read_tensors
from millpond.checkpoints.architecture import EncoderFields, EncoderNames
from millpond.checkpoints.weights import tensor_shapes, weight_files
from millpond.errors import ModelLoadError

# Fields that are not built here with any other value.
_PLAIN = {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}
# The fields of EncoderFields that are no sizes.
_NO_SIZES = ("epsilon", "activation")
_EPSILON = 1e-12


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
    folder: Path,
    config: Mapping[str, Any],
    names: EncoderNames,
    *,
    dtype: torch.dtype,
    is_head_tensor: Callable[[str], bool],
) -> nn.Module | None:
    """The modules that ``PackedEncoder`` takes; ``None`` if transformers has to read them."""
    shape = _shape(config, names.fields)
    if shape is None:
        return None
    expected = _expected(names, shape)
    try:
        if any(path.suffix not in (".safetensors", ".onnx") for path in weight_files(folder, None)):
            return None
        sizes = tensor_shapes(folder)
        prefix = f"{names.prefix}." if next(iter(expected)) not in sizes else ""
        prefixed = {prefix + name: size for name, size in expected.items()}
        if any(sizes.get(name) != size for name, size in prefixed.items()):
            return None
        if any(name not in prefixed and not is_head_tensor(name) for name in sizes):
            return None
        tensors = read_tensors(folder, only=tuple(prefixed))
    except ModelLoadError:
        return None
    backbone = _modules({name: tensors.pop(prefix + name).to(dtype) for name in expected}, shape)
    fields = names.fields
    backbone.config = SimpleNamespace(**{fields.heads: shape.heads, fields.activation: shape.activation})  # type: ignore[assignment]
    return backbone


def _shape(config: Mapping[str, Any], fields: EncoderFields) -> _Shape | None:
    """The sizes, if config.json gives them all and nothing unusual."""
    if any(config.get(field, plain) != plain for field, plain in _PLAIN.items()) or config.get("pruned_heads"):
        return None
    size_fields = {size: field for size, field in vars(fields).items() if field and size not in _NO_SIZES}
    sizes = {
        size: value for size, field in size_fields.items() if type(value := config.get(field)) is int and value > 0
    }
    activation = config.get(fields.activation)
    epsilon = config.get(fields.epsilon) if fields.epsilon else _EPSILON
    if sizes.keys() != size_fields.keys():
        return None
    if sizes["hidden"] % sizes["heads"] or not isinstance(activation, str) or not isinstance(epsilon, float):
        return None
    all_sizes = {"types": 0, "buckets": 0, "embedding": sizes["hidden"], **sizes}
    return _Shape(epsilon=epsilon, activation=activation, **all_sizes)


def _expected(names: EncoderNames, shape: _Shape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the family with its shape."""
    hidden, narrow = shape.hidden, shape.embedding
    expected: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (shape.words, narrow),
        "embeddings.position_embeddings.weight": (shape.positions, narrow),
        **({"embeddings.token_type_embeddings.weight": (shape.types, narrow)} if shape.types else {}),
        **_norm("embeddings.LayerNorm", narrow),
        **(_linear("embeddings_project", hidden, narrow) if narrow != hidden else {}),
    }
    if shape.buckets:
        expected[f"{names.relative_bias}.weight"] = (shape.buckets, shape.heads)
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
    """The tree of modules with these names of tensors."""
    root = nn.Module()
    root.embeddings = Embeddings(typed=shape.types > 0)
    for name, weight in tensors.items():
        path, _, kind = name.rpartition(".")
        if kind == "weight":
            parent, _, leaf = path.rpartition(".")
            _child(root, parent).add_module(leaf, _leaf(weight, tensors.get(f"{path}.bias"), shape.epsilon))
    return root


def _child(root: nn.Module, path: str) -> nn.Module:
    """The module at ``path``, created if it is missing."""
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
    # Creates no weights, which would be replaced at once.
    norm = nn.LayerNorm(len(weight), eps=epsilon, elementwise_affine=False)
    norm.weight, norm.bias = (nn.Parameter(part, requires_grad=False) for part in (weight, bias))
    return norm


class Embeddings(nn.Module):
    """Sum of words, types and positions, in this order as in transformers, and a norm."""

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
