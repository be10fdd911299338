"""Plan: the steps of a forward pass and their packed weights, as the native encoder runs them.

A family says what it computes in methods of :class:`PlanBuilder`; the steps themselves are in ``native/encoder/``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millpond.backends.native import structs
from millpond.backends.native.kernels import Kernels
from millpond.backends.native.packing.weight_packer import (
    UNIT,
    Floats,
    Indexes,
    Linear,
    LowRank,
    NotSupported,
    WeightPacker,
    padded,
    padded_rows,
    tensor_of,
)
from millpond.backends.native.plans.distances import DistanceTerms, by_head
from millpond.backends.native.plans.layer_shares import LayerShares
from millpond.backends.native.plans.rotation import Rotation
from millpond.backends.native.plans.smoothing import factors_of, smooth, smoothed_norms
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.errors import ModelLoadError

_WIDEST = 8192  # kMostColumns of norms.h
_MOST_TAPS = 8  # kMostTaps of convolution.h
_MOST_EXPERTS = 1024  # kMost of experts.h
_ALL = 1 << 40  # a distance beyond any token
_WEIGHTS = ("weight", "down", "low")  # of a step


@dataclass(frozen=True, kw_only=True, eq=False)
class Expert:
    """A feed forward that only some tokens pass: ``down(activation(up))``, or ``down(activation(gate) * up)``."""

    up: Linear
    down: Linear
    gate: Linear | None = None


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
    chunk: int  # of a model of two parts (token types 0 and 1), states of the encoder that become one; 0: of any other
    rotations: tuple[Rotation, ...]  # tables of rotary positions, which have to cover a call's longest text
    owned: tuple[Any, ...]  # what the struct points to


class PlanBuilder(LayerShares):
    """Collects steps; :meth:`build` packs their weights."""

    def __init__(self, kernels: Kernels, *, adapters: int = 0, rank: int = 0, shares: Sequence[float] = ()) -> None:
        super().__init__(shares)
        self._kernels = kernels
        self._packer = WeightPacker(kernels, adapters=adapters, rank=rank)
        self._steps: list[structs.Step] = []
        self._rotations: dict[int, Rotation] = {}  # by step
        self._tables: list[tuple[int, str, StoredTensor]] = []  # of embeddings, with the step and its field
        self._experts: list[tuple[Any, list[structs.Weight]]] = []  # arrays that steps point to, and what goes there
        self._value_tables: dict[int, tuple[StoredTensor, int]] = {}  # and the step that has them, by their ids
        self._same_words: list[tuple[int, int]] = []  # steps that have another one's table
        self._distance_tables: dict[int, tuple[Floats, int | None]] = {}  # with their addresses, by their ids
        self._hidden = self._output = self._heads = self._inner = self._vocabulary = self._types = self._positions = 0
        self._branch = self._kept = False
        self._chunk = 0
        self._adapters, self._rank = adapters, rank

    def embed(
        self,
        words: StoredTensor,  # [vocabulary, columns]
        positions: StoredTensor | None = None,  # [positions, columns]
        types: StoredTensor | None = None,  # [types, columns]
        *,
        scale: float = 1.0,
        trigrams: bool = False,
        start: int | None = None,
        adapter: LowRank | None = None,
        type_adapter: LowRank | None = None,
    ) -> None:
        """Embeddings, the first step: the sum of a word (scaled), its type and its position.

        An adapter of the words is added to each word that is read; the few types are merged with theirs beforehand.
        With ``trigrams`` instead three words side by side, a token's next one, its own and the one before. With
        ``start`` the word before instead of a token's own, of a text's first token the word ``start``.
        """
        columns = padded(words.shape[1])
        self._hidden = max(self._hidden, 3 * columns if trigrams else columns)
        self._vocabulary = words.shape[0]
        if types is not None and type_adapter is not None:
            self._types = types.shape[0]
            types = self._merged(types, type_adapter)
        self._place(words, positions, types)
        self._add(
            kind=structs.EMBED,
            columns=columns,
            whole=trigrams,
            low_words=None if adapter is None else self._packer.floats(adapter.down),
            low_columns=None if adapter is None else self._packer.floats(_padded(adapter.up.T)),
            vocabulary=self._vocabulary,
            kinds=self._types,
            scale=scale,
            shifted=start is not None,
            start=start or 0,
        )

    def place(self, positions: StoredTensor, types: StoredTensor) -> None:
        """Add the embeddings of positions and types to the sums, which are as wide."""
        self._place(None, positions, types)
        self._add(kind=structs.EMBED, columns=padded(types.shape[1]), kinds=self._types)

    def _place(self, words: StoredTensor | None, positions: StoredTensor | None, types: StoredTensor | None) -> None:
        """Note the tables of the step that is added next."""
        if positions is not None:
            self._bound(positions.shape[0])
        if types is not None and not self._types:
            self._types = types.shape[0]
        for field, table in (("words", words), ("positions", positions), ("types", types)):
            if table is not None:
                self._tables.append((len(self._steps), field, table))

    def norm(
        self,
        norm: structs.NormWeights,
        columns: int,
        *,
        residual: bool = False,
        keep: bool = False,
        sums: bool = False,
        branch: bool = False,
        carry: bool = False,
        mixture: tuple[float, float] | None = None,
    ) -> None:
        """A norm of the sums, or of sums + states (``residual``), whose result are the states.

        With ``keep`` the sums take the result too, with ``carry`` the branch, with ``sums`` only the sums. With
        ``branch`` instead: ``sums += norm(branch)``. With ``mixture`` it is of the sums and the branch, times these.
        """
        if columns > _WIDEST:
            raise NotSupported(f"{columns} columns")
        self._output, columns = columns, padded(columns)
        self._branch |= carry
        target = 5 if mixture else 4 if carry else 3 if branch else 2 if sums else int(keep)
        scale, share = mixture or (0.0, 0.0)
        fields = {"scale": scale, "share": share, "residual": residual, "target": target}
        self._add(kind=structs.NORM, columns=columns, norm=norm, **fields)

    def heads(self, *parts: Linear, dim: int | None = None, turned: int = 0, adapter: LowRank | None = None) -> None:
        """Queries, keys and values: the linear layers of all three side by side.

        Args:
            parts: The layers.
            dim: Columns of a head; ``None``: a multiple of UNIT.
            turned: The first heads, which :meth:`rotary` turns.
            adapter: The factors of all layers' adapters.
        """
        self._adapt(adapter, target=0)
        rows = sum(part.weight.shape[0] for part in parts)
        order = None if dim is None or dim % UNIT == 0 else _head_rows(rows // dim, dim, turned)
        weight = self._packer.weight(*parts, order=order, adapter=adapter)
        self._heads = max(self._heads, weight.out)
        self._add(kind=structs.PRODUCT, target=0, weight=weight)

    def blend(self, share: float, *, begins: bool = False, ends: bool = False) -> None:
        """See :meth:`LayerShares.blend`."""
        self._branch = True
        self._add(kind=structs.BLEND, columns=padded(self._output), scale=share, target=2 if ends else int(not begins))

    def read_part(self, kind: int) -> None:
        """From here on the rows of one part of each text, of this token type; their positions begin anew."""
        if kind == 0 and self._steps:
            raise NotSupported("steps before those of a part")

    def merged_heads(self, query: Linear, key: Linear, value: Linear, *, dim: int, turned: int) -> None:
        """Queries, keys and values of the states; beside them keys and values of the kept states."""
        own = query.weight.shape[0] // dim
        self.heads(query, dim=dim, turned=own)
        queries = self._steps[-1].sources[0].out
        self.heads(key, value, dim=dim, turned=turned - own)
        self._steps[-1].columns = queries
        weight = self._steps[-1].sources[0]
        self._add(kind=structs.PRODUCT, target=6, columns=queries, weight=weight)
        self._heads = max(self._heads, queries + weight.out)

    def keep_states(self, *, chunk: int | None = None) -> None:
        """The states of an encoder, for :meth:`cross_heads` of its decoder.

        ``chunk``: of parts, the means of so many neighbouring states each, for :meth:`merged_heads`.
        """
        self._kept, self._chunk = True, chunk or 0
        self._add(kind=structs.KEEP, reach=self._chunk)

    def cross_heads(self, query: Linear, key: Linear, value: Linear, *, dim: int) -> None:
        """Queries of the states; keys and values of the states that were kept."""
        self.heads(query, dim=dim)
        queries = self._steps[-1].sources[0].out
        self.heads(key, value, dim=dim)
        step = self._steps[-1]
        step.target, step.columns = 5, queries
        self._heads = max(self._heads, queries + step.sources[0].out)

    def gate_by_kept(self, gate: Linear, kept: Linear, norm: structs.NormWeights, activation: str | None) -> None:
        """The states' product, activated, times the norm of that of the states that were kept: ``queries =`` both."""
        if activation not in structs.ACTIVATIONS:
            raise NotSupported(f"activation {activation}")
        columns = padded(gate.weight.shape[0])
        self.heads(gate)
        self.heads(kept)
        self._steps[-1].target, self._steps[-1].columns = 5, columns
        self._heads = max(self._heads, 2 * columns)
        code = structs.ACTIVATIONS[activation]
        self._add(kind=structs.GATE, columns=columns, factor=0, other=columns, norm=norm, activation=code)

    def gate_attention(self, *, heads: int, kv_heads: int, dim: int, activation: str) -> None:
        """The attention's result times the columns behind the values, activated."""
        columns, behind = heads * padded(dim), (heads + 2 * kv_heads) * padded(dim)
        if columns > _WIDEST:
            raise NotSupported(f"a gate of {heads * dim} columns")
        code, copied = structs.ACTIVATIONS[activation], structs.NormWeights(kind=structs.COPY)
        self._add(kind=structs.GATE, columns=columns, factor=behind, other=0, norm=copied, activation=code)

    def exclude_values(self, *, heads: int, kv_heads: int, dim: int, shares: Floats) -> None:
        """The attention's result without a share ``[heads]`` of what it has along a row's own values."""
        sizes = {"heads": heads, "kv_heads": kv_heads, "dim": padded(dim)}
        self._add(kind=structs.EXCLUDE, **sizes, distances=self._packer.floats(shares))

    def value_words(self, words: StoredTensor, *, heads: int, kv_heads: int, dim: int) -> None:
        """Add the row of each token's word to its values."""
        behind, sizes = (heads + kv_heads) * padded(dim), {"columns": kv_heads * padded(dim)}
        _, held = self._value_tables.setdefault(id(words), (words, len(self._steps)))
        if held < len(self._steps):
            self._same_words.append((len(self._steps), held))
            self._add(kind=structs.EMBED, target=1, other=behind, **sizes)
            return
        if dim % UNIT:
            rows = words.float32().reshape(len(words.stored), kv_heads, dim)
            rows = np.pad(rows, ((0, 0), (0, 0), (0, padded(dim) - dim)))
            words = tensor_of(rows.reshape(len(rows), -1))
        self._tables.append((len(self._steps), "words", words))
        self._add(kind=structs.EMBED, target=1, other=behind, **sizes)

    def up_proj(self, part: Linear, *, piece: int | None = None) -> None:
        """Another width: ``sums = states W``; ``piece``: columns of each word of a trigram."""
        weight = self._packer.weight(part, piece=piece)
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
        value_norm: structs.NormWeights | None = None,
        whole: bool = False,
        rotation: Rotation | None = None,
        merged: bool = False,
    ) -> None:
        """Norms of heads, then the rotation of queries and keys; ``whole``: the norms are of all heads as one row.

        ``merged``: the kept keys have the norm too, and no positions.
        """
        if whole and heads * padded(dim) > _WIDEST:
            raise NotSupported(f"a norm of {heads * dim} columns")
        if rotation is not None:
            self._rotations[len(self._steps)] = rotation
        self._add(
            kind=structs.HEADS,
            heads=heads,
            kv_heads=kv_heads,
            dim=padded(dim),
            norm=norm or structs.NormWeights(kind=structs.COPY),
            key_norm=key_norm or structs.NormWeights(kind=structs.COPY),
            whole=whole,
        )
        if value_norm is not None:  # a step of its own, to which the heads before the values are queries
            self._add(
                kind=structs.HEADS, heads=heads + kv_heads, kv_heads=kv_heads, dim=padded(dim), key_norm=value_norm
            )
        if merged and key_norm is not None:
            columns = heads * padded(dim)
            self._add(
                kind=structs.HEADS, target=1, columns=columns, kv_heads=kv_heads, dim=padded(dim), key_norm=key_norm
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
        distances: Floats | DistanceTerms | None = None,  # [heads, 2 reach - 1]
        before: int | None = None,
        after: int | None = None,
        merged: bool | None = None,
    ) -> None:
        """Attention, ``queries = attention``.

        ``window`` counts positions in each direction, the own one included. ``distances`` are added to the scores by
        the distance of query and key; beside DeBERTa's terms there is neither window nor softcap. Of a part (``merged``
        is no ``None``) ``before`` and ``after`` are the positions back and ahead, ``None`` all of them; with ``merged``
        its tokens attend to all kept states too.
        """
        if merged is None:
            before = None if window is None else window - 1
            after = 0 if causal else before
        self._add(
            kind=structs.ATTENTION,
            target=int(bool(merged)),
            heads=heads,
            kv_heads=kv_heads,
            dim=padded(dim),
            scale=scale,
            before=_ALL if before is None else before,
            after=_ALL if after is None else after,
            softcap=softcap or 0.0,
            int8=self._kernels.int8 == "all",
            **self._distances(distances, heads),
        )

    def convolve(self, taps: StoredTensor, *, ahead: int) -> None:  # [columns, 1, taps]
        """A convolution between two gates: ``queries = keys * convolved(queries * values)``, all of these columns.

        A row is a sum over the rows from ``taps - 1 - ahead`` before it to ``ahead`` behind it.
        """
        columns, _, count = taps.shape
        if count > _MOST_TAPS:
            raise NotSupported(f"a convolution over {count} rows")
        wide = np.pad(self.numbers(taps)[:, 0].T, ((0, 0), (0, padded(columns) - columns)))
        self._add(
            kind=structs.CONVOLVE,
            heads=1,
            dim=padded(columns),
            distances=self._packer.floats(wide),
            reach=count,
            after=ahead,
        )

    def o_proj(
        self,
        part: Linear,
        *,
        dim: int | None = None,
        add: bool = False,
        branch: bool = False,
        adapter: LowRank | None = None,
    ) -> None:
        """The product after attention: ``sums = heads W``, ``sums +=`` or ``branch =``; ``dim``: as for the heads."""
        self._branch |= branch
        self._adapt(adapter, target=1, piece=dim)
        weight = self._packer.weight(part, piece=dim, adapter=adapter)
        self._hidden = max(self._hidden, weight.out)
        self._add(kind=structs.PRODUCT, target=3 if branch else 2 if add else 1, weight=weight)

    def mlp(
        self,
        up: Linear,
        down: Linear,
        activation: str | None,
        *,
        gate: Linear | None = None,
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
        inner = padded(up.weight.shape[0])
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

    def experts(
        self,
        router: Linear,
        experts: Sequence[Expert],
        activation: str | None,
        *,
        top: int,
        renormalized: bool = False,
        bias: StoredTensor | None = None,  # [columns]
        add: bool = False,
        branch: bool = False,
    ) -> None:
        """A mixture of feed forwards, which goes where :meth:`mlp` puts its own.

        A row's result is the sum of those of its ``top`` experts, weighted by a softmax of the router's scores over
        all of them, ``renormalized`` so that a row's weights add up to 1; ``bias`` is added once.
        """
        if activation not in structs.ACTIVATIONS:
            raise NotSupported(f"activation {activation}")
        if len(experts) > _MOST_EXPERTS:
            raise NotSupported(f"{len(experts)} experts")
        if top > len(experts):
            raise ModelLoadError(f"config.json gives a token {top} experts, and there are {len(experts)}")
        self._branch |= branch
        first, columns = experts[0], padded(experts[0].down.weight.shape[0])
        self._hidden = max(self._hidden, columns)
        weights = []
        for expert in experts:
            up, gate = expert.up, expert.gate
            weights += [
                self._packer.weight(up, exact=True) if gate is None else self._packer.gated(gate, up, exact=True),
                self._packer.weight(expert.down, exact=True),
            ]
        held = (structs.Weight * len(weights))()
        self._experts.append((held, weights))
        shared = None if bias is None else self._packer.floats(np.pad(self.numbers(bias), (0, columns - bias.shape[0])))
        self._add(
            kind=structs.EXPERTS,
            target=3 if branch else 2 if add else 1,
            activation=structs.ACTIVATIONS[activation],
            gated=first.gate is not None,
            columns=columns,
            weight=self._packer.weight(router, exact=True),
            down=structs.Weight(bias=shared),
            experts=ctypes.addressof(held),
            expert_count=len(experts),
            top=top,
            renormalized=renormalized,
        )

    def numbers(self, tensor: StoredTensor) -> Floats:
        """A tensor's numbers as the model's precision has them."""
        return self._packer.numbers_of(tensor)

    def layer_norm(
        self, weight: StoredTensor | None, bias: StoredTensor | None, epsilon: float, *, dim: int | None = None
    ) -> structs.NormWeights:
        """The weights of a layer norm; ``dim``: of all heads of so many columns as one row."""
        numbers = self._floats(weight)
        order = None if dim is None or numbers is None else _head_rows(len(numbers) // dim, dim, 0)
        return self._norm_weights(structs.LAYER_NORM, numbers, self._floats(bias), epsilon, order)

    def rms_norm(
        self, weight: StoredTensor | None, epsilon: float, *, offset: float = 0.0, dim: int | None = None
    ) -> structs.NormWeights:
        """The weights of an RMS norm; ``offset`` is added to them (1 for Gemma).

        ``dim``: of one or more heads of so many columns, which are turned.
        """
        numbers = self._floats(weight)
        count = 0 if dim is None or numbers is None else len(numbers) // dim
        order = _head_rows(count, dim, count) if dim is not None and count else None
        whole = None if numbers is None else numbers + np.float32(offset)
        return self._norm_weights(structs.RMS_NORM, whole, None, epsilon, order)

    def scale_norm(self, weight: StoredTensor, bias: StoredTensor) -> structs.NormWeights:
        """The weights of a norm that only scales and shifts."""
        return self._norm_weights(structs.SCALE, self._floats(weight), self._floats(bias), 0.0)

    def repeat(self, first: int, end: int) -> None:
        """Steps ``[first, end)`` once more, with the same weights."""
        for step in self._steps[first:end]:
            self._steps.append(structs.Step.from_buffer_copy(step))
            self._steps[-1].sources = step.sources

    @property
    def count(self) -> int:
        """Steps so far."""
        return len(self._steps)

    def build(self, identity: object = None) -> Plan:
        """Read tables and weights, and pack these; ``identity``: as of :meth:`WeightPacker.pack`."""
        for step, name, table in self._tables:
            self._packer.table(table, self._steps[step], name)
        attentions = [step for step in self._steps if step.kind in (structs.ATTENTION, structs.CONVOLVE)]
        if attentions:
            attentions[-1].last = True
        # Of a model of two parts no steps are run on random tokens.
        norms = [] if self._kept else smoothed_norms(self._steps, self._packer.in_int8)
        factors = self._packer.pack(
            identity,
            smoothed=[norm.weight for norm in norms],
            factors_of=lambda: factors_of(
                norms,
                self._model(),
                self._kernels,
                vocabulary=self._vocabulary,
                positions=self._positions,
                weights=self._packer.numbers,
            ),
        )
        model = self._model()
        steps = model.steps
        smoothed = [part for norm in norms for part in smooth(steps, norm, factors[id(norm.weight)])]
        for i, rotation in self._rotations.items():
            rotation.serve(steps[i])
        return Plan(
            model=model,
            kernels=self._kernels,
            hidden=self._output,
            weights=self._packer.numbers,
            vocabulary=self._vocabulary,
            types=self._types,
            positions=self._positions,
            adapters=self._adapters,
            chunk=self._chunk,
            rotations=tuple(dict.fromkeys(self._rotations.values())),
            owned=(steps, *(held for held, _ in self._experts), *self._packer.owned, *smoothed),
        )

    def _model(self) -> structs.Model:
        """The model, once its weights have their places."""
        steps = (structs.Step * len(self._steps))(*self._steps)
        self._copy_weights(steps)
        for step, held in self._same_words:
            steps[step].words = steps[held].words
        for i, rotation in self._rotations.items():
            rotation.place(steps[i])
        return structs.Model(
            steps=steps,
            count=len(steps),
            hidden=self._hidden,
            heads=self._heads,
            inner=self._inner,
            branch=self._branch,
            codes=max((step.weight.in_ for step in steps if step.weight.scales), default=0),
            output=self._output,
            low=self._packer.low,
            rank=self._rank,
            kept=self._kept,
        )

    def _distances(self, added: Floats | DistanceTerms | None, heads: int) -> dict[str, Any]:
        """The fields of an attention that adds to its scores by distance."""
        if added is None:
            return {}
        if not isinstance(added, DistanceTerms):
            reach = (added.shape[1] + 1) // 2
            self._bound(reach)
            if id(added) not in self._distance_tables:  # all layers of a model have the same
                self._distance_tables[id(added)] = added, self._packer.floats(np.pad(added.reshape(-1), (0, UNIT)))
            return {"distances": self._distance_tables[id(added)][1], "reach": reach}
        own = added.columns
        fields: dict[str, Any] = {"columns": own.rows.shape[1], "reach": own.reach}
        sides = (("key_columns", "weight", added.keys), ("query_columns", "down", added.queries))
        for (columns, weight, table), places, rows in zip(sides, own.columns, own.rows, strict=True):
            if table is not None:
                fields[columns] = self._packer.integers(places)
                fields[weight] = self._packer.weight(Linear(weight=by_head(table, rows, heads)), exact=True)
        return fields

    def _add(self, **fields: Any) -> None:
        self._steps.append(structs.Step(**fields))
        self._steps[-1].sources = [fields.get(name) for name in _WEIGHTS]

    def _copy_weights(self, steps: Any) -> None:
        """A struct within a struct is a copy, made before its weight was packed."""
        for struct, step in zip(self._steps, steps, strict=True):
            for name, source in zip(_WEIGHTS, struct.sources, strict=True):
                if source is not None:
                    setattr(step, name, source)
        for held, weights in self._experts:
            held[:] = weights

    def _bound(self, positions: int) -> None:
        self._positions = min(self._positions or positions, positions)

    def _adapt(self, adapter: LowRank | None, *, target: int, piece: int | None = None) -> None:
        """Put the products with the adapters' first factors behind the states (0), or behind the queries (1)."""
        if adapter is not None:
            self._add(kind=structs.ADAPT, target=target, weight=self._packer.low_weight(adapter, piece=piece))

    def _floats(self, tensor: StoredTensor | None) -> Floats | None:
        return None if tensor is None else self.numbers(tensor)

    def _norm_weights(
        self, kind: int, weight: Floats | None, bias: Floats | None, epsilon: float, order: Indexes | None = None
    ) -> structs.NormWeights:
        """A norm of weights in ``order``, behind which there are zeros; -1: a zero between them."""
        columns = 0 if weight is None else len(weight)
        order = padded_rows(columns) if order is None else order
        weight, bias = (None if part is None else np.append(part, np.float32(0))[order] for part in (weight, bias))
        floats = self._packer.floats
        return structs.NormWeights(
            kind=kind, weight=floats(weight), bias=floats(bias), epsilon=epsilon, padding=len(order) - columns
        )

    def _merged(self, table: StoredTensor, adapter: LowRank) -> StoredTensor:
        """``[(1 + adapters) rows, columns]``: a table, and below it those with each of its adapters."""
        whole = self._packer.numbers_of(table)
        ups = adapter.up.reshape(len(adapter.up), -1, self._rank).swapaxes(0, 1)  # [adapters, columns, rank]
        return tensor_of(
            np.concatenate([whole, *(whole + low @ up.T for low, up in zip(adapter.down, ups, strict=True))])
        )


def _padded(rows: Floats) -> Floats:
    """Rows with zeros up to the columns that the kernels compute."""
    return np.pad(rows, ((0, 0), (0, padded(rows.shape[1]) - rows.shape[1])))


def _head_rows(heads: int, dim: int, turned: int) -> Indexes:
    """The row of each column of heads with zeros in them, -1: of those that are turned, behind either half."""
    whole = np.full((heads, padded(dim)), -1)
    rows, half, wide = np.arange(heads * dim).reshape(heads, dim), dim // 2, padded(dim) // 2
    whole[:turned, :half], whole[:turned, wide : wide + dim - half] = rows[:turned, :half], rows[:turned, half:]
    whole[turned:, :dim] = rows[turned:]
    return whole.reshape(-1)
