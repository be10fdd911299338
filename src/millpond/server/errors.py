"""Errors on the wire: OpenAI's error object, with vLLM's status and words."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from millpond.errors import (
    EngineClosedError,
    EngineOverloadedError,
    InputTooLongError,
    InvalidDimensionsError,
    InvalidRequestError,
    MillpondError,
    UnknownModelError,
)

logger = logging.getLogger(__name__)

INTERNAL = "The server could not answer this request; its log says why."
# A message may quote what it was sent, which may be of any length.
_LONGEST = 2000


class RequestError(MillpondError):
    """A request that is answered with an error of its own.

    Attributes:
        status: HTTP status.
        type: OpenAI's ``type``.
        param: Which field is at fault.
        headers: Sent with the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "BadRequestError",
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.headers = headers


class NotServedError(RequestError):
    """The route exists, and the model has no such task."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=501, type="NotImplementedError")


class ClientGoneError(RequestError):
    """Nobody waits for the answer; the status is nginx's, and seen in the log only."""

    def __init__(self) -> None:
        super().__init__("The client closed the connection", status=499, type="ClientClosedRequest")


@dataclass(frozen=True, kw_only=True)
class _Words:
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def _as_it_is(error: Any, request: Request) -> _Words:
    """The error's own words, a model's folder in them replaced by what clients call the model."""
    message = str(error)
    for model in request.app.state.models:
        name = model.engine.spec.name
        if os.sep in name:
            message = message.replace(name, model.name)
    return _Words(message=message)


def _too_long(error: Any, request: Request) -> _Words:
    if error.tokens is None:  # a prompt or a template leaves no room: no text is at fault
        return _as_it_is(error, request)
    several = getattr(request.state, "texts", 0) != 1
    return _Words(
        message=(
            f"This model's maximum context length is {error.limit} tokens. However, your prompt contains "
            f"{'at least ' if error.at_least else ''}{error.tokens} input tokens, "
            "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
            + (f" It is the one at index {error.index}." if several else "")
        ),
        param="input_tokens",
    )


def _dimensions(error: Any, request: Request) -> _Words:
    name = getattr(request.state, "model", None)
    if error.native is None or name is None:
        return replace(_as_it_is(error, request), param="dimensions")
    if not error.trained:
        told = (
            "does not support Matryoshka embeddings; dimensions must be unset "
            f"(received dimensions={error.dimensions})."
        )
    elif error.declared:
        told = f"only supports Matryoshka dimensions {list(error.declared)}, got {error.dimensions}."
    else:
        told = f"only supports dimensions in range [{error.smallest}, {error.native}], got {error.dimensions}."
    return _Words(message=f"Model {name!r} {told}", param="dimensions")


def _overloaded(error: Any, _: Request) -> _Words:
    return _Words(message=str(error), headers={"Retry-After": str(max(1, math.ceil(error.retry_after)))})


def _closed(_error: Any, _: Request) -> _Words:
    return _Words(message="The model was stopped; ask another server, or this one later", headers={"Retry-After": "1"})


def _unforeseen(error: Any, request: Request) -> _Words:
    logger.error("%s %r failed", request.method, request.url.path, exc_info=error)
    return _Words(message=INTERNAL)


# What is answered to which error: of several rows that fit, the first.
_TABLE: tuple[tuple[type[Exception], int, str, Callable[[Any, Request], _Words]], ...] = (
    (InputTooLongError, 400, "BadRequestError", _too_long),
    (InvalidDimensionsError, 400, "BadRequestError", _dimensions),
    (InvalidRequestError, 400, "BadRequestError", _as_it_is),
    (UnknownModelError, 404, "NotFoundError", _as_it_is),
    (EngineOverloadedError, 429, "TooManyRequestsError", _overloaded),
    (EngineClosedError, 503, "ServiceUnavailableError", _closed),
    (Exception, 500, "InternalServerError", _unforeseen),
)


def error_response(
    status: int, type: str, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """OpenAI's error object."""
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST]}…"
    message = message.encode("utf-8", "replace").decode()  # half a character, of a name that was no UTF-8
    content: dict[str, Any] = {"error": {"message": message, "type": type, "param": param, "code": status}}
    return JSONResponse(content, status_code=status, headers=headers)


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """What a request that failed with ``error`` is answered; nothing of an unforeseen one goes on the wire."""
    if isinstance(error, RequestError):
        return error_response(error.status, error.type, str(error), param=error.param, headers=error.headers)
    if isinstance(error, HTTPException):  # the router's: no such path, no such method
        phrase = HTTPStatus(error.status_code).phrase
        return error_response(error.status_code, phrase, str(error.detail), headers=error.headers)
    _, status, type, words = next(row for row in _TABLE if isinstance(error, row[0]))
    told = words(error, request)
    return error_response(status, type, told.message, param=told.param, headers=told.headers)
