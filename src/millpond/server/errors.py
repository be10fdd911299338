"""Errors on the wire: OpenAI's error object with vLLM's statuses and messages."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from millpond.errors import (
    DeviceLostError,
    EngineClosedError,
    EngineOverloadedError,
    IndexLockedError,
    InputTooLongError,
    InvalidDimensionsError,
    InvalidRequestError,
    MillpondError,
    UnknownModelError,
)

logger = logging.getLogger(__name__)

INTERNAL = "The server could not answer this request; its log says why."
# A message may quote input of any length.
_MAX_MESSAGE = 2000


class RequestError(MillpondError):
    """An error with its own HTTP status.

    Attributes:
        status: HTTP status.
        type: OpenAI's ``type``.
        headers: Sent with the response.
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
        self.headers = headers
        self._param = param

    @property
    def param(self) -> str | None:
        """The invalid field."""
        return self._param


class NotServedError(RequestError):
    """The route exists, but the model does not serve its task."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=501, type="NotImplementedError")


class BodyTooLargeError(RequestError):
    """The body has more bytes than the server reads.

    Args:
        max_bytes: The limit.
        unread: Whether some of it will not be read, so that the connection cannot be kept.
    """

    def __init__(self, max_bytes: int, *, unread: bool) -> None:
        super().__init__(
            f"The body has more than {max_bytes} bytes, which is the most that this server reads; send it in parts",
            status=413,
            type="Request Entity Too Large",
            headers={"Connection": "close"} if unread else None,
        )


class ClientGoneError(RequestError):
    """The client closed the connection; the status is nginx's and appears only in the log."""

    def __init__(self) -> None:
        super().__init__("The client closed the connection", status=499, type="ClientClosedRequest")


@dataclass(frozen=True, kw_only=True)
class _WireError:
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def _own_message(error: Any, request: Request) -> _WireError:
    """The error's own message, with the folder of a model replaced by the name that clients use."""
    message = str(error)
    for model in request.app.state.models:
        name = model.engine.spec.name
        if os.sep in name:
            message = message.replace(name, model.name)
    return _WireError(message=message)


def _too_long(error: Any, request: Request) -> _WireError:
    if error.tokens is None:  # a prompt or a template leaves no room: no single text is too long
        return _own_message(error, request)
    several_texts = getattr(request.state, "texts", 0) != 1
    return _WireError(
        message=(
            f"This model's maximum context length is {error.limit} tokens. However, your prompt contains "
            f"{'at least ' if error.at_least else ''}{error.tokens} input tokens, "
            "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
            + (f" It is the one at index {error.index}." if several_texts else "")
        ),
        param="input_tokens",
    )


def _dimensions(error: Any, request: Request) -> _WireError:
    name = getattr(request.state, "model", None)
    if error.native is None or name is None:
        return replace(_own_message(error, request), param="dimensions")
    return _WireError(message=dimensions_message(error, name), param="dimensions")


def dimensions_message(error: InvalidDimensionsError, name: str) -> str:
    """vLLM's message about a width that the vectors of the model ``name`` cannot be cut to."""
    if not error.trained:
        return (
            f"Model {name!r} does not support Matryoshka embeddings; dimensions must be unset "
            f"(received dimensions={error.dimensions}). A model known to be trained for it can be served with "
            "--hf-overrides '{\"is_matryoshka\": true}'."
        )
    if error.declared:
        return f"Model {name!r} only supports Matryoshka dimensions {list(error.declared)}, got {error.dimensions}."
    return (
        f"Model {name!r} only supports dimensions in range [{error.smallest}, {error.native}], got {error.dimensions}."
    )


def _overloaded(error: Any, _: Request) -> _WireError:
    return _WireError(message=str(error), headers={"Retry-After": str(max(1, math.ceil(error.retry_after)))})


def _closed(_error: Any, _: Request) -> _WireError:
    message = "The model was stopped; ask another server, or this one later"
    return _WireError(message=message, headers={"Retry-After": "1"})


def _locked(_error: Any, _: Request) -> _WireError:
    return _WireError(message="Another process writes the index; try again later", headers={"Retry-After": "5"})


