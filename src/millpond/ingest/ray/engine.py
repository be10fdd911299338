"""ClusterEngine: the engines of a cluster's workers, as the one engine of a run."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from millpond.engine.input import resolve
from millpond.engine.input.model import LoadedModel
from millpond.ingest.ray.pool import WorkerPool
from millpond.tasks import Role, Task
from millpond.values.outputs import EmbeddingOutput, SparseEmbeddingOutput
from millpond.values.params import PoolingParams


class ClusterEngine:
    """Takes the place of an :class:`~millpond.Engine` in :func:`~millpond.ingest.ingest`."""

    def __init__(self, pool: WorkerPool, model: LoadedModel, *, cached: bool, sparse: bool = False) -> None:
        self.spec = model.spec
        self.tasks = model.spec.tasks
        self.cache = pool if cached else None  # as far as a run asks for it: what is not in it
        self._pool = pool
        self._model = model
        self._sparse = sparse

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
