"""Plans of Llama and its relatives: pre-norm, gated, heads in groups; the residual stream is in the sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.backends.native import structs
from millpond.backends.native.packing.weight_packer import tensor_of
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.backends.native.plans.rotation import Rotation, rotation_of
from millpond.backends.native.plans.tensors import Tensors
from millpond.checkpoints.architecture import Architecture


def decoder_plan(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any], row: Architecture) -> None:
    """The steps of a decoder, whose differences from Llama ``row.traits`` has."""
    decoder = _Decoder(builder, tensors, config, row)
    hidden = int(config["hidden_size"])
    words = tensors.take("embed_tokens.weight", int(config["vocab_size"]), hidden)
    # Gemma's scale, rounded to the precision of the weights as transformers does.
    scale = float(builder.numbers(tensor_of([hidden**0.5]))[0]) if decoder.traits.centred else 1.0
    builder.embed(words, scale=scale)
    for i in range(int(config["num_hidden_layers"])):
        decoder.attend(i)
        decoder.feed(i)
    builder.norm(decoder.norm("norm", hidden), hidden)


class _Decoder:
    def __init__(self, builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any], row: Architecture) -> None:
        assert row.traits is not None
        self._builder, self._tensors, self._config, self.traits = builder, tensors, config, row.traits
        self._hidden, self._heads, self._kv_heads, self._dim = (
            int(config[name]) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        )
        # The config has precedence over the class, as in transformers.
        causal, both = config.get("is_causal"), self.traits.centred and config.get("use_bidirectional_attention")
        self._causal = bool(row.decoder and not both if causal is None else causal)
        self._rotations: dict[str, Rotation] = {}

    def attend(self, i: int) -> None:
        """Attention and its residual."""
        builder, layer, hidden = self._builder, f"layers.{i}.", self._hidden
        builder.norm(self.norm(f"{layer}input_layernorm", hidden), hidden)
        biased = "attention" in self.traits.biases and bool(self._config["attention_bias"])
        shapes = {"q": self._heads, "k": self._kv_heads, "v": self._kv_heads}
        builder.heads(
            *(
                self._tensors.linear(
                    f"{layer}self_attn.{letter}_proj",
                    heads * self._dim,
                    hidden,
                    biased=biased or "qkv" in self.traits.biases,
                )
                for letter, heads in shapes.items()
            ),
            dim=self._dim,
            turned=self._heads + self._kv_heads,
        )
        sizes: dict[str, Any] = {"heads": self._heads, "kv_heads": self._kv_heads, "dim": self._dim}
        norms = [
            self.norm(f"{layer}self_attn.{letter}_norm", self._dim, of_heads=True)
            for letter in "qk" * self.traits.head_norms
        ]
        kind = self._config["layer_types"][i] if "layer_types" in self._config else ""
        norm, key_norm = norms or (None, None)
        builder.rotary(**sizes, norm=norm, key_norm=key_norm, rotation=self._rotation(kind))
        builder.attention(**sizes, **self._masking(kind))
        o_proj = self._tensors.linear(f"{layer}self_attn.o_proj", hidden, self._heads * self._dim, biased=biased)
        builder.o_proj(o_proj, dim=self._dim, add=not self.traits.sandwich, branch=self.traits.sandwich)

    def feed(self, i: int) -> None:
        """The feed forward and its residual. Gemma 2 and 3 also have a norm after each half of the layer."""
        layer, hidden, sandwich = f"layers.{i}.", self._hidden, self.traits.sandwich
        if sandwich:
            self._builder.norm(self.norm(f"{layer}post_attention_layernorm", hidden), hidden, branch=True)
        before = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        self._builder.norm(self.norm(layer + before, hidden), hidden)
        inner = int(self._config["intermediate_size"])
        biased = "mlp" in self.traits.biases and bool(self._config["mlp_bias"])
        gate, up = (
            self._tensors.linear(f"{layer}mlp.{part}_proj", inner, hidden, biased=biased) for part in ("gate", "up")
        )
        down = self._tensors.linear(f"{layer}mlp.down_proj", hidden, inner, biased=biased)
        activation = self._config[self.traits.activation]
        self._builder.mlp(up, down, activation, gate=gate, add=not sandwich, branch=sandwich)
        if sandwich:
            self._builder.norm(self.norm(f"{layer}post_feedforward_layernorm", hidden), hidden, branch=True)

    def norm(self, name: str, columns: int, *, of_heads: bool = False) -> structs.NormWeights:
        """The weights of an RMS norm."""
        weight = self._tensors.take(f"{name}.weight", columns)
        epsilon, offset = float(self._config["rms_norm_eps"]), 1.0 if self.traits.centred else 0.0
        return self._builder.rms_norm(weight, epsilon, offset=offset, of_heads=of_heads)

    def _rotation(self, kind: str) -> Rotation:
        if not self.traits.rotary_by_kind:
            kind = ""
        if kind not in self._rotations:
            rope = self._config["rope_parameters"]
            most = int(self._config["max_position_embeddings"])
            self._rotations[kind] = rotation_of(rope[kind] if kind else rope, self._dim, most=most)
        return self._rotations[kind]

    def _masking(self, kind: str) -> dict[str, Any]:
        """What the class passes to its attention function."""
        config, traits = self._config, self.traits
        windowed = traits.window == "config" or (traits.window == "layer" and kind == "sliding_attention")
        return {
            "scale": float(config["query_pre_attn_scalar"] if traits.sandwich else self._dim) ** -0.5,
            "causal": self._causal,
            "window": config["sliding_window"] if windowed else None,
            "softcap": config["attn_logit_softcapping"] if traits.softcap else None,
        }
