"""Adapters: low-rank products (LoRA) added to a backbone's matrices, chosen for each token of a packed row.

No adapter is merged into its matrix. The factors of all adapters lie side by side, ``[adapters rank, ...]``; one small
product serves all tokens, and a mask keeps the columns of each token's adapter. So texts of all tasks share one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from millpond.backends.torch.forwards.linear import activation_of, linear
from millpond.backends.torch.weights import read_tensors
from millpond.checkpoints.checkpoint import Checkpoint
from millpond.checkpoints.families.jina import DOWN, UP, adapter_names, of_adapter
from millpond.checkpoints.weights import tensor_shapes
from millpond.errors import WeightMismatchError


@dataclass(frozen=True, kw_only=True)
class AdapterChoice:
    """The adapter of each token."""

    adapter_ids: torch.Tensor  # `[tokens]`; 0 for a token without an adapter, whose `mask` is 0
    mask: torch.Tensor  # `[tokens, adapters rank]`: 1 in the columns of the token's adapter, else 0


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The factors of all adapters of one matrix."""

    down: torch.Tensor  # `[adapters rank, in]`; for an embedding table `[adapters, rows, rank]`
    up: torch.Tensor  # `[out, adapters rank]`, multiplied by the scale `alpha / rank`


class Adapters:
    """A checkpoint's adapters. Each matrix takes its own once."""

    def __init__(self, checkpoint: Checkpoint, *, prefix: str, like: torch.Tensor) -> None:
        folder, config = checkpoint.layout.transformer, checkpoint.config
        # A pooler may have adapters too, but it is never run.
        keys = tuple(key for key in tensor_shapes(folder) if of_adapter(key) and "pooler." not in key)
        tensors = read_tensors(folder, only=keys) if keys else {}
        self._left = {key.removeprefix(f"{prefix}."): tensor for key, tensor in tensors.items()}
        self._like, self._name = like, checkpoint.source.name
        self.count = len(adapter_names(config))
        self.rank = int(config.get("lora_rank") or 4)
        self._scale = float(config.get("lora_alpha") or 1) / self.rank

    def linear(self, key: str, shape: torch.Size) -> Adapter | None:
        """The adapter of a linear layer with a weight of ``shape [out, in]``: ``(B A) alpha / rank``."""
        if not self.count:
            return None
        down = self._take(key + DOWN, (self.rank, shape[1])).flatten(0, 1)
        up = self._take(key + UP, (shape[0], self.rank)).permute(1, 0, 2).flatten(1)
        return self._placed(down, up)

    def embedding(self, key: str, shape: torch.Size) -> Adapter | None:
        """The adapter of a table of ``shape [rows, width]``, whose factors are exchanged: ``(A B) alpha / rank``."""
        if not self.count:
            return None
        down = self._take(key + DOWN, (shape[0], self.rank))
        return self._placed(down, self._take(key + UP, (self.rank, shape[1])).flatten(0, 1).T)

    def check_all_taken(self) -> None:
        """Refuse adapters that no matrix took, since they would be lost silently."""
        if self._left:
            raise self._mismatch(f"the model does not know {min(self._left)}")

    def _take(self, key: str, shape: tuple[int, int]) -> torch.Tensor:
        tensor = self._left.pop(key, None)
        if tensor is None:
            raise self._mismatch(f"the model misses {key}")
        if tuple(tensor.shape) != (self.count, *shape):
            expected = f"{self.count} lora_adaptations and lora_rank {self.rank} make it {[self.count, *shape]}"
            raise self._mismatch(f"{key} has shape {list(tensor.shape)}, and {expected}")
        return tensor

    def _placed(self, down: torch.Tensor, up: torch.Tensor) -> Adapter:
        up = up.float() * self._scale
        return Adapter(down=down.to(self._like).contiguous(), up=up.to(self._like).contiguous())

    def _mismatch(self, problem: str) -> WeightMismatchError:
        return WeightMismatchError(
            f"{self._name}: config.json and weights disagree; {problem}; check that the files belong together"
        )


class _Adapted(nn.Module):
    """A part that may have adapters."""

    adapter_down: torch.Tensor | None
    adapter_up: torch.Tensor | None

    def take(self, adapter: Adapter | None) -> None:
        """Have this adapter."""
        self.register_buffer("adapter_down", None if adapter is None else adapter.down, persistent=False)
        self.register_buffer("adapter_up", None if adapter is None else adapter.up, persistent=False)


class AdaptedLinear(_Adapted):
    """Linear layers joined to one, plus each token's adapter, then the activation."""

    def __init__(self, parts: tuple[Any, ...], adapters: Adapters, key: str, act: str | None = None) -> None:
        super().__init__()
        weight, bias = (torch.cat([getattr(part, kind).detach() for part in parts]) for kind in ("weight", "bias"))
        adapter = adapters.linear(key, weight.shape)
        self.activation = act
        # The activation follows the adapter, so it can be fused only into a layer without one.
        self.base = linear(weight, bias, act if adapter is None else None)
        self.activate = activation_of(None if adapter is None else act)
        self.take(adapter)

    def forward(
        self, rows: torch.Tensor, choice: AdapterChoice | None
    ) -> torch.Tensor:  # [tokens, in] -> [tokens, out]
        """Multiply, add the adapter, activate."""
        out: torch.Tensor = self.base(rows)
        if choice is not None and self.adapter_down is not None and self.adapter_up is not None:
            low = F.linear(rows, self.adapter_down) * choice.mask  # [tokens, adapters rank]
            out = torch.addmm(out, low, self.adapter_up.T)
        return self.activate(out)


class AdaptedEmbedding(_Adapted):
    """An embedding table plus each token's adapter."""

    def __init__(self, table: nn.Embedding, adapters: Adapters, key: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(table.weight.detach(), requires_grad=False)
        self.copies = adapters.count
        self.take(adapters.embedding(key, table.weight.shape))

    def forward(self, ids: torch.Tensor, choice: AdapterChoice | None) -> torch.Tensor:  # [tokens] -> [tokens, width]
        """Look up the rows and add the adapter."""
        rows = F.embedding(ids, self.weight)
        if choice is None or self.adapter_down is None or self.adapter_up is None:
            return rows
        low = self.adapter_down[choice.adapter_ids, ids]  # [tokens, rank]
        return torch.addmm(rows, low.repeat(1, self.copies) * choice.mask, self.adapter_up.T)
