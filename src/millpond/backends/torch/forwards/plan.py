"""A native plan's steps in torch: the forward of the families that transformers has no class of.

The function that tells a family's steps to the native backend's ``PlanBuilder`` tells them to :class:`TorchPlan`, so
the family is described once, for GPUs too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from millpond.backends.native.families import shares_of, tell, tensors_of
from millpond.backends.native.packing.weight_packer import Floats, Linear, NotSupported
from millpond.backends.native.plans.distances import DistanceColumns, DistanceTerms
from millpond.backends.native.plans.layer_shares import LayerShares
from millpond.backends.native.plans.plan import Expert
from millpond.backends.native.plans.rotation import Rotation
from millpond.backends.torch.attention.kernels import attend
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import Masking
from millpond.backends.torch.forwards.deberta import Batches, DistanceAttention, DistanceBatches
from millpond.backends.torch.forwards.encoder import Output
from millpond.backends.torch.forwards.encoder_decoder import KeepChunks, MergedHeads, PartAttention, ReadPart
from millpond.backends.torch.forwards.flow import Flow
from millpond.backends.torch.forwards.linear import linear
from millpond.backends.torch.forwards.rms_norm import RMSNorm
from millpond.backends.torch.forwards.rotary import apply_rotary
from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.checkpoint import Checkpoint
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.checkpoints.weights import stored_tensors
from millpond.errors import ModelLoadError


class PackedPlan(nn.Module):
    """A plan's steps over a checkpoint's tensors, run on one packed row."""

    takes_rows = True

    def __init__(self, steps: list[nn.Module]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)
        self._last = max(
            i for i, step in enumerate(steps) if isinstance(step, _Attention | _Convolution | PartAttention)
        )

    @classmethod
    def read(cls, checkpoint: Checkpoint, row: Architecture, *, device: torch.device, dtype: torch.dtype) -> Self:
        """Read the weights; ``checkpoint.config`` is in the native terms.

        Raises:
            WeightMismatchError: config.json and the weights disagree.
            ModelLoadError: A weight file is missing or damaged, or config.json asks for what is not computed here.
        """
        name = checkpoint.source.name
        tensors, config = tensors_of(stored_tensors(checkpoint.layout.transformer), checkpoint, row)
        builder = TorchPlan(device=device, dtype=dtype, shares=shares_of(checkpoint.layout.layer_mean, config, row))
        try:
            tell(builder, tensors, config, row)
        except NotSupported as reason:
            raise ModelLoadError(f"{name}: {reason}, which millpond does not run for {row.prefix}") from reason
        tensors.check()
        return cls(builder.steps)

    def forward(
        self,
        *,
        input_ids: torch.Tensor,  # [1, tokens]
        position_ids: torch.Tensor,  # [1, tokens]
        segments: Segments,
        token_type_ids: torch.Tensor | None = None,  # [1, tokens]
        use_cache: bool = False,
        rows: torch.Tensor | None = None,  # [n]
    ) -> Output:
        """Hidden states of every token, or only of the tokens ``rows``; there is no key-value cache."""
        none = input_ids.new_empty(0)
        types = None if token_type_ids is None else token_type_ids[0]
        flow = Flow(
            ids=input_ids[0],
            positions=position_ids[0],
            types=types,
            segments=segments,
            states=none,
            sums=none,
            branch=none,
            heads=none,
            kept=none,
            text=(input_ids[0], types, segments),
        )
        for i, step in enumerate(self.steps):
            step(flow)
            if i == self._last and rows is not None:
                flow.keep(rows)
        states = flow.states
        if flow.parts and rows is None:  # of the encoder's rows nothing is read
            whole = states.new_zeros(segments.total, states.shape[1])
            states = whole.index_copy_(0, flow.parts[1].rows, states)
        return Output(last_hidden_state=states[None])


class TorchPlan(LayerShares):
    """Makes a module of each step that is told to a ``PlanBuilder``, whose methods these are, without adapters."""

    def __init__(self, *, device: torch.device, dtype: torch.dtype, shares: Sequence[float] = ()) -> None:
        super().__init__(shares)
        self.steps: list[nn.Module] = []
        self._device, self._dtype = device, dtype
        self._shared: dict[int, tuple[Any, nn.Module]] = {}  # modules that several steps have, by what they are of

    def numbers(self, tensor: StoredTensor) -> Floats:
        """A tensor's numbers as the model's precision has them."""
        numbers: Floats = self._tensor(tensor).float().cpu().numpy()
        return numbers

    def layer_norm(
        self, weight: StoredTensor | None, bias: StoredTensor | None, epsilon: float, *, dim: int | None = None
    ) -> nn.Module:
        """A layer norm, of as many columns as its weight has."""
        assert weight is not None
        norm = nn.LayerNorm(len(weight.stored), eps=epsilon, elementwise_affine=False)
        for name, part in (("weight", weight), ("bias", bias)):
            if part is not None:
                setattr(norm, name, nn.Parameter(self._tensor(part), requires_grad=False))
        return norm

    def rms_norm(
        self, weight: StoredTensor | None, epsilon: float, *, offset: float = 0.0, dim: int | None = None
    ) -> nn.Module:
        """An RMS norm; ``offset`` 1: its weights are those stored + 1."""
        assert weight is not None
        return RMSNorm(self._tensor(weight), epsilon, centred=bool(offset))

    def embed(
        self,
        words: StoredTensor,
        positions: StoredTensor | None = None,
        types: StoredTensor | None = None,
        *,
        scale: float = 1.0,
        trigrams: bool = False,
        start: int | None = None,
        adapter: None = None,
        type_adapter: None = None,
    ) -> None:
        """``PlanBuilder.embed``."""
        if trigrams:
            self.steps.append(_Trigrams(self._tensor(words)))
            return
        places, kinds = (None if part is None else self._tensor(part) for part in (positions, types))
        self.steps.append(_Embed(self._tensor(words), places, kinds, scale, start))

    def place(self, positions: StoredTensor, types: StoredTensor) -> None:
        """``PlanBuilder.place``."""
        self.steps.append(_Embed(None, self._tensor(positions), self._tensor(types), 1.0))

    def scale_norm(self, weight: StoredTensor, bias: StoredTensor) -> nn.Module:
        """A norm that only scales and shifts."""
        return _Scale(self._tensor(weight), self._tensor(bias))

    def norm(
        self,
        norm: Any,
        columns: int,
        *,
        residual: bool = False,
        keep: bool = False,
        sums: bool = False,
        branch: bool = False,
        carry: bool = False,
    ) -> None:
        """``PlanBuilder.norm``."""
        norm = norm if isinstance(norm, nn.Module) else nn.Identity()  # a copy
        target = "carry" if carry else "branch" if branch else "sums" if sums else "both" if keep else "states"
        self.steps.append(_Norm(norm, residual=residual, target=target))

    def heads(self, *parts: Linear, dim: int | None = None, turned: int = 0, adapter: None = None) -> None:
        """``PlanBuilder.heads``."""
        self.steps.append(_Product(self._linear(*parts), source="states", target="heads"))

    def read_part(self, kind: int) -> None:
        """``PlanBuilder.read_part``."""
        self.steps.append(ReadPart(kind))

    def keep_states(self, *, chunk: int | None = None) -> None:
        """``PlanBuilder.keep_states``."""
        self.steps.append(_Keep() if chunk is None else KeepChunks(chunk))

    def merged_heads(self, query: Linear, key: Linear, value: Linear, *, dim: int, turned: int) -> None:
        """``PlanBuilder.merged_heads``."""
        self.steps.append(MergedHeads(self._linear(query), self._linear(key, value)))

    def blend(self, share: float, *, begins: bool = False, ends: bool = False) -> None:
        """``PlanBuilder.blend``."""
        self.steps.append(_Blend(share, begins=begins, ends=ends))

    def cross_heads(self, query: Linear, key: Linear, value: Linear, *, dim: int) -> None:
        """``PlanBuilder.cross_heads``."""
        self.steps.append(_CrossHeads(self._linear(query), self._linear(key, value)))

    def gate_by_kept(self, gate: Linear, kept: Linear, norm: nn.Module, activation: str | None) -> None:
        """``PlanBuilder.gate_by_kept``."""
        self.steps.append(_GateByKept(self._linear(gate, activation=activation), self._linear(kept), norm))

    def up_proj(self, part: Linear, *, piece: int | None = None) -> None:
        """``PlanBuilder.up_proj``."""
        self.steps.append(_Product(self._linear(part), source="states", target="sums"))

    def rotary(
        self,
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        norm: nn.Module | None = None,
        key_norm: nn.Module | None = None,
        value_norm: nn.Module | None = None,
        whole: bool = False,
        rotation: Rotation | None = None,
        merged: bool = False,
    ) -> None:
        """``PlanBuilder.rotary``."""
        turn = None
        if rotation is not None:
            turn = self._once(rotation, lambda: _Turn(rotation, dim, device=self._device))
        self.steps.append(
            _Heads((heads, kv_heads, dim), (norm, key_norm, value_norm), turn, whole=whole, merged=merged)
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
        distances: Floats | DistanceTerms | None = None,
        before: int | None = None,
        after: int | None = None,
        merged: bool | None = None,
    ) -> None:
        """``PlanBuilder.attention``."""
        if merged is not None:
            self.steps.append(PartAttention((heads, kv_heads, dim), scale, before, after, merged=merged))
            return
        if isinstance(distances, DistanceTerms):
            columns = distances.columns
            keys, queries = (
                None if part is None else self._tensor(part) for part in (distances.keys, distances.queries)
            )
            batches = self._once(columns, lambda: _Batches(columns))
            self.steps.append(_TermsAttention(DistanceAttention(heads, scale, keys, queries), batches))
            return
        bias = None if distances is None else self._once(distances, lambda: _Distances(distances, self._device))
        masking = Masking(scale=scale, causal=causal, window=window, softcap=softcap)
        self.steps.append(_Attention((heads, kv_heads, dim), masking, bias))

    def convolve(self, taps: StoredTensor, *, ahead: int) -> None:
        """``PlanBuilder.convolve``."""
        self.steps.append(_Convolution(self._tensor(taps)[:, 0].T.contiguous(), ahead))

    def o_proj(
        self, part: Linear, *, dim: int | None = None, add: bool = False, branch: bool = False, adapter: None = None
    ) -> None:
        """``PlanBuilder.o_proj``."""
        self.steps.append(_Product(self._linear(part), source="heads", target=_target(add, branch)))

    def mlp(
        self,
        up: Linear,
        down: Linear,
        activation: str | None,
        *,
        gate: Linear | None = None,
        add: bool = False,
        branch: bool = False,
    ) -> None:
        """``PlanBuilder.mlp``."""
        self.steps.append(_Feed(self._feed(up, down, activation, gate), _target(add, branch)))

    def experts(
        self,
        router: Linear,
        experts: Sequence[Expert],
        activation: str | None,
        *,
        top: int,
        renormalized: bool = False,
        bias: StoredTensor | None = None,
        add: bool = False,
        branch: bool = False,
    ) -> None:
        """``PlanBuilder.experts``."""
        feeds = [self._feed(expert.up, expert.down, activation, expert.gate) for expert in experts]
        shared = None if bias is None else self._tensor(bias)
        choice = _Choice(self._linear(router), top, renormalized=renormalized)
        self.steps.append(_Experts(choice, feeds, shared, _target(add, branch)))

    def _feed(self, up: Linear, down: Linear, activation: str | None, gate: Linear | None) -> _FeedForward:
        first = self._linear(up if gate is None else gate, activation=activation)
        return _FeedForward(first, None if gate is None else self._linear(up), self._linear(down))

    def _linear(self, *parts: Linear, activation: str | None = None) -> nn.Module:
        weight = torch.cat([self._tensor(part.weight) for part in parts])
        biases = [None if part.bias is None else self._tensor(part.bias) for part in parts]
        if all(bias is None for bias in biases):
            return linear(weight, None, activation)
        zeros = [weight.new_zeros(part.weight.shape[0]) for part in parts]
        bias = torch.cat([zero if bias is None else bias for bias, zero in zip(biases, zeros, strict=True)])
        return linear(weight, bias, activation)

    def _tensor(self, stored: StoredTensor) -> torch.Tensor:
        if type(stored) is StoredTensor and stored.dtype == "bfloat16":
            tensor = torch.from_numpy(stored.numbers().view(np.int16).copy()).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(stored.float32().copy())
        return tensor.to(device=self._device, dtype=self._dtype)

    def _once(self, of: Any, make: Callable[[], nn.Module]) -> nn.Module:
        """The module of an object, the same for all steps."""
        if id(of) not in self._shared:
            self._shared[id(of)] = of, make()
        return self._shared[id(of)][1]


def _target(add: bool, branch: bool) -> str:
    return "branch" if branch else "add" if add else "sums"


# --- Steps ------------------------------------------------------------------------------------------------------------


class _Embed(nn.Module):
    def __init__(
        self,
        words: torch.Tensor | None,
        positions: torch.Tensor | None,
        types: torch.Tensor | None,
        scale: float,
        start: int | None = None,
    ) -> None:
        super().__init__()
        self.words, self.positions, self.types = (
            None if table is None else nn.Embedding.from_pretrained(table) for table in (words, positions, types)
        )
        self.scale, self.start = scale, start

    def forward(self, flow: Flow) -> None:
        rows = flow.sums if self.words is None else self.words(self._ids(flow))
        if self.scale != 1:
            rows = rows * self.scale
        if self.types is not None:
            rows = rows + (self.types.weight[0] if flow.types is None else self.types(flow.types))
        if self.positions is not None:
            rows = rows + self.positions(flow.positions)
        flow.sums = rows

    def _ids(self, flow: Flow) -> torch.Tensor:
        if self.start is None:
            return flow.ids
        # The token before each; in a graph an empty text begins after the last row.
        before = torch.cat((flow.ids[:1], flow.ids))
        return before.index_fill(0, flow.segments.cu_seqlens[:-1].long(), self.start)[:-1]


class _Keep(nn.Module):
    def forward(self, flow: Flow) -> None:
        flow.kept = flow.states


class _GateByKept(nn.Module):
    """The product of the states, activated, times the norm of that of the states that were kept."""

    def __init__(self, gate: nn.Module, kept: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.gate, self.kept, self.norm = gate, kept, norm

    def forward(self, flow: Flow) -> None:
        flow.heads = self.gate(flow.states) * self.norm(self.kept(flow.kept))


class _Blend(nn.Module):
    """A part of the states, added to the branch."""

    def __init__(self, share: float, *, begins: bool, ends: bool) -> None:
        super().__init__()
        self.share, self.begins, self.ends = share, begins, ends

    def forward(self, flow: Flow) -> None:
        part = self.share * flow.states.float()
        flow.branch = part if self.begins else flow.branch + part
        if self.ends:
            flow.states = flow.branch.to(flow.states.dtype)


class _CrossHeads(nn.Module):
    """Queries of the states, keys and values of those that were kept."""

    def __init__(self, query: nn.Module, key_value: nn.Module) -> None:
        super().__init__()
        self.query, self.key_value = query, key_value

    def forward(self, flow: Flow) -> None:
        flow.heads = torch.cat((self.query(flow.states), self.key_value(flow.kept)), 1)


class _Trigrams(nn.Module):
    """The words after a token, of it and before it; zeros beyond a text's ends."""

    def __init__(self, words: torch.Tensor) -> None:
        super().__init__()
        self.words = nn.Embedding.from_pretrained(words)

    def forward(self, flow: Flow) -> None:
        rows, first = self.words(flow.ids), (flow.positions == 0)[:, None]
        after = rows.roll(-1, 0).masked_fill(first.roll(-1, 0), 0)
        flow.sums = torch.cat((after, rows, rows.roll(1, 0).masked_fill(first, 0)), 1)