def _unexpected(error: Any, request: Request) -> _WireError:
    logger.error("%s %r failed", request.method, request.url.path, exc_info=error)
    return _WireError(message=INTERNAL)


# Status, type and message of each error; the first row that fits counts.
_TABLE: tuple[tuple[type[Exception], int, str, Callable[[Any, Request], _WireError]], ...] = (
    (InputTooLongError, 400, "BadRequestError", _too_long),
    (InvalidDimensionsError, 400, "BadRequestError", _dimensions),
    (InvalidRequestError, 400, "BadRequestError", _own_message),
    (UnknownModelError, 404, "NotFoundError", _own_message),
    (EngineOverloadedError, 429, "TooManyRequestsError", _overloaded),
    (EngineClosedError, 503, "ServiceUnavailableError", _closed),
    (DeviceLostError, 503, "ServiceUnavailableError", _own_message),
    (IndexLockedError, 503, "ServiceUnavailableError", _locked),
    (Exception, 500, "InternalServerError", _unexpected),
)


def error_response(
    status: int, type: str, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """OpenAI's error object."""
    if len(message) > _MAX_MESSAGE:
        message = f"{message[:_MAX_MESSAGE]}…"
    message = message.encode("utf-8", "replace").decode()  # unpaired surrogates
    content: dict[str, Any] = {"error": {"message": message, "type": type, "param": param, "code": status}}
    return JSONResponse(content, status_code=status, headers=headers)


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """The response to a request that failed with ``error``; the message of an unexpected error is not shown."""
    if isinstance(error, RequestError):
        return error_response(error.status, error.type, str(error), param=error.param, headers=error.headers)
    if isinstance(error, HTTPException):  # from the router: unknown path or method
        phrase = HTTPStatus(error.status_code).phrase
        return error_response(error.status_code, phrase, str(error.detail), headers=error.headers)
    _, status, type, describe = next(row for row in _TABLE if isinstance(error, row[0]))
    wire = describe(error, request)
    return error_response(status, type, wire.message, param=wire.param, headers=wire.headers)


# For every item of a list, a union can fail in as many ways as it has members.
_MAX_SHOWN = 8
_VALUE_LENGTH = 100


def validation_error(errors: Sequence[Any]) -> RequestError:
    """The error for a body that does not match its schema: what is wrong, where, and the invalid value.

    Args:
        errors: pydantic's errors.
    """
    shown = "; ".join(_line(error) for error in errors[:_MAX_SHOWN])
    more = f"; and {len(errors) - _MAX_SHOWN} more" if len(errors) > _MAX_SHOWN else ""
    noun = "error" if len(errors) == 1 else "errors"
    return RequestError(
        f"{len(errors)} validation {noun}: {shown}{more}",
        type="Bad Request",
        param=_field(errors[0]["loc"]) or None,
    )


async def answer_validation_error(request: Request, error: Exception) -> JSONResponse:
    """The response to a validation error of FastAPI: in the query, or in a part of the path."""
    assert isinstance(error, RequestValidationError)
    return await answer_error(request, validation_error(error.errors()))


def _line(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "body"
    value = "" if error["type"] == "json_invalid" else f", input={_shown(error['input'])}"
    return f"{where[:_VALUE_LENGTH]}: {error['msg'][: 4 * _VALUE_LENGTH]} [type={error['type']}{value}]"


def _field(loc: tuple[int | str, ...]) -> str:
    """The invalid field: the first name of the path, without the union members after it."""
    return str(loc[0]) if loc and isinstance(loc[0], str) else ""


def _shown(value: Any) -> str:
    """The value, shortened; the contents of a large one are never read."""
    if isinstance(value, str):
        return repr(value if len(value) <= _VALUE_LENGTH else f"{value[:_VALUE_LENGTH]}…")
    if isinstance(value, list | dict):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return "a number that is not finite"
    if isinstance(value, int) and value.bit_length() > 256:
        return "an int of more than 256 bits"
    return repr(value)[:_VALUE_LENGTH]
