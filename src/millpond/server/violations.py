"""Violations of a schema, in vLLM's format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from millpond.server.errors import RequestError, answer_error

# For every item of a list, a union can fail in as many ways as it has members.
_MAX_SHOWN = 8
_VALUE_LENGTH = 100


def violation(errors: Sequence[Any]) -> RequestError:
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


async def answer_violation(request: Request, error: Exception) -> JSONResponse:
    """The response to a validation error of FastAPI: in the query, or in a part of the path."""
    assert isinstance(error, RequestValidationError)
    return await answer_error(request, violation(error.errors()))


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
