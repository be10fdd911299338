"""Encoding: responses as JSON with numpy arrays, and vectors as binary or base64."""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
from fastapi import Response
from starlette.types import Receive, Scope, Send

from millpond.vectors.small_floats import to_8_bits, to_bfloat16

EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]

# A response of at most this many numbers is encoded on the event loop: handing it to a thread takes longer.
_INLINE = 16384
# A larger response is sent in pieces of so many bytes.
_PIECE = 1 << 20
# Bytes of a number in JSON with its comma, on average: a float32 has up to nine digits, a sign and a point.
JSON_BYTES = 12.0
_ITEM_BYTES: dict[EmbedDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
_BASE64 = 4 / 3


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """How a response writes its numbers."""

    encoding: EncodingFormat = "base64"  # JSON, base64, or binary with or without a header
    dtype: EmbedDtype = "float32"  # in base64 and binary
    order: Endianness = "little"

    @property
    def bytes_per_number(self) -> float:
        """Bytes of a number in the response, about."""
        if self.encoding == "float":
            return JSON_BYTES
        return _ITEM_BYTES[self.dtype] * (_BASE64 if self.encoding == "base64" else 1)

    @property
    def byte_order(self) -> Literal["big", "little"]:
        """``order``, with ``native`` replaced by that of this machine."""
        return sys.byteorder if self.order == "native" else self.order

    def to_bytes(self, rows: npt.NDArray[np.float32]) -> bytes:
        """The numbers of ``rows``, one row after the other."""
        typed = _as(rows, self.dtype)
        foreign = self.byte_order != sys.byteorder and typed.dtype.itemsize > 1
        return (typed.byteswap() if foreign else typed).tobytes()


@dataclass(frozen=True)
class Json:
    """A part of a response that is JSON already."""

    content: bytes


@dataclass(frozen=True, kw_only=True)
class Base64:
    """Numbers that become base64 when the JSON is written."""

    rows: npt.NDArray[np.float32]
    form: NumberFormat = NumberFormat()


class LargeResponse(Response):
    """A response that is sent in pieces, each when the client has read those before it, and never put together.

    A client that reads slowly then holds one copy of it, in a request that has not ended.
    """

    def __init__(self, parts: Sequence[bytes], media_type: str, headers: Mapping[str, str]) -> None:
        length = str(sum(map(len, parts)))
        super().__init__(media_type=media_type, headers={**headers, "content-length": length})
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _pieces(self) -> Iterator[bytes]:
        piece = bytearray()
        for part in self._parts:
            for start in range(0, len(part), _PIECE):
                piece += part[start : start + _PIECE]
                if len(piece) >= _PIECE:
                    yield bytes(piece)
                    piece.clear()
        yield bytes(piece)


def response_of(parts: Sequence[bytes], media_type: str, headers: Mapping[str, str] | None = None) -> Response:
    """A response of any size, whose body has these parts."""
    if sum(map(len, parts)) > _PIECE:
        return LargeResponse(parts, media_type, headers or {})
    return Response(b"".join(parts), media_type=media_type, headers=headers)


async def json_response(content: Any) -> Response:
    """A response of mappings with str keys, lists, numpy arrays and :class:`Base64`; what is not finite is null."""
    body = await encoded(lambda: to_json(content), numbers=_numbers(content))
    return response_of([body], "application/json")


async def encoded(encode: Callable[[], bytes], *, numbers: int) -> bytes:
    """The bytes from ``encode``, called in a thread if it has many ``numbers`` to encode."""
    return encode() if numbers <= _INLINE else await asyncio.to_thread(encode)


def to_json(content: Any) -> bytes:
    """``content`` as JSON."""
    return orjson.dumps(content, default=_fragment, option=orjson.OPT_PASSTHROUGH_DATACLASS)


def repeatable(value: Any) -> Any:
    """A value from a request's JSON, for a response: integers of more than 64 bits keep their digits."""
    if isinstance(value, Mapping):
        return {name: repeatable(part) for name, part in value.items()}
    if isinstance(value, list):
        return [repeatable(part) for part in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return orjson.Fragment(str(value))
    return value


def _as(rows: npt.NDArray[np.float32], dtype: EmbedDtype) -> npt.NDArray[Any]:
    """``rows`` in another precision; types that numpy lacks are integers of the same width."""
    if dtype in ("float32", "float16"):
        return np.ascontiguousarray(rows, dtype=dtype)
    if dtype == "bfloat16":
        return to_bfloat16(rows)
    return to_8_bits(rows, dtype.removeprefix("fp8_"))


def _fragment(value: Any) -> orjson.Fragment:
    """An array, encoded separately: between two arrays the event loop can run, during one long call it cannot."""
    if isinstance(value, Json):
        return orjson.Fragment(value.content)
    if isinstance(value, Base64):
        return orjson.Fragment(f'"{base64.b64encode(value.form.to_bytes(value.rows)).decode("ascii")}"')
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"a {type(value).__name__} has no form in JSON")
    if isinstance(value, np.ndarray) and not value.flags.c_contiguous:
        value = np.ascontiguousarray(value)
    return orjson.Fragment(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))


def _numbers(content: Any) -> int:
    """An estimate of the numbers to write; the items of a list are assumed to be alike."""
    if isinstance(content, Base64):
        return content.rows.size // 4  # copying is faster than writing digits
    if isinstance(content, np.ndarray):
        return content.size
    if isinstance(content, Json):
        return len(content.content) // 64
    if isinstance(content, str):
        return len(content) // 16  # which takes as long
    if isinstance(content, dict):
        return sum(map(_numbers, content.values()))
    if isinstance(content, list | tuple) and content:
        return len(content) * _numbers(content[0])
    return 1
