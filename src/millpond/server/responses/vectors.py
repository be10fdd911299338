"""Vectors: a response with the rows or matrices of each prompt, in the encoding that the request names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import Response

from millpond.server.responses.binary import RowsOrMatrices, binary_response
from millpond.server.responses.encoding import Base64, NumberFormat, json_response


async def vector_response(
    rows: RowsOrMatrices, form: NumberFormat, envelope: dict[str, Any], usage: dict[str, Any], *, item: str, field: str
) -> Response:
    """A response that holds numbers for each prompt."""
    if form.encoding in ("bytes", "bytes_only"):
        return await binary_response(
            rows,
            envelope,
            usage,
            dtype=form.dtype,
            order=form.order,
            with_metadata=form.encoding == "bytes",
        )
    arrays: Iterable[npt.NDArray[np.float32]] = rows
    if form.encoding == "float":
        data = [{"index": i, "object": item, field: row} for i, row in enumerate(arrays)]
    else:
        data = [_base64_item(i, row, form, item, field) for i, row in enumerate(arrays)]
    return await json_response({**envelope, "data": data, "usage": usage})


def _base64_item(index: int, row: npt.NDArray[np.float32], form: NumberFormat, item: str, field: str) -> dict[str, Any]:
    numbers = Base64(rows=row, dtype=form.dtype, order=form.order)
    content: dict[str, Any] = {"index": index, "object": item, field: numbers}
    return content if row.ndim == 1 else {**content, "shape": list(row.shape)}  # base64 does not keep a shape
