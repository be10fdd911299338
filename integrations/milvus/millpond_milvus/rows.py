"""Token rows as a field holds them: packed int8 in Milvus Lite, an array of structs on a server."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.codecs.rows import FLOAT32, INT8
from millpond.late_interaction.scoring.exact import Tokens

FloatArray = npt.NDArray[np.float32]

ROWS = "rows"
"""The field that holds a document's rows."""

VECTOR = "embedding"
"""The vector field of a struct."""

PATH = f"{ROWS}[{VECTOR}]"
"""Where an index of the structs' vectors is made and searched."""


def pack(matrix: FloatArray) -> str:
    """Rows ``[tokens, width]`` as int8 with a float16 scale each, in base64: Milvus Lite has no field for bytes."""
    codes, scales = INT8.pack(matrix)
    assert scales is not None
    return base64.b64encode(codes.tobytes() + scales.tobytes()).decode("ascii")


def packed_tokens(texts: Sequence[str], lengths: Sequence[int], *, width: int) -> Tokens:
    """The documents of :func:`pack`, of rows of ``width`` columns, ready to be scored."""
    columns = INT8.width(width)
    codes, scales = [np.empty(0, np.int8)], [np.empty(0, np.float16)]
    for text, tokens in zip(texts, lengths, strict=True):
        content = base64.b64decode(text, validate=True)
        if len(content) != tokens * (columns + 2):
            raise ValueError(f"{len(content)} bytes are no {tokens} rows of {width} columns")
        codes.append(np.frombuffer(content, dtype=np.int8, count=tokens * columns))
        scales.append(np.frombuffer(content, dtype=np.float16, offset=tokens * columns))
    return Tokens(
        codec=INT8,
        rows=np.concatenate(codes).reshape(-1, columns),
        scales=np.concatenate(scales),
        offsets=_offsets(lengths),
    )


def to_structs(matrix: FloatArray) -> list[dict[str, FloatArray]]:
    """Rows ``[tokens, width]`` as the elements of an array of structs."""
    return [{VECTOR: row} for row in matrix]


def struct_tokens(documents: Sequence[Sequence[Mapping[str, Any]]], *, width: int) -> Tokens:
    """The documents of :func:`to_structs`, ready to be scored."""
    rows = [struct[VECTOR] for structs in documents for struct in structs]
    return Tokens(
        codec=FLOAT32,
        rows=np.array(rows, dtype=np.float32).reshape(len(rows), width),
        scales=None,
        offsets=_offsets([len(structs) for structs in documents]),
    )


def _offsets(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