class _Scale(nn.Module):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(part, requires_grad=False) for part in (weight, bias))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.bias, rows, self.weight)


class _Norm(nn.Module):
    def __init__(self, norm: nn.Module, *, residual: bool, target: str) -> None:
        super().__init__()
        self.norm = norm
        self.residual, self.target = residual, target

    def forward(self, flow: Flow) -> None:
        if self.target == "branch":
            flow.sums = flow.sums + self.norm(flow.branch)
            return
        result = self.norm(flow.sums + flow.states if self.residual else flow.sums)
        if self.target == "carry":
            flow.branch = result
        elif self.target != "states":
            flow.sums = result
        if self.target != "sums":
            flow.states = result


class _Product(nn.Module):
    def __init__(self, layer: nn.Module, *, source: str, target: str) -> None:
        super().__init__()
        self.linear = layer
        self.source, self.target = source, target

    def forward(self, flow: Flow) -> None:
        result = self.linear(getattr(flow, self.source))
        if self.target == "heads":
            flow.heads = result
        else:
            flow.put(result, self.target)


class _Heads(nn.Module):
    def __init__(
        self,
        sizes: tuple[int, int, int],
        norms: tuple[nn.Module | None, nn.Module | None, nn.Module | None],  # of queries, keys and values
        turn: nn.Module | None,
        *,
        whole: bool,
        merged: bool,
    ) -> None:
        super().__init__()
        self.sizes, self.whole, self.merged, self.turn = sizes, whole, merged, turn
        self.norm, self.key_norm, self.value_norm = norms

    def forward(self, flow: Flow) -> None:
        heads, kv_heads, dim = self.sizes
        parts = list(flow.heads.split((heads * dim, kv_heads * dim, kv_heads * dim), 1))
        for i, norm in enumerate((self.norm, self.key_norm, self.value_norm)):
            if norm is not None:
                parts[i] = norm(parts[i] if self.whole else parts[i].unflatten(1, (-1, dim))).flatten(1)
            if self.turn is not None and i < 2:
                parts[i] = apply_rotary(parts[i].unflatten(1, (-1, dim)), *self.turn(flow)).flatten(1)
        flow.heads = torch.cat(parts, 1)
        if self.merged:  # the kept keys have no positions
            assert self.key_norm is not None and flow.kept_heads is not None
            keys, values = flow.kept_heads.split(kv_heads * dim, 1)
            flow.kept_heads = torch.cat((self.key_norm(keys.unflatten(1, (-1, dim))).flatten(1), values), 1)


