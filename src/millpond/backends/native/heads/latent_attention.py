"""NV-Embed's latent attention in float32.

The latents are the same for all rows, so what is made of them alone is computed once. The product of a head's keys with
its projection to queries has a row for each latent, and that of its projection of the result with its values a column:
together a head is ``x + B softmax(A norm(x))``, an eighth of the work, as a head has as many columns as a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from millpond.backends.native.heads.kernels import Floats, Linear, gelu
from millpond.backends.native.heads.norms import layer_norm
from millpond.checkpoints.modules import LATENTS, LatentAttention
from millpond.checkpoints.stored_tensor import StoredTensor

_EPSILON = 1e-5  # of torch.nn.LayerNorm
_ROWS = 256  # that pass at a time: the feed forward has eight times their columns


class LatentAttentionHead:
    """A row and its attention to the latents, then that and its feed forward."""

    def __init__(self, description: LatentAttention, tensors: Mapping[str, StoredTensor]) -> None:
        self._heads = description.heads
        attention, feed = (f"{LATENTS}cross_attend_blocks.{i}." for i in range(2))

        def norm_of(name: str) -> tuple[Floats, Floats]:
            return tensors[f"{name}.weight"].float32(), tensors[f"{name}.bias"].float32()

        latents = layer_norm(tensors[f"{LATENTS}latents"].float32(), *norm_of(f"{attention}norm_context"), _EPSILON)
        query, key_value, out = (tensors[f"{attention}fn.to_{name}.weight"] for name in ("q", "kv", "out"))
        self._norm, self._feed_norm = norm_of(f"{attention}norm"), norm_of(f"{feed}norm")
        scores, mixed, dim = [], [], description.dim
        for start in range(0, self._heads * dim, dim):
            part = slice(start, start + dim)
            behind = slice(self._heads * dim + start, self._heads * dim + start + dim)
            keys, values = (latents @ key_value[rows].float32().T for rows in (part, behind))  # [latents, dim]
            scores.append(keys @ query[part].float32() * np.float32(dim**-0.5))
            mixed.append(out.float32()[:, part] @ values.T)
        self._scores, self._mixed = Linear(np.concatenate(scores)), Linear(np.concatenate(mixed, 1))
        up, up_bias = tensors[f"{feed}fn.net.0.weight"], tensors[f"{feed}fn.net.0.bias"].float32()
        half = 4 * description.width
        self._up, self._gate = Linear(up[:half], up_bias[:half]), Linear(up[half:], up_bias[half:])
        self._down = Linear(tensors[f"{feed}fn.net.2.weight"], tensors[f"{feed}fn.net.2.bias"])

    def __call__(self, rows: Floats, threads: int) -> Floats:  # [n, d] -> [n, d]
        """Run rows through, a bounded number at a time."""
        out = np.empty_like(rows)
        for start in range(0, len(rows), _ROWS):
            out[start : start + _ROWS] = self._passed(rows[start : start + _ROWS], threads)
        return out

    def _passed(self, rows: Floats, threads: int) -> Floats:
        scores = self._scores(layer_norm(rows, *self._norm, _EPSILON), threads).reshape(len(rows), self._heads, -1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        rows = rows + self._mixed(shares.reshape(len(rows), -1), threads)
        normed = layer_norm(rows, *self._feed_norm, _EPSILON)
        inner = gelu(self._gate(normed, threads))
        inner *= self._up(normed, threads)
        rows += self._down(inner, threads)
        return rows
