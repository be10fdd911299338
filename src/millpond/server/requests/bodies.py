"""Request bodies: read within their limits, parsed and validated."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from millpond.errors import EngineOverloadedError
from millpond.server.errors import BodyTooLargeError, ClientGoneError, RequestError, validation_error
from millpond.server.requests.body_budget import LARGEST_DROPPED, body_budget_of
from millpond.server.state import record_model, state_of

Body = TypeVar("Body")

# A larger body is parsed in a thread; a smaller one takes less time than the handover.
_INLINE_BYTES = 1 << 16
# Most lists and objects of a body: creating a Python object for each of more of them takes seconds.
_MAX_CONTAINERS = 1 << 16
_CONTAINERS_PER_INPUT = 8  # raises the limit for servers with a large max_inputs
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)


async def read(
    request: Request, schema: type[Body] | TypeAdapter[Body], *, queued: bool = True, untyped: bool = False
) -> Body:
    """The validated body of ``request``; ``untyped``: also without a Content-Type, which browsers always send."""
    _check_headers(request, untyped=untyped)
    if queued:
        _check_queues(request)
    data = await _within_time(request)
    if len(data) <= _INLINE_BYTES:
        return _parsed(data, schema)
    limit = max(_MAX_CONTAINERS, _CONTAINERS_PER_INPUT * state_of(request).config.max_inputs)
    return await asyncio.to_thread(_parsed_within, data, schema, limit)


def _check_headers(request: Request, *, untyped: bool) -> None:
    given = request.headers.get("content-type", "application/json" if untyped else "")
    media_type = given.partition(";")[0].strip().lower()
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
    models = list(state_of(request).models)
    for model in models:
        try:
            return model.engine.check_room(1)
        except EngineOverloadedError as error:
            full = error
    if len(models) == 1:
        record_model(request, models[0])
    raise full


async def _within_time(request: Request) -> bytearray:
    try:
        async with asyncio.timeout_at(getattr(request.state, "deadline", None)):
            return await _whole(request, state_of(request).config.max_body_bytes)
    except TimeoutError:
        seconds = state_of(request).config.request_timeout
        message = f"The body did not arrive within {seconds:g} s; send less, or over a faster line"
        headers = {"Connection": "close"}
        raise RequestError(message, status=408, type="Request Timeout", headers=headers) from None
    except ClientDisconnect:
        rejection = getattr(request.state, "rejection", None)
        if rejection is None:
            raise ClientGoneError from None
        status, message = rejection  # what the protocol has answered in the middle of the body, for the log
        raise RequestError(message, status=status.value, type=status.phrase) from None


async def _whole(request: Request, max_bytes: int) -> bytearray:
    """All bytes of the body; its Content-Length, which RequestMiddleware has checked, is not trusted."""
    data, budget = bytearray(), body_budget_of(request)
    received, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk, more = message.get("body", b""), message.get("more_body", False)
        received += len(chunk)
        if received <= max_bytes:
            budget.take(request.scope, len(chunk))
            data += chunk
        elif received > LARGEST_DROPPED * max_bytes:
            raise BodyTooLargeError(max_bytes, unread=True)
        else:
            data.clear()
    if received > max_bytes:
        raise BodyTooLargeError(max_bytes, unread=False)
    return data


def _parsed_within(data: bytearray, schema: type[Body] | TypeAdapter[Body], limit: int) -> Body:
    """A large body, parsed only if it has at most ``limit`` lists and objects."""
    if data.count(b"[") + data.count(b"{") > limit:
        outside = _STRINGS.sub(b"", data)  # strings may hold any number of brackets
        count = outside.count(b"[") + outside.count(b"{")
        if count > limit:
            raise RequestError(f"The body has {count} lists and objects; this server reads {limit}: send it in parts")
    return _parsed(data, schema)


def _parsed(data: bytearray, schema: type[Body] | TypeAdapter[Body]) -> Body:
    try:
        if b"NaN" in data or b"Infinity" in data:  # most likely in a string; elsewhere they are not JSON
            from_json(bytes(data), allow_inf_nan=False)
        if isinstance(schema, TypeAdapter):
            return schema.validate_json(data)
        assert issubclass(schema, BaseModel)
        return schema.model_validate_json(data)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False, include_context=False)) from None
    except ValueError as error:  # of from_json
        message = f"1 validation error: body: Invalid JSON: {error} [type=json_invalid]"
        raise RequestError(message, type="Bad Request") from None
