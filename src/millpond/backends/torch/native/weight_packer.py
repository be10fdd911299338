"""WeightPacker: the weights of a plan, arranged and packed as the kernels read them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from millpond.backends.torch.native import structs
from millpond.backends.torch.native.kernels import Kernels
from millpond.backends.torch.native.memory import Memory
from millpond.support.load_progress import advance, begin

# A product computes that many columns at a time, and a panel of states has as many, in all instruction sets.
UNIT = 32
# Of int8 weights: inner numbers that one range of a row's codes spans, and those of a panel (int8.h).
_CHUNK, _CODE_PANEL = 384, 64


class NotSupported(Exception):  # noqa: N818 - not an error: the backbone runs in torch's operators
    """The native encoder does not compute this model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRank:
    """The factors of all adapters of a weight."""

    # `[adapters rank, in]`, one adapter below the other; of an embedding table `[adapters, rows, rank]`
    down: torch.Tensor
    up: torch.Tensor  # `[out, adapters rank]`


class WeightPacker:
    """Takes weights one after another; :meth:`pack` packs them, and only then arranges each."""

    def __init__(self, kernels: Kernels, dtype: torch.dtype, *, adapters: int, rank: int) -> None:
        self.owned: list[Any] = []
        self.low = -(-adapters * rank // UNIT) * UNIT
        self._kernels, self._dtype, self._adapters, self._rank = kernels, dtype, adapters, rank
        self._weights: list[tuple[structs.Weight, Callable[[], torch.Tensor]]] = []

    @property
    def numbers(self) -> int:
        """Of all weights that are not packed yet."""
        return sum(struct.out * struct.in_ for struct, _ in self._weights)

    def weight(self, *parts: Any, adapter: LowRank | None = None, mlp: bool = False) -> structs.Weight:
        """Linear layers side by side, with the second factors of an adapter behind them."""
        weights = [part.weight.detach() for part in parts]
        up: torch.Tensor | None = None
        if adapter is not None:
            if self._kernels.int8 != "none":
                raise NotSupported("adapters of weights in eight bits")
            up = adapter.up.detach()
            up = F.pad(up, (0, self.low - up.shape[1]))

        def whole() -> torch.Tensor:
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            return weight if up is None else torch.cat([weight, up], dim=1)

        shape = (sum(map(len, weights)), weights[0].shape[1] + (0 if up is None else self.low))
        bias = None if all(part.bias is None for part in parts) else torch.cat([_bias_of(part) for part in parts])
        return self._packed(whole, shape, bias, mlp=mlp)

    def gated(self, gate: Any, up: Any) -> structs.Weight:
        """The columns of gate and up in turn, a vector of each."""

        def interleaved(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            lanes = self._kernels.lanes
            pieces = [part.detach().unflatten(0, (-1, lanes)) for part in (one, other)]
            return torch.stack(pieces, dim=1).flatten(0, 2)

        bias = None
        if gate.bias is not None or up.bias is not None:
            bias = interleaved(_bias_of(gate), _bias_of(up))
        weights = [gate.weight.detach(), up.weight.detach()]
        shape = (len(weights[0]) + len(weights[1]), weights[0].shape[1])
        return self._packed(partial(interleaved, *weights), shape, bias, mlp=True)

    def low_weight(self, adapter: LowRank) -> structs.Weight:
        """The first factors of a weight's adapters as a weight of its own."""
        down = adapter.down.detach()
        if self.low > down.shape[1]:  # behind the queries stand as many columns of keys
            raise NotSupported(f"{self._adapters} adapters of rank {self._rank} for {down.shape[1]} columns")
        whole = F.pad(down, (0, 0, 0, self.low - len(down)))
        return self._packed(partial(torch.Tensor.contiguous, whole), whole.shape, None, mlp=False)

    def merged(self, table: torch.Tensor, adapter: LowRank) -> torch.Tensor:
        """``[(1 + adapters) rows, columns]``: a table, and below it those with each of its adapters."""
        ups = adapter.up.detach().float().unflatten(1, (-1, self._rank)).transpose(0, 1)  # [adapters, columns, rank]
        whole = table.detach().float()
        merged = [whole + down @ up.T for down, up in zip(adapter.down.detach().float(), ups, strict=True)]
        return torch.cat([whole, *merged])

    def table(self, table: torch.Tensor | None) -> int | None:
        """The address of a table in the model's precision, which is not copied if it has that already."""
        return None if table is None else self._kept(table.detach().to(self._dtype).contiguous())

    def floats(self, numbers: torch.Tensor | None) -> int | None:
        """The address of numbers in float32."""
        return None if numbers is None else self._kept(numbers.detach().float().contiguous())

    def columns(self, columns: int) -> int:
        """A number of columns that the kernels compute."""
        if columns % UNIT:
            raise NotSupported(f"{columns} columns are no multiple of {UNIT}")
        return columns

    def pack(self) -> Memory:
        """Pack all weights into one piece of memory, in the order of their use."""
        memory = Memory(sum(self._bytes(struct) for struct, _ in self._weights) + 4096)
        at = memory.address
        begin("arranging weights", sum(self._bytes(struct) for struct, _ in self._weights))
        while self._weights:
            struct, weight = self._weights.pop(0)  # the last reference to it, if its module is gone
            int8 = bool(struct.scales)
            whole = weight().detach().to(torch.int8 if int8 else self._dtype).contiguous()
            struct.units = at
            call = structs.PackCall(whole.data_ptr(), at, *whole.shape)
            (self._kernels.pack_int8 if int8 else self._kernels.pack)(ctypes.addressof(call))
            at += self._bytes(struct)
            del whole, weight
            advance(self._bytes(struct))
        return memory

    def _packed(
        self, whole: Callable[[], torch.Tensor], shape: Sequence[int], bias: torch.Tensor | None, *, mlp: bool
    ) -> structs.Weight:
        """A weight that ``whole`` arranges when it is packed, so that only one is in memory twice."""
        out, into = (self.columns(size) for size in shape)
        struct = structs.Weight(bias=self.floats(bias), out=out, in_=into)
        if self._kernels.int8 == "all" or (mlp and self._kernels.int8 == "feeds"):
            codes, scales = _eight_bits(whole())
            struct.scales = self.floats(scales)
            whole = partial(torch.Tensor.contiguous, codes)
        self._weights.append((struct, whole))
        return struct

    def _bytes(self, weight: structs.Weight) -> int:
        """Of a weight, packed."""
        if weight.scales:
            return int(weight.out * -(-weight.in_ // _CODE_PANEL) * _CODE_PANEL)
        return int(weight.out * weight.in_ * self._dtype.itemsize)

    def _kept(self, tensor: torch.Tensor) -> int:
        self.owned.append(tensor)
        return tensor.data_ptr()


def _bias_of(part: Any) -> torch.Tensor:
    """Zeros if a linear layer has none."""
    bias: torch.Tensor = part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias.detach()
    return bias


def _eight_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as int8 ``[out, in]``, and float32 ``[1 + chunks, out]``: scales, and sums of each chunk's integers."""
    whole = weight.detach().float()
    scales = whole.abs().amax(1).clamp_(min=1e-12).div_(127)
    codes = (whole / scales[:, None]).round_().to(torch.int8)
    sums = [chunk.sum(1).float() for chunk in codes.split(_CHUNK, dim=1)]
    return codes, torch.stack([scales, *sums])
