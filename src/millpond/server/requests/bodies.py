"""Request bodies: read within their limits, parsed, checked, and described in OpenAPI."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from millpond.errors import EngineOverloadedError
from millpond.server import openapi
from millpond.server.errors import ClientGoneError, RequestError
from millpond.server.state import config_of, held_of, meant, models_of
from millpond.server.violations import violation

Body = TypeVar("Body")

# A larger body is parsed in a thread: what is smaller takes less time than the way there.
_INLINE_BYTES = 1 << 16
# Lists and objects of a body, the least that is refused: an object of Python for each takes the interpreter seconds.
_MANY = 1 << 16
_PER_INPUT = 8  # where a server takes so many inputs that they may have more
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_TOO_SLOW = "The body did not arrive within {seconds:g} s; send less, or over a faster line"


async def read(request: Request, schema: type[Body] | TypeAdapter[Body], *, queued: bool = True) -> Body:
    """The body of ``request``.

    Args:
        request: The request.
        schema: What the body is: a pydantic model, or a TypeAdapter of a union of them.
        queued: Whether its texts are to be queued: while no model takes any, the body is not read at all.

    Raises:
        EngineOverloadedError: Every queue is full, or the bodies under way are too large together (429).
        RequestError: Another content type (400), too large (413) or too slow (408), no JSON, or JSON of another shape
            (400).
    """
    _check_headers(request)
    if queued:
        _check_queues(request)
    data = await _within_time(request)
    if len(data) <= _INLINE_BYTES:
        return _parsed(data, schema)
    most = max(_MANY, _PER_INPUT * config_of(request).max_inputs)
    return await asyncio.to_thread(_large, data, schema, most)


def documented(
    schema: Any, *, answer: Any = None, octets: bool = False, description: str = "The answer."
) -> dict[str, Any]:
    """What a route that reads its body by itself tells OpenAPI: pass it as ``openapi_extra``.

    Args:
        schema: The body: a pydantic model, or any type that pydantic knows, such as a union of models.
        answer: The same for the answer; ``None`` leaves its shape open.
        octets: Whether the answer may be ``application/octet-stream`` as well.
        description: A sentence on the answer.
    """
    return openapi.operation(schema, answer=answer, octets=octets, description=description)


def _check_headers(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise RequestError("Unsupported Media Type: Only 'application/json' is allowed", type="Bad Request")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise RequestError(
            f"Content-Encoding {coding[:40]!r} is not read here; send the JSON as it is",
            status=415,
            type="Unsupported Media Type",
        )


def _check_queues(request: Request) -> None:
    models = list(models_of(request))
    for model in models:
        try:
            return model.engine.check_room(1)
        except EngineOverloadedError as error:
            full = error
    if len(models) == 1:
        meant(request, models[0])
    raise full


async def _within_time(request: Request) -> bytearray:
    try:
        async with asyncio.timeout_at(getattr(request.state, "deadline", None)):
            return await _whole(request, config_of(request).max_body_bytes)
    except TimeoutError:
        seconds = config_of(request).request_timeout
        raise RequestError(
            _TOO_SLOW.format(seconds=seconds), status=408, type="Request Timeout", headers={"Connection": "close"}
        ) from None
    except ClientDisconnect:
        raise ClientGoneError from None


async def _whole(request: Request, most: int) -> bytearray:
    """Every byte of the body, whatever its header says about their number."""
    said = request.headers.get("content-length", "")
    data, held = bytearray(), held_of(request)
    seen = 0
    # Of a body that is too large as much again is read and dropped: most clients look for an answer when they have
    # sent everything, and would see a broken connection instead of it.
    hopeless = said.isascii() and said.isdigit() and len(said) < 20 and int(said) > 2 * most
    if not hopeless:
        async for chunk in request.stream():
            seen += len(chunk)
            if seen <= most:
                held.take(request.scope, len(chunk))
                data += chunk
            elif seen > 2 * most:
                break
            else:
                data.clear()
        if seen <= most:
            return data
    raise RequestError(
        f"The body has more than {most} bytes, which is the most that this server reads; send it in parts",
        status=413,
        type="Request Entity Too Large",
        headers={"Connection": "close"} if hopeless or seen > 2 * most else None,
    )


def _large(data: bytearray, schema: type[Body] | TypeAdapter[Body], most: int) -> Body:
    """A body that is looked at before it is taken apart."""
    if _parts(data) > most:  # texts may have any number of brackets
        parts = _parts(_STRINGS.sub(b"", data))
        if parts > most:
            raise RequestError(f"The body has {parts} lists and objects; this server reads {most}: send it in parts")
    return _parsed(data, schema)


def _parts(data: bytes | bytearray) -> int:
    return data.count(b"[") + data.count(b"{")


def _parsed(data: bytearray, schema: type[Body] | TypeAdapter[Body]) -> Body:
    try:
        if b"NaN" in data or b"Infinity" in data:  # in a text, most likely; elsewhere they are no JSON
            _refuse_constants(data)
        if isinstance(schema, TypeAdapter):
            return schema.validate_json(data)
        assert issubclass(schema, BaseModel)
        return schema.model_validate_json(data)
    except ValidationError as error:
        raise violation(error.errors(include_url=False, include_context=False)) from None


def _refuse_constants(data: bytearray) -> None:
    try:
        from_json(bytes(data), allow_inf_nan=False)
    except ValueError as error:
        told = f"1 validation error: body: Invalid JSON: {error} [type=json_invalid]"
        raise RequestError(told, type="Bad Request") from None
