"""Octet streams: the numbers of an answer, one vector behind the other, and what they are in a header.

vLLM's clients look for the header ``metadata``: the answer's JSON with, for each vector, where it lies and what shape
it has. A table of thousands of vectors passes what clients and proxies take for headers, so beyond a size it is left
out: vectors of one width are told by ``shape`` and ``stride``; matrices of different heights by ``table``, the place
behind the numbers where the table follows as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import Response

from millpond.ragged import Ragged
from millpond.server import encoding
from millpond.server.encoding import EmbedDtype, Endianness

# A batch of 64 fits; aiohttp reads no header of more than 8190 bytes unless it is told to.
_HEADER = 7600

Rows = npt.NDArray[np.float32] | Ragged


async def octet_answer(
    rows: Rows,
    envelope: dict[str, Any],
    usage: dict[str, Any],
    *,
    dtype: EmbedDtype,
    order: Endianness,
    described: bool,
) -> Response:
    """An answer of nothing but numbers.

    Args:
        rows: ``[n, d]``, or n matrices.
        envelope: ``id``, ``created`` and ``model``, for the header.
        usage: For the header.
        dtype: The numbers' type.
        order: Their byte order.
        described: Whether there is a header at all.
    """
    flat = rows.flat if isinstance(rows, Ragged) else rows
    body = await encoding.encoded(lambda: encoding.to_bytes(flat, dtype, order), numbers=flat.size // 4)
    if not described:
        return Response(body, media_type="application/octet-stream")
    said = {"embed_dtype": dtype, "endianness": encoding.resolved(order)}
    table = _table(rows, len(body) // max(1, len(flat)), said)
    told = {"id": envelope["id"], "created": envelope["created"], "model": envelope["model"]}
    metadata = _dense({**told, "data": table, "usage": usage})
    if len(metadata) > _HEADER:
        place, behind = _elsewhere(rows, table, body, said)
        metadata = _dense({**told, "data": None, **place, "usage": usage})
        body += behind
    return Response(body, media_type="application/octet-stream", headers={"metadata": metadata})


def _dense(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _table(rows: Rows, stride: int, said: Mapping[str, str]) -> list[dict[str, Any]]:
    """For each vector or matrix, the bytes it takes and its shape."""
    width = rows.flat.shape[1] if isinstance(rows, Ragged) else rows.shape[1]
    table = []
    for i in range(len(rows)):
        first, last = (rows.offsets[i], rows.offsets[i + 1]) if isinstance(rows, Ragged) else (i, i + 1)
        shape = [int(last - first), width] if isinstance(rows, Ragged) else [width]
        table.append({"index": i, **said, "start": int(first) * stride, "end": int(last) * stride, "shape": shape})
    return table


def _elsewhere(
    rows: Rows, table: list[dict[str, Any]], body: bytes, said: Mapping[str, str]
) -> tuple[dict[str, Any], bytes]:
    """What the header says in the place of a long table, and what follows the numbers."""
    if not isinstance(rows, Ragged):
        return {**said, "shape": list(rows.shape), "stride": len(body) // len(rows)}, b""
    behind = json.dumps(table).encode()
    return {**said, "table": {"start": len(body), "end": len(body) + len(behind)}}, behind
