"""SparseSource: the fields of an adapter that gives sparse vectors, and the engine's weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from langchain_millpond.source import EngineSource

Vector = TypeVar("Vector")
Weights = dict[int, float]  # {token id: weight}, without weights of 0

_ROWS_PER_TURN = 64  # vectors that are made in one turn of an event loop


class SparseSource(EngineSource):
    """The fields that the adapters over ``sparse_embed`` add to those of every adapter.

    Attributes:
        query_prompt: Prepended to every query instead of the checkpoint's query prompt; ``""`` for none.
        document_prompt: Prepended to every document instead of the checkpoint's document prompt; ``""`` for none.
        truncate: Which end of an over-long text is cut, or ``"error"``.
        show_progress: Draw a progress bar in ``embed_documents``, if standard error is a terminal, or in a notebook.
    """

    query_prompt: str | None = None
    document_prompt: str | None = None
    truncate: Literal["end", "start", "error"] = "end"
    show_progress: bool = False

    def _documents(self, texts: list[str], vector: Callable[[Weights], Vector]) -> list[Vector]:
        options = self._options("document")
        return [vector(row) for row in self._engine().encode(texts, **options, show_progress=self.show_progress)]

    def _query(self, text: str, vector: Callable[[Weights], Vector]) -> Vector:
        return vector(self._engine().encode([text], **self._options("query"))[0])

    async def _adocuments(self, texts: list[str], vector: Callable[[Weights], Vector]) -> list[Vector]:
        rows = await self._arows(texts, "document")
        vectors: list[Vector] = []
        for start in range(0, len(rows), _ROWS_PER_TURN):
            if start:
                await asyncio.sleep(0)
            vectors += map(vector, rows[start : start + _ROWS_PER_TURN])
        return vectors

    async def _aquery(self, text: str, vector: Callable[[Weights], Vector]) -> Vector:
        return vector((await self._arows([text], "query"))[0])

    async def _arows(self, texts: list[str], role: Literal["query", "document"]) -> Sequence[Weights]:
        engine = await self._aengine()
        from millpond import AsyncEngine  # imports torch, which loading has imported already

        rows: Sequence[Weights] = await AsyncEngine(engine).encode(texts, **self._options(role))
        return rows

    def _options(self, role: Literal["query", "document"]) -> dict[str, Any]:
        """The options of ``encode``, which takes a prompt for sparse vectors too."""
        from millpond import PoolingParams

        prompt = self.query_prompt if role == "query" else self.document_prompt
        return {"task": "sparse_embed", "params": PoolingParams(role=role, prompt=prompt, truncate=self.truncate)}
