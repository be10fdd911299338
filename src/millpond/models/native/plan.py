"""Plan: the steps of a forward pass and their packed weights, as the native encoder runs them.

A family says what it computes in methods of :class:`PlanBuilder`; the steps themselves are in ``native/encoder/``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from millpond.models.native import structs
from millpond.models.native.kernels import Kernels
from millpond.models.native.memory import Memory

if TYPE_CHECKING:
    from millpond.models.native.rotation import Rotation

# A product computes that many columns at a time, and a panel of states has as many, in all instruction sets.
UNIT = 32
_WIDEST = 8192  # kMostColumns of norms.h
# Of int8 weights: inner numbers that one range of a row's codes spans, and those of a panel (int8.h).
_CHUNK, _CODE_PANEL = 384, 64

_WEIGHTS = ("weight", "down", "low")  # of a step


class Unfit(Exception):  # noqa: N818 - not an error: the backbone runs in torch's operators
    """The native encoder does not compute this model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRank:
    """The factors of all adapters of a weight.

    Attributes:
        down: ``[adapters rank, in]``, one adapter below the other; of an embedding table ``[adapters, rows, rank]``.
        up: ``[out, adapters rank]``.
    """

    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A model's steps with everything that they point to.

    Attributes:
        model: The struct; valid as long as the plan lives.
        kernels: What runs it.
        hidden: Columns of the result.
        weights: Numbers of all weights that every token is multiplied with.
        vocabulary: Rows of the word table.
        types: Rows of the table of token types; 0: none.
        positions: Positions that the model has; 0: any number.
        adapters: Adapters of each weight; 0: none.
        rotations: Tables of rotary positions, which have to cover a call's longest text.
        owned: What the struct points to.
        layers: Of each layer its first step, and last the step behind the last layer; empty: not marked.
    """

    model: structs.Model
    kernels: Kernels
    hidden: int
    weights: int
    vocabulary: int
    types: int
    positions: int
    adapters: int
    rotations: tuple[Rotation, ...]
    owned: tuple[Any, ...]
    layers: tuple[int, ...] = ()

    def of_layers(self, chosen: Sequence[int]) -> Plan:
        """The plan of the same model with only these of its layers; it shares the weights with this one."""
        bounds = self.layers
        kept = [*range(bounds[0])]
        for layer in chosen:
            kept += range(bounds[layer], bounds[layer + 1])
        kept += range(bounds[-1], self.model.count)
        steps = (structs.Step * len(kept))(*(self.model.steps[i] for i in kept))  # copies
        attention = [step for step in steps if step.kind == structs.ATTENTION]
        for step in attention:
            step.last = step is attention[-1]
        model = structs.Model.from_buffer_copy(self.model)
        model.steps, model.count = steps, len(kept)
        return replace(self, model=model, owned=(steps, self.owned), layers=())


class PlanBuilder:
    """Collects steps; :meth:`build` packs their weights.

    Raises:
        Unfit: By every method, if a size or an activation has no kernel.
    """

    def __init__(self, kernels: Kernels, dtype: torch.dtype, *, adapters: int = 0, rank: int = 0) -> None:
        """Start without steps.

        Args:
            kernels: What will run the plan.
            dtype: The precision of the model.
            adapters: Adapters of each weight.
            rank: Of an adapter.
        """
        self._kernels = kernels
        self._dtype = dtype
        self._steps: list[structs.Step] = []
        self._weights: list[tuple[structs.Weight, Callable[[], torch.Tensor]]] = []
        self._owned: list[Any] = []
        self._rotations: dict[int, Rotation] = {}  # by step
        self._hidden = 0
        self._heads = 0
        self._inner = 0
        self._branch = False
        self._vocabulary = 0
        self._types = 0
        self._positions = 0
        self._adapters = adapters
        self._rank = rank
        self._low = -(-adapters * rank // UNIT) * UNIT  # columns of the first factors of all adapters
        self._layers: list[int] = []  # see Plan

    def begin_layer(self) -> None:
        """The next step is the first one of a layer, or the first one behind the last layer."""
        self._layers.append(len(self._steps))

    def embed(
        self,
        words: torch.Tensor,  # [vocabulary, columns]
        positions: torch.Tensor | None = None,  # [positions, columns]
        types: torch.Tensor | None = None,  # [types, columns]
        scale: float = 1.0,
        adapter: LowRank | None = None,
        type_adapter: LowRank | None = None,
    ) -> None:
        """Embeddings: the sum of a word (scaled), its type and its position.

        An adapter of the words is added to each word that is read; the few types are merged with theirs beforehand.
        """
        columns = self._columns(words.shape[1])
        self._hidden = max(self._hidden, columns)
        self._vocabulary = len(words)
        self._types = 0 if types is None else len(types)
        if positions is not None:
            self._bound(len(positions))
        self._add(
            kind=structs.EMBED,
            columns=columns,
            words=self._table(words),
            positions=self._table(positions),
            types=self._table(types if types is None or type_adapter is None else self._merged(types, type_adapter)),
            low_words=None if adapter is None else self._floats(adapter.down),
            low_columns=None if adapter is None else self._floats(adapter.up.T),
            vocabulary=len(words),
            kinds=self._types,
            scale=scale,
        )

    def norm(
        self,
        norm: structs.NormWeights,
        columns: int,
        *,
        residual: bool = False,
        keep: bool = False,
        branch: bool = False,
    ) -> None:
        """A norm of the sums, or of sums + states (``residual``), whose result are the states.

        With ``keep`` the sums take the result too. With ``branch`` instead: ``sums += norm(branch)``.
        """
        columns = self._columns(columns)
        if columns > _WIDEST:
            raise Unfit(f"{columns} columns")
        self._add(kind=structs.NORM, columns=columns, norm=norm, residual=residual, target=3 if branch else int(keep))

    def heads(self, *parts: Any, adapter: LowRank | None = None) -> None:
        """Queries, keys and values: the linear layers of all three side by side."""
        self._adapt(adapter, target=0)
        weight = self._weight(*parts, adapter=adapter)
        self._heads = max(self._heads, weight.out)
        self._add(kind=structs.PRODUCT, target=0, weight=weight)

    def widen(self, part: Any) -> None:
        """Widen the embeddings: ``sums = states W``."""
        weight = self._weight(part)
        self._hidden = max(self._hidden, weight.out)
        self._add(kind=structs.PRODUCT, target=4, weight=weight)

    def turn(
        self,
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        norm: structs.NormWeights | None = None,
        key_norm: structs.NormWeights | None = None,
        cosines: torch.Tensor | None = None,  # [positions, dim / 2]
        sines: torch.Tensor | None = None,  # [positions, dim / 2]
        rotation: Rotation | None = None,
    ) -> None:
        """Norms of query and key heads, then their rotation, by tables of a fixed size or by those that grow."""
        self._columns(dim)
        if cosines is not None:
            self._bound(len(cosines))
        if rotation is not None:
            self._rotations[len(self._steps)] = rotation
        self._add(
            kind=structs.HEADS,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            norm=norm or structs.NormWeights(kind=structs.COPY),
            key_norm=key_norm or structs.NormWeights(kind=structs.COPY),
            cosines=self._floats(cosines),
            sines=self._floats(sines),
        )

    def attention(
        self,
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        scale: float,
        causal: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        distances: torch.Tensor | None = None,  # [heads, 2 reach - 1]
        last: bool,
    ) -> None:
        """Attention, ``queries = attention``; ``last``: of the model's last layer.

        ``window`` counts positions in each direction, the own one included.
        """
        self._columns(dim)
        if distances is not None:
            self._bound((distances.shape[1] + 1) // 2)
        before = (1 << 40) if window is None else window - 1
        self._add(
            kind=structs.ATTENTION,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            scale=scale,
            before=before,
            after=0 if causal else before,
            softcap=softcap or 0.0,
            distances=None if distances is None else self._floats(nn.functional.pad(distances.flatten(), (0, UNIT))),
            reach=0 if distances is None else (distances.shape[1] + 1) // 2,
            last=last,
        )

    def out(self, part: Any, *, add: bool = False, branch: bool = False, adapter: LowRank | None = None) -> None:
        """The product after attention: ``sums = heads W``, ``sums +=`` or ``branch =``."""
        self._branch |= branch
        self._adapt(adapter, target=1)
        weight = self._weight(part, adapter=adapter)
        self._hidden = max(self._hidden, weight.out)
        self._add(kind=structs.PRODUCT, target=3 if branch else 2 if add else 1, weight=weight)

    def feed(
        self,
        up: Any,
        down: Any,
        activation: str | None,
        *,
        gate: Any | None = None,
        add: bool = False,
        branch: bool = False,
        adapter: LowRank | None = None,
        down_adapter: LowRank | None = None,
    ) -> None:
        """The feed forward, ``down(activation(up))``, or with a gate ``down(activation(gate) * up)``.

        It goes to the sums, is added to them, or goes to the branch. A feed with a gate has no adapters.
        """
        if activation not in structs.ACTIVATIONS:
            raise Unfit(f"activation {activation}")
        self._branch |= branch
        inner = self._columns(up.weight.shape[0])
        self._inner = max(self._inner, inner, self._low)
        self._adapt(adapter, target=0)
        weight = self._weight(up, adapter=adapter, feed=True) if gate is None else self._gated(gate, up)
        narrow = self._weight(down, adapter=down_adapter, feed=True)
        self._hidden = max(self._hidden, narrow.out)
        self._add(
            kind=structs.FEED,
            target=3 if branch else 2 if add else 1,
            activation=structs.ACTIVATIONS[activation],
            gated=gate is not None,
            weight=weight,
            down=narrow,
            **({} if down_adapter is None else {"low": self._low_weight(down_adapter)}),
        )

    def norm_weights(
        self, kind: int, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float, offset: float = 0.0
    ) -> structs.NormWeights:
        """A norm's weights; ``offset`` is added to the weight (1 for Gemma)."""
        whole = None if weight is None else weight.detach().float() + offset
        return structs.NormWeights(kind=kind, weight=self._floats(whole), bias=self._floats(bias), epsilon=epsilon)

    def norm_of(self, norm: nn.Module) -> structs.NormWeights:
        """The weights of torch's layer norm, with or without a bias; the identity copies."""
        if isinstance(norm, nn.Identity):
            return structs.NormWeights(kind=structs.COPY)
        if type(norm) is not nn.LayerNorm:
            raise Unfit(f"norm {type(norm).__name__}")
        return self.norm_weights(structs.LAYER_NORM, norm.weight, norm.bias, norm.eps)

    def build(self) -> Plan:
        """Pack the weights into one piece of memory, in the order of their use."""
        total = sum(struct.out * struct.in_ for struct, _ in self._weights)
        memory = Memory(sum(self._bytes(struct) for struct, _ in self._weights) + 4096)
        at, count = memory.address, len(self._weights)
        while self._weights:
            struct, weight = self._weights.pop(0)  # the last reference to it, if its module is gone
            int8 = bool(struct.scales)
            whole = weight().detach().to(torch.int8 if int8 else self._dtype).contiguous()
            struct.units = at
            call = structs.PackCall(whole.data_ptr(), at, *whole.shape)
            (self._kernels.pack_int8 if int8 else self._kernels.pack)(ctypes.addressof(call))
            at += self._bytes(struct)
            del whole, weight
        assert count
        steps = (structs.Step * len(self._steps))(*self._steps)
        self._copy_units(steps)
        for i, rotation in self._rotations.items():
            rotation.serve(steps[i])
        model = structs.Model(
            steps=steps,
            count=len(steps),
            hidden=self._hidden,
            heads=self._heads,
            inner=self._inner,
            branch=self._branch,
            codes=max((step.weight.in_ for step in self._steps if step.weight.scales), default=0),
            output=self._hidden,
            low=self._low,
            rank=self._rank,
        )
        return Plan(
            model=model,
            kernels=self._kernels,
            hidden=self._hidden,
            weights=total,
            vocabulary=self._vocabulary,
            types=self._types,
            positions=self._positions,
            adapters=self._adapters,
            rotations=tuple(dict.fromkeys(self._rotations.values())),
            owned=(memory, steps, *self._owned),
            layers=tuple(self._layers),
        )

    def _add(self, **fields: Any) -> None:
        self._steps.append(structs.Step(**fields))
        self._steps[-1].sources = [fields.get(name) for name in _WEIGHTS]

    def _copy_units(self, steps: Any) -> None:
        """A struct within a struct is a copy, made before its weight was packed."""
        for struct, step in zip(self._steps, steps, strict=True):
            for name, source in zip(_WEIGHTS, struct.sources, strict=True):
                if source is not None:
                    getattr(step, name).units = source.units

    def _bound(self, positions: int) -> None:
        self._positions = min(self._positions or positions, positions)

    def _bytes(self, weight: structs.Weight) -> int:
        """Of a weight, packed."""
        if weight.scales:
            return int(weight.out * -(-weight.in_ // _CODE_PANEL) * _CODE_PANEL)
        return int(weight.out * weight.in_ * self._dtype.itemsize)

    def _columns(self, columns: int) -> int:
        if columns % UNIT:
            raise Unfit(f"{columns} columns are no multiple of {UNIT}")
        return columns

    def _adapt(self, adapter: LowRank | None, *, target: int) -> None:
        """Put the products with the adapters' first factors behind the states (0), or behind the queries (1)."""
        if adapter is not None:
            self._add(kind=structs.ADAPT, target=target, weight=self._low_weight(adapter))

    def _low_weight(self, adapter: LowRank) -> structs.Weight:
        """The first factors of a weight's adapters as a weight of its own."""
        down = adapter.down.detach()
        if self._low > down.shape[1]:  # behind the queries stand as many columns of keys
            raise Unfit(f"{self._adapters} adapters of rank {self._rank} for {down.shape[1]} columns")
        whole = F.pad(down, (0, 0, 0, self._low - len(down)))
        return self._packed(partial(torch.Tensor.contiguous, whole), whole.shape, None, feed=False)

    def _merged(self, table: torch.Tensor, adapter: LowRank) -> torch.Tensor:
        """``[(1 + adapters) rows, columns]``: a table, and below it those with each of its adapters."""
        ups = adapter.up.detach().float().unflatten(1, (-1, self._rank)).transpose(0, 1)  # [adapters, columns, rank]
        whole = table.detach().float()
        merged = [whole + down @ up.T for down, up in zip(adapter.down.detach().float(), ups, strict=True)]
        return torch.cat([whole, *merged])

    def _weight(self, *parts: Any, adapter: LowRank | None = None, feed: bool = False) -> structs.Weight:
        weights = [part.weight.detach() for part in parts]
        up: torch.Tensor | None = None
        if adapter is not None:
            if self._kernels.int8 != "none":
                raise Unfit("adapters of weights in eight bits")
            up = adapter.up.detach()
            up = F.pad(up, (0, self._low - up.shape[1]))

        def whole() -> torch.Tensor:
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            return weight if up is None else torch.cat([weight, up], dim=1)

        shape = (sum(map(len, weights)), weights[0].shape[1] + (0 if up is None else self._low))
        bias = None if all(part.bias is None for part in parts) else torch.cat([_bias_of(part) for part in parts])
        return self._packed(whole, shape, bias, feed=feed)

    def _gated(self, gate: Any, up: Any) -> structs.Weight:
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
        return self._packed(partial(interleaved, *weights), shape, bias, feed=True)

    def _packed(
        self, whole: Callable[[], torch.Tensor], shape: Sequence[int], bias: torch.Tensor | None, *, feed: bool
    ) -> structs.Weight:
        """A weight that ``whole`` arranges when it is packed, so that only one is in memory twice."""
        out, into = (self._columns(size) for size in shape)
        struct = structs.Weight(bias=self._floats(bias), out=out, in_=into)
        if self._kernels.int8 == "all" or (feed and self._kernels.int8 == "feeds"):
            codes, scales = _eight_bits(whole())
            struct.scales = self._floats(scales)
            whole = partial(torch.Tensor.contiguous, codes)
        self._weights.append((struct, whole))
        return struct

    def _table(self, table: torch.Tensor | None) -> int | None:
        """The address of a table in the model's precision, which is not copied if it has that already."""
        return None if table is None else self._kept(table.detach().to(self._dtype).contiguous())

    def _floats(self, numbers: torch.Tensor | None) -> int | None:
        return None if numbers is None else self._kept(numbers.detach().float().contiguous())

    def _kept(self, tensor: torch.Tensor) -> int:
        self._owned.append(tensor)
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
