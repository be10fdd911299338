"""The self-check's rows for the native encoder: small models with every kind of step, and their formulas in float64."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.backends.kernel_check import LENGTHS, Case, KernelCheck, Row, check, code_hash, processor_name
from millpond.backends.native.encoder import NativeEncoder, Rows, bounds_of
from millpond.backends.native.formulas import Inputs, Model, formulas, read
from millpond.backends.native.kernels import Int8, Precision, encoder_name, kernels_of
from millpond.backends.native.packing.weight_packer import Linear, LowRank, tensor_of
from millpond.backends.native.plans.distances import DistanceColumns, Distances, DistanceTerms
from millpond.backends.native.plans.plan import Expert, PlanBuilder
from millpond.backends.native.plans.rotation import Rotation
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.native import library

logger = logging.getLogger(__name__)

# The similarity from which states are right. That of these models is at least 0.99999 in bfloat16, and 0.9999 in eight
# bits; in float32 it is more than 0.999999.
_LEAST = {"float32": 0.99999, "bfloat16": 0.9999}
_LEAST_INT8 = 0.999
VOCABULARY, _POSITIONS, _RANK = 211, 80, 4
_READ: tuple[Rows, ...] = ("all", "first", "last", "mean")


def check_encoder(dtype: Precision, int8: Int8, *, remembered: bool = True) -> list[KernelCheck]:
    """Compare the encoder's kernels for a precision; wrong ones serve nothing in this process.

    Whatever goes wrong with the comparison itself is logged for who debugs, and models are served.
    """
    try:
        return check(encoder_rows(dtype, int8), remembered=remembered)
    except Exception as error:
        logger.debug("the self-check could not run", exc_info=error)
        return []


def encoder_rows(dtype: Precision, int8: Int8) -> list[Row]:
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
            made_of=_made_of(),
            cases=partial(_cases, dtype, int8),
            least=_LEAST[dtype] if int8 == "none" else _LEAST_INT8,
            otherwise='Models run in torch\'s operators instead, which are slower (pip install "millpond[torch]").',
        )
    ]


@cache
def _made_of() -> str:
    return f"numpy {np.__version__}, code {code_hash(Path(__file__).parent)}"


def _cases(dtype: Precision, int8: Int8) -> Iterator[Case]:
    lengths = (*LENGTHS, 70)
    places = np.arange(sum(lengths), dtype=np.int64)
    ids = (places * 2654435761 % VOCABULARY).astype(np.int32)
    for name, model in MODELS.items():
        if int8 != "none" and model in (adapted, modernbert):
            continue  # there are no adapters of weights in eight bits, and a gate's products differ most from float32
        inputs = Inputs(
            lengths=lengths,
            ids=ids,
            types=(places % 2).astype(np.int32),
            keys=np.array([*LENGTHS, 65], dtype=np.int32),  # of the last text, some tokens are no keys
            adapters=(np.arange(len(lengths)) % 3 - 1).astype(np.int32) if model is adapted else None,
            offset=3,
            rank=_RANK,
        )
        states = formulas(model, dtype, inputs)
        encoder = cache(partial(_encoder, model, dtype, int8, inputs))
        for rows in _READ:
            yield Case(
                call=f"{name}, {rows}",
                found=partial(_encoded, encoder, inputs, rows),
                expected=partial(read, states, lengths, rows),
            )


def _encoder(model: Model, dtype: Precision, int8: Int8, inputs: Inputs) -> NativeEncoder:
    kernels = kernels_of(dtype, int8=int8)
    assert kernels is not None
    adapted = inputs.adapters is not None
    builder = PlanBuilder(kernels, adapters=2 if adapted else 0, rank=inputs.rank if adapted else 0)
    model(builder, dtype)
    return NativeEncoder(builder.build())


def _encoded(encoder: Callable[[], NativeEncoder], inputs: Inputs, rows: Rows) -> npt.NDArray[np.float32]:
    options = asdict(inputs)
    ids, lengths, _ = (options.pop(name) for name in ("ids", "lengths", "rank"))
    return encoder().encode(ids, bounds_of(lengths), rows=rows, **options)


# --- The models -------------------------------------------------------------------------------------------------------


class _Drawing:
    """Random numbers that a precision has; each call draws others."""

    def __init__(self, dtype: Precision) -> None:
        self._dtype, self._drawn = dtype, 0

    def numbers(self, *shape: int, scale: float = 1.0, around: float = 0.0) -> npt.NDArray[np.float32]:
        """Normally distributed numbers."""
        places = np.arange(self._drawn, self._drawn + math.prod(shape))
        self._drawn += len(places)
        drawn = np.take(_normal(), places, mode="wrap").reshape(shape) * np.float32(scale) + np.float32(around)
        return drawn if self._dtype == "float32" else (drawn.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    def __call__(self, *shape: int, scale: float = 1.0, around: float = 0.0) -> StoredTensor:
        """The same as a tensor."""
        return tensor_of(self.numbers(*shape, scale=scale, around=around))

    def linear(self, out: int, into: int, *, bias: bool = True) -> Linear:
        """A linear layer."""
        return Linear(weight=self(out, into, scale=1.5 * into**-0.5), bias=self(out, scale=0.1) if bias else None)

    def low_rank(self, out: int, into: int) -> LowRank:
        """Two adapters of a weight."""
        down = self.numbers(2 * _RANK, into, scale=into**-0.5)
        return LowRank(down=down, up=self.numbers(out, 2 * _RANK, scale=0.4))


@cache
def _normal() -> npt.NDArray[np.float32]:
    """As many numbers as make a model; a model is drawn for each text again, which would take most of the time."""
    return np.random.default_rng(0).standard_normal(65537, dtype=np.float32)


def post_norm(builder: Any, dtype: Precision, *, layers: int = 2, positions: int = _POSITIONS) -> None:
    """A BERT of 96 columns: positions, types, layer norms after residuals; the last layer adds a bias of distances."""
    hidden, heads, dim, inner = 96, 3, 32, 416
    draw = _Drawing(dtype)
    builder.embed(*(draw(rows, hidden) for rows in (VOCABULARY, positions, 2)))
    norm = builder.layer_norm(draw(hidden, scale=0.1, around=1.0), draw(hidden), 1e-5)
    builder.norm(norm, hidden)
    for i in range(layers):
        distances = draw.numbers(heads, 2 * positions - 1, scale=2.0) if i == layers - 1 else None
        builder.heads(*(draw.linear(heads * dim, hidden) for _ in range(3)))
        builder.attention(heads=heads, kv_heads=heads, dim=dim, scale=dim**-0.5, distances=distances)
        builder.o_proj(draw.linear(hidden, heads * dim))
        builder.norm(norm, hidden, residual=True)
        builder.mlp(draw.linear(inner, hidden), draw.linear(hidden, inner), "gelu")
        builder.norm(norm, hidden, residual=True)


def pre_norm(builder: Any, dtype: Precision, *, layers: int = 2, positions: int = _POSITIONS) -> None:
    """A decoder: scaled words, RMS norms before the parts and after them, rotary heads in groups, gates, a window."""
    hidden, heads, kv_heads, dim, inner = 64, 4, 2, 32, 448
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim}
    draw = _Drawing(dtype)
    builder.embed(draw(VOCABULARY, hidden), scale=hidden**0.5)
    rotation = Rotation((100.0 ** -(np.arange(dim // 2) * 2 / dim)).astype(np.float32))
    for i in range(layers):
        rms = [
            builder.rms_norm(draw(columns, scale=0.1), 1e-6, offset=1.0)
            for columns in (hidden, dim, dim, hidden, hidden, hidden)
        ]
        builder.norm(rms[0], hidden)
        shapes = [heads * dim, kv_heads * dim, kv_heads * dim]
        builder.heads(*(draw.linear(rows, hidden, bias=False) for rows in shapes))
        builder.rotary(**sizes, norm=rms[1], key_norm=rms[2], rotation=rotation)
        masks: dict[str, Any] = {"softcap": 2.0} if i % 2 else {"window": 7}
        builder.attention(**sizes, scale=dim**-0.5, causal=True, **masks)
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
    builder.norm(builder.rms_norm(None, 1e-6), hidden)


def modernbert(builder: Any, dtype: Precision) -> None:
    """A residual stream that begins with normed embeddings, layer norms without a bias, a window both ways, a gate."""
    hidden, heads, dim, inner = 96, 3, 32, 416
    sizes = {"heads": heads, "kv_heads": heads, "dim": dim}
    draw = _Drawing(dtype)
    builder.embed(draw(VOCABULARY, hidden, scale=3.0))
    norms = [builder.layer_norm(draw(hidden, scale=0.1, around=1.0), None, 1e-5) for _ in range(3)]
    builder.norm(norms[0], hidden, keep=True)
    builder.heads(*(draw.linear(heads * dim, hidden, bias=False) for _ in range(3)))
    builder.rotary(**sizes, rotation=Rotation((50.0 ** -(np.arange(dim // 2) * 2 / dim)).astype(np.float32)))
    builder.attention(**sizes, scale=0.5 * dim**-0.5, window=9)
    builder.o_proj(draw.linear(hidden, heads * dim, bias=False), add=True)
    builder.norm(norms[1], hidden)
    up, gate, down = draw.linear(inner, hidden), draw.linear(inner, hidden), draw.linear(hidden, inner)
    builder.mlp(up, down, "gelu", gate=gate, add=True)
    builder.norm(norms[2], hidden)


def deberta(builder: Any, dtype: Precision) -> None:
    """Post-norm, and scores with both terms of logarithmic distances."""
    hidden, heads, dim, inner, span = 64, 2, 32, 96, 12
    draw = _Drawing(dtype)
    columns = DistanceColumns.of(Distances(span=span, buckets=True, farthest=40))
    builder.embed(draw(VOCABULARY, hidden))
    norm = builder.layer_norm(draw(hidden, scale=0.1, around=1.0), draw(hidden), 1e-7)
    builder.norm(norm, hidden)
    builder.heads(*(draw.linear(hidden, hidden) for _ in range(3)))
    terms = DistanceTerms(columns=columns, keys=draw(2 * span, hidden), queries=draw(2 * span, hidden))
    builder.attention(heads=heads, kv_heads=heads, dim=dim, scale=(3 * dim) ** -0.5, distances=terms)
    builder.o_proj(draw.linear(hidden, hidden))
    builder.norm(norm, hidden, residual=True)
    builder.mlp(draw.linear(inner, hidden), draw.linear(hidden, inner), "gelu")
    builder.norm(norm, hidden, residual=True)


def adapted(builder: Any, dtype: Precision) -> None:
    """A layer of jina-embeddings-v3: post-norm, and an adapter of every weight."""
    hidden, heads, dim, inner = 64, 2, 32, 96
    draw = _Drawing(dtype)
    words, types = (
        (
            draw(rows, hidden),
            LowRank(down=draw.numbers(2, rows, _RANK), up=draw.numbers(hidden, 2 * _RANK, scale=0.4)),
        )
        for rows in (VOCABULARY, 2)
    )
    builder.embed(words[0], types=types[0], adapter=words[1], type_adapter=types[1])
    norm = builder.layer_norm(draw(hidden, scale=0.1, around=1.0), draw(hidden), 1e-5)
    builder.norm(norm, hidden)
    builder.heads(*(draw.linear(hidden, hidden) for _ in range(3)), adapter=draw.low_rank(3 * hidden, hidden))
    builder.attention(heads=heads, kv_heads=heads, dim=dim, scale=dim**-0.5)
    builder.o_proj(draw.linear(hidden, hidden), adapter=draw.low_rank(hidden, hidden))
    builder.norm(norm, hidden, residual=True)
    up, down = draw.linear(inner, hidden), draw.linear(hidden, inner)
    low, low_down = draw.low_rank(inner, hidden), draw.low_rank(hidden, inner)
    builder.mlp(up, down, "gelu", adapter=low, down_adapter=low_down)
    builder.norm(norm, hidden, residual=True)


def experts(builder: Any, dtype: Precision) -> None:
    """Mixtures of experts, with gates or without; heads that are normalized as one row, and a norm of the sums."""
    hidden, heads, dim, inner, count = 64, 2, 32, 96, 5
    draw = _Drawing(dtype)
    builder.embed(draw(VOCABULARY, hidden))
    norm = builder.layer_norm(draw(hidden, scale=0.1, around=1.0), draw(hidden), 1e-5)
    builder.norm(norm, hidden, keep=True)
    for gated in (False, True):
        builder.heads(*(draw.linear(hidden, hidden) for _ in range(3)))
        builder.rotary(heads=heads, kv_heads=heads, dim=dim, norm=norm, key_norm=norm, whole=True)
        builder.attention(heads=heads, kv_heads=heads, dim=dim, scale=dim**-0.5)
        builder.o_proj(draw.linear(hidden, hidden))
        builder.norm(norm, hidden, residual=True, sums=True)
        builder.norm(norm, hidden, residual=True, keep=gated)
        # Scores so far apart that no rounding changes a row's choice.
        router = Linear(weight=draw(count, hidden, scale=0.01), bias=tensor_of(np.arange(count)[:: 1 - 2 * gated]))
        feeds = [
            Expert(
                up=draw.linear(inner, hidden),
                down=draw.linear(hidden, inner),
                gate=draw.linear(inner, hidden) if gated else None,
            )
            for _ in range(count)
        ]
        bias = None if gated else draw(hidden)
        builder.experts(router, feeds, "silu", top=2, renormalized=gated, bias=bias, add=gated)
        builder.norm(norm, hidden, residual=not gated)


def gates(builder: Any, dtype: Precision) -> None:
    """Values that are normalized, or have words added; results without their values' part, and gates of all kinds."""
    hidden, heads, kv_heads, dim, inner = 64, 4, 2, 32, 96
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim}
    draw = _Drawing(dtype)
    builder.embed(draw(VOCABULARY, hidden))
    plain = builder.rms_norm(draw(hidden, scale=0.1, around=1.0), 1e-6)
    builder.norm(plain, hidden, carry=True)
    builder.keep_states()
    rms = builder.rms_norm(draw(dim, scale=0.1, around=1.0), 1e-6)
    builder.norm(plain, hidden, mixture=(1.1, -0.4))
    rows = [heads * dim, kv_heads * dim, kv_heads * dim, heads * dim]
    builder.heads(*(draw.linear(count, hidden, bias=False) for count in rows))
    builder.rotary(**sizes, norm=rms, key_norm=rms, value_norm=rms)
    builder.value_words(draw(VOCABULARY, kv_heads * dim), **sizes)
    builder.attention(**sizes, scale=dim**-0.5)
    builder.exclude_values(**sizes, shares=draw.numbers(heads, scale=0.5))
    builder.gate_attention(**sizes, activation="sigmoid")
    builder.o_proj(draw.linear(hidden, heads * dim, bias=False), add=True)
    builder.norm(plain, hidden)
    builder.mlp(draw.linear(inner, hidden), draw.linear(hidden, inner), "relu2", add=True)
    builder.norm(plain, hidden)
    norm = builder.rms_norm(draw(dim, scale=0.1, around=1.0), 1e-6)
    builder.gate_by_kept(*(draw.linear(dim, hidden, bias=False) for _ in range(2)), norm, "gelu_new")
    builder.o_proj(draw.linear(hidden, dim, bias=False), add=True)
    builder.norm(plain, hidden)


MODELS: dict[str, Model] = {
    "encoder": post_norm,
    "decoder": pre_norm,
    "ModernBERT": modernbert,
    "DeBERTa": deberta,
    "adapters": adapted,
    "experts": experts,
    "gates": gates,
}
