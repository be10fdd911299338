"""WorkerPool: the workers of a run, each an actor that Ray restarts, and whose calls Ray makes again, if it dies."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from millpond.engine.input import resolve
from millpond.engine.input.model import LoadedModel
from millpond.errors import EngineClosedError, MillpondError
from millpond.ingest.ray.worker import Reply, Worker, WorkerSettings
from millpond.tasks import Role, Task
from millpond.values.outputs import EmbeddingOutput, SparseEmbeddingOutput
from millpond.values.params import PoolingParams

logger = logging.getLogger(__name__)

CALLS_PER_WORKER = 2  # one is embedded while another is written or on its way
# A text that kills every worker that embeds it is given up after so many of them.
_MAX_ATTEMPTS = 2
_CLOSE_SECONDS = 20.0


class WorkerDeathsError(MillpondError):
    """Every worker that got a call died."""


class WorkerPool:
    """Sends each call to a free worker, at most two to each; the others wait here.

    The workers start with the first call, so that a run with nothing to embed starts none. Calls may be repeated
    safely, since a write replaces rows with the same id.
    """

    def __init__(self, settings: WorkerSettings, *, workers: int, num_cpus: float, num_gpus: float) -> None:
        self.workers = workers
        self._settings = settings
        # One call beside those that embed and write, so that stop() is answered at once.
        self._actor_class = ray.remote(Worker).options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_concurrency=CALLS_PER_WORKER + 1,
            max_restarts=-1,
            max_task_retries=_MAX_ATTEMPTS - 1,
        )
        self._actors: list[Any] = []
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()  # an actor for each call that it may get
        self._calls = ThreadPoolExecutor(CALLS_PER_WORKER * workers, "millpond-workers")
        self._replies: dict[str, Reply] = {}  # the last one of each process that has been a worker
        self._error: BaseException | None = None

    @property
    def unwritten(self) -> int:
        """Vectors that the workers' caches could not store."""
        return sum(each.unwritten for each in list(self._replies.values()))

    @property
    def write_error(self) -> str | None:
        """Why not."""
        return next((each.write_error for each in list(self._replies.values()) if each.write_error), None)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of any worker; the future can be cancelled until a worker gets the call.

        It fails with the worker's error, also with one of loading the model.
        """
        if not self._actors:
            self._actors = [self._actor_class.remote(self._settings) for _ in range(self.workers)]
            for actor in self._actors:
                threading.Thread(target=self._load, args=[actor], name="millpond-load", daemon=True).start()
        return self._calls.submit(self._call, method, arguments)

    def stop(self) -> None:
        """Let no worker wait for a database that does not answer."""
        for actor in self._actors:
            actor.stop.remote()

    def close(self) -> None:
        """End the workers; calls that wait are cancelled."""
        self._calls.shutdown(wait=False, cancel_futures=True)
        self._fail(EngineClosedError("the workers were closed"))
        closing = [actor.close.remote() for actor in self._actors]
        with suppress(RayError):
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS) if closing else None
        for actor in self._actors:
            ray.kill(actor)

    def _load(self, actor: Any) -> None:
        """Wait until a worker has loaded the model, and give it calls."""
        loaded = actor.load.remote()
        try:
            ray.get(loaded)
        except RayActorError as error:
            self._fail(
                EngineClosedError(
                    f"{_MAX_ATTEMPTS} workers died while they loaded {self._settings.engine.model!r} "
                    f"({_reason(error)}); their machines may lack the memory: ask for fewer workers on each, by a "
                    "larger num_cpus or num_gpus"
                )
            )
        except BaseException as error:  # whatever it is, nobody may wait for ever
            self._fail(_cause(error))
        else:
            for _ in range(CALLS_PER_WORKER):
                self._free.put(actor)

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        actor = self._free.get()
        try:
            if self._error is not None:
                raise self._error
            reply: Reply = ray.get(getattr(actor, method).remote(*arguments))
        except RayActorError as error:
            reason = _reason(error)
            logger.warning("%d workers died (%s); Ray starts others in their place", _MAX_ATTEMPTS, reason)
            raise WorkerDeathsError(f"{_MAX_ATTEMPTS} workers died while they embedded it ({reason})") from error
        except RayTaskError as error:
            raise _cause(error) from None
        finally:
            self._free.put(actor)
        self._replies[reply.worker] = reply._replace(value=None)
        return reply.value

    def _fail(self, error: BaseException) -> None:
        """Nothing can be embedded any more: let every call that waits find the error."""
        self._error = self._error or error
        self._free.put(None)


def _cause(error: BaseException) -> BaseException:
    """The exception that a worker raised, without Ray's wall of text around it."""
    cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, BaseException) else error


def _reason(error: BaseException) -> str:
    """The telling line of Ray's message about a death."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "exit detail" in line.lower()), lines[0])[:200]


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
