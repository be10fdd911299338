"""JinaBERT v2, in both layouts, implemented from its description with the tensor names of the hub.

BERT without positions: a head's score falls by its slope times the distance, in either direction. The feed forward is
gated; the newer layout normalizes whole queries and keys, and adds the block's input twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

States = Callable[..., torch.Tensor]  # ids [n], types [n] if they are not all 0 -> [n, hidden]


def slopes(heads: int) -> list[float]:
    """Of each head: a geometric sequence from 2^(-8/n); beside a power of two, every second one of twice as many."""

    def sequence(count: int) -> list[float]:
        first = 2.0 ** (-8.0 / count)
        return [first ** (i + 1) for i in range(count)]

    below = 2 ** math.floor(math.log2(heads))
    return sequence(below) + sequence(2 * below)[0::2][: heads - below]


def jina_bert(
    folder: Path,
    config: dict[str, Any],
    *,
    slopes_of: Callable[[int], list[float]] = slopes,
    one_sided: bool = False,
    swapped: bool = False,
) -> States:
    """The states; the options make mistakes: other slopes, no bias for earlier keys, the halves exchanged."""
    tensors = {name.removeprefix("bert."): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    heads, act = config["num_attention_heads"], {"geglu": F.gelu, "reglu": F.relu}[config["feed_forward_type"]]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, config["layer_norm_eps"])

    def attention(x: torch.Tensor, layer: str, newer: bool) -> torch.Tensor:
        q, k, v = (linear(x, f"{layer}.self.{part}") for part in ("query", "key", "value"))
        if newer:
            q, k = norm(q, f"{layer}.self.layer_norm_q"), norm(k, f"{layer}.self.layer_norm_k")
        place = torch.arange(len(x))
        distance = (place[None] - place[:, None]).float()
        distance = distance.clamp(min=0) if one_sided else distance.abs()
        mixed = []
        parts = zip(*(part.chunk(heads, -1) for part in (q, k, v)), slopes_of(heads), strict=True)
        for query, key, value, slope in parts:
            scores = query @ key.T / math.sqrt(query.shape[-1]) - slope * distance
            mixed.append(scores.softmax(-1) @ value)
        return norm(linear(torch.cat(mixed, -1), f"{layer}.output.dense") + x, f"{layer}.output.LayerNorm")

    def states(ids: torch.Tensor, types: torch.Tensor | None = None) -> torch.Tensor:
        words, kinds = (tensors[f"embeddings.{name}_embeddings.weight"] for name in ("word", "token_type"))
        x = norm(words[ids] + (kinds[0] if types is None else kinds[types]), "embeddings.LayerNorm")
        for i in range(config["num_hidden_layers"]):
            layer = f"encoder.layer.{i}"
            newer = f"{layer}.layer_norm_1.weight" in tensors
            y = attention(x, f"{layer}.attention", newer)
            if newer:
                y = norm(y + x, f"{layer}.layer_norm_1")
            first, second = linear(y, f"{layer}.mlp.{'up_gated_layer' if newer else 'gated_layers'}").chunk(2, -1)
            gated = first * act(second) if newer != swapped else act(first) * second
            wide = linear(gated, f"{layer}.mlp.{'down_layer' if newer else 'wo'}")
            x = norm(wide + y, f"{layer}.layer_norm_2" if newer else f"{layer}.mlp.layernorm")
        return x

    return states