class _Convolution(nn.Module):
    """A convolution of each column over the rows of a text, between two gates."""

    def __init__(self, taps: torch.Tensor, ahead: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(taps, requires_grad=False)  # [taps, columns]
        self.ahead = ahead

    def forward(self, flow: Flow) -> None:
        before, behind, values = flow.heads.chunk(3, 1)
        inner, places, back = before * values, flow.positions, len(self.taps) - 1 - self.ahead
        if flow.segments.keys is not None:
            inner = inner * self._counts(flow)
        mixed = inner * self.taps[back]
        for k, tap in enumerate(self.taps):
            if k != back:
                # Positions begin anew with each text, so those of another one do not go on from here.
                same = (places.roll(back - k) == places + (k - back))[:, None]
                mixed = mixed + torch.where(same, inner.roll(back - k, 0), 0) * tap
        flow.heads = behind * (mixed if flow.segments.keys is None else mixed * self._counts(flow))

    @staticmethod
    def _counts(flow: Flow) -> torch.Tensor:
        """``[tokens, 1]``: 1 for the tokens that others may attend to."""
        pairs = zip(flow.segments.keys or (), flow.segments.lengths, strict=True)
        rows = [part for keys, length in pairs for part in ([1.0] * keys + [0.0] * (length - keys))]
        return torch.tensor(rows, dtype=flow.heads.dtype, device=flow.heads.device)[:, None]


class _Turn(nn.Module):
    """Cosines and sines of a rotation, ``[tokens, 1, dim]`` each; once for all layers."""

    frequencies: torch.Tensor  # [dim / 2]
    scales: torch.Tensor  # [dim]

    def __init__(self, rotation: Rotation, dim: int, device: torch.device) -> None:
        super().__init__()
        half = dim // 2
        self.register_buffer("frequencies", torch.from_numpy(rotation.frequencies[:half]).to(device))
        self.register_buffer("scales", torch.from_numpy(np.tile(rotation.scales[:half], 2)).to(device))

    def forward(self, flow: Flow) -> tuple[torch.Tensor, torch.Tensor]:
        if self not in flow.made:
            angles = flow.positions[:, None].float() * self.frequencies
            both = torch.cat([angles, angles], 1)[:, None]
            flow.made[self] = tuple((part(both) * self.scales).to(flow.heads.dtype) for part in (torch.cos, torch.sin))
        made: tuple[torch.Tensor, torch.Tensor] = flow.made[self]
        return made


class _Attention(nn.Module):
    def __init__(self, sizes: tuple[int, int, int], masking: Masking, bias: nn.Module | None) -> None:
        super().__init__()
        self.sizes, self.masking, self.bias = sizes, masking, bias

    def forward(self, flow: Flow) -> None:
        heads, kv_heads, dim = self.sizes
        query, key, value = flow.heads.unflatten(1, (-1, dim)).split((heads, kv_heads, kv_heads), 1)
        masking = self.masking if self.bias is None else replace(self.masking, bias=self.bias(flow))
        flow.heads = attend(query, key, value, flow.segments, masking).flatten(1)


class _TermsAttention(_Attention):
    """Attention with products with the embedding of each distance."""

    def __init__(self, attention: DistanceAttention, batches: nn.Module) -> None:
        nn.Module.__init__(self)
        self.attention, self.batches = attention, batches

    def forward(self, flow: Flow) -> None:
        flow.heads = self.attention(flow.heads, self.batches(flow))


class _Batches(nn.Module):
    """The dense batches of a forward; once for all layers."""

    def __init__(self, columns: DistanceColumns) -> None:
        super().__init__()
        self._batches = DistanceBatches(lambda length: torch.from_numpy(columns.rows_of(np.arange(1 - length, length))))

    def forward(self, flow: Flow) -> Batches:
        if self not in flow.made:
            flow.made[self] = self._batches.of(flow.segments, flow.heads.device)
        made: Batches = flow.made[self]
        return made


class _Distances(nn.Module):
    """What is added to scores by distance, ``[heads, longest, longest]``; once for all layers."""

    by_distance: torch.Tensor  # [heads, 2 reach - 1]

    def __init__(self, by_distance: Floats, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("by_distance", torch.from_numpy(by_distance).to(device))

    def forward(self, flow: Flow) -> torch.Tensor:
        if self not in flow.made:
            length, middle = flow.segments.max_seqlen, self.by_distance.shape[1] // 2
            near = self.by_distance[:, middle - length + 1 : middle + length].to(flow.heads.dtype)
            # Row i begins one number before row i - 1.
            rows = near.unfold(1, length, 1)  # [heads, length, length], the last row first
            flow.made[self] = rows.flip(1).contiguous()
        made: torch.Tensor = flow.made[self]
        return made


class _FeedForward(nn.Module):
    compiled_parts = ("forward",)  # methods that run faster compiled

    def __init__(self, first: nn.Module, up: nn.Module | None, down: nn.Module) -> None:
        super().__init__()
        self.first, self.up_proj, self.down_proj = first, up, down

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        inner = self.first(rows)
        if self.up_proj is not None:
            inner = inner.mul_(self.up_proj(rows))
        result: torch.Tensor = self.down_proj(inner)
        return result


class _Feed(nn.Module):
    def __init__(self, feed: _FeedForward, target: str) -> None:
        super().__init__()
        self.feed, self.target = feed, target

    def forward(self, flow: Flow) -> None:
        flow.put(self.feed(flow.states), self.target)


class _Choice(nn.Module):
    def __init__(self, router: nn.Module, top: int, *, renormalized: bool) -> None:
        super().__init__()
        self.router, self.top, self.renormalized = router, top, renormalized

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [tokens, top] each
        """The weights of each row's experts, and which they are."""
        shares = self.router(rows).float().softmax(-1)
        weights, chosen = shares.topk(self.top, -1)
        return (weights / weights.sum(-1, keepdim=True) if self.renormalized else weights).to(rows.dtype), chosen


class _Experts(nn.Module):
    def __init__(self, choice: _Choice, experts: list[_FeedForward], bias: torch.Tensor | None, target: str) -> None:
        super().__init__()
        self.choice, self.experts, self.target = choice, nn.ModuleList(experts), target
        self.register_buffer("bias", bias)

    def forward(self, flow: Flow) -> None:
        flow.segments.lengths  # noqa: B018 - how many rows an expert has the host must know: no graph can be captured
        rows = flow.states
        weights, chosen = self.choice(rows)
        order = chosen.flatten().argsort(stable=True)  # the rows of one expert after those of another
        source = order // self.choice.top
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        parts = rows[source].split(counts)
        results = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)])
        results = results * weights.flatten()[order][:, None]
        mixed = results.new_zeros(len(rows), results.shape[1]).index_add_(0, source, results)
        flow.put(mixed if self.bias is None else mixed + self.bias, self.target)
