"""AsyncEngine: the same calls for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from millpond.engine.engine import Engine
from millpond.engine.progress import progress_bar
from millpond.outputs import EmbeddingOutput, TokenEmbeddingOutput
from millpond.params import PoolingParams
from millpond.spec import ModelSpec
from millpond.tasks import OutputDtype, Role, Task, Truncate


class AsyncEngine:
    """Awaits an engine's futures; the loop never tokenizes, computes or reads the cache.

    Cancelling the awaiting task drops what is still queued. Several loops and threads may share one engine.

    Args:
        engine: The engine; closing this object leaves it open unless ``await aclose()`` is called.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def spec(self) -> ModelSpec:
        """What the checkpoint is."""
        return self.engine.spec

    @property
    def tasks(self) -> frozenset[Task]:
        """What the checkpoint serves."""
        return self.engine.tasks

    async def embed(
        self,
        texts: Sequence[str],
        *,
        role: Role | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        output_dtype: OutputDtype = "float32",
        truncate: Truncate = "end",
        show_progress: bool = False,
    ) -> EmbeddingOutput:
        """As :meth:`millpond.Engine.embed`."""
        params = PoolingParams(
            role=role,
            prompt=prompt,
            prompt_name=prompt_name,
            dimensions=dimensions,
            normalize=normalize,
            output_dtype=output_dtype,
            truncate=truncate,
        )
        output: EmbeddingOutput = await self._run("embed", texts, params, show_progress)
        return output

    async def token_embed(
        self,
        texts: Sequence[str],
        *,
        role: Role | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: Truncate = "end",
        show_progress: bool = False,
    ) -> TokenEmbeddingOutput:
        """As :meth:`millpond.Engine.token_embed`."""
        params = PoolingParams(
            role=role,
            prompt=prompt,
            prompt_name=prompt_name,
            dimensions=dimensions,
            normalize=normalize,
            truncate=truncate,
        )
        output: TokenEmbeddingOutput = await self._run("token_embed", texts, params, show_progress)
        return output

    async def submit(self, task: Task, inputs: Sequence[str], params: PoolingParams | None = None) -> Any:
        """As :meth:`millpond.Engine.submit`, awaited: the task's output."""
        return await asyncio.wrap_future(self.engine.submit(task, inputs, params))

    async def _run(self, task: Task, texts: Sequence[str], params: PoolingParams, show_progress: bool) -> Any:
        with progress_bar(texts, show=show_progress) as bar:
            progress = bar.update if show_progress else None
            return await asyncio.wrap_future(self.engine._start(task, texts, params, progress=progress))

    async def aclose(self) -> None:
        """Close the engine; the loop goes on while it drains."""
        await asyncio.to_thread(self.engine.close)
