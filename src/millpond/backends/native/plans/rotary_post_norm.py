"""Plans of post-norm encoders with rotary positions: NomicBert and GTE, and jina-embeddings-v3 with its adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from millpond.backends.native.packing.weight_packer import Linear, LowRank
from millpond.backends.native.plans.adapters import Adapters
from millpond.backends.native.plans.distances import ComputedTensor
from millpond.backends.native.plans.plan import Expert, PlanBuilder
from millpond.backends.native.plans.post_norm import layer_norm
from millpond.backends.native.plans.rotation import Rotation, rotation_of
from millpond.backends.native.plans.tensors import Tensors
from millpond.checkpoints.stored_tensor import StoredTensor

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# The linear layers that have a bias.
NOMIC_BIASES: frozenset[str] = frozenset()
GTE_BIASES = frozenset((*_QKV, "self_attn.o_proj", "mlp.down_proj"))


def rotary_plan(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any], biases: frozenset[str]) -> None:
    """NomicBert or GTE: a gated feed forward."""
    layers = _Layers(builder, tensors, config, None)
    layers.embed()
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    for name in layers.names():
        layers.attend(name, biases)
        gate, up = (
            tensors.linear(name + part, inner, hidden, biased=part in biases)
            for part in ("mlp.gate_proj", "mlp.up_proj")
        )
        down = tensors.linear(f"{name}mlp.down_proj", hidden, inner, biased="mlp.down_proj" in biases)
        builder.mlp(up, down, config["hidden_act"], gate=gate)
        layers.norm(f"{name}post_mlp_layernorm")


def jina_plan(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any], adapters: Adapters | None) -> None:
    """jina-embeddings-v3; jina-colbert-v2 has no adapters."""
    layers = _Layers(builder, tensors, config, adapters)
    layers.embed()
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    for name in layers.names():
        layers.attend(name, GTE_BIASES)
        up, down = (
            tensors.linear(f"{name}mlp.{part}", *shape)
            for part, shape in (("fc1", (inner, hidden)), ("fc2", (hidden, inner)))
        )
        builder.mlp(
            up,
            down,
            config["hidden_act"],
            adapter=layers.adapter(f"{name}mlp.fc1", inner, hidden),
            down_adapter=layers.adapter(f"{name}mlp.fc2", hidden, inner),
        )
        layers.norm(f"{name}post_mlp_layernorm")
    if adapters is not None:
        adapters.check()


def nomic_moe_plan(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any]) -> None:
    """NomicBert with a plain feed forward, or in every nth layer a mixture of experts (nomic-embed-text-v2-moe)."""
    layers = _Layers(builder, tensors, config, None)
    layers.embed()
    hidden, inner, count = (int(config[name]) for name in ("hidden_size", "intermediate_size", "num_experts"))
    qkv, fc1, fc2 = (bool(config[name]) for name in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"))
    biases = frozenset((*_QKV, "self_attn.o_proj") if qkv else ())
    for i, name in enumerate(layers.names()):
        layers.attend(name, biases)
        if i % int(config["moe_every_n_layers"]) == 1:
            router = tensors.linear(f"{name}mlp.router.layer", count, hidden, biased=False)
            up, down = (tensors.take(f"{name}mlp.experts.mlp.{part}", count * inner, hidden) for part in ("w1", "w2"))
            pieces = [slice(first, first + inner) for first in range(0, count * inner, inner)]
            builder.experts(
                router,
                # Of the second weights the files have `[inner, hidden]`, one below the other.
                [Expert(up=Linear(weight=up[rows]), down=Linear(weight=_turned(down[rows]))) for rows in pieces],
                config["hidden_act"],
                top=int(config["moe_top_k"]),
                renormalized=bool(config["moe_normalize_expert_weights"]),
                bias=tensors.take(f"{name}mlp.experts.bias", hidden),
            )
        else:
            wide = tensors.linear(f"{name}mlp.fc1", inner, hidden, biased=fc1)
            builder.mlp(wide, tensors.linear(f"{name}mlp.down_proj", hidden, inner, biased=fc2), config["hidden_act"])
        layers.norm(f"{name}post_mlp_layernorm")


def _turned(tensor: StoredTensor) -> StoredTensor:
    """A matrix with its rows as columns."""
    return ComputedTensor.of(tensor.name, tensor.shape[::-1], lambda: np.ascontiguousarray(tensor.float32().T))


class _Layers:
    """The parts that both kinds of layers share."""

    def __init__(
        self, builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any], adapters: Adapters | None
    ) -> None:
        self._builder, self._tensors, self._config, self._adapters = builder, tensors, config, adapters
        self._hidden, self._heads, self._dim = (
            int(config[name]) for name in ("hidden_size", "num_attention_heads", "head_dim")
        )
        self._rotation: Rotation = rotation_of(config["rope_parameters"], self._dim)

    def names(self) -> list[str]:
        """Of the layers, with a point behind each."""
        return [f"layers.{i}." for i in range(int(self._config["num_hidden_layers"]))]

    def embed(self) -> None:
        tensors, adapters, hidden = self._tensors, self._adapters, self._hidden
        rows = {"word": int(self._config["vocab_size"]), "token_type": int(self._config["type_vocab_size"])}
        names = {kind: f"embeddings.{kind}_embeddings" for kind, count in rows.items() if count}
        tables = {kind: tensors.take(f"{name}.weight", rows[kind], hidden) for kind, name in names.items()}
        low = {
            kind: adapters.table(self._builder, name, rows[kind], hidden)
            for kind, name in names.items()
            if adapters is not None
        }
        self._builder.embed(
            tables["word"],
            types=tables.get("token_type"),
            adapter=low.get("word"),
            type_adapter=low.get("token_type"),
        )
        self.norm("embeddings.LayerNorm", residual=False)

    def attend(self, layer: str, biases: frozenset[str]) -> None:
        builder, tensors, hidden, width = self._builder, self._tensors, self._hidden, self._heads * self._dim
        builder.heads(
            *(tensors.linear(layer + name, width, hidden, biased=name in biases) for name in _QKV),
            dim=self._dim,
            turned=2 * self._heads,
            adapter=self.adapter(f"{layer}mixer.Wqkv", 3 * width, hidden),
        )
        builder.rotary(heads=self._heads, kv_heads=self._heads, dim=self._dim, rotation=self._rotation)
        builder.attention(heads=self._heads, kv_heads=self._heads, dim=self._dim, scale=self._dim**-0.5)
        name = "self_attn.o_proj"
        builder.o_proj(
            tensors.linear(layer + name, hidden, width, biased=name in biases),
            dim=self._dim,
            adapter=self.adapter(f"{layer}mixer.out_proj", hidden, width),
        )
        self.norm(f"{layer}post_attention_layernorm")

    def adapter(self, key: str, out: int, into: int) -> LowRank | None:
        """That of a linear layer."""
        return None if self._adapters is None else self._adapters.linear(self._builder, f"encoder.{key}", out, into)

    def norm(self, name: str, *, residual: bool = True) -> None:
        """A layer norm, of the sums and the layer's input."""
        weights = layer_norm(self._builder, self._tensors, name, self._hidden, float(self._config["layer_norm_eps"]))
        self._builder.norm(weights, self._hidden, residual=residual)
