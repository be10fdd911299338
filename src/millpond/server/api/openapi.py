"""OpenAPI: descriptions of the routes that parse their bodies and write their responses themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, Field, TypeAdapter


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(description="What is wrong, the limit, and how to fix it.")
    type: str = Field(description="The type of error, with vLLM's name.")
    param: str | None = Field(default=None, description="The invalid field.")
    code: int = Field(description="The HTTP status.")


class ErrorAnswer(BaseModel):
    """The body of every error response."""

    error: ErrorDetail


class TextErrorAnswer(BaseModel):
    """The body of an error response to clients of Ollama and of Weaviate's containers."""

    error: str = Field(description="What is wrong, the limit, and how to fix it.")


# The key under which an operation carries its schemas until the document is assembled.
_SCHEMAS = "x-millpond-schemas"
_REF = "#/components/schemas/{model}"

_FAILURES = {
    400: "The request can never succeed as it is.",
    401: "No API key of this server came with the request.",
    404: "No model of that name is served here.",
    408: "The body took too long.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "The queue is full; `Retry-After` says for about how many seconds.",
    500: "The server is at fault.",
    501: "The model does not serve this route.",
    503: "The server is about to stop, or has lost its device.",
    504: "The answer took too long.",
}


def operation(
    schema: Any, *, answer: Any, binary: bool = False, failure: type[BaseModel] = ErrorAnswer
) -> dict[str, Any]:
    """The part of an operation that FastAPI cannot derive: pass it as a route's ``openapi_extra``."""
    schemas: dict[str, Any] = {}
    body = _reference(schema, "validation", schemas)
    shape = _reference(answer, "serialization", schemas)
    failed = {"application/json": {"schema": _reference(failure, "serialization", schemas)}}
    content: dict[str, Any] = {"application/json": {"schema": shape}}
    if binary:
        content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{str(status): {"description": meaning, "content": failed} for status, meaning in _FAILURES.items()},
        },
        _SCHEMAS: schemas,
    }


def describe(app: FastAPI, *, key_required: Callable[[str, str], bool]) -> Callable[[], dict[str, Any]]:
    """``app.openapi``: FastAPI's document with the schemas of every operation."""

    @cache
    def document() -> dict[str, Any]:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        components = document.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        for path, operations in document.get("paths", {}).items():
            for method, described in operations.items():
                for name, schema in described.pop(_SCHEMAS, {}).items():
                    if schemas.setdefault(name, schema) != schema:
                        raise ValueError(f"two schemas of {path} and another route are called {name}; rename one")
                if key_required(method.upper(), path):
                    described["security"] = [{"key": []}]
                    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return document

    return document


def _reference(kind: Any, mode: Literal["validation", "serialization"], schemas: dict[str, Any]) -> dict[str, Any]:
    """The schema of ``kind``; for a model a reference, with the schema itself added to ``schemas``."""
    shape = TypeAdapter(kind).json_schema(ref_template=_REF, mode=mode)
    schemas.update(shape.pop("$defs", {}))
    if isinstance(kind, type) and "title" in shape:
        schemas[kind.__name__] = shape
        return {"$ref": _REF.format(model=kind.__name__)}
    return shape
