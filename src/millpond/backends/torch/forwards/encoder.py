"""BERT-like encoders, packed, over the weights that transformers loaded.

q, k and v are one product, the activation is fused into its linear on a CPU, and there is neither a mask nor a copy of
``[1, heads, tokens, dim]``. Families whose classes cannot run packed rows run here too: MPNet with its relative bias,
RoFormer with its rotation, Longformer with its windows, and pre-norm ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from millpond.backends.torch.attention.kernels import attend
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import Masking
from millpond.backends.torch.forwards.add_norm import AddNorm
from millpond.backends.torch.forwards.linear import PlainLinear, joined
from millpond.backends.torch.forwards.rotary import apply_rotary
from millpond.checkpoints.architecture import Architecture, EncoderNames


@dataclass(frozen=True, kw_only=True)
class Output:
    """A backbone's result, with the field that the runner reads from transformers' classes too."""

    last_hidden_state: torch.Tensor  # [1, tokens, hidden]


class PackedEncoder(nn.Module):
    """A loaded BERT-like backbone, run on one packed row."""

    takes_rows = True

    def __init__(self, backbone: nn.Module, row: Architecture) -> None:
        super().__init__()
        names = row.encoder
        assert names is not None
        config: Any = backbone.config
        self.embeddings: nn.Module = backbone.embeddings  # type: ignore[assignment]
        # Embeddings may be narrower than the layers.
        module, _, name = names.widen.rpartition(".")
        self.widen: nn.Module | None = getattr(backbone.get_submodule(module), name, None)
        heads, activation = int(getattr(config, names.fields.heads)), getattr(config, names.fields.activation)
        self.angles: nn.Module | None = backbone.get_submodule(names.rotary) if names.rotary else None
        layers = list(backbone.get_submodule(names.layers).children())
        windows = list(getattr(config, names.fields.window)) if names.fields.window else [None] * len(layers)
        kind = PreNormLayer if names.last_norm else PackedLayer
        self.layers = nn.ModuleList(
            kind(layer, names, heads, activation, None if window is None else window // 2 + 1)
            for layer, window in zip(layers, windows, strict=True)
        )
        self.last_norm: nn.Module = backbone.get_submodule(names.last_norm) if names.last_norm else nn.Identity()
        self.bias: RelativeBias | None = None
        if names.relative_bias:
            self.bias = RelativeBias(backbone.get_submodule(names.relative_bias).weight)  # type: ignore[arg-type]

    def forward(
        self,
        *,
        input_ids: torch.Tensor,  # [1, tokens]
        position_ids: torch.Tensor,  # [1, tokens]
        segments: Segments,
        token_type_ids: torch.Tensor | None = None,  # [1, tokens]
        rows: torch.Tensor | None = None,  # [n]
    ) -> Output:
        """Hidden states of every token, or only of the tokens ``rows``."""
        more = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        turns = None
        if self.angles is None:
            more["position_ids"] = position_ids
        else:
            sines, cosines = self.angles(input_ids.shape, position_ids=position_ids)[0, :, None].chunk(2, -1)
            turns = torch.cat((cosines, cosines), -1), torch.cat((sines, sines), -1)  # [tokens, 1, dim] each
        hidden = self.embeddings(input_ids=input_ids, **more)[0]  # [tokens, embedding]
        if self.widen is not None:
            hidden = self.widen(hidden)  # [tokens, hidden]
        bias = None if self.bias is None else self.bias(segments.max_seqlen).to(hidden.dtype).contiguous()
        *layers, last = self.layers
        for layer in layers:
            hidden = layer(hidden, segments, bias, turns)
        hidden = self.last_norm(last(hidden, segments, bias, turns, rows))
        return Output(last_hidden_state=hidden[None])


class PackedLayer(nn.Module):
    """One post-norm layer over the weights of the loaded one."""

    def __init__(
        self, layer: nn.Module, names: EncoderNames, heads: int, activation: str, window: int | None = None
    ) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv = joined(*(layer.get_submodule(name) for name in (names.query, names.key, names.value)))
        self.attention_out = joined(layer.get_submodule(names.attention_out))
        self.attention_norm = AddNorm(layer.get_submodule(names.attention_norm))
        self.up = joined(layer.get_submodule(names.up), activation=activation)
        self.down = joined(layer.get_submodule(names.down))
        self.norm = AddNorm(layer.get_submodule(names.norm))
        # Methods that run faster compiled: none where oneDNN has fused the activation.
        self.compiled_parts = ("_feed",) if isinstance(self.up, PlainLinear) else ()

    def forward(
        self,
        hidden: torch.Tensor,  # [tokens, hidden]
        segments: Segments,
        bias: torch.Tensor | None,  # [heads, longest, longest], added to the scores
        turns: tuple[torch.Tensor, torch.Tensor] | None = None,  # [tokens, 1, dim] each, cosines and sines
        rows: torch.Tensor | None = None,  # [n]
    ) -> torch.Tensor:  # [tokens, hidden], or [n, hidden]
        """The layer's states, of every token or only of the tokens ``rows``."""
        mixed = self._mixed(hidden, segments, bias, turns)
        return self._feed(hidden, mixed) if rows is None else self._feed(hidden[rows], mixed[rows])

    def _mixed(
        self,
        states: torch.Tensor,
        segments: Segments,
        bias: torch.Tensor | None,
        turns: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """``[tokens, hidden]``, the attention of ``states``."""
        qkv = self.qkv(states).unflatten(-1, (3 * self.heads, -1))  # [tokens, 3 heads, dim]
        query, key, value = qkv.chunk(3, 1)
        if turns is not None:
            query, key = apply_rotary(qkv[:, : 2 * self.heads], *turns).chunk(2, 1)
        masking = Masking(scale=query.shape[-1] ** -0.5, causal=False, bias=bias, window=self.window)
        return attend(query, key, value, segments, masking).flatten(1)

    def _feed(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The rest of the layer: ``hidden`` and the attention's output to the layer's states."""
        hidden = self.attention_norm(self.attention_out(mixed), hidden)
        return self.norm(self.down(self.up(hidden)), hidden)  # type: ignore[no-any-return]


class PreNormLayer(PackedLayer):
    """A layer whose norms come before the attention and the feed forward."""

    def _mixed(
        self,
        states: torch.Tensor,
        segments: Segments,
        bias: torch.Tensor | None,
        turns: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        return super()._mixed(self.attention_norm.norm(states), segments, bias, turns)

    def _feed(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention_out(mixed)
        return hidden + self.down(self.up(self.norm.norm(hidden)))  # type: ignore[no-any-return]


class RelativeBias(nn.Module):
    """MPNet's (and T5's) bucketed distance bias, shared by all layers."""

    def __init__(self, weight: torch.Tensor, *, max_distance: int = 128) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach(), persistent=False)  # [buckets, heads]
        self.max_distance = max_distance

    def forward(self, length: int) -> torch.Tensor:
        """``[heads, length, length]``: added to the score of a query (row) and a key (column)."""
        positions = torch.arange(length, device=self.weight.device)  # type: ignore[arg-type]
        return self.by_distance(positions[None, :] - positions[:, None]).permute(2, 0, 1)

    def by_distance(self, distance: torch.Tensor) -> torch.Tensor:
        """The bias ``[..., heads]`` of a key that is so many positions behind its query."""
        weight = self.weight
        assert isinstance(weight, torch.Tensor)
        return weight[self._bucket(distance)]

    def _bucket(self, distance: torch.Tensor) -> torch.Tensor:
        """Half of the buckets for each direction; half of those exact, half logarithmic up to ``max_distance``."""
        assert isinstance(self.weight, torch.Tensor)
        per_side = self.weight.shape[0] // 2
        exact = per_side // 2
        reach = distance.abs()
        growth = torch.log(reach.clamp(min=1).float() / exact) / torch.log(torch.tensor(self.max_distance / exact))
        far = (exact + (growth * (per_side - exact)).long()).clamp(max=per_side - 1)
        return torch.where(reach < exact, reach, far) + per_side * (distance > 0)
