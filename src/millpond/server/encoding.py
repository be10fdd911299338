"""Answers as bytes: JSON with numpy arrays written as they are, and vectors in binary."""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
from fastapi import Response

EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]

# Numbers of an answer that is encoded on the event loop; a hand-over to a thread takes longer than these do.
_INLINE = 16384
_TORCH_NAMES = {"bfloat16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


@dataclass(frozen=True, kw_only=True)
class Base64:
    """Numbers that an answer in JSON holds as base64; made into it only when the answer is written.

    Attributes:
        rows: The numbers.
        dtype: Their type there.
        order: Their byte order.
    """

    rows: npt.NDArray[np.float32]
    dtype: EmbedDtype = "float32"
    order: Endianness = "little"


async def json_answer(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in JSON.

    Args:
        content: Mappings with str keys, lists, numpy arrays of any shape (what is not finite becomes null), and
            :class:`Base64`.
        status: HTTP status.
        headers: Sent with it.
    """
    body = await encoded(lambda: to_json(content), numbers=_numbers(content))
    return Response(body, status_code=status, headers=headers, media_type="application/json")


async def encoded(encode: Callable[[], bytes], *, numbers: int) -> bytes:
    """The bytes that ``encode`` makes of so many numbers: in a thread, where that takes long."""
    return encode() if numbers <= _INLINE else await asyncio.to_thread(encode)


def to_json(content: Any) -> bytes:
    """``content`` in JSON."""
    return orjson.dumps(content, default=_written, option=orjson.OPT_PASSTHROUGH_DATACLASS)


def repeatable(value: Any) -> Any:
    """A value of a request's JSON, as an answer can hold it: whole numbers of more than 64 bits keep their digits."""
    if isinstance(value, Mapping):
        return {name: repeatable(part) for name, part in value.items()}
    if isinstance(value, list):
        return [repeatable(part) for part in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return orjson.Fragment(str(value))
    return value


def to_bytes(rows: npt.NDArray[np.float32], dtype: EmbedDtype = "float32", order: Endianness = "little") -> bytes:
    """The numbers of ``rows``, row behind row."""
    typed = _as(rows, dtype)
    foreign = resolved(order) != sys.byteorder and typed.dtype.itemsize > 1
    return (typed.byteswap() if foreign else typed).tobytes()


def to_base64(rows: npt.NDArray[np.float32], dtype: EmbedDtype = "float32", order: Endianness = "little") -> str:
    """:func:`to_bytes` as text."""
    return base64.b64encode(to_bytes(rows, dtype, order)).decode("ascii")


def resolved(order: Endianness) -> Literal["big", "little"]:
    """The byte order that ``native`` is, where it is asked for."""
    return sys.byteorder if order == "native" else order


def _as(rows: npt.NDArray[np.float32], dtype: EmbedDtype) -> npt.NDArray[Any]:
    """``rows`` in another precision; what numpy has no type for, as whole numbers of its width."""
    if dtype in ("float32", "float16"):
        return np.ascontiguousarray(rows, dtype=dtype)
    import torch

    # A copy: the engine's rows may be read-only, which torch warns about.
    rounded = torch.from_numpy(np.array(rows, dtype=np.float32)).to(getattr(torch, _TORCH_NAMES[dtype]))
    return rounded.view(torch.int16 if dtype == "bfloat16" else torch.uint8).numpy()


def _written(value: Any) -> orjson.Fragment:
    """An array, encoded by itself: between two of them the event loop gets its turn, which one long call would keep."""
    if isinstance(value, Base64):
        return orjson.Fragment(f'"{to_base64(value.rows, value.dtype, value.order)}"')
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"a {type(value).__name__} has no form in JSON")
    if isinstance(value, np.ndarray) and not value.flags.c_contiguous:
        value = np.ascontiguousarray(value)
    return orjson.Fragment(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))


def _numbers(content: Any) -> int:
    """About how many numbers are to be written, taking the items of a list for alike."""
    if isinstance(content, Base64):
        return content.rows.size // 4  # copying is faster than writing digits
    if isinstance(content, np.ndarray):
        return content.size
    if isinstance(content, str):
        return len(content) // 16  # which takes as long
    if isinstance(content, Mapping):
        return sum(_numbers(value) for value in content.values())
    if isinstance(content, Sequence) and content:
        return len(content) * _numbers(content[0])
    return 1
