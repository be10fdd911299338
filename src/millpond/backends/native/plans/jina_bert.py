"""The plan of JinaBERT v2: BERT with a gated feed forward, whose scores fall with the distance (ALiBi) both ways.

Its newer layout (jina-embeddings-v2-base-code) also normalizes queries and keys, and has two norms after the attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from millpond.backends.native.packing.weight_packer import Floats, Linear
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.backends.native.plans.post_norm import embed, layer_norm
from millpond.backends.native.plans.tensors import Tensors
from millpond.errors import ModelLoadError


def jina_bert_plan(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any]) -> None:
    """The steps of a JinaBERT; the names of its tensors say which layout it has."""
    hidden, heads, positions = (
        int(config[name]) for name in ("hidden_size", "num_attention_heads", "max_position_embeddings")
    )
    if hidden % heads:
        raise ModelLoadError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads} in config.json")
    model = _JinaBert(builder, tensors, config)
    embed(builder, tensors, words=int(config["vocab_size"]), types=int(config["type_vocab_size"]), columns=hidden)
    model.norm("embeddings.LayerNorm", residual=False)
    distances = alibi(heads, positions)
    newer = "encoder.layer.0.layer_norm_1.weight" in tensors
    for i in range(int(config["num_hidden_layers"])):
        layer = f"encoder.layer.{i}."
        model.attend(layer, distances, newer=newer)
        if newer:
            model.feed(f"{layer}mlp.", "up_gated_layer", "down_layer", gate_first=False)
            model.norm(f"{layer}layer_norm_2")
        else:
            model.feed(f"{layer}mlp.", "gated_layers", "wo", gate_first=True)
            model.norm(f"{layer}mlp.layernorm")


class _JinaBert:
    """Adds the parts of both layouts."""

    def __init__(self, builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any]) -> None:
        self._builder, self._tensors, self._config = builder, tensors, config
        self._hidden, self._heads = int(config["hidden_size"]), int(config["num_attention_heads"])

    def attend(self, layer: str, distances: Floats, *, newer: bool) -> None:
        """Attention, its residual and norm; in the newer layout the norm's result is added to the input once more."""
        builder, hidden, heads = self._builder, self._hidden, self._heads
        dim, linear = hidden // heads, self._tensors.linear
        names = [f"{layer}attention.self.{part}" for part in ("query", "key", "value")]
        builder.heads(*(linear(name, hidden, hidden) for name in names), dim=dim)
        if newer:
            norm, key_norm = (self._norm(f"{layer}attention.self.layer_norm_{part}", dim=dim) for part in "qk")
            builder.rotary(heads=heads, kv_heads=heads, dim=dim, norm=norm, key_norm=key_norm, whole=True)
        builder.attention(heads=heads, kv_heads=heads, dim=dim, scale=dim**-0.5, distances=distances)
        builder.o_proj(linear(f"{layer}attention.output.dense", hidden, hidden), dim=dim)
        self.norm(f"{layer}attention.output.LayerNorm", sums=newer)
        if newer:
            self.norm(f"{layer}layer_norm_1")

    def feed(self, mlp: str, both: str, down: str, *, gate_first: bool) -> None:
        """The feed forward, whose first linear layer holds the gate and the other factor, or the other way round."""
        hidden, inner = self._hidden, int(self._config["intermediate_size"])
        halves = self._tensors.linear(mlp + both, 2 * inner, hidden, biased=False).weight
        parts = [Linear(weight=halves[rows]) for rows in (slice(inner), slice(inner, None))]
        gate, up = parts if gate_first else reversed(parts)
        self._builder.mlp(up, self._tensors.linear(mlp + down, hidden, inner), self._config["hidden_act"], gate=gate)

    def norm(self, name: str, *, residual: bool = True, sums: bool = False) -> None:
        """A layer norm, of the sums and the input; ``sums``: its result are the sums."""
        self._builder.norm(self._norm(name), self._hidden, residual=residual, sums=sums)

    def _norm(self, name: str, dim: int | None = None) -> Any:
        epsilon = float(self._config["layer_norm_eps"])
        return layer_norm(self._builder, self._tensors, name, self._hidden, epsilon, dim=dim)


def alibi(heads: int, reach: int) -> Floats:
    """ALiBi's bias ``[heads, 2 reach - 1]``: minus a head's slope times the distance, from 1 - reach up."""
    bias: Floats = -slopes(heads)[:, None] * np.abs(np.arange(1 - reach, reach, dtype=np.float32))
    return bias


def slopes(heads: int) -> Floats:
    """ALiBi's slopes (arXiv:2108.12409): powers of 2^(-8/n) for n heads, a power of two.

    Other numbers of heads have those of the largest power of two below, then every second one of the next power's.
    """
    n = 1 << (heads.bit_length() - 1)
    exponents = [*(8 * i / n for i in range(1, n + 1)), *(4 * i / n for i in range(1, 2 * (heads - n), 2))]
    powers: Floats = np.exp2(-np.array(exponents)).astype(np.float32)
    return powers
