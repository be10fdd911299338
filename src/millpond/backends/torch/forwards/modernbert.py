"""ModernBERT, packed, over the weights that transformers loaded; tests hold both equal.

Queries and keys are rotated together and in the precision of the states, the activation is fused into its half of the
gated product, and sums are in place.
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
from millpond.backends.torch.forwards.rotary import apply_rotary
from millpond.checkpoints.architecture import Architecture

CosSin = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [tokens, 1, dim] each


class PackedModernBert(nn.Module):
    """A loaded ModernBERT, run on one packed row. Its layers are released one by one."""

    takes_rows = True

    def __init__(self, backbone: nn.Module, row: Architecture) -> None:
        super().__init__()
        parts: Any = backbone
        self.embeddings: nn.Module = parts.embeddings
        self.rotary: nn.Module = parts.rotary_emb
        self.layers = nn.ModuleList()
        for i, kind in enumerate(parts.config.layer_types):
            self.layers.append(PackedLayer(parts.layers[i], parts.config, kind))
            parts.layers[i] = nn.Identity()
        self.norm: nn.Module = parts.final_norm

    def forward(
        self,
        *,
        input_ids: torch.Tensor,  # [1, tokens]
        position_ids: torch.Tensor,  # [1, tokens]
        segments: Segments,
        rows: torch.Tensor | None = None,  # [n]
    ) -> Output:
        """Hidden states of every token, or only of the tokens ``rows``."""
        hidden = self.embeddings(input_ids=input_ids)[0]  # [tokens, hidden]
        states: torch.Tensor | None = None
        rotary: dict[str, CosSin] = {}
        for layer in self.layers:
            assert isinstance(layer, PackedLayer)
            if layer.kind not in rotary:
                cos, sin = self.rotary(hidden, position_ids, layer.kind)  # [1, tokens, dim]
                rotary[layer.kind] = cos[0][:, None], sin[0][:, None]
            chosen = rows if layer is self.layers[-1] else None
            hidden, states = layer(hidden, states, segments, rotary[layer.kind], chosen)
        return Output(last_hidden_state=add_and_norm(hidden, states, self.norm)[None])


class PackedLayer(nn.Module):
    """One pre-norm layer over the weights of the loaded one."""

    compiled_parts = ("_heads", "_feed")  # methods that run faster compiled

    def __init__(self, layer: Any, config: Any, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.heads = int(config.num_attention_heads)
        self.window: int | None = layer.attn.sliding_window
        self.attention_norm: nn.Module = layer.attn_norm  # the first layer has none: identity
        self.qkv = joined(layer.attn.Wqkv)
        self.attention_out = joined(layer.attn.Wo)
        self.norm: nn.Module = layer.mlp_norm
        weight, bias = layer.mlp.Wi.weight.detach(), layer.mlp.Wi.bias
        weights, biases = weight.chunk(2), (None, None) if bias is None else bias.detach().chunk(2)
        self.gated = GatedProduct((weights[0], biases[0]), (weights[1], biases[1]), config.hidden_activation)
        self.down_proj = joined(layer.mlp.Wo)

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
        query, key, value = self._heads(hidden, states, *cos_sin)
        masking = Masking(scale=query.shape[-1] ** -0.5, causal=False, window=self.window)
        mixed = attend(query, key, value, segments, masking).flatten(1)  # [tokens, hidden]
        if rows is not None:
            hidden, mixed = hidden[rows], mixed[rows]
        return hidden, self._feed(hidden, mixed)

    def _heads(
        self, hidden: torch.Tensor, states: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, ``[tokens, heads, dim]`` each; adds to ``hidden``."""
        normed = add_and_norm(hidden, states, self.attention_norm)
        qkv = self.qkv(normed).unflatten(-1, (3 * self.heads, -1))  # [tokens, 3 heads, dim]
        query, key = apply_rotary(qkv[:, : 2 * self.heads], cos, sin).chunk(2, 1)  # [tokens, heads, dim]
        return query, key, qkv[:, 2 * self.heads :]

    def _feed(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Add the attention's output to ``hidden``; returns the feed forward's output, to be added to it."""
        return self.down_proj(  # type: ignore[no-any-return]
            self.gated(add_and_norm(hidden, self.attention_out(mixed), self.norm))
        )
