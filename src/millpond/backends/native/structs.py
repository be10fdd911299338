"""The structs of ``native/encoder/plan.h``, field by field."""

from __future__ import annotations

import ctypes
from typing import ClassVar

_int, _float, _pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p

# enum StepKind
EMBED, NORM, PRODUCT, HEADS, ATTENTION, FEED, ADAPT, EXPERTS, CONVOLVE, KEEP, GATE, EXCLUDE, BLEND = range(13)
# enum NormKind
COPY, LAYER_NORM, RMS_NORM, SCALE = range(4)
# enum Reading
ALL_ROWS, FIRST_ROW, LAST_ROW, MEAN_ROW = range(4)
# enum EncodeError
BAD_TOKEN, NOT_FINITE = 1, 2
# enum Activation, by the names of config.json
ACTIVATIONS: dict[str | None, int] = {
    None: 0,
    "linear": 0,
    "gelu": 1,
    "gelu_python": 1,
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"), 2),
    "silu": 3,
    "swish": 3,
    "relu": 4,
    "sigmoid": 5,
    "relu2": 6,
}
# enum Stored
STORED_FLOAT32, STORED_BFLOAT16 = range(2)


class Weight(ctypes.Structure):
    """``struct Weight``."""

    _fields_: ClassVar = [("units", _pointer), ("bias", _pointer), ("out", _int), ("in_", _int), ("scales", _pointer)]


class NormWeights(ctypes.Structure):
    """``struct NormWeights``."""

    _fields_: ClassVar = [
        ("kind", _int),
        *((name, _pointer) for name in ("weight", "bias")),
        ("epsilon", _float),
        ("padding", _int),
    ]


class Step(ctypes.Structure):
    """``struct Step``."""

    _fields_: ClassVar = [
        *((name, _int) for name in ("kind", "target", "activation", "gated", "residual", "columns")),
        ("weight", Weight),
        ("down", Weight),
        ("low", Weight),
        ("norm", NormWeights),
        ("key_norm", NormWeights),
        ("whole", _int),
        *((name, _pointer) for name in ("words", "positions", "types", "low_words", "low_columns")),
        *((name, _int) for name in ("vocabulary", "kinds")),
        *((name, _pointer) for name in ("cosines", "sines", "distances")),
        *((name, _int) for name in ("reach", "heads", "kv_heads", "dim", "before", "after")),
        ("scale", _float),
        ("softcap", _float),
        ("last", _int),
        *((name, _pointer) for name in ("key_columns", "query_columns", "experts")),
        *((name, _int) for name in ("expert_count", "top", "renormalized", "shifted", "start", "factor", "other")),
        ("share", _float),
        ("int8", _int),
        ("state_factors", _pointer),
    ]


class Model(ctypes.Structure):
    """``struct Model``."""

    _fields_: ClassVar = [
        ("steps", ctypes.POINTER(Step)),
        *(
            (name, _int)
            for name in ("count", "hidden", "heads", "inner", "branch", "codes", "output", "low", "rank", "kept")
        ),
    ]


class EncodeCall(ctypes.Structure):
    """``struct EncodeCall``."""

    _fields_: ClassVar = [
        ("model", ctypes.POINTER(Model)),
        *((name, _pointer) for name in ("ids", "bounds", "types", "keys", "skip", "leads", "out", "workspace")),
        *((name, _int) for name in ("texts", "offset", "reading", "block", "threads")),
        *((name, _pointer) for name in ("adapters", "timings", "kept")),
        *((name, _int) for name in ("vocabulary", "width", "unit")),
        ("prefix", _pointer),
        ("prefix_tokens", _int),
        ("peaks", _pointer),
    ]


class PackRowsCall(ctypes.Structure):
    """``struct PackRowsCall``."""

    _fields_: ClassVar = [
        *((name, _pointer) for name in ("rows", "units", "scales")),
        *((name, _int) for name in ("stored", "out", "in_", "count", "piece", "padded", "exact")),
        ("factors", _pointer),
    ]
