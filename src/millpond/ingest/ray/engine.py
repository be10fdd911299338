"""ClusterEngine: the engines of a cluster's workers, as the one engine of a run."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from millpond.engine.input import resolve
from millpond.engine.input.model import LoadedModel
from millpond.ingest.pipeline.run import IngestRun, RunParts
from millpond.ingest.ray.pool import CALLS_PER_WORKER, WorkerPool
from millpond.ingest.ray.run import ClusterRun
from millpond.outputs import EmbeddingOutput, SparseEmbeddingOutput
from millpond.params import PoolingParams
from millpond.tasks import Role, Task


class ClusterEngine:
    """Takes the place of an :class:`~millpond.Engine` in :func:`~millpond.ingest.ingest`.

    Args:
        pool: The workers.
        model: The model, as its files describe it.
        cached: Whether the workers have a cache.
        writes: Whether the workers write to the database.
        sparse: Whether the calls are for the workers' second engine.
    """

    def __init__(
        self, pool: WorkerPool, model: LoadedModel, *, cached: bool, writes: bool = False, sparse: bool = False
    ) -> None:
        self.spec = model.spec
        self.tasks = model.spec.tasks
        self.calls_ahead = CALLS_PER_WORKER * pool.workers
        self.cache = WorkerCaches(pool) if cached else None
        self._pool = pool
        self._model = model
        self._writes = writes
        self._sparse = sparse

    def make_run(self, parts: RunParts) -> IngestRun:
        """The run: one whose workers write, or one whose driver does."""
        return ClusterRun(parts, self._pool) if self._writes else IngestRun(parts)

    def submit(
        self, task: Task, texts: Sequence[str], params: PoolingParams
    ) -> Future[EmbeddingOutput | SparseEmbeddingOutput]:
        """Send an engine call to a worker."""
        return self._pool.call("embed", self._sparse, task, list(texts), params)

    def count_tokens(self, texts: Sequence[str], *, role: Role | None = None) -> list[int]:
        """The tokens of texts, counted by the driver: see :meth:`millpond.Engine.count_tokens`."""
        prompt = resolve.plan("embed", PoolingParams(role=role), self._model, count=2).prompt
        tokenizer = self._model.encoder.texts
        return [len(ids) for ids in tokenizer.ids([prompt + text for text in texts], special_tokens=True)]


class WorkerCaches:
    """The vector caches of the workers, as far as a run asks for them."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    @property
    def unwritten(self) -> int:
        """Vectors that could not be stored."""
        return self._pool.losses.unwritten

    @property
    def write_error(self) -> str | None:
        """Why not."""
        return self._pool.losses.error
