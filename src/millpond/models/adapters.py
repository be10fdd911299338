"""Adapters: low-rank products over a backbone's matrices, of which each token of a row may have another.

None is merged into its matrix: all of them lie side by side, ``[adapters rank, ...]``, and a mask of a token's own
columns picks its adapter out of the one small product that all tokens share. So texts of all tasks run in one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from millpond.checkpoints.checkpoint import Checkpoint
from millpond.checkpoints.weights import read_tensors, tensor_shapes
from millpond.errors import WeightMismatchError
from millpond.models.linear import activation_of, linear

# torch's names for a parametrized weight and for what is added to it.
WEIGHT, DOWN, UP = (f".parametrizations.weight.{part}" for part in ("original", "0.lora_A", "0.lora_B"))


def adapter_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The tasks that a checkpoint has adapters for; an adapter's number is its place among them."""
    return tuple(config.get("lora_adaptations") or ())


def of_adapter(key: str) -> bool:
    """Whether a checkpoint's tensor is part of an adapter."""
    return key.endswith((DOWN, UP))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which adapter each token has.

    Attributes:
        adapter_ids: ``[tokens]``; 0 for a token without one, which ``own`` makes good.
        own: ``[tokens, adapters rank]``: 1 in the columns of the token's adapter, else 0.
    """

    adapter_ids: torch.Tensor
    own: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What all adapters add to one matrix.

    Attributes:
        down: ``[adapters rank, in]``; of an embedding table ``[adapters, rows, rank]``.
        up: ``[out, adapters rank]``, the scale ``alpha / rank`` in it.
    """

    down: torch.Tensor
    up: torch.Tensor


class Adapters:
    """A checkpoint's adapters, each asked for once by the matrix that it belongs to.

    Attributes:
        count: How many a matrix has.
        rank: Width between the two factors of each.
    """

    def __init__(self, checkpoint: Checkpoint, *, prefix: str, like: torch.Tensor) -> None:
        folder, config = checkpoint.layout.transformer, checkpoint.config
        # A pooler may have them too; the one of these backbones is never run.
        keys = tuple(key for key in tensor_shapes(folder) if of_adapter(key) and "pooler." not in key)
        found = read_tensors(folder, only=keys) if keys else {}
        self._left = {key.removeprefix(f"{prefix}."): tensor for key, tensor in found.items()}
        self._like, self._name = like, checkpoint.source.name
        self.count = len(adapter_names(config))
        self.rank = int(config.get("lora_rank") or 4)
        self._scale = float(config.get("lora_alpha") or 1) / self.rank

    def linear(self, key: str, shape: torch.Size) -> Adapter | None:
        """Of a linear layer with a weight of ``shape [out, in]``: ``(B A) alpha / rank``."""
        if not self.count:
            return None
        down = self._take(key + DOWN, (self.rank, shape[1])).flatten(0, 1)
        up = self._take(key + UP, (shape[0], self.rank)).permute(1, 0, 2).flatten(1)
        return self._placed(down, up)

    def embedding(self, key: str, shape: torch.Size) -> Adapter | None:
        """Of a table of ``shape [rows, width]``, where the factors change places: ``(A B) alpha / rank``."""
        if not self.count:
            return None
        down = self._take(key + DOWN, (shape[0], self.rank))
        return self._placed(down, self._take(key + UP, (self.rank, shape[1])).flatten(0, 1).T)

    def check_all_taken(self) -> None:
        """Nothing may be left: an adapter without its matrix, or without a name, would be lost in silence.

        Raises:
            WeightMismatchError: Something is.
        """
        if self._left:
            raise self._mismatch(f"the model does not know {min(self._left)}")

    def _take(self, key: str, shape: tuple[int, int]) -> torch.Tensor:
        tensor = self._left.pop(key, None)
        if tensor is None:
            raise self._mismatch(f"the model misses {key}")
        if tuple(tensor.shape) != (self.count, *shape):
            wanted = f"{self.count} lora_adaptations and lora_rank {self.rank} make it {[self.count, *shape]}"
            raise self._mismatch(f"{key} has shape {list(tensor.shape)}, and {wanted}")
        return tensor

    def _placed(self, down: torch.Tensor, up: torch.Tensor) -> Adapter:
        up = up.float() * self._scale
        return Adapter(down=down.to(self._like).contiguous(), up=up.to(self._like).contiguous())

    def _mismatch(self, problem: str) -> WeightMismatchError:
        return WeightMismatchError(
            f"{self._name}: config.json and weights disagree; {problem}; check that the files belong together"
        )


class AdaptedLinear(nn.Module):
    """Linear layers side by side, as one; each token's adapter; the activation."""

    def __init__(self, parts: tuple[Any, ...], adapters: Adapters, key: str, act: str | None = None) -> None:
        super().__init__()
        weight, bias = (torch.cat([getattr(part, kind).detach() for part in parts]) for kind in ("weight", "bias"))
        adapter = adapters.linear(key, weight.shape)
        # The activation comes behind the adapter, so that only a layer without one can have it fused.
        self.base = linear(weight, bias, act if adapter is None else None)
        self.activate = activation_of(None if adapter is None else act)
        self.register_buffer("adapter_down", None if adapter is None else adapter.down, persistent=False)
        self.register_buffer("adapter_up", None if adapter is None else adapter.up, persistent=False)

    def forward(self, rows: torch.Tensor, choice: Choice | None) -> torch.Tensor:  # [tokens, in] -> [tokens, out]
        """Multiply, add, activate."""
        out: torch.Tensor = self.base(rows)
        if choice is not None and self.adapter_down is not None:
            assert isinstance(self.adapter_down, torch.Tensor) and isinstance(self.adapter_up, torch.Tensor)
            low = F.linear(rows, self.adapter_down) * choice.own  # [tokens, adapters rank]
            out = torch.addmm(out, low, self.adapter_up.T)
        return self.activate(out)


class AdaptedEmbedding(nn.Module):
    """A table, and each token's adapter of it."""

    def __init__(self, table: nn.Embedding, adapters: Adapters, key: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(table.weight.detach(), requires_grad=False)
        adapter = adapters.embedding(key, table.weight.shape)
        self.copies = adapters.count
        self.register_buffer("adapter_down", None if adapter is None else adapter.down, persistent=False)
        self.register_buffer("adapter_up", None if adapter is None else adapter.up, persistent=False)

    def forward(self, ids: torch.Tensor, choice: Choice | None) -> torch.Tensor:  # [tokens] -> [tokens, width]
        """Look up, add."""
        rows = F.embedding(ids, self.weight)
        if choice is None or self.adapter_down is None:
            return rows
        assert isinstance(self.adapter_down, torch.Tensor) and isinstance(self.adapter_up, torch.Tensor)
        low = self.adapter_down[choice.adapter_ids, ids]  # [tokens, rank]
        return torch.addmm(rows, low.repeat(1, self.copies) * choice.own, self.adapter_up.T)
