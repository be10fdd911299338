"""Vectors: a response with the rows or matrices of each prompt, in the encoding that the request names.

vLLM's clients read the header ``metadata`` of a binary response: its JSON with the byte range and the shape of each
vector. The table of thousands of vectors is longer than clients and proxies accept as a header, so above a size it is
left out: vectors of one width are then described by ``shape`` and ``stride``; matrices of different heights by
``table``, the byte range after the numbers where the table follows as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import Response

from millpond.server.responses.encoding import Base64, NumberFormat, encoded, response_of, to_json
from millpond.vectors.ragged import Ragged

# A batch of 64 fits; aiohttp by default reads no header of more than 8190 bytes.
_MAX_HEADER = 7600

RowsOrMatrices = npt.NDArray[np.float32] | Ragged


async def vector_response(
    rows: RowsOrMatrices, form: NumberFormat, envelope: dict[str, Any], usage: dict[str, Any], *, item: str, field: str
) -> Response:
    """A response with an ``item`` for each prompt, whose ``field`` holds the numbers, between envelope and usage."""
    if form.encoding in ("bytes", "bytes_only"):
        return await _binary_response(rows, form, envelope, usage)
    data = []
    for i, row in enumerate(rows):
        numbers = row if form.encoding == "float" else Base64(rows=row, form=form)
        content = {"index": i, "object": item, field: numbers}
        if form.encoding == "base64" and row.ndim > 1:
            content["shape"] = list(row.shape)  # base64 does not keep it
        data.append(content)
    content = {**envelope, "data": data, "usage": usage}
    numbers = rows.flat.size if isinstance(rows, Ragged) else rows.size
    body = await encoded(lambda: to_json(content), numbers=numbers if form.encoding == "float" else numbers // 4)
    return response_of([body], "application/json")


async def _binary_response(
    rows: RowsOrMatrices, form: NumberFormat, envelope: dict[str, Any], usage: dict[str, Any]
) -> Response:
    flat = rows.flat if isinstance(rows, Ragged) else rows
    body = await encoded(lambda: form.to_bytes(flat), numbers=flat.size // 4)
    if form.encoding == "bytes_only":
        return response_of([body], "application/octet-stream")
    number_format = {"embed_dtype": form.dtype, "endianness": form.byte_order}
    table = _table(rows, len(body) // max(1, len(flat)), number_format)
    head = {"id": envelope["id"], "created": envelope["created"], "model": envelope["model"]}
    metadata = _compact({**head, "data": table, "usage": usage})
    if len(metadata) > _MAX_HEADER:
        trailer = json.dumps(table).encode() if isinstance(rows, Ragged) else b""
        location = (
            {"table": {"start": len(body), "end": len(body) + len(trailer)}}
            if isinstance(rows, Ragged)
            else {"shape": list(rows.shape), "stride": len(body) // len(rows)}
        )
        metadata = _compact({**head, "data": None, **number_format, **location, "usage": usage})
        body += trailer
    return response_of([body], "application/octet-stream", {"metadata": metadata})


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _table(rows: RowsOrMatrices, stride: int, number_format: Mapping[str, str]) -> list[dict[str, Any]]:
    """The byte range and the shape of each vector or matrix."""
    width = rows.flat.shape[1] if isinstance(rows, Ragged) else rows.shape[1]
    table = []
    for i in range(len(rows)):
        first, last = (rows.offsets[i], rows.offsets[i + 1]) if isinstance(rows, Ragged) else (i, i + 1)
        shape = [int(last - first), width] if isinstance(rows, Ragged) else [width]
        byte_range = {"start": int(first) * stride, "end": int(last) * stride}
        table.append({"index": i, **number_format, **byte_range, "shape": shape})
    return table
