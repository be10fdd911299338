"""NV-Embed's latent attention: what is made of the latents alone is computed once, as in the native head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from millpond.backends.torch.weights import read_tensors
from millpond.checkpoints.modules import LATENTS, LatentAttention
from millpond.errors import WeightMismatchError

_ROWS = 1024  # that pass at a time: the feed forward has eight times their columns


class LatentAttentionHead(nn.Module):
    """A row and its attention to the latents, then that and its feed forward."""

    def __init__(self, description: LatentAttention) -> None:
        super().__init__()
        tensors = _read(description)
        width, self.heads = description.width, description.heads
        attention, feed = (f"{LATENTS}cross_attend_blocks.{i}." for i in range(2))
        self.norm, self.feed_norm = (_norm(tensors, f"{block}norm", width) for block in (attention, feed))
        latents = _norm(tensors, f"{attention}norm_context", width)(tensors[f"{LATENTS}latents"])
        query, key_value, out = (tensors[f"{attention}fn.to_{name}.weight"] for name in ("q", "kv", "out"))
        each = (self.heads, description.dim)
        keys, values = (latents @ part.T for part in key_value.chunk(2))
        scores = torch.einsum("lhd,hdc->hlc", keys.unflatten(1, each), query.unflatten(0, each)) * each[1] ** -0.5
        mixed = torch.einsum("chd,lhd->chl", out.unflatten(1, each), values.unflatten(1, each))
        self.scores, self.mixed = scores.flatten(0, 1), mixed.flatten(1)
        self.up, self.down = (
            _linear(tensors[f"{feed}fn.net.{i}.weight"], tensors[f"{feed}fn.net.{i}.bias"]) for i in (0, 2)
        )
        for name in ("scores", "mixed"):
            tensor = getattr(self, name)
            delattr(self, name)
            self.register_buffer(name, tensor.contiguous())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # [n, d] -> [n, d]
        """Run rows through, a bounded number at a time."""
        return torch.cat([self._passed(part) for part in rows.split(_ROWS)])

    def _passed(self, rows: torch.Tensor) -> torch.Tensor:
        shares = (self.norm(rows) @ self.scores.T).unflatten(1, (self.heads, -1)).softmax(-1)
        rows = rows + shares.flatten(1) @ self.mixed.T
        up, gate = self.up(self.feed_norm(rows)).chunk(2, -1)
        out: torch.Tensor = rows + self.down(up * nn.functional.gelu(gate))
        return out


def _read(description: LatentAttention) -> dict[str, torch.Tensor]:
    """Its tensors in float32, with the shapes that config.json says."""
    found = read_tensors(description.folder, only=tuple(description.tensors))
    for name, shape in description.tensors.items():
        if name not in found or tuple(found[name].shape) != shape:
            stored = "no such tensor" if name not in found else f"shape {list(found[name].shape)}"
            raise WeightMismatchError(
                f"{description.folder}: weights and config.json disagree: for {name} the file has {stored}, and "
                f"config.json asks for shape {list(shape)}; check that the files belong together"
            )
    return {name: tensor.float() for name, tensor in found.items()}


def _norm(tensors: Mapping[str, torch.Tensor], name: str, width: int) -> nn.LayerNorm:
    norm = nn.LayerNorm(width)
    norm.load_state_dict({part: tensors[f"{name}.{part}"] for part in ("weight", "bias")})
    return norm.requires_grad_(False)


def _linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer
