"""The plan of LFM2: short convolutions in the place of most attentions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.backends.native import structs
from millpond.backends.native.packing.weight_packer import Linear, NotSupported
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.backends.native.plans.rotation import Rotation, rotation_of
from millpond.backends.native.plans.tensors import Tensors


def lfm2_plan(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any]) -> None:
    """The steps of an LFM2."""
    model = _Lfm2(builder, tensors, config)
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    builder.embed(tensors.take("embed_tokens.weight", int(config["vocab_size"]), hidden))
    most = int(config["max_position_embeddings"])
    rotation = rotation_of(config["rope_parameters"], int(config["head_dim"]), most=most)
    for i, mixer in enumerate(config["mixers"]):
        layer = f"layers.{i}."
        builder.norm(model.norm(f"{layer}operator_norm", hidden), hidden)
        if mixer == "conv":
            model.convolve(f"{layer}conv.")
        else:
            model.attend(f"{layer}self_attn.", rotation)
        builder.norm(model.norm(f"{layer}ffn_norm", hidden), hidden)
        gate, up = (tensors.linear(f"{layer}feed_forward.{w}", inner, hidden, biased=False) for w in ("w1", "w3"))
        down = tensors.linear(f"{layer}feed_forward.w2", hidden, inner, biased=False)
        builder.mlp(up, down, "silu", gate=gate, add=True)
    builder.norm(model.norm("embedding_norm", hidden), hidden)


class _Lfm2:
    def __init__(self, builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any]) -> None:
        if config["conv_bias"]:
            raise NotSupported("a convolution with biases")
        self._builder, self._tensors, self._config = builder, tensors, config
        self._hidden = int(config["hidden_size"])
        causal = config.get("is_causal")
        self._causal = True if causal is None else bool(causal)

    def attend(self, name: str, rotation: Rotation) -> None:
        """Attention, added to the residual stream."""
        heads, kv_heads, dim = (
            int(self._config[field]) for field in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        counts = {"q": heads, "k": kv_heads, "v": kv_heads}
        parts = [self._linear(f"{name}{letter}_proj", count * dim, self._hidden) for letter, count in counts.items()]
        self._builder.heads(*parts, dim=dim, turned=heads + kv_heads)
        norm, key_norm = (self.norm(f"{name}{letter}_layernorm", dim, dim=dim) for letter in "qk")
        sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "dim": dim}
        self._builder.rotary(**sizes, norm=norm, key_norm=key_norm, rotation=rotation)
        self._builder.attention(**sizes, scale=dim**-0.5, causal=self._causal)
        self._builder.o_proj(self._linear(f"{name}out_proj", self._hidden, heads * dim), dim=dim, add=True)

    def convolve(self, name: str) -> None:
        """A convolution, over rows before if the model is causal, else around each row."""
        hidden, taps = self._hidden, int(self._config["conv_L_cache"])
        together = self._linear(f"{name}in_proj", 3 * hidden, hidden).weight
        parts = (Linear(weight=together[i * hidden : (i + 1) * hidden]) for i in range(3))
        self._builder.heads(*parts, dim=hidden)
        ahead = 0 if self._causal else taps - 1 - taps // 2
        self._builder.convolve(self._tensors.take(f"{name}conv.weight", hidden, 1, taps), ahead=ahead)
        self._builder.o_proj(self._linear(f"{name}out_proj", hidden, hidden), add=True)

    def norm(self, name: str, columns: int, *, dim: int | None = None) -> structs.NormWeights:
        """The weights of an RMS norm; ``dim``: of heads."""
        weight = self._tensors.take(f"{name}.weight", columns)
        return self._builder.rms_norm(weight, float(self._config["norm_eps"]), dim=dim)

    def _linear(self, name: str, out: int, into: int) -> Linear:
        return self._tensors.linear(name, out, into, biased=False)
