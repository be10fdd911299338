"""The routes, by the clients they are for; a new module is added to the list below."""

from __future__ import annotations

from importlib import import_module

from fastapi import APIRouter

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
    "root",
    "service",
    "page.files",
)

ROUTERS: tuple[APIRouter, ...] = tuple(import_module(f"{__name__}.{name}").router for name in _MODULES)
