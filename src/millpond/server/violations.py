"""Violations of a schema, in vLLM's words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from millpond.server.errors import RequestError, answer_error

# A union can fail in as many ways as it has members for every item of a list.
_MOST = 8
_VALUE_LENGTH = 100


def violation(found: Sequence[Any]) -> RequestError:
    """The answer to a body of another shape: what is wrong, where, and the value that is.

    Args:
        found: pydantic's errors.
    """
    told = "; ".join(_one(each) for each in found[:_MOST])
    more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
    noun = "error" if len(found) == 1 else "errors"
    return RequestError(
        f"{len(found)} validation {noun}: {told}{more}",
        type="Bad Request",
        param=_field(found[0]["loc"]) or None,
    )


async def answer_violation(request: Request, error: Exception) -> JSONResponse:
    """The same of what FastAPI reads by itself: a query, or a part of a path."""
    assert isinstance(error, RequestValidationError)
    return await answer_error(request, violation(error.errors()))


def _one(found: Any) -> str:
    where = ".".join(str(part) for part in found["loc"]) or "body"
    value = "" if found["type"] == "json_invalid" else f", input={_shown(found['input'])}"
    return f"{where[:_VALUE_LENGTH]}: {found['msg'][: 4 * _VALUE_LENGTH]} [type={found['type']}{value}]"


def _field(loc: tuple[int | str, ...]) -> str:
    """The field at fault: the names in front, without the members of unions behind them."""
    return str(loc[0]) if loc and isinstance(loc[0], str) else ""


def _shown(value: Any) -> str:
    """The value in few characters; the insides of a large one are never walked."""
    if isinstance(value, str):
        return repr(value if len(value) <= _VALUE_LENGTH else f"{value[:_VALUE_LENGTH]}…")
    if isinstance(value, list | dict):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return "a number that is not finite"
    if isinstance(value, int) and value.bit_length() > 256:
        return "an int of more than 256 bits"
    return repr(value)[:_VALUE_LENGTH]
