"""The self-check's rows for the native encoder: three small models with every kind of step, and formulas in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from millpond.backends.kernel_check import LENGTHS, Case, Row, processor_name
from millpond.backends.torch.attention.self_check import computed, made_of
from millpond.backends.torch.attention.signature import Masking
from millpond.backends.torch.native import structs
from millpond.backends.torch.native.encoder import NativeEncoder, Rows, bounds_of
from millpond.backends.torch.native.kernels import Int8, encoder_name, kernels_of
from millpond.backends.torch.native.plan import PlanBuilder
from millpond.backends.torch.native.weight_packer import LowRank
from millpond.native import library

# The similarity from which states are right. That of these models is at least 0.99999 in bfloat16, and 0.9999 in eight
# bits; in float32 it is more than 0.999999.
_LEAST = {torch.float32: 0.99999, torch.bfloat16: 0.9999}
_LEAST_INT8 = 0.999
VOCABULARY, _POSITIONS, _RANK = 211, 80, 4
_READ: tuple[Rows, ...] = ("all", "first", "last", "mean")
_CPU = torch.device("cpu")

Model = Callable[[Any, torch.dtype], None]


def encoder_rows(dtype: torch.dtype, int8: Int8) -> list[Row]:
    """A row if this processor has kernels for the precision."""
    if kernels_of(dtype, int8=int8) is None:
        return []
    name = encoder_name(dtype, int8)
    return [
        Row(
            kernel=f"encoder {library.isa()}",
            name=name,
            precision=name.removeprefix("encoder in "),
            device=processor_name(),
            made_of=made_of(),
            cases=partial(_cases, dtype, int8),
            least=_LEAST[dtype] if int8 == "none" else _LEAST_INT8,
            otherwise="Models run in torch's operators instead, which are slower.",
        )
    ]


def _cases(dtype: torch.dtype, int8: Int8) -> Iterator[Case]:
    lengths = (*LENGTHS, 17)
    places = np.arange(sum(lengths), dtype=np.int64)
    inputs: dict[str, Any] = {
        "types": (places % 2).astype(np.int32),
        "keys": np.array([*LENGTHS, 5], dtype=np.int32),  # of the last text, some tokens are no keys
        "offset": 3,
    }
    ids = (places * 2654435761 % VOCABULARY).astype(np.int32)
    for name, model in (("encoder", post_norm), ("decoder", pre_norm), ("adapters", adapted)):
        if model is adapted and int8 != "none":
            continue  # the kernels have no adapters of weights in eight bits
        if model is adapted:
            inputs["adapters"] = (np.arange(len(lengths)) % 3 - 1).astype(np.int32)
        states = formulas(model, dtype, ids, lengths, **inputs)
        for rows in _READ:
            yield Case(
                call=f"{name}, {rows}",
                found=partial(
                    computed, _CPU, partial(_native, model, dtype, int8, ids, bounds_of(lengths), rows=rows, **inputs)
                ),
                expected=lambda rows=rows, states=states: read(states, lengths, rows).numpy(),  # type: ignore[misc]
            )


def _native(model: Model, dtype: torch.dtype, int8: Int8, *texts: Any, **inputs: Any) -> torch.Tensor:
    kernels = kernels_of(dtype, int8=int8)
    assert kernels is not None
    builder = PlanBuilder(kernels, dtype, **({"adapters": 2, "rank": _RANK} if "adapters" in inputs else {}))
    model(builder, dtype)
    return NativeEncoder(builder.build()).encode(*texts, **inputs)


# --- The formulas -----------------------------------------------------------------------------------------------------


def formulas(
    model: Model,
    dtype: torch.dtype,
    ids: Any,  # [tokens]
    lengths: Sequence[int],
    *,
    types: Any = None,  # [tokens]
    keys: Any = None,  # [texts]
    adapters: Any = None,  # [texts]
    offset: int = 0,
) -> torch.Tensor:  # float64 [tokens, hidden]
    """The states of a model that tells its steps to a ``PlanBuilder``; arguments as of ``NativeEncoder.encode``."""
    texts = torch.as_tensor(ids).long().split(list(lengths))
    kinds = torch.zeros(sum(lengths), dtype=torch.long) if types is None else torch.as_tensor(types).long()
    states = []
    for i, (text, kind) in enumerate(zip(texts, kinds.split(list(lengths)), strict=True)):
        steps = _Formulas(
            ids=text,
            types=kind,
            offset=offset,
            keys=None if keys is None else int(keys[i]),
            adapter=-1 if adapters is None else int(adapters[i]),
        )
        with torch.inference_mode():
            model(steps, dtype)
        states.append(steps.states)
    return torch.cat(states)


def read(states: torch.Tensor, lengths: Sequence[int], rows: Rows, skip: Any = None) -> torch.Tensor:
    """The rows of all states that ``NativeEncoder.encode`` gives."""
    if rows == "all":
        return states
    firsts = [0] * len(lengths) if skip is None else [int(first) for first in skip]
    texts = zip(states.split(list(lengths)), firsts, strict=True)
    return torch.stack([{"first": x[first], "last": x[-1], "mean": x[first:].mean(0)}[rows] for x, first in texts])


class _Formulas:
    """Computes what is told to a ``PlanBuilder`` in float64, for one text."""

    def __init__(self, *, ids: torch.Tensor, types: torch.Tensor, offset: int, keys: int | None, adapter: int) -> None:
        self._ids, self._types, self._keys, self._adapter = ids, types, keys, adapter
        self._places = slice(offset, offset + len(ids))
        self.states = self._sums = self._branch = self._parts = torch.empty(0)

    def norm_weights(
        self, kind: int, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float, offset: float = 0.0
    ) -> tuple[Any, ...]:
        return (kind, None if weight is None else weight.double() + offset, bias, epsilon)

    def embed(
        self,
        words: torch.Tensor,
        positions: torch.Tensor | None = None,
        types: torch.Tensor | None = None,
        scale: float = 1.0,
        adapter: LowRank | None = None,
        type_adapter: LowRank | None = None,
    ) -> None:
        self._sums = (words[self._ids].double() + self._low(adapter, self._ids)) * scale
        if positions is not None:
            self._sums = self._sums + positions[self._places].double()
        if types is not None:
            self._sums = self._sums + types[self._types].double() + self._low(type_adapter, self._types)

    def norm(
        self, norm: Any, columns: int, *, residual: bool = False, keep: bool = False, branch: bool = False
    ) -> None:
        if isinstance(norm, structs.NormWeights):
            norm = (norm.kind, None, None, norm.epsilon)
        if branch:
            self._sums = self._sums + normalized(self._branch, *norm)
            return
        self.states = normalized(self._sums + self.states if residual else self._sums, *norm)
        self._sums = self.states if keep else self._sums

    def heads(self, *layers: Any, adapter: LowRank | None = None) -> None:
        whole = torch.cat([_product(self.states, layer) for layer in layers], dim=1)
        self._parts = whole + self._low(adapter, self.states)

    def up_proj(self, layer: Any) -> None:
        self._sums = _product(self.states, layer)

    def rotary(
        self,
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        norm: Any = None,
        key_norm: Any = None,
        cosines: torch.Tensor | None = None,
        sines: torch.Tensor | None = None,
    ) -> None:
        parts = list(self._parts.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1))
        for i, weights in enumerate((norm, key_norm)):
            parts[i] = parts[i] if weights is None else normalized(parts[i], *weights)
            if cosines is not None and sines is not None:
                parts[i] = rotated(parts[i], cosines[self._places], sines[self._places])
        self._parts = torch.cat(parts, dim=1).flatten(1)

    def attention(self, *, heads: int, kv_heads: int, dim: int, last: bool, **masks: Any) -> None:
        parts = self._parts.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
        self._parts = attended(*parts, count=self._keys, **masks)[0].flatten(1)

    def o_proj(self, layer: Any, *, add: bool = False, branch: bool = False, adapter: LowRank | None = None) -> None:
        self._put(_product(self._parts, layer) + self._low(adapter, self._parts), add, branch)

    def mlp(
        self,
        up: Any,
        down: Any,
        activation: str | None,
        *,
        gate: Any = None,
        add: bool = False,
        branch: bool = False,
        adapter: LowRank | None = None,
        down_adapter: LowRank | None = None,
    ) -> None:
        inner = _product(self.states, up) + self._low(adapter, self.states)
        factor = activated(inner if gate is None else _product(self.states, gate), activation)
        inner = factor if gate is None else factor * inner
        self._put(_product(inner, down) + self._low(down_adapter, inner), add, branch)

    def _put(self, result: torch.Tensor, add: bool, branch: bool) -> None:
        if branch:
            self._branch = result
        else:
            self._sums = self._sums + result if add else result

    def _low(self, adapter: LowRank | None, rows: torch.Tensor) -> torch.Tensor | float:
        """What the text's adapter adds to rows of a table (by index), or to a product with ``rows``."""
        if adapter is None or self._adapter < 0:
            return 0.0
        up: torch.Tensor = adapter.up.double().split(_RANK, dim=1)[self._adapter]
        down: torch.Tensor = adapter.down.double()
        low = down[self._adapter][rows] if down.dim() == 3 else rows @ down.split(_RANK)[self._adapter].T
        return low.matmul(up.T)


