"""The plan of EmbeddingGemma 2's text: Gemma's layers without a mask, and in each a gate by the words' embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from millpond.backends.native import structs
from millpond.backends.native.packing.weight_packer import Linear, tensor_of
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.backends.native.plans.rotation import Rotation, rotation_of
from millpond.backends.native.plans.tensors import Tensors


def embedding_gemma2_plan(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any]) -> None:
    """The steps of its text."""
    text = _Text(builder, tensors, config)
    hidden, width = int(config["layer_width"]), int(config["hidden_size"])
    words = tensors.take("embed_tokens.weight", int(config["vocab_size"]), hidden)
    builder.embed(words, scale=float(builder.numbers(tensor_of([hidden**0.5]))[0]))
    builder.norm(structs.NormWeights(kind=structs.COPY), hidden)
    builder.keep_states()
    for i in range(int(config["num_hidden_layers"])):
        text.attend(i)
        text.feed(i)
        text.gate(i)
    builder.norm(text.norm("norm", hidden), hidden)
    builder.up_proj(tensors.linear("embedding_projection", width, hidden, biased=False))
    builder.norm(structs.NormWeights(kind=structs.COPY), width)


class _Text:
    def __init__(self, builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any]) -> None:
        self._builder, self._tensors, self._config = builder, tensors, config
        self._hidden, self._heads, self._gates, self._layers = (
            int(config[name])
            for name in ("layer_width", "num_attention_heads", "hidden_size_per_layer_input", "num_hidden_layers")
        )
        self._activation = config["hidden_activation"]
        self._rotations: dict[tuple[str, int], Rotation] = {}

    def norm(self, name: str, columns: int, *, dim: int | None = None, unit: float = 1.0) -> structs.NormWeights:
        """The weights of an RMS norm of numbers that are so many times too large; ``dim``: of heads."""
        epsilon = float(self._config["rms_norm_eps"]) * unit**2
        return self._builder.rms_norm(self._tensors.take(f"{name}.weight", columns), epsilon, dim=dim)

    def attend(self, i: int) -> None:
        """Attention, whose values are normalized too, and its residual."""
        builder, config, hidden, layer = self._builder, self._config, self._hidden, f"layers.{i}."
        kind, dim, kv_heads = (config[name][i] for name in ("layer_types", "head_dims", "key_heads"))
        biased = bool(config["attention_bias"])
        builder.norm(self.norm(f"{layer}input_layernorm", hidden), hidden)
        shapes = {"q": self._heads, "k": kv_heads, "v": kv_heads}
        parts = [
            self._tensors.linear(f"{layer}self_attn.{letter}_proj", heads * dim, hidden, biased=biased)
            for letter, heads in shapes.items()
        ]
        builder.heads(*parts, dim=dim, turned=self._heads + kv_heads)
        norms = [self.norm(f"{layer}self_attn.{letter}_norm", dim, dim=dim) for letter in "qk"]
        sizes: dict[str, Any] = {"heads": self._heads, "kv_heads": kv_heads, "dim": dim}
        builder.rotary(
            **sizes,
            norm=norms[0],
            key_norm=norms[1],
            value_norm=builder.rms_norm(tensor_of(np.ones(dim, np.float32)), float(config["rms_norm_eps"])),
            rotation=self._rotation(kind, dim),
        )
        # The config's window does not count the own position.
        window = int(config["sliding_window"]) + 1 if kind == "sliding_attention" else None
        builder.attention(**sizes, scale=1.0, window=window)
        out = self._tensors.linear(f"{layer}self_attn.o_proj", hidden, self._heads * dim, biased=biased)
        builder.o_proj(out, dim=dim, branch=True)
        builder.norm(self.norm(f"{layer}post_attention_layernorm", hidden), hidden, branch=True)

    def feed(self, i: int) -> None:
        """The feed forward and its residual."""
        builder, hidden, layer = self._builder, self._hidden, f"layers.{i}."
        inner = int(self._config["intermediate_size"])
        builder.norm(self.norm(f"{layer}pre_feedforward_layernorm", hidden), hidden)
        gate, up = (
            self._tensors.linear(f"{layer}mlp.{name}_proj", inner, hidden, biased=False) for name in ("gate", "up")
        )
        down = self._tensors.linear(f"{layer}mlp.down_proj", hidden, inner, biased=False)
        builder.mlp(up, down, self._activation, gate=gate, branch=True)
        builder.norm(self.norm(f"{layer}post_feedforward_layernorm", hidden), hidden, branch=True)

    def gate(self, i: int) -> None:
        """The gate by this layer's part of what is made of the words, its residual, and the factor of all."""
        builder, tensors, hidden, gates = self._builder, self._tensors, self._hidden, self._gates
        block = f"layers.{i}.ple_block."
        builder.norm(structs.NormWeights(kind=structs.COPY), hidden)
        whole = tensors.take("ple.per_layer_model_projection.weight", self._layers * gates, hidden)
        builder.gate_by_kept(
            tensors.linear(f"{block}per_layer_input_gate", gates, hidden, biased=False),
            Linear(weight=whole[i * gates : (i + 1) * gates]),
            self.norm("ple.per_layer_projection_norm", gates, unit=hidden**0.5),
            self._activation,
        )
        builder.o_proj(tensors.linear(f"{block}per_layer_projection", hidden, gates, biased=False), branch=True)
        builder.norm(self.norm(f"{block}post_per_layer_input_norm", hidden), hidden, branch=True)
        factor = builder.numbers(tensors.take(f"layers.{i}.layer_scalar", 1))[0]
        scale = builder.scale_norm(*(tensor_of(np.full(hidden, number, np.float32)) for number in (factor, 0)))
        builder.norm(scale, hidden, sums=True)

    def _rotation(self, kind: str, dim: int) -> Rotation:
        if (kind, dim) not in self._rotations:
            most = int(self._config["max_position_embeddings"])
            self._rotations[kind, dim] = rotation_of(self._config["rope_parameters"][kind], dim, most=most)
        return self._rotations[kind, dim]
