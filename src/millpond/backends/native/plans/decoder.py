"""Plans of Llama and its relatives: pre-norm, gated, heads in groups; the residual stream is in the sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.backends.native import structs
from millpond.backends.native.packing.weight_packer import Linear, tensor_of
from millpond.backends.native.plans.plan import Expert, PlanBuilder
from millpond.backends.native.plans.rotation import Rotation, part_first, rotation_of
from millpond.backends.native.plans.tensors import Tensors
from millpond.checkpoints.architecture import Architecture


def decoder_plan(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any], row: Architecture) -> None:
    """The steps of a decoder, whose differences from Llama ``row.traits`` has."""
    decoder = _Decoder(builder, tensors, config, row)
    hidden = int(config["hidden_size"])
    words = tensors.take("embed_tokens.weight", int(config["vocab_size"]), hidden)
    scale = 1.0
    if decoder.traits.centred:  # Gemma's scale, rounded to the precision of the weights as transformers does
        scale = float(builder.numbers(tensor_of([hidden**0.5]))[0])
    elif decoder.traits.multipliers:
        scale = float(config["embedding_multiplier"]) / decoder.unit
    builder.embed(words, scale=scale)
    for i in range(int(config["num_hidden_layers"])):
        decoder.attend(i)
        decoder.feed(i)
    builder.norm(decoder.norm("norm", hidden, of_stream=True), hidden)


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
        # Granite multiplies all that is added to the residual stream, which here has numbers in units of that factor.
        self.unit = float(config["residual_multiplier"]) if row.traits.multipliers else 1.0
        self._normed = row.traits.sandwich or row.traits.post_norms  # what is added to the stream

    def attend(self, i: int) -> None:
        """Attention and its residual."""
        builder, layer, dim = self._builder, f"layers.{i}.", self._dim
        self._enter(f"{layer}input_layernorm")
        biased = "attention" in self.traits.biases and bool(self._config["attention_bias"])
        kind = self._config["layer_types"][i] if "layer_types" in self._config else ""
        rotation = self._rotation(kind) if self._turns(i) else None
        shapes = {"q": self._heads, "k": self._kv_heads, "v": self._kv_heads}
        biased_heads = biased or "qkv" in self.traits.biases
        parts = [
            self._tensors.linear(f"{layer}self_attn.{letter}_proj", heads * dim, self._hidden, biased=biased_heads)
            for letter, heads in shapes.items()
        ]
        if rotation is not None and rotation.turned < dim:
            parts = [*(ordered(part, dim, rotation.turned) for part in parts[:2]), parts[2]]
        builder.heads(*parts, dim=dim, turned=self._heads + self._kv_heads)
        sizes: dict[str, Any] = {"heads": self._heads, "kv_heads": self._kv_heads, "dim": dim}
        whole = self.traits.whole_norms
        norms = [
            self.norm(f"{layer}self_attn.{letter}_norm", dim * (shapes[letter] if whole else 1), dim=dim)
            for letter in "qk" * self.traits.head_norms
        ]
        norm, key_norm = norms or (None, None)
        if norms or rotation is not None:
            builder.rotary(**sizes, norm=norm, key_norm=key_norm, whole=whole, rotation=rotation)
        builder.attention(**sizes, **self._masking(kind))
        o_proj = self._tensors.linear(f"{layer}self_attn.o_proj", self._hidden, self._heads * dim, biased=biased)
        builder.o_proj(o_proj, dim=dim, add=not self._normed, branch=self._normed)
        self._leave(f"{layer}post_attention_layernorm")

    def feed(self, i: int) -> None:
        """The feed forward and its residual."""
        layer, hidden = f"layers.{i}.", self._hidden
        self._enter(layer + ("pre_feedforward_layernorm" if self.traits.sandwich else "post_attention_layernorm"))
        if self.traits.experts and self._mixes(i):
            self._mix(f"{layer}mlp.")
            return
        inner = int(self._config["intermediate_size"])
        biased = "mlp" in self.traits.biases and bool(self._config["mlp_bias"])
        gate, up = (
            self._tensors.linear(f"{layer}mlp.{part}_proj", inner, hidden, biased=biased) for part in ("gate", "up")
        )
        down = self._tensors.linear(f"{layer}mlp.down_proj", hidden, inner, biased=biased)
        activation = self._config[self.traits.activation]
        self._builder.mlp(up, down, activation, gate=gate, add=not self._normed, branch=self._normed)
        self._leave(f"{layer}post_feedforward_layernorm")

    def _mixes(self, i: int) -> bool:
        """Whether a layer has experts."""
        config = self._config
        return i not in config["mlp_only_layers"] and (i + 1) % int(config["decoder_sparse_step"]) == 0

    def _mix(self, mlp: str) -> None:
        config, hidden, inner = self._config, self._hidden, int(self._config["moe_intermediate_size"])

        def linear(name: str, out: int, into: int) -> Linear:
            return self._tensors.linear(mlp + name, out, into, biased=False)

        count = int(config["num_experts"])
        self._builder.experts(
            linear("gate", count, hidden),
            [
                Expert(
                    gate=linear(f"experts.{e}.gate_proj", inner, hidden),
                    up=linear(f"experts.{e}.up_proj", inner, hidden),
                    down=linear(f"experts.{e}.down_proj", hidden, inner),
                )
                for e in range(count)
            ],
            config[self.traits.activation],
            top=int(config["num_experts_per_tok"]),
            renormalized=bool(config["norm_topk_prob"]),
            add=True,
        )

    def norm(self, name: str, columns: int, *, dim: int | None = None, of_stream: bool = False) -> structs.NormWeights:
        """The weights of an RMS norm; ``dim``: of heads."""
        weight = self._tensors.take(f"{name}.weight", columns)
        epsilon, offset = float(self._config["rms_norm_eps"]), 1.0 if self.traits.centred else 0.0
        return self._builder.rms_norm(weight, epsilon / self.unit**2 if of_stream else epsilon, offset=offset, dim=dim)

    def _enter(self, name: str) -> None:
        """The states of a half of a layer: normalized, but in OLMo."""
        copied = structs.NormWeights(kind=structs.COPY)
        norm = copied if self.traits.post_norms else self.norm(name, self._hidden, of_stream=True)
        self._builder.norm(norm, self._hidden)

    def _leave(self, name: str) -> None:
        """Add the result of a half to the residual stream, if it is normalized before that."""
        if self._normed:
            self._builder.norm(self.norm(name, self._hidden), self._hidden, branch=True)

    def _turns(self, i: int) -> bool:
        """Whether a layer has positions."""
        return not self.traits.unrotated or bool(self._config[self.traits.unrotated][i])

    def _rotation(self, kind: str) -> Rotation:
        if not self.traits.rotary_by_kind:
            kind = ""
        if kind not in self._rotations:
            rope = self._config["rope_parameters"]
            most = int(self._config["max_position_embeddings"])
            self._rotations[kind] = rotation_of(
                rope[kind] if kind else rope, self._dim, most=most, partial=self.traits.partial
            )
        return self._rotations[kind]

    def _masking(self, kind: str) -> dict[str, Any]:
        """What the class passes to its attention function."""
        config, traits = self._config, self.traits
        windowed = traits.window == "config" or (
            bool(traits.window) and kind == "sliding_attention" and config.get("use_sliding_window", True)
        )
        window = config["sliding_window"] if windowed else None  # null: none, whatever the class of the layer
        scale = float(config["query_pre_attn_scalar"] if traits.sandwich else self._dim) ** -0.5
        return {
            "scale": float(config["attention_multiplier"]) if traits.multipliers else scale,
            "causal": self._causal,
            "window": window + (traits.window == "radius") if windowed and window is not None else None,
            "softcap": config["attn_logit_softcapping"] if traits.softcap else None,
        }


def ordered(part: Linear, dim: int, turned: int) -> Linear:
    """Queries or keys with the columns that are turned where :func:`part_first` puts them."""
    order = part_first(part.weight.shape[0] // dim, dim, turned)
    return Linear(weight=part.weight[order], bias=None if part.bias is None else part.bias[order])
