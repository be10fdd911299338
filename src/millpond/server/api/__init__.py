"""The routes, by the clients they are for; a new module is added to the list below."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from fastapi import APIRouter

from millpond.server.settings.config import Protocol

# In the order of the API documentation.
_MODULES = (
    "openai.embeddings",
    "openai.pooling",
    "openai.classify",
    "openai.tokenize",
    "openai.score",
    "openai.rerank",
    "indexes",
    "explain",
    "cohere",
    "tei.embed",
    "tei.predict",
    "ollama",
    "root",
    "service",
    "page.files",
)


def _routers(names: Sequence[str]) -> tuple[APIRouter, ...]:
    return tuple(import_module(f"{__name__}.{name}").router for name in names)


ROUTERS = _routers(_MODULES)
# By the server's protocol; Weaviate's containers share paths with the others, so that they have a server of their own.
ROUTERS_OF: dict[Protocol, tuple[APIRouter, ...]] = {"default": ROUTERS, "weaviate": _routers(("weaviate", "service"))}
