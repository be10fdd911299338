"""Engine: a checkpoint, loaded once, answering many callers."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt
from tqdm import tqdm

from millpond.cache import VectorCache
from millpond.config import EngineConfig
from millpond.engine import demand
from millpond.engine.dispatch import Dispatcher
from millpond.engine.intake import INLINE_TEXTS
from millpond.engine.loading import load
from millpond.engine.progress import progress_bar
from millpond.errors import InvalidRequestError
from millpond.outputs import EmbeddingOutput, TokenEmbeddingOutput
from millpond.params import PoolingParams
from millpond.spec import ModelSpec
from millpond.tasks import OutputDtype, Role, Task, Truncate

# Tokens per batch: on a CPU what keeps a layer's activations in the cache, on a GPU what fills it.
_CPU_BATCH_TOKENS = 4096
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
        self._loaded = load(self.config)
        self.dtype = self._loaded.dtype
        self.device = str(self._loaded.runner.device)
        self._owns_cache = cache is not None and not isinstance(cache, VectorCache)
        self._cache = cache if cache is None or isinstance(cache, VectorCache) else VectorCache(cache)
        default = _CPU_BATCH_TOKENS if self._loaded.runner.device.type == "cpu" else _GPU_BATCH_TOKENS
        self._dispatcher = Dispatcher(
            self._loaded, budget=max_batch_tokens or default, max_queue=max_queue, cache=self._cache
        )
        # Holds the dispatcher, not the engine: its threads stop when the engine is dropped, or the program ends.
        self._finalizer = weakref.finalize(self, self._dispatcher.stop)

    @property
    def spec(self) -> ModelSpec:
        """What the checkpoint is."""
        return self._loaded.spec

    @property
    def tasks(self) -> frozenset[Task]:
        """What the checkpoint serves."""
        return self._loaded.spec.tasks

    @property
    def cache(self) -> VectorCache | None:
        """The vector cache, if the engine has one."""
        return self._cache

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._dispatcher.closed

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
        demand.plan("embed", params, self.spec, texts=2)
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
        return self._start(task, inputs, params or PoolingParams())

    def close(self) -> None:
        """Finish what is queued, then stop; later calls raise :class:`~millpond.errors.EngineClosedError`."""
        self._dispatcher.close()
        if self._owns_cache and self._cache is not None:
            self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Engine({self._loaded.spec.name!r}, device={self.device!r}, dtype={self.dtype!r})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "an Engine cannot be pickled (it holds a loaded model); pass the model's name and load it there"
        )

    def _run(self, task: Task, texts: Sequence[str], params: PoolingParams, show_progress: bool) -> Any:
        with progress_bar(texts, show=show_progress) as bar:
            inline = isinstance(texts, Sequence) and len(texts) <= INLINE_TEXTS
            future = self._start(task, texts, params, inline=inline, progress=bar.update if show_progress else None)
            try:
                return future.result()
            except BaseException:
                future.cancel()  # the caller was interrupted: nobody waits for the rest
                raise

    def _start(
        self,
        task: Task,
        inputs: Sequence[str],
        params: PoolingParams,
        *,
        inline: bool = False,
        progress: Callable[[int], object] | None = None,
    ) -> Future[Any]:
        """Check everything, then queue."""
        task = demand.check_task(task, self.spec)
        texts = demand.check_texts(inputs, task)
        plan = demand.plan(task, params, self.spec, texts=len(texts))
        if plan.prompt and not self._loaded.include_prompt:
            plan = replace(plan, skip=self._loaded.tokenizer.prompt_length(plan.prompt))
        return self._dispatcher.submit(texts, plan, inline=inline, progress=progress, owner=self)

    def _stream(self, texts: Iterator[str], params: PoolingParams, show_progress: bool) -> Iterator[npt.NDArray[Any]]:
        ahead: deque[Future[EmbeddingOutput]] = deque()
        try:
            with progress_bar(texts, show=show_progress) as bar:
                while window := list(islice(texts, _ITER_WINDOW)):
                    ahead.append(self._start("embed", window, params))
                    if len(ahead) == _ITER_CALLS:
                        yield from _rows(ahead.popleft().result(), bar)
                while ahead:
                    yield from _rows(ahead.popleft().result(), bar)
        finally:
            for future in ahead:
                future.cancel()


def _rows(output: EmbeddingOutput, bar: tqdm[Any]) -> Iterator[npt.NDArray[Any]]:
    for row in output.embeddings:
        yield row
        bar.update()
