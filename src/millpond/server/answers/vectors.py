"""Results: the rows and matrices of an answer, in the encoding that its request asks for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import Response

from millpond.server.answers.binary import Rows, octet_answer
from millpond.server.encoding import Base64, json_answer
from millpond.server.schemas.vectors import VectorRequest


async def vector_answer(
    rows: Rows, body: VectorRequest, envelope: dict[str, Any], usage: dict[str, Any], *, item: str, field: str
) -> Response:
    """An answer that holds numbers for each prompt.

    Args:
        rows: ``[n, d]``, or n matrices.
        body: The request, for its encoding.
        envelope: What stands before the data.
        usage: Token counts.
        item: What each item's ``object`` is.
        field: The item's field for the numbers.
    """
    if body.encoding_format in ("bytes", "bytes_only"):
        return await octet_answer(
            rows,
            envelope,
            usage,
            dtype=body.embed_dtype,
            order=body.endianness,
            described=body.encoding_format == "bytes",
        )
    listed: Iterable[npt.NDArray[np.float32]] = rows
    if body.encoding_format == "float":
        data = [{"index": i, "object": item, field: row} for i, row in enumerate(listed)]
    else:
        data = [_in_base64(i, row, body, item, field) for i, row in enumerate(listed)]
    return await json_answer({**envelope, "data": data, "usage": usage})


def _in_base64(i: int, row: npt.NDArray[np.float32], body: VectorRequest, item: str, field: str) -> dict[str, Any]:
    numbers = Base64(rows=row, dtype=body.embed_dtype, order=body.endianness)
    told: dict[str, Any] = {"index": i, "object": item, field: numbers}
    return told if row.ndim == 1 else {**told, "shape": list(row.shape)}  # a matrix is lost without
