"""Absent: ``null``, which many clients send for unset options, means the field's default."""

from __future__ import annotations

from typing import Any

from pydantic import BeforeValidator
from pydantic_core import PydanticUseDefault


def absent_if_null(kind: Any) -> BeforeValidator:
    """A validator for the ``Annotated`` type of a field of ``kind`` whose default is not null."""
    return BeforeValidator(_default, json_schema_input_type=kind | None)


def _default(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value
