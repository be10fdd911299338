"""The plan of T5Gemma 2: an encoder reads the first part of a text, a decoder the second and the encoder's states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.backends.native import structs
from millpond.backends.native.packing.weight_packer import tensor_of
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.backends.native.plans.rotation import Rotation, rotation_of
from millpond.backends.native.plans.tensors import Tensors
from millpond.checkpoints.architectures import row_of
from millpond.checkpoints.defaults import complete

# Token types of the two parts.
_ENCODER, _DECODER = range(2)


def t5gemma2_plan(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any]) -> None:
    """The steps of both; the states are the decoder's."""
    gemma = row_of("gemma3_text")
    assert gemma is not None
    hidden, words = int(config["hidden_size"]), int(config["vocab_size"])
    table = tensors.take("embed_tokens.weight", words, hidden)
    # Files may have the table twice, and the word behind an image, which no text has.
    tensors.leave("decoder.embed_tokens.weight")
    for lead in ("", "decoder."):
        tensors.leave(f"{lead}embed_tokens.eoi_embedding")
    scale = float(builder.numbers(tensor_of([hidden**0.5]))[0])
    for part, lead in ((_ENCODER, ""), (_DECODER, "decoder.")):
        stack = _Stack(builder, tensors, complete(config["encoder" if part == _ENCODER else "decoder"], gemma), lead)
        builder.read_part(part)
        builder.embed(table, scale=scale)
        for i in range(int(stack.config["num_hidden_layers"])):
            stack.attend(i, merged=part == _DECODER)
            stack.feed(i)
        builder.norm(stack.norm("norm", hidden), hidden)
        if part == _ENCODER:
            builder.keep_states(chunk=int(config["encoder_chunk_size"] or 1))


class _Stack:
    """The layers of one part."""

    def __init__(self, builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any], lead: str) -> None:
        self._builder, self._tensors, self.config, self._lead = builder, tensors, config, lead
        self._hidden, self._heads, self._kv_heads, self._dim = (
            int(config[name]) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        )
        most = int(config["max_position_embeddings"])
        self._rotations: dict[str, Rotation] = {
            kind: rotation_of(config["rope_parameters"][kind], self._dim, most=most)
            for kind in dict.fromkeys(config["layer_types"])
        }

    def attend(self, i: int, *, merged: bool) -> None:
        """Attention and its residual; ``merged``: to the states that were kept too."""
        builder, layer, dim = self._builder, f"layers.{i}.", self._dim
        kind = self.config["layer_types"][i]
        builder.norm(self.norm(f"{layer}pre_self_attn_layernorm", self._hidden), self._hidden)
        sizes: dict[str, Any] = {"heads": self._heads, "kv_heads": self._kv_heads, "dim": dim}
        query, key, value = (
            self._linear(f"{layer}self_attn.{letter}_proj", count * dim, self._hidden)
            for letter, count in zip("qkv", (self._heads, self._kv_heads, self._kv_heads), strict=True)
        )
        turned = self._heads + self._kv_heads
        if merged:
            builder.merged_heads(query, key, value, dim=dim, turned=turned)
        else:
            builder.heads(query, key, value, dim=dim, turned=turned)
        norm, key_norm = (self.norm(f"{layer}self_attn.{letter}_norm", dim, dim=dim) for letter in "qk")
        builder.rotary(**sizes, norm=norm, key_norm=key_norm, rotation=self._rotations[kind], merged=merged)
        before, after = self._reach(kind, merged=merged)
        scale = float(self.config["query_pre_attn_scalar"]) ** -0.5
        builder.attention(**sizes, scale=scale, before=before, after=after, merged=merged)
        builder.o_proj(self._linear(f"{layer}self_attn.o_proj", self._hidden, self._heads * dim), dim=dim, branch=True)
        builder.norm(self.norm(f"{layer}post_self_attn_layernorm", self._hidden), self._hidden, branch=True)

    def feed(self, i: int) -> None:
        """The feed forward and its residual."""
        layer, hidden, inner = f"layers.{i}.", self._hidden, int(self.config["intermediate_size"])
        self._builder.norm(self.norm(f"{layer}pre_feedforward_layernorm", hidden), hidden)
        gate, up = (self._linear(f"{layer}mlp.{part}_proj", inner, hidden, biased=False) for part in ("gate", "up"))
        down = self._linear(f"{layer}mlp.down_proj", hidden, inner, biased=False)
        self._builder.mlp(up, down, self.config["hidden_activation"], gate=gate, branch=True)
        self._builder.norm(self.norm(f"{layer}post_feedforward_layernorm", hidden), hidden, branch=True)

    def norm(self, name: str, columns: int, *, dim: int | None = None) -> structs.NormWeights:
        """The weights of an RMS norm; ``dim``: of heads."""
        weight = self._tensors.take(f"{self._lead}{name}.weight", columns)
        return self._builder.rms_norm(weight, float(self.config["rms_norm_eps"]), offset=1.0, dim=dim)

    def _reach(self, kind: str, *, merged: bool) -> tuple[int | None, int | None]:
        """How many positions back and ahead a token attends; ``None``: all."""
        window = self.config["sliding_window"] if kind == "sliding_attention" else None
        if merged:
            return None if window is None else window - 1, 0
        return (None, None) if window is None else ((window + 1) // 2 - 1, window // 2)

    def _linear(self, name: str, out: int, into: int, *, biased: bool | None = None) -> Any:
        biased = bool(self.config["attention_bias"]) if biased is None else biased
        return self._tensors.linear(self._lead + name, out, into, biased=biased)
