"""What /openapi.json says of routes that read their bodies and write their answers by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from millpond.server.schemas.error import ErrorAnswer

# Where an operation carries the schemas that it refers to, until the document is put together.
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
    503: "The server is about to stop.",
    504: "The answer took too long.",
}


def operation(schema: Any, *, answer: Any, octets: bool, description: str) -> dict[str, Any]:
    """The part of an operation that FastAPI cannot know."""
    schemas: dict[str, Any] = {}
    body = _reference(schema, "validation", schemas)
    shape = {} if answer is None else _reference(answer, "serialization", schemas)
    failure = {"application/json": {"schema": _reference(ErrorAnswer, "serialization", schemas)}}
    content: dict[str, Any] = {"application/json": {"schema": shape}}
    if octets:
        content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {"description": description, "content": content},
            **{str(status): {"description": told, "content": failure} for status, told in _FAILURES.items()},
        },
        _SCHEMAS: schemas,
    }


def describe(app: FastAPI, *, guarded: Callable[[str, str], bool]) -> Callable[[], dict[str, Any]]:
    """``app.openapi``: FastAPI's document with every schema in its place.

    Args:
        app: The application.
        guarded: Whether a method of a path asks for an API key.
    """

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, guarded)
        return app.openapi_schema

    return document


def _document(app: FastAPI, guarded: Callable[[str, str], bool]) -> dict[str, Any]:
    found = get_openapi(
        title=app.title, version=app.version, summary=app.summary, description=app.description, routes=app.routes
    )
    components = found.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for path, operations in found.get("paths", {}).items():
        for method, told in operations.items():
            for name, schema in told.pop(_SCHEMAS, {}).items():
                if schemas.setdefault(name, schema) != schema:
                    raise ValueError(f"two schemas of {path} and another route are called {name}; rename one")
            if guarded(method.upper(), path):
                told["security"] = [{"key": []}]
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return found


def _reference(kind: Any, mode: Literal["validation", "serialization"], schemas: dict[str, Any]) -> dict[str, Any]:
    """The schema of ``kind``: a reference where it is a model, whose schema is put into ``schemas``."""
    shape = TypeAdapter(kind).json_schema(ref_template=_REF, mode=mode)
    schemas.update(shape.pop("$defs", {}))
    if isinstance(kind, type) and "title" in shape:
        schemas[kind.__name__] = shape
        return {"$ref": _REF.format(model=kind.__name__)}
    return shape
