"""Token rows as a field holds them: packed int8 in Milvus Lite, an array of structs on a server."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

ROWS = "rows"
"""The field that holds a document's rows."""

VECTOR = "embedding"
"""The vector field of a struct."""

PATH = f"{ROWS}[{VECTOR}]"
"""Where an index of the structs' vectors is made and searched."""

_LEVELS = 127


def pack(matrix: FloatArray) -> str:
    """Rows as int8 with a float16 scale each, in base64: Milvus Lite has no field for bytes.

    Args:
        matrix: float32 ``[tokens, width]``.
    """
    peaks = np.abs(matrix).max(axis=1, initial=0)  # [tokens]
    scales = (peaks / _LEVELS).astype("<f2")
    # Rounded by the scale that is read back; that of a row of zeros is arbitrary.
    divisors = np.where(scales > 0, scales, 1).astype(np.float32)[:, None]
    codes = np.clip(np.rint(matrix / divisors), -_LEVELS, _LEVELS).astype(np.int8)
    return base64.b64encode(codes.tobytes() + scales.tobytes()).decode("ascii")


def unpack(text: str, *, tokens: int, width: int) -> FloatArray:
    """The rows of :func:`pack`, float32 ``[tokens, width]``.

    Raises:
        ValueError: The text has another size, or is not base64.
    """
    content = base64.b64decode(text, validate=True)
    if len(content) != tokens * (width + 2):
        raise ValueError(f"{len(content)} bytes are no {tokens} rows of {width} columns")
    codes = np.frombuffer(content, dtype=np.int8, count=tokens * width).reshape(tokens, width)
    scales = np.frombuffer(content, dtype="<f2", offset=tokens * width)
    return codes * scales.astype(np.float32)[:, None]


def to_structs(matrix: FloatArray) -> list[dict[str, FloatArray]]:
    """Rows ``[tokens, width]`` as the elements of an array of structs."""
    return [{VECTOR: row} for row in matrix]


def from_structs(structs: Sequence[Mapping[str, Any]], *, width: int) -> FloatArray:
    """The rows of :func:`to_structs`, float32 ``[tokens, width]``."""
    return np.array([struct[VECTOR] for struct in structs], dtype=np.float32).reshape(len(structs), width)
