"""Errors on the wire: OpenAI's error object with vLLM's statuses and messages.

Clients of Ollama and of Weaviate's containers read ``error`` as a text instead.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
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
    """An error with its own HTTP status."""

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
    """The body has more bytes than the server reads."""

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


# Status and type of each error; the first row that fits counts.
_TABLE: tuple[tuple[type[Exception], int, str], ...] = (
    (InvalidRequestError, 400, "BadRequestError"),
    (UnknownModelError, 404, "NotFoundError"),
    (EngineOverloadedError, 429, "TooManyRequestsError"),
    (EngineClosedError, 503, "ServiceUnavailableError"),
    (DeviceLostError, 503, "ServiceUnavailableError"),
    (IndexLockedError, 503, "ServiceUnavailableError"),
    (Exception, 500, "InternalServerError"),
)


def _described(error: Exception, request: Request) -> tuple[str, str | None, dict[str, str]]:
    """The message of an error of the table, the field that it is about, and the headers of its response."""
    name = getattr(request.state, "model", None)
    if isinstance(error, InputTooLongError) and error.tokens is not None:  # else a prompt or a template has no room
        several_texts = getattr(request.state, "texts", 0) != 1
        message = (
            f"This model's maximum context length is {error.limit} tokens. However, your prompt contains "
            f"{'at least ' if error.at_least else ''}{error.tokens} input tokens, "
            "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
        )
        return message + (f" It is the one at index {error.index}." if several_texts else ""), "input_tokens", {}
    if isinstance(error, InvalidDimensionsError) and error.native is not None and name is not None:
        return dimensions_message(error, name), "dimensions", {}
    if isinstance(error, EngineOverloadedError):
        return str(error), None, {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    if isinstance(error, EngineClosedError):
        return "The model was stopped; ask another server, or this one later", None, {"Retry-After": "1"}
    if isinstance(error, IndexLockedError):
        return "Another process writes the index; try again later", None, {"Retry-After": "5"}
    if not isinstance(error, InvalidRequestError | UnknownModelError | DeviceLostError):
        logger.error("%s %r failed", request.method, request.url.path, exc_info=error)
        return INTERNAL, None, {}
    message = str(error)
    for model in request.app.state.models:  # a folder is replaced by the name that clients use
        if os.sep in model.engine.spec.name:
            message = message.replace(model.engine.spec.name, model.name)
    return message, "dimensions" if isinstance(error, InvalidDimensionsError) else None, {}


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
    answer = _answer(request, error)
    if not getattr(request.state, "text_errors", False):
        return answer
    headers = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
    message = json.loads(bytes(answer.body))["error"]["message"]
    return JSONResponse({"error": message}, status_code=answer.status_code, headers=headers)


def _answer(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, RequestError):
        return error_response(error.status, error.type, str(error), param=error.param, headers=error.headers)
    if isinstance(error, HTTPException):  # from the router: unknown path or method
        phrase = HTTPStatus(error.status_code).phrase
        return error_response(error.status_code, phrase, str(error.detail), headers=error.headers)
    if isinstance(error, RequestValidationError):  # of the query, or of a part of the path
        return _answer(request, validation_error(error.errors()))
    status, type = next((status, type) for kind, status, type in _TABLE if isinstance(error, kind))
    message, param, headers = _described(error, request)
    return error_response(status, type, message, param=param, headers=headers)


# For every item of a list, a union can fail in as many ways as it has members.
_MAX_SHOWN = 8
_VALUE_LENGTH = 100


def validation_error(errors: Sequence[Any]) -> RequestError:
    """The error for a body that does not match its schema: what is wrong, where, and the invalid value."""
    lines = []
    for error in errors[:_MAX_SHOWN]:
        where = ".".join(str(part) for part in error["loc"]) or "body"
        value = "" if error["type"] == "json_invalid" else f", input={_shown(error['input'])}"
        lines.append(f"{where[:_VALUE_LENGTH]}: {error['msg'][: 4 * _VALUE_LENGTH]} [type={error['type']}{value}]")
    more = f"; and {len(errors) - _MAX_SHOWN} more" if len(errors) > _MAX_SHOWN else ""
    noun = "error" if len(errors) == 1 else "errors"
    first = next(iter(errors[0]["loc"]), None)  # the field, without the union members after it
    param = first if isinstance(first, str) and first else None
    return RequestError(f"{len(errors)} validation {noun}: {'; '.join(lines)}{more}", type="Bad Request", param=param)


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
