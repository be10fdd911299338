"""BERT-like encoders, packed, over the weights that transformers loaded.

q, k and v are one product, the activation is fused into its linear on a CPU, and there is neither a mask nor a copy of
``[1, heads, tokens, dim]``. MPNet, whose class cannot run packed rows at all, runs here with its relative bias.
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
        # ELECTRA's embeddings may be narrower than its layers.
        self.widen: nn.Module | None = getattr(backbone, "embeddings_project", None)
        heads, activation = int(getattr(config, names.fields.heads)), getattr(config, names.fields.activation)
        layers = backbone.get_submodule(names.layers)
        self.layers = nn.ModuleList(PackedLayer(layer, names, heads, activation) for layer in layers.children())
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
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        hidden = self.embeddings(input_ids=input_ids, position_ids=position_ids, **types)[0]  # [tokens, embedding]
        if self.widen is not None:
            hidden = self.widen(hidden)  # [tokens, hidden]
        bias = None if self.bias is None else self.bias(segments.max_seqlen).to(hidden.dtype).contiguous()
        *layers, last = self.layers
        for layer in layers:
            hidden = layer(hidden, segments, bias)
        hidden = last(hidden, segments, bias, rows)
        return Output(last_hidden_state=hidden[None])


class PackedLayer(nn.Module):
    """One post-norm layer over the weights of the loaded one."""

    def __init__(self, layer: nn.Module, names: EncoderNames, heads: int, activation: str) -> None:
        super().__init__()
        self.heads = heads
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
        rows: torch.Tensor | None = None,  # [n]
    ) -> torch.Tensor:  # [tokens, hidden], or [n, hidden]
        """The layer's states, of every token or only of the tokens ``rows``."""
        qkv = self.qkv(hidden).unflatten(-1, (3, self.heads, -1))  # [tokens, 3, heads, dim]
        query, key, value = qkv.unbind(1)
        masking = Masking(scale=query.shape[-1] ** -0.5, causal=False, bias=bias)
        mixed = attend(query, key, value, segments, masking).flatten(1)  # [tokens, hidden]
        return self._feed(hidden, mixed) if rows is None else self._feed(hidden[rows], mixed[rows])

    def _feed(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The rest of the layer: ``hidden`` and the attention's output to the layer's states."""
        hidden = self.attention_norm(self.attention_out(mixed), hidden)
        return self.norm(self.down(self.up(hidden)), hidden)  # type: ignore[no-any-return]


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
