"""Binary responses: the numbers of all vectors one after the other, and a header that describes them.

vLLM's clients read the header ``metadata``: the response's JSON with the byte range and the shape of each vector. The
table of thousands of vectors is longer than clients and proxies accept as a header, so above a size it is left out:
vectors of one width are then described by ``shape`` and ``stride``; matrices of different heights by ``table``, the
byte range after the numbers where the table follows as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import Response

from millpond.server.responses import encoding
from millpond.server.responses.encoding import EmbedDtype, Endianness
from millpond.vectors.ragged import Ragged

# A batch of 64 fits; aiohttp by default reads no header of more than 8190 bytes.
_MAX_HEADER = 7600

RowsOrMatrices = npt.NDArray[np.float32] | Ragged


async def binary_response(
    rows: RowsOrMatrices,
    envelope: dict[str, Any],
    usage: dict[str, Any],
    *,
    dtype: EmbedDtype,
    order: Endianness,
    with_metadata: bool,
) -> Response:
    """A response of numbers only."""
    flat = rows.flat if isinstance(rows, Ragged) else rows
    body = await encoding.encoded(lambda: encoding.to_bytes(flat, dtype, order), numbers=flat.size // 4)
    if not with_metadata:
        return Response(body, media_type="application/octet-stream")
    number_format = {"embed_dtype": dtype, "endianness": encoding.resolved(order)}
    table = _table(rows, len(body) // max(1, len(flat)), number_format)
    head = {"id": envelope["id"], "created": envelope["created"], "model": envelope["model"]}
    metadata = _compact({**head, "data": table, "usage": usage})
    if len(metadata) > _MAX_HEADER:
        location, trailer = _short_description(rows, table, body, number_format)
        metadata = _compact({**head, "data": None, **location, "usage": usage})
        body += trailer
    return Response(body, media_type="application/octet-stream", headers={"metadata": metadata})


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


def _short_description(
    rows: RowsOrMatrices, table: list[dict[str, Any]], body: bytes, number_format: Mapping[str, str]
) -> tuple[dict[str, Any], bytes]:
    """The header entry that replaces a long table, and the bytes after the numbers."""
    if not isinstance(rows, Ragged):
        return {**number_format, "shape": list(rows.shape), "stride": len(body) // len(rows)}, b""
    trailer = json.dumps(table).encode()
    return {**number_format, "table": {"start": len(body), "end": len(body) + len(trailer)}}, trailer
