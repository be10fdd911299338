"""Engine: a checkpoint, loaded once, answering many callers."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, islice
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy.typing as npt
from tqdm import tqdm

from millpond.cache import VectorCache
from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.config import EngineConfig
from millpond.engine import demand
from millpond.engine.call import Call
from millpond.engine.intake import INLINE_TEXTS, Intake, cache_namespace
from millpond.engine.runner import Runner
from millpond.engine.scheduler import Scheduler
from millpond.engine.tokenize import TextTokenizer
from millpond.engine.worker import Worker
from millpond.errors import CacheError, EngineClosedError, EngineOverloadedError, InvalidRequestError
from millpond.models.architectures import find
from millpond.models.load import load_backbone
from millpond.models.placement import resolve_device, resolve_dtype
from millpond.models.specify import Options, complete, specify
from millpond.outputs import EmbeddingOutput, TokenEmbeddingOutput
from millpond.params import PoolingParams
from millpond.pooling.pooler import Pooler
from millpond.spec import ModelSpec
from millpond.tasks import OutputDtype, Role, Task, Truncate

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Tokens per batch: on a CPU what keeps a layer's activations in the cache, on a GPU what fills it.
_CPU_BATCH_TOKENS = 2048
_GPU_BATCH_TOKENS = 32768
_ITER_WINDOW = 1024
_ITER_CALLS = 3


class Engine:
    """A pooling engine over one checkpoint; thread-safe, and callers that come together share batches.

    Args:
        model: Hub id or local folder.
        revision: Branch, tag or commit of a hub id.
        device: ``auto`` (cuda, then mps, then cpu) or a torch device.
        dtype: ``auto``, ``float32``, ``float16`` or ``bfloat16``. ``auto`` is half precision on a GPU, bfloat16 on a
            CPU that has it in hardware, else float32. Pooling and heads are float32 always.
        max_length: Most tokens per text, special tokens and prompt included; the checkpoint's own by default.
        pooling: Replaces the checkpoint's pooling: ``cls``, ``mean``, ``max``, ``mean_sqrt_len``, ``weightedmean``,
            ``lasttoken``, or several joined by ``+``.
        normalize: Replaces the checkpoint's normalization.
        convert: ``auto`` or ``embed``: a language model or a bare backbone becomes an embedder.
        hf_overrides: Merged into config.json, for example ``{"is_matryoshka": True}``.
        quantization: Not available in this version.
        max_batch_tokens: Most tokens per forward.
        max_queue: Most texts waiting; a call that finds more is refused (a call alone may be of any size).
        cache: A path or a :class:`~millpond.VectorCache`; vectors are read from it and committed to it.
        compile: Not available in this version.
        trust_remote_code: Never needed, and refused.
        score_template: Not available in this version.

    Raises:
        ModelLoadError: The checkpoint cannot be found, read or run; see its subclasses.
        InvalidRequestError: An option that makes no sense.
        CacheError: The cache file cannot be used.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        max_length: int | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        convert: str = "auto",
        hf_overrides: Mapping[str, Any] | None = None,
        quantization: str | None = None,
        max_batch_tokens: int | None = None,
        max_queue: int = 1 << 18,
        cache: str | os.PathLike[str] | VectorCache | None = None,
        compile: bool = False,
        trust_remote_code: bool = False,
        score_template: str | None = None,
    ) -> None:
        self.config = EngineConfig(
            model=os.fspath(model) if isinstance(model, os.PathLike) else model,
            revision=revision,
            device=device,
            dtype=dtype,
            max_length=max_length,
            pooling=pooling,
            normalize=normalize,
            convert=convert,
            hf_overrides=hf_overrides,
            quantization=quantization,
            max_batch_tokens=max_batch_tokens,
            max_queue=max_queue,
            compile=compile,
            trust_remote_code=trust_remote_code,
            score_template=score_template,
        )
        checkpoint = read_checkpoint(self.config.model, revision=revision, hf_overrides=hf_overrides)
        architecture = find(checkpoint.config, checkpoint.source.name)
        place = resolve_device(device)
        precision = resolve_dtype(dtype, place, architecture, _stored_dtype(checkpoint.config))
        options = Options(max_length=max_length, pooling=pooling, normalize=normalize, hf_overrides=hf_overrides)
        layout = complete(checkpoint, architecture, options)
        assert layout.pooling is not None
        tokenizer = TextTokenizer.load(layout.transformer, lower=layout.do_lower_case)
        self._spec = specify(checkpoint, architecture, layout, options, tokenizer_limit=tokenizer.limit)
        backbone = load_backbone(checkpoint, architecture, device=place, dtype=precision)
        pooler = Pooler(layout.pooling, token_heads=layout.token_heads, heads=layout.heads, device=place)
        offset = architecture.position_offset(checkpoint.config)
        runner = Runner(backbone, pooler, architecture=architecture, device=place, offset=offset)

        self.device = str(place)
        self.dtype = str(precision).removeprefix("torch.")
        self._include_prompt = layout.pooling.include_prompt
        self._tokenizer = tokenizer
        self._owns_cache = cache is not None and not isinstance(cache, VectorCache)
        self._cache = cache if cache is None or isinstance(cache, VectorCache) else VectorCache(cache)
        budget = max_batch_tokens or (_CPU_BATCH_TOKENS if place.type == "cpu" else _GPU_BATCH_TOKENS)
        self._scheduler = Scheduler(budget)
        self._threads = ThreadPoolExecutor(_intake_threads(), thread_name_prefix="millpond-intake")
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="millpond-commit")
        self._intake = Intake(
            scheduler=self._scheduler,
            tokenizer=tokenizer,
            threads=self._threads,
            cache=self._cache,
            namespace=self._namespace,
        )
        self._gate = threading.Condition()
        self._waiting: dict[Call, int] = {}  # calls under way, with their texts
        self._closed = False
        self._pid = os.getpid()
        self._pace = _Pace()
        self._worker = Worker(self._scheduler, runner, name=self.device)
        self._worker.start()
        # Without a reference to the engine: it stops its threads when it is collected, or when the program ends.
        self._stop = weakref.finalize(
            self, _stop, self._scheduler, self._worker, self._threads, self._committer, self._pid
        )

    @property
    def spec(self) -> ModelSpec:
        """What the checkpoint is."""
        return self._spec

    @property
    def tasks(self) -> frozenset[Task]:
        """What the checkpoint serves."""
        return self._spec.tasks

    @property
    def cache(self) -> VectorCache | None:
        """The vector cache, if the engine has one."""
        return self._cache

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def embed(
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
        """One vector per text.

        Args:
            texts: A list of texts; duplicates are computed once.
            role: ``"query"`` or ``"document"`` applies the checkpoint's prompt for it, if it has one.
            prompt: Put before every text instead; ``""`` switches the default prompt off.
            prompt_name: One of ``spec.prompts`` instead.
            dimensions: Matryoshka width; the vector is cut, then normalized.
            normalize: L2-normalize; by default as the checkpoint does.
            output_dtype: ``float32``, ``float16``, ``int8``, ``uint8``, ``binary`` or ``ubinary``.
            truncate: ``"end"`` or ``"start"`` of an over-long text is cut; ``"error"`` refuses it.
            show_progress: Draw a progress bar, if this is a terminal.

        Returns:
            ``embeddings [n, d]`` in the order of the texts, with ``cached``, ``truncated`` and ``usage``.

        Raises:
            TypeError: ``texts`` is a bare str.
            InvalidRequestError: A text or an option that cannot be served; nothing was queued.
            EngineOverloadedError: Too many texts are waiting.
            EngineClosedError: The engine was closed.
        """
        params = PoolingParams(
            role=role,
            prompt=prompt,
            prompt_name=prompt_name,
            dimensions=dimensions,
            normalize=normalize,
            output_dtype=output_dtype,
            truncate=truncate,
        )
        output: EmbeddingOutput = self._run("embed", texts, params, show_progress)
        return output

    def embed_iter(
        self,
        texts: Iterable[str],
        *,
        role: Role | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        output_dtype: OutputDtype = "float32",
        truncate: Truncate = "end",
        show_progress: bool = False,
    ) -> Iterator[npt.NDArray[Any]]:
        """One ``[d]`` vector per text, in order, from an iterable of any length in bounded memory.

        At most a few thousand texts are read ahead of the vector handed out. Arguments and errors as :meth:`embed`;
        ``int8`` and ``uint8`` are refused, since their range is found over a whole call.
        """
        params = PoolingParams(
            role=role,
            prompt=prompt,
            prompt_name=prompt_name,
            dimensions=dimensions,
            normalize=normalize,
            output_dtype=output_dtype,
            truncate=truncate,
        )
        if isinstance(texts, str | bytes):
            raise TypeError("embed_iter takes an iterable of texts, not a str; write embed_iter([text])")
        if output_dtype in ("int8", "uint8"):
            raise InvalidRequestError(
                f"output_dtype={output_dtype!r} finds its range over a whole call, which a stream does not have; "
                "choose float16 or binary, or call embed"
            )
        demand.plan("embed", params, self._spec, texts=2)
        return self._stream(iter(texts), params, show_progress)

    def token_embed(
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
        """One matrix per text: a row for each token, special tokens and prompt included.

        Arguments and errors as :meth:`embed`. ``normalize=None`` follows the checkpoint's habit for its vectors.

        Returns:
            ``embeddings``, a :class:`~millpond.ragged.Ragged` of n ``[tokens_i, d]`` matrices.
        """
        params = PoolingParams(
            role=role,
            prompt=prompt,
            prompt_name=prompt_name,
            dimensions=dimensions,
            normalize=normalize,
            truncate=truncate,
        )
        output: TokenEmbeddingOutput = self._run("token_embed", texts, params, show_progress)
        return output

    def submit(self, task: Task, inputs: Sequence[str], params: PoolingParams | None = None) -> Future[Any]:
        """Queue a call; what every other method uses.

        Returns:
            A future of the task's output. Cancelling it drops what is still queued.

        Raises:
            TypeError: ``inputs`` is a bare str.
            InvalidRequestError: A text or an option that cannot be served; nothing was queued.
            EngineOverloadedError: Too many texts are waiting.
            EngineClosedError: The engine was closed.
        """
        return self._submit(task, inputs, params or PoolingParams(), inline=False, progress=None)

    def close(self) -> None:
        """Finish what is queued, then stop; later calls raise :class:`~millpond.errors.EngineClosedError`."""
        with self._gate:
            self._closed = True
            self._gate.wait_for(lambda: not self._waiting)
        self._stop()
        if self._owns_cache and self._cache is not None:
            self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Engine({self._spec.name!r}, device={self.device!r}, dtype={self.dtype!r})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "an Engine cannot be pickled (it holds a loaded model); pass the model's name and load it there"
        )

    def _run(self, task: Task, texts: Sequence[str], params: PoolingParams, show_progress: bool) -> Any:
        with _bar(texts, show_progress) as bar:
            inline = isinstance(texts, Sequence) and len(texts) <= INLINE_TEXTS
            future = self._submit(task, texts, params, inline=inline, progress=bar.update if show_progress else None)
            try:
                return future.result()
            except BaseException:
                future.cancel()  # the caller was interrupted: nobody waits for the rest
                raise

    def _submit(
        self,
        task: Task,
        inputs: Sequence[str],
        params: PoolingParams,
        *,
        inline: bool,
        progress: Callable[[int], object] | None,
    ) -> Future[Any]:
        task = demand.check_task(task, self._spec)
        texts = demand.check_texts(inputs, task)
        plan = demand.plan(task, params, self._spec, texts=len(texts))
        if not self._include_prompt and plan.prompt:
            plan = replace(plan, skip=self._tokenizer.prompt_length(plan.prompt))
        caches = self._cache is not None and task == "embed"
        call = Call(
            texts,
            plan,
            native_width=self._spec.dimensions if task == "embed" else self._spec.hidden_size,
            commit=self._commit if caches else None,
            progress=progress,
            refill=self._intake.refill,
        )
        self._admit(call)
        self._intake.admit(call, inline=inline, caches=caches)
        return call.future

    def _admit(self, call: Call) -> None:
        if os.getpid() != self._pid:
            raise EngineClosedError(
                "this engine was loaded in another process and does not survive a fork; load it after forking, "
                'or start workers with the "spawn" method'
            )
        with self._gate:
            if self._closed:
                raise EngineClosedError("the engine was closed; make a new one")
            waiting = sum(self._waiting.values())
            if waiting and waiting + call.size > self.config.max_queue:
                wait = self._pace.seconds(waiting)
                raise EngineOverloadedError(
                    f"{waiting} texts are waiting and {call.size} more would pass max_queue={self.config.max_queue}; "
                    f"retry in about {wait:.1f} s, or raise max_queue",
                    retry_after=wait,
                )
            self._waiting[call] = call.size
        call.future.add_done_callback(lambda _: self._release(call))

    def _release(self, call: Call) -> None:
        self._intake.drop(call)
        self._pace.count(call.size)
        with self._gate:
            self._waiting.pop(call, None)
            self._gate.notify_all()

    def _namespace(self, call: Call) -> str:
        return cache_namespace(self._spec.fingerprint, self.dtype, call)

    def _commit(self, call: Call, slots: list[int], last: bool) -> None:
        self._committer.submit(self._write, call, slots, last)

    def _write(self, call: Call, slots: list[int], last: bool) -> None:
        """Commit a group of vectors; the call ends with its last group, so what was returned was committed."""
        assert self._cache is not None
        try:
            keys = self._cache.keys(self._namespace(call), [call.texts[slot] for slot in slots])
            self._cache.put(keys, call.rows[slots], tokens=call.tokens[slots], truncated=call.truncated[slots])
        except CacheError as error:
            # The vectors are right all the same; losing them because the disk is full would be worse.
            logger.error("%d vectors could not be cached: %s", len(slots), error)
        except Exception as error:
            return call.fail(error)
        if last:
            call.finish()

    def _stream(self, texts: Iterator[str], params: PoolingParams, show_progress: bool) -> Iterator[npt.NDArray[Any]]:
        ahead: deque[Future[EmbeddingOutput]] = deque()
        try:
            with tqdm(unit=" texts", disable=None if show_progress else True) as bar:
                windows = iter(lambda: list(islice(texts, _ITER_WINDOW)), [])
                for window in windows:
                    ahead.append(self._submit("embed", window, params, inline=False, progress=None))
                    if len(ahead) >= _ITER_CALLS:
                        yield from _rows(ahead.popleft().result(), bar)
                while ahead:
                    yield from _rows(ahead.popleft().result(), bar)
        finally:
            for future in chain(ahead):
                future.cancel()


class _Pace:
    """How fast texts get done, for the advice in an overload error."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._texts = 0

    def count(self, texts: int) -> None:
        self._texts += texts

    def seconds(self, texts: int) -> float:
        """Time that ``texts`` will take, between 0.1 and 60 seconds."""
        elapsed = max(time.monotonic() - self._started, 1e-3)
        return min(60.0, max(0.1, texts * elapsed / max(self._texts, 1)))


def _rows(output: EmbeddingOutput, bar: tqdm[Any]) -> Iterator[npt.NDArray[Any]]:
    for row in output.embeddings:
        yield row
        bar.update()


def _bar(texts: Sequence[str], show: bool) -> tqdm[Any]:
    total = len(texts) if isinstance(texts, Sequence) else None
    # disable=None hides the bar where nobody would see it draw: no terminal.
    return tqdm(total=total, unit=" texts", disable=None if show else True)


def _stored_dtype(config: Mapping[str, Any]) -> str | None:
    stored = config.get("dtype") or config.get("torch_dtype")
    return None if stored is None else str(stored).removeprefix("torch.")


def _intake_threads() -> int:
    return max(1, min(4, (os.cpu_count() or 2) // 2))


def _stop(
    scheduler: Scheduler, worker: Worker, threads: ThreadPoolExecutor, committer: ThreadPoolExecutor, pid: int
) -> None:
    if os.getpid() != pid:
        return  # a fork has none of these threads
    scheduler.close()
    worker.join()
    threads.shutdown()
    committer.shutdown()
