"""SparseSource: the fields of an adapter that gives sparse vectors, and the engine's weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from langchain_millpond.source import EngineSource
from millpond.compat.fastembed_options import translate_sparse_options
from millpond.compat.role_prompts import PromptOptions, role_prompt

if TYPE_CHECKING:
    from millpond import Engine

Vector = TypeVar("Vector")
Weights = dict[int, float]  # {token id: weight}, without weights of 0

_ROWS_PER_TURN = 64  # vectors that are made in one turn of an event loop


class SparseSource(EngineSource):
    """The fields that the adapters over ``sparse_embed`` add to those of every adapter.

    Attributes:
        query_prompt: Prepended to every query instead of the checkpoint's query prompt; ``""`` for none; ``"auto"`` as
            in ``MillpondEmbeddings``.
        document_prompt: The same for documents.
        query_prompt_name: The name of one of the checkpoint's prompts, for queries.
        document_prompt_name: The same for documents.
        truncate: Which end of an over-long text is cut, or ``"error"``.
        show_progress: Draw a progress bar in ``embed_documents``, if standard error is a terminal, or in a notebook.
    """

    query_prompt: str | None = None
    document_prompt: str | None = None
    query_prompt_name: str | None = None
    document_prompt_name: str | None = None
    truncate: Literal["end", "start", "error"] = "end"
    show_progress: bool = False

    @classmethod
    def _translated(cls, options: dict[str, Any]) -> dict[str, Any]:
        return translate_sparse_options(options, own=cls._own_options())

    def _documents(self, texts: list[str], vector: Callable[[Weights], Vector]) -> list[Vector]:
        engine = self._engine()
        options = self._options(engine, "document")
        return [vector(row) for row in engine.encode(texts, **options, show_progress=self.show_progress)]

    def _query(self, text: str, vector: Callable[[Weights], Vector]) -> Vector:
        engine = self._engine()
        return vector(engine.encode([text], **self._options(engine, "query"))[0])

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

        rows: Sequence[Weights] = await AsyncEngine(engine).encode(texts, **self._options(engine, role))
        return rows

    def _options(self, engine: Engine, role: Literal["query", "document"]) -> dict[str, Any]:
        """The options of ``encode``, which takes a prompt for sparse vectors too."""
        from millpond import PoolingParams

        prompts = {
            "query": PromptOptions(text=self.query_prompt, name=self.query_prompt_name),
            "document": PromptOptions(text=self.document_prompt, name=self.document_prompt_name),
        }
        prompt = None if prompts[role] == PromptOptions() else role_prompt(engine.spec, role, prompts[role])
        return {"task": "sparse_embed", "params": PoolingParams(role=role, prompt=prompt, truncate=self.truncate)}
