"""Plan: the steps of a forward pass and their packed weights, as the native encoder runs them.

A family says what it computes in methods of :class:`PlanBuilder`; the steps themselves are in ``native/encoder/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from millpond.backends.torch.native import structs
from millpond.backends.torch.native.kernels import Kernels
from millpond.backends.torch.native.weight_packer import UNIT, LowRank, NotSupported, WeightPacker

if TYPE_CHECKING:
    from millpond.backends.torch.native.rotation import Rotation

_WIDEST = 8192  # kMostColumns of norms.h
_WEIGHTS = ("weight", "down", "low")  # of a step


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A model's steps with everything that they point to."""

    model: structs.Model  # the struct; valid as long as the plan lives
    kernels: Kernels  # what runs it
    hidden: int  # columns of the result
    weights: int  # numbers of all weights that every token is multiplied with
    vocabulary: int  # rows of the word table
    types: int  # rows of the table of token types; 0: none
    positions: int  # positions that the model has; 0: any number
    adapters: int  # adapters of each weight; 0: none
    rotations: tuple[Rotation, ...]  # tables of rotary positions, which have to cover a call's longest text
    owned: tuple[Any, ...]  # what the struct points to


class PlanBuilder:
    """Collects steps; :meth:`build` packs their weights."""

    def __init__(self, kernels: Kernels, dtype: torch.dtype, *, adapters: int = 0, rank: int = 0) -> None:
        self._kernels = kernels
        self._packer = WeightPacker(kernels, dtype, adapters=adapters, rank=rank)
        self._steps: list[structs.Step] = []
        self._rotations: dict[int, Rotation] = {}  # by step
        self._hidden = self._heads = self._inner = self._vocabulary = self._types = self._positions = 0
        self._branch = False
        self._adapters, self._rank = adapters, rank

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
        columns = self._packer.columns(words.shape[1])
        self._hidden = max(self._hidden, columns)
        self._vocabulary = len(words)
        self._types = 0 if types is None else len(types)
        if positions is not None:
            self._bound(len(positions))
        self._add(
            kind=structs.EMBED,
            columns=columns,
            words=self._packer.table(words),
            positions=self._packer.table(positions),
            types=self._packer.table(
                types if types is None or type_adapter is None else self._packer.merged(types, type_adapter)
            ),
            low_words=None if adapter is None else self._packer.floats(adapter.down),
            low_columns=None if adapter is None else self._packer.floats(adapter.up.T),
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
        columns = self._packer.columns(columns)
        if columns > _WIDEST:
            raise NotSupported(f"{columns} columns")
        self._add(kind=structs.NORM, columns=columns, norm=norm, residual=residual, target=3 if branch else int(keep))

    def heads(self, *parts: Any, adapter: LowRank | None = None) -> None:
        """Queries, keys and values: the linear layers of all three side by side."""
        self._adapt(adapter, target=0)
        weight = self._packer.weight(*parts, adapter=adapter)
        self._heads = max(self._heads, weight.out)
        self._add(kind=structs.PRODUCT, target=0, weight=weight)

    def up_proj(self, part: Any) -> None:
        """Widen the embeddings: ``sums = states W``."""
        weight = self._packer.weight(part)
        self._hidden = max(self._hidden, weight.out)
        self._add(kind=structs.PRODUCT, target=4, weight=weight)

    def rotary(
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
        self._packer.columns(dim)
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
            cosines=self._packer.floats(cosines),
            sines=self._packer.floats(sines),
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
        self._packer.columns(dim)
        reach, padded = 0, None
        if distances is not None:
            reach = (distances.shape[1] + 1) // 2
            padded = self._packer.floats(nn.functional.pad(distances.flatten(), (0, UNIT)))
            self._bound(reach)
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
            distances=padded,
            reach=reach,
            last=last,
        )

    def o_proj(self, part: Any, *, add: bool = False, branch: bool = False, adapter: LowRank | None = None) -> None:
        """The product after attention: ``sums = heads W``, ``sums +=`` or ``branch =``."""
        self._branch |= branch
        self._adapt(adapter, target=1)
        weight = self._packer.weight(part, adapter=adapter)
        self._hidden = max(self._hidden, weight.out)
        self._add(kind=structs.PRODUCT, target=3 if branch else 2 if add else 1, weight=weight)

    def mlp(
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
            raise NotSupported(f"activation {activation}")
        self._branch |= branch
        inner = self._packer.columns(up.weight.shape[0])
        self._inner = max(self._inner, inner, self._packer.low)
        self._adapt(adapter, target=0)
        weight = self._packer.weight(up, adapter=adapter, mlp=True) if gate is None else self._packer.gated(gate, up)
        narrow = self._packer.weight(down, adapter=down_adapter, mlp=True)
        self._hidden = max(self._hidden, narrow.out)
        self._add(
            kind=structs.FEED,
            target=3 if branch else 2 if add else 1,
            activation=structs.ACTIVATIONS[activation],
            gated=gate is not None,
            weight=weight,
            down=narrow,
            **({} if down_adapter is None else {"low": self._packer.low_weight(down_adapter)}),
        )

    def norm_weights(
        self, kind: int, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float, offset: float = 0.0
    ) -> structs.NormWeights:
        """A norm's weights; ``offset`` is added to the weight (1 for Gemma)."""
        whole = None if weight is None else weight.detach().float() + offset
        return structs.NormWeights(
            kind=kind, weight=self._packer.floats(whole), bias=self._packer.floats(bias), epsilon=epsilon
        )

    def norm_of(self, norm: nn.Module) -> structs.NormWeights:
        """The weights of torch's layer norm, with or without a bias; the identity copies."""
        if isinstance(norm, nn.Identity):
            return structs.NormWeights(kind=structs.COPY)
        if type(norm) is not nn.LayerNorm:
            raise NotSupported(f"norm {type(norm).__name__}")
        return self.norm_weights(structs.LAYER_NORM, norm.weight, norm.bias, norm.eps)

    def build(self) -> Plan:
        """Pack the weights."""
        total = self._packer.numbers
        memory = self._packer.pack()
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
            low=self._packer.low,
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
            owned=(memory, steps, *self._packer.owned),
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

    def _adapt(self, adapter: LowRank | None, *, target: int) -> None:
        """Put the products with the adapters' first factors behind the states (0), or behind the queries (1)."""
        if adapter is not None:
            self._add(kind=structs.ADAPT, target=target, weight=self._packer.low_weight(adapter))
