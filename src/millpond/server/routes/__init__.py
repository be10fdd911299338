"""Routes: one module for each group of clients; a new module is added to the list below."""

from __future__ import annotations

from importlib import import_module

from fastapi import APIRouter

# In the order of the API documentation.
_MODULES = (
    "embeddings",
    "pooling",
    "classify",
    "tokenize",
    "score",
    "rerank",
    "indexes",
    "explain",
    "cohere",
    "tei",
    "predict",
    "root",
    "metrics",
    "page",
    "service",
)

ROUTERS: tuple[APIRouter, ...] = tuple(import_module(f"{__name__}.{name}").router for name in _MODULES)
