"""Adapters of jina-embeddings-v3: the factors of all adapters of a matrix side by side, from tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.backends.native.packing.weight_packer import Floats, LowRank, tensor_of
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.checkpoints.families.jina import DOWN, PREFIX, UP, adapter_names, of_adapter
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.errors import WeightMismatchError


class Adapters:
    """A checkpoint's adapters, if it has any. Each matrix takes its own once."""

    def __init__(self, stored: Mapping[str, StoredTensor], config: Mapping[str, Any], name: str) -> None:
        # A pooler may have adapters too, but it is never run.
        own = {key: tensor for key, tensor in stored.items() if of_adapter(key) and "pooler." not in key}
        self._left = {key.removeprefix(f"{PREFIX}."): tensor for key, tensor in own.items()}
        self._name = name
        self.count = len(adapter_names(config))
        self.rank = int(config.get("lora_rank") or 4)
        self._scale = float(config.get("lora_alpha") or 1) / self.rank

    def linear(self, builder: PlanBuilder, key: str, out: int, into: int) -> LowRank | None:
        """The adapter of a linear layer with a weight ``[out, into]``: ``(B A) alpha / rank``."""
        if not self.count:
            return None
        down = self._take(key + DOWN, self.rank, into).float32().reshape(-1, into)
        up = self._take(key + UP, out, self.rank).float32().swapaxes(0, 1).reshape(out, -1)
        return self._rounded(builder, down, up)

    def table(self, builder: PlanBuilder, key: str, rows: int, columns: int) -> LowRank | None:
        """The adapter of a table ``[rows, columns]``, whose factors are exchanged: ``(A B) alpha / rank``."""
        if not self.count:
            return None
        down = self._take(key + DOWN, rows, self.rank).float32()
        return self._rounded(builder, down, self._take(key + UP, self.rank, columns).float32().reshape(-1, columns).T)

    def check(self) -> None:
        """Refuse adapters that no matrix took, since they would be lost silently."""
        if self._left:
            raise self._mismatch(f"the model does not know {min(self._left)}")

    def _take(self, key: str, *shape: int) -> StoredTensor:
        tensor = self._left.pop(key, None)
        if tensor is None:
            raise self._mismatch(f"the model misses {key}")
        if tensor.shape != (self.count, *shape):
            expected = f"{self.count} lora_adaptations and lora_rank {self.rank} make it {[self.count, *shape]}"
            raise self._mismatch(f"{key} has shape {list(tensor.shape)}, and {expected}")
        return tensor

    def _rounded(self, builder: PlanBuilder, down: Floats, up: Floats) -> LowRank:
        """Both factors in the model's precision."""
        down, up = (builder.numbers(tensor_of(factor)) for factor in (down, up * self._scale))
        return LowRank(down=down, up=up)

    def _mismatch(self, problem: str) -> WeightMismatchError:
        return WeightMismatchError(
            f"{self._name}: config.json and weights disagree; {problem}; check that the files belong together"
        )
