"""The plan of NeoMME's text: pre-norm without weights, layers that read their input mixed with the first one's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from millpond.backends.native import structs
from millpond.backends.native.packing.weight_packer import tensor_of
from millpond.backends.native.plans.decoder import ordered
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.backends.native.plans.rotation import Rotation, rotation_of
from millpond.backends.native.plans.tensors import Tensors

_LONG_WINDOW = 1024  # of every second layer with a window, where config.json gives no windows
# What reads images.
_OF_IMAGES = ("norm.weight", "norm.bias", "up_proj.weight", "down_proj.weight", "down_proj.bias")


def neomme_plan(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any]) -> None:
    """The steps of its text."""
    text = _Text(builder, tensors, config)
    hidden, rank = int(config["hidden_size"]), int(config["embedding_rank"])
    for name in _OF_IMAGES:
        tensors.leave(f"patch_embeddings.{name}")
    copied = structs.NormWeights(kind=structs.COPY)
    builder.embed(tensors.take("embed_tokens.word_embeddings.weight", int(config["vocab_size"]), rank))
    builder.norm(copied, rank)
    builder.up_proj(tensors.linear("embed_tokens.embedding_projection", hidden, rank, biased=False))
    first = builder.rms_norm(tensor_of(np.full(hidden, 1 / text.unit, np.float32)), float(config["norm_eps"]))
    builder.norm(first, hidden, keep=True)
    builder.norm(copied, hidden, carry=True)
    for i in range(int(config["num_hidden_layers"])):
        text.attend(i)
        text.feed(i)
    builder.norm(text.norm(hidden), hidden)


class _Text:
    def __init__(self, builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any]) -> None:
        self._builder, self._tensors, self._config = builder, tensors, config
        self._hidden, self._heads, self._kv_heads, self._dim = (
            int(config[name]) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        )
        # All that is added to the residual stream is multiplied by it, so the stream has numbers in units of it.
        self.unit = float(config["residual_multiplier"])
        kinds = config["layer_types"]
        full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        self._with_words = {full[0], full[-1]} if full else set()
        self._windows = windows_of(config)
        self._rotations: dict[str, Rotation] = {}

    def norm(self, columns: int, *, dim: int | None = None) -> structs.NormWeights:
        """An RMS norm without weights, of the stream; ``dim``: of heads."""
        epsilon = float(self._config["norm_eps"]) / (1.0 if dim else self.unit**2)
        return self._builder.rms_norm(tensor_of(np.ones(columns, np.float32)), epsilon, dim=dim)

    def attend(self, i: int) -> None:
        """Attention, and what is done to its result, and its residual."""
        builder, config, hidden, dim, layer = self._builder, self._config, self._hidden, self._dim, f"layers.{i}."
        biased, attention = bool(config["attention_bias"]), f"layers.{i}.self_attn."
        own, first = (float(number) for number in builder.numbers(self._tensors.take(f"{layer}lambdas", 2)))
        builder.norm(self.norm(hidden), hidden, mixture=(own, first))
        rotation = self._rotation(config["layer_types"][i])
        shapes = {"q": self._heads, "k": self._kv_heads, "v": self._kv_heads}
        parts = [
            self._tensors.linear(f"{attention}{letter}_proj", heads * dim, hidden, biased=biased)
            for letter, heads in shapes.items()
        ]
        if rotation.turned < dim:
            parts[:2] = (ordered(part, dim, rotation.turned) for part in parts[:2])
        gate = self._tensors.linear(f"{attention}output_projection.gate_proj", self._heads * dim, hidden, biased=False)
        builder.heads(*parts, gate, dim=dim, turned=self._heads + self._kv_heads)
        sizes: dict[str, Any] = {"heads": self._heads, "kv_heads": self._kv_heads, "dim": dim}
        norm = self.norm(dim, dim=dim)
        builder.rotary(**sizes, norm=norm, key_norm=norm, rotation=rotation)
        if i in self._with_words:
            rows = int(config["vocab_size"])
            builder.value_words(self._tensors.take("value_embeddings.weight", rows, self._kv_heads * dim), **sizes)
        window = self._windows[i]
        builder.attention(**sizes, scale=dim**-0.5, window=None if window is None else window + 1)
        alpha = builder.numbers(self._tensors.take(f"{attention}exclusive_self_attention.alpha", self._heads))
        builder.exclude_values(**sizes, shares=np.tanh(alpha))
        builder.gate_attention(**sizes, activation="sigmoid")
        out = f"{attention}output_projection.o_proj"
        builder.o_proj(self._tensors.linear(out, hidden, self._heads * dim, biased=biased), dim=dim, add=True)

    def feed(self, i: int) -> None:
        """The feed forward and its residual."""
        hidden, inner = self._hidden, int(self._config["intermediate_size"])
        biased = bool(self._config["mlp_bias"])
        self._builder.norm(self.norm(hidden), hidden)
        up, down = (
            self._tensors.linear(f"layers.{i}.mlp.{name}_proj", *shape, biased=biased)
            for name, shape in (("up", (inner, hidden)), ("down", (hidden, inner)))
        )
        self._builder.mlp(up, down, self._config["hidden_act"], add=True)

    def _rotation(self, kind: str) -> Rotation:
        """One axis of positions: those of a text are the same on both."""
        if kind not in self._rotations:
            most = int(self._config["max_position_embeddings"])
            self._rotations[kind] = rotation_of(
                self._config["rope_parameters"][kind], self._dim, most=most, partial=True
            )
        return self._rotations[kind]


def windows_of(config: Mapping[str, Any]) -> list[int | None]:
    """How far each layer's tokens attend to either side; ``None``: to all."""
    kinds, window, given = config["layer_types"], config["sliding_window"], config.get("per_layer_config")
    if given is not None:
        own = {str(layer): fields for layer, fields in given.items()}
        return [own.get(str(i), {}).get("sliding_window", window) for i in range(len(kinds))]
    sliding = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    windows = {i: _LONG_WINDOW if place % 2 else window for place, i in enumerate(sliding)}
    return [windows.get(i) for i in range(len(kinds))]
