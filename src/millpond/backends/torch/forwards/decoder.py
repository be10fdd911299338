"""Llama and its relatives, packed, over the weights that transformers loaded; tests hold both equal.

Besides what ``encoder.py`` does, the norms of query and key heads take one pass and their rotation another. A
checkpoint that needs what is missing here (:meth:`PackedDecoder.fits`) runs in transformers' class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from millpond.backends.torch.attention.kernels import attend
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import Masking
from millpond.backends.torch.forwards.add_norm import add_and_norm
from millpond.backends.torch.forwards.encoder import Output
from millpond.backends.torch.forwards.linear import GatedProduct, joined
from millpond.backends.torch.forwards.rms_norm import RMSNorm
from millpond.backends.torch.forwards.rotary import apply_rotary
from millpond.checkpoints.architecture import Architecture, DecoderTraits

CosSin = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [tokens, 1, dim] each


# Rows of a block on a CPU. With more, the states between two products do not fit into the cache, and beyond 32 MiB the
# allocator maps memory for each new tensor; at 4,000 rows a layer's norms and rotations take three times as long a row.
_ROWS = 1024
_LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


class PackedDecoder(nn.Module):
    """A loaded backbone of Llama's kind, run on one packed row.

    The backbone is consumed: each of its layers is released once its weights are taken, so they are in memory once.
    """

    takes_rows = True

    def __init__(self, backbone: nn.Module, row: Architecture) -> None:
        super().__init__()
        parts: Any = backbone
        traits = row.traits
        assert traits is not None
        self.embeddings: nn.Module = parts.embed_tokens
        self.rotary: nn.Module = parts.rotary_emb
        self.layers = nn.ModuleList()
        for i in range(len(parts.layers)):
            kind = parts.config.layer_types[i] if traits.rotary_by_kind else None
            self.layers.append(PackedLayer(parts.layers[i], parts.config, traits, kind))
            parts.layers[i] = nn.Identity()
        self.norm = _norm_of(parts.norm, traits)

    @staticmethod
    def fits(backbone: nn.Module, row: Architecture) -> bool:
        """Whether this forward does all that the loaded class would."""
        layers: Any = backbone.get_submodule("layers")
        return _is_known(backbone, row) and all(_is_plain(layer) for layer in layers)

    def forward(
        self,
        *,
        input_ids: torch.Tensor,  # [1, tokens]
        position_ids: torch.Tensor,  # [1, tokens]
        segments: Segments,
        use_cache: bool = False,
        rows: torch.Tensor | None = None,  # [n]
    ) -> Output:
        """Hidden states of every token, or only of the tokens ``rows``.

        ``use_cache`` is an argument of transformers' classes; there is no key-value cache.
        """
        hidden = self.embeddings(input_ids)[0]  # [tokens, hidden]
        states: torch.Tensor | None = None
        rotary: dict[str | None, CosSin] = {}
        for layer in self.layers:
            assert isinstance(layer, PackedLayer)
            kind = layer.kind
            if kind not in rotary:
                cos, sin = self.rotary(hidden, position_ids, *(() if kind is None else (kind,)))  # [1, tokens, dim]
                rotary[kind] = cos[0][:, None], sin[0][:, None]
            chosen = rows if layer is self.layers[-1] else None
            hidden, states = layer(hidden, states, segments, rotary[kind], chosen)
        return Output(last_hidden_state=add_and_norm(hidden, states, self.norm)[None])


class PackedLayer(nn.Module):
    """One pre-norm layer over the weights of the loaded one."""

    compiled_parts = ("_heads", "_feed")  # methods that run faster compiled

    def __init__(self, layer: Any, config: Any, traits: DecoderTraits, kind: str | None) -> None:
        super().__init__()
        attention = layer.self_attn
        self.kind = kind
        self.masking = _masking(attention, config, traits)
        self.dim = int(attention.head_dim)
        self.heads = attention.q_proj.out_features // self.dim
        self.kv_heads = attention.k_proj.out_features // self.dim
        self.attention_norm = _norm_of(layer.input_layernorm, traits)
        self.qkv_proj = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.qk_norm: RMSNorm | None = None
        if hasattr(attention, "q_norm"):
            # One norm over the query heads and the key heads that follow them: [all heads, dim].
            pieces = ((attention.q_norm, self.heads), (attention.k_norm, self.kv_heads))
            weight = torch.cat([norm.weight.detach().expand(count, -1) for norm, count in pieces])
            self.qk_norm = RMSNorm(weight, _eps(attention.q_norm), centred=traits.centred)
        self.o_proj = joined(attention.o_proj)
        # Gemma 2 and 3 also have a norm after each half of the layer, and other names for the four norms.
        sandwich = hasattr(layer, "pre_feedforward_layernorm")
        before = layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm
        self.attention_post: nn.Module | None = _norm_of(layer.post_attention_layernorm, traits) if sandwich else None
        self.norm = _norm_of(before, traits)
        self.gated = GatedProduct.of(layer.mlp.gate_proj, layer.mlp.up_proj, getattr(config, traits.activation))
        self.down_proj = joined(layer.mlp.down_proj)
        self.post: nn.Module | None = _norm_of(layer.post_feedforward_layernorm, traits) if sandwich else None

    def forward(
        self,
        hidden: torch.Tensor,  # [tokens, hidden]
        states: torch.Tensor | None,  # [tokens, hidden]
        segments: Segments,
        cos_sin: CosSin,
        rows: torch.Tensor | None = None,  # [n]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden + states``, both of the layer before, to those of this one; with ``rows`` of these tokens only.

        The sum is left to the next norm, which has it in the same pass; ``hidden`` is overwritten.
        """
        unblocked = hidden.device.type != "cpu" or torch.compiler.is_compiling()
        size = len(hidden) if unblocked else _ROWS
        blocks = hidden.split(size)
        if len(blocks) == 1:
            query, key, value = self._heads(hidden, states, *cos_sin)
        else:
            before = [None] * len(blocks) if states is None else states.split(size)
            turned = zip(*(part.split(size) for part in cos_sin), strict=True)
            pieces = [self._heads(block, some, *pair) for block, some, pair in zip(blocks, before, turned, strict=True)]
            query, key, value = (torch.cat(piece) for piece in zip(*pieces, strict=True))
        mixed = attend(query, key, value, segments, self.masking).flatten(1)  # [tokens, heads dim]
        if rows is not None:
            hidden, mixed = hidden[rows], mixed[rows]
        blocks = hidden.split(size)
        if len(blocks) == 1:
            return hidden, self._feed(hidden, mixed)
        fed = [self._feed(block, some) for block, some in zip(blocks, mixed.split(size), strict=True)]
        return hidden, torch.cat(fed)

    def _heads(
        self, hidden: torch.Tensor, states: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[tokens, heads, dim]`` queries and ``[tokens, kv_heads, dim]`` keys and values; adds to ``hidden``."""
        normed = add_and_norm(hidden, states, self.attention_norm)
        heads = self.qkv_proj(normed).unflatten(-1, (-1, self.dim))  # [tokens, all heads, dim]
        qk, value = heads.split((self.heads + self.kv_heads, self.kv_heads), 1)
        query, key = apply_rotary(qk, cos, sin, self.qk_norm).split((self.heads, self.kv_heads), 1)
        return query, key, value

    def _feed(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Add the projected attention output to ``hidden``; returns the feed forward's output, to be added to it."""
        states = self.o_proj(mixed)
        states = states if self.attention_post is None else self.attention_post(states)
        states = self.down_proj(self.gated(add_and_norm(hidden, states, self.norm)))
        return states if self.post is None else self.post(states)  # type: ignore[no-any-return]


def _masking(attention: Any, config: Any, traits: DecoderTraits) -> Masking:
    """The masking that the class passes to its attention function."""
    # The config has precedence over the class, as in transformers.
    causal = getattr(config, "is_causal", None)
    window = None
    if traits.window is not None:
        window = getattr(attention if traits.window == "layer" else config, "sliding_window", None)
    return Masking(
        scale=float(attention.scaling),
        causal=bool(attention.is_causal if causal is None else causal),
        window=window,
        softcap=attention.attn_logit_softcapping if traits.softcap else None,
    )


def _norm_of(norm: Any, traits: DecoderTraits) -> RMSNorm:
    return RMSNorm(norm.weight, _eps(norm), centred=traits.centred)


def _eps(norm: Any) -> float:
    """Gemma's classes name it ``eps``, Llama's ``variance_epsilon``."""
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def _is_known(backbone: Any, row: Architecture) -> bool:
    """Whether it is transformers' own class, with the embeddings, activation and rotary angles that are run here."""
    from transformers.activations import ACT2FN

    kind = type(backbone)
    traits = row.traits
    if traits is None or kind.__name__ != row.model_class or not kind.__module__.startswith("transformers.models."):
        return False
    activation = getattr(backbone.config, traits.activation, None)
    if activation not in ACT2FN or hasattr(backbone.embed_tokens, "embed_scale") != traits.centred:
        return False
    frequencies = [buffer for name, buffer in backbone.rotary_emb.named_buffers() if name.endswith("inv_freq")]
    return all(
        str(layer.mlp.act_fn) == str(ACT2FN[activation])
        and all(2 * len(buffer) == layer.self_attn.head_dim for buffer in frequencies)
        for layer in backbone.layers
    )


def _is_plain(layer: nn.Module) -> bool:
    """Whether its linears are plain (no adapter, not quantized), and all or none of q, k and v have a bias."""
    linears = [layer.get_submodule(name) for name in (*_LINEARS, *_GATED)]
    biased = {getattr(part, "bias", None) is not None for part in linears[:3]}
    return all(type(part) is nn.Linear for part in linears) and len(biased) == 1