def _product(rows: torch.Tensor, layer: Any) -> torch.Tensor:
    result: torch.Tensor = rows @ layer.weight.double().T
    return result if layer.bias is None else result + layer.bias.double()


def normalized(
    rows: torch.Tensor,
    kind: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> torch.Tensor:
    """A norm over the last dimension, in float64."""
    rows = rows.double()
    if kind == structs.COPY:
        return rows
    off = rows - rows.mean(-1, keepdim=True) if kind == structs.LAYER_NORM else rows
    result = off / (off.square().mean(-1, keepdim=True) + epsilon).sqrt()
    result = result if weight is None else result * weight.double()
    return result if bias is None else result + bias.double()


def activated(numbers: torch.Tensor, name: str | None) -> torch.Tensor:
    """An activation by the name of config.json, in float64."""
    functions: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
        None: lambda x: x,
        "gelu": F.gelu,
        "gelu_new": partial(F.gelu, approximate="tanh"),
        "silu": F.silu,
        "relu": F.relu,
    }
    return functions[name](numbers.double())


def rotated(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary positions of ``heads [tokens, heads, dim]``, in float64."""
    low, high = heads.double().chunk(2, dim=-1)
    cosines, sines = cosines.double()[:, None], sines.double()[:, None]
    return torch.cat([low * cosines - high * sines, high * cosines + low * sines], dim=-1)


def attended(
    queries: torch.Tensor,  # [tokens, heads, dim]
    keys: torch.Tensor,  # [tokens, kv_heads, dim]
    values: torch.Tensor,  # [tokens, kv_heads, dim]
    *,
    causal: bool = False,
    count: int | None = None,
    distances: torch.Tensor | None = None,  # [heads, 2 reach - 1]
    **masks: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention within one text in float64, and of the magnitudes of the values; 0 for rows without a key.

    ``masks`` are fields of :class:`Masking`.
    """
    masking = Masking(causal=causal, **masks)
    length, heads, _ = queries.shape
    group = heads // keys.shape[1]
    keys, values = (part.double().repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * masking.scale
    if masking.softcap:
        scores = (scores / masking.softcap).tanh() * masking.softcap
    apart = torch.arange(length) - torch.arange(length)[:, None]  # key - query
    if distances is not None:
        scores = scores + distances.double()[:, apart + (distances.shape[1] + 1) // 2 - 1]
    seen = masking.mask(length, queries.device, keep_causal=True)
    seen = torch.ones(length, length, dtype=torch.bool) if seen is None else seen
    if count is not None:
        seen &= torch.arange(length) < count
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    mixed, size = (torch.einsum("hqk,khd->qhd", weights, part) for part in (values, values.abs()))
    return mixed, size


# --- The models -------------------------------------------------------------------------------------------------------


class _Drawing:
    """Random numbers that a precision has; each call draws others."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._random = dtype, np.random.default_rng(0)

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normally distributed numbers."""
        return torch.from_numpy(self._random.standard_normal(shape) * scale).to(self._dtype).float()

    def linear(self, out: int, into: int, *, bias: bool = True) -> Any:
        """What a plan reads of a linear layer."""
        return SimpleNamespace(
            weight=self(out, into, scale=1.5 * into**-0.5), bias=self(out, scale=0.1) if bias else None
        )

    def low_rank(self, out: int, into: int) -> LowRank:
        """Two adapters of a weight."""
        return LowRank(down=self(2 * _RANK, into, scale=into**-0.5), up=self(out, 2 * _RANK, scale=0.4))


def post_norm(builder: Any, dtype: torch.dtype, *, layers: int = 2, positions: int = _POSITIONS) -> None:
    """A BERT of 96 columns: positions, types, layer norms after residuals; the last layer adds a bias of distances."""
    hidden, heads, dim, inner = 96, 3, 32, 416
    draw = _Drawing(dtype)
    builder.embed(*(draw(rows, hidden) for rows in (VOCABULARY, positions, 2)))
    norm = builder.norm_weights(structs.LAYER_NORM, 1 + draw(hidden, scale=0.1), draw(hidden), 1e-5)
    builder.norm(norm, hidden)
    for i in range(layers):
        last = i == layers - 1
        distances = draw(heads, 2 * positions - 1, scale=2.0) if last else None
        builder.heads(*(draw.linear(heads * dim, hidden) for _ in range(3)))
        builder.attention(heads=heads, kv_heads=heads, dim=dim, scale=dim**-0.5, distances=distances, last=last)
        builder.o_proj(draw.linear(hidden, heads * dim))
        builder.norm(norm, hidden, residual=True)
        builder.mlp(draw.linear(inner, hidden), draw.linear(hidden, inner), "gelu")
        builder.norm(norm, hidden, residual=True)


def pre_norm(builder: Any, dtype: torch.dtype, *, layers: int = 2, positions: int = _POSITIONS) -> None:
    """A decoder: scaled words, RMS norms before the parts and after them, rotary heads in groups, gates, a window."""
    hidden, heads, kv_heads, dim, inner = 64, 4, 2, 32, 448
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim}
    draw = _Drawing(dtype)
    builder.embed(draw(VOCABULARY, hidden), scale=hidden**0.5)
    angles = torch.arange(positions)[:, None] / 100.0 ** (torch.arange(dim // 2) * 2 / dim)
    for i in range(layers):
        rms = [
            builder.norm_weights(structs.RMS_NORM, draw(columns, scale=0.1), None, 1e-6, offset=1.0)
            for columns in (hidden, dim, dim, hidden, hidden, hidden)
        ]
        builder.norm(rms[0], hidden)
        shapes = [heads * dim, kv_heads * dim, kv_heads * dim]
        builder.heads(*(draw.linear(rows, hidden, bias=False) for rows in shapes))
        builder.rotary(**sizes, norm=rms[1], key_norm=rms[2], cosines=angles.cos(), sines=angles.sin())
        masks: dict[str, Any] = {"softcap": 2.0} if i % 2 else {"window": 7}
        builder.attention(**sizes, scale=dim**-0.5, causal=True, last=i == layers - 1, **masks)
        builder.o_proj(draw.linear(hidden, heads * dim, bias=False), branch=True)
        builder.norm(rms[3], hidden, branch=True)
        builder.norm(rms[4], hidden)
        up, gate = (draw.linear(inner, hidden, bias=False) for _ in range(2))
        down = draw.linear(hidden, inner, bias=False)
        if i == 0:
            builder.mlp(up, down, "silu", gate=gate, branch=True)
            builder.norm(rms[5], hidden, branch=True)
        else:
            builder.mlp(up, down, "gelu_new", gate=gate, add=True)
    builder.norm(builder.norm_weights(structs.RMS_NORM, None, None, 1e-6), hidden)


def adapted(builder: Any, dtype: torch.dtype) -> None:
    """A layer of jina-embeddings-v3: post-norm, and an adapter of every weight."""
    hidden, heads, dim, inner = 64, 2, 32, 96
    draw = _Drawing(dtype)
    words, types = (
        (draw(rows, hidden), LowRank(down=draw(2, rows, _RANK), up=draw(hidden, 2 * _RANK, scale=0.4)))
        for rows in (VOCABULARY, 2)
    )
    builder.embed(words[0], types=types[0], adapter=words[1], type_adapter=types[1])
    norm = builder.norm_weights(structs.LAYER_NORM, 1 + draw(hidden, scale=0.1), draw(hidden), 1e-5)
    builder.norm(norm, hidden)
    builder.heads(*(draw.linear(hidden, hidden) for _ in range(3)), adapter=draw.low_rank(3 * hidden, hidden))
    builder.attention(heads=heads, kv_heads=heads, dim=dim, scale=dim**-0.5, last=True)
    builder.o_proj(draw.linear(hidden, hidden), adapter=draw.low_rank(hidden, hidden))
    builder.norm(norm, hidden, residual=True)
    up, down = draw.linear(inner, hidden), draw.linear(hidden, inner)
    low, low_down = draw.low_rank(inner, hidden), draw.low_rank(hidden, inner)
    builder.mlp(up, down, "gelu", adapter=low, down_adapter=low_down)
    builder.norm(norm, hidden, residual=True)
