"""Engine: a checkpoint, loaded once, answering many callers."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy.typing as npt

from millpond.engine import timed_rerank
from millpond.engine.composite.timed_ranking import TimeBudget
from millpond.engine.dispatcher import Dispatcher
from millpond.engine.execute.interrupts import is_interrupt
from millpond.engine.input import resolve, validate
from millpond.engine.input.oversize import split_by_size
from millpond.engine.input.token_spans import token_spans
from millpond.engine.schedule.call import CallOptions
from millpond.engine.schedule.counters import Observer
from millpond.engine.schedule.timing import CallFuture
from millpond.engine.submission import Submission
from millpond.engine.task_methods import EmbedOptions, TaskMethods
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.errors import DeviceLostError, InvalidRequestError
from millpond.support.fork import loading
from millpond.tasks import Activation, Role, ScoreMethod, Task, Truncate
from millpond.values.config import EngineConfig
from millpond.values.inputs import Item, Pair
from millpond.values.outputs import TokenSpans
from millpond.values.params import PoolingParams
from millpond.values.replacements import names_replacements
from millpond.values.spec import ModelSpec
from millpond.values.stats import EngineStats

if TYPE_CHECKING:
    from millpond.cache.vector_cache import VectorCache

# Tokens per batch: on a CPU, a layer's activations stay in the cache; on a GPU, the batch fills the device.
_CPU_BATCH_TOKENS = 4096
_GPU_BATCH_TOKENS = 32768


@names_replacements
class Engine(TaskMethods):
    """A pooling engine over one checkpoint; thread-safe, and concurrent callers share batches.

    Besides what a method names, every call raises TypeError for a bare str in place of a list, and of
    :mod:`millpond.errors` InvalidRequestError for a text or an option that cannot be served, UnsupportedTaskError for
    a task that the checkpoint does not serve, EngineOverloadedError if too many texts are waiting, EngineClosedError
    after :meth:`close` and in a forked process, and DeviceLostError once no device is left. Nothing was queued then.

    Args:
        model: Hub id or local folder; a name without an owner is looked up under ``sentence-transformers`` and
            ``cross-encoder``.
        revision: Branch, tag or commit of a hub id.
        device: ``auto`` (cuda, then mps, then cpu), a torch device, or several devices of one kind
            (``["cuda:0", "cuda:1"]``): each gets a replica of the model, and all take batches from one queue.
        backend: ``auto``, ``native`` (compiled kernels, without torch) or ``torch`` (the reference, and GPUs). ``auto``
            is native on a CPU where it can run; ``millpond models MODEL`` says which, and why.
        dtype: ``auto``, ``float32``, ``float16`` or ``bfloat16``. ``auto`` is half precision on a GPU, bfloat16 on a
            CPU with bfloat16 hardware, else float32. Pooling and heads always run in float32.
        max_length: Most tokens per text, special tokens and prompt included; the checkpoint's own by default.
        pooling: Replaces the checkpoint's pooling: ``cls``, ``mean``, ``max``, ``mean_sqrt_len``, ``weightedmean``,
            ``lasttoken``, or several joined by ``+``.
        normalize: Replaces the checkpoint's normalization.
        activation: Replaces the activation of the checkpoint's logits: ``identity``, ``sigmoid`` or ``softmax``.
        convert: ``embed`` turns a language model or a classifier into an embedder; ``classify`` turns a language model
            or a backbone with a head into a classifier; ``auto`` follows the checkpoint's architecture.
        hf_overrides: Merged into config.json, for example ``{"is_matryoshka": True}``.
        quantization: ``int8``, ``int8-all`` or ``fp8`` keeps the weights of linear layers in eight bits and quantizes
            each token's activations during the forward. On a CPU ``int8`` does so in the feed-forward layers and
            ``int8-all`` in all; on a GPU they are the same. ``fp8`` needs a GPU of compute capability 8.9; on a GPU
            all need the ``quantization`` extra. ``auto`` is ``int8`` where compiled kernels run it and are right by the
            self-check, else none. Vectors of each are a space of their own; docs/engine.md says what they cost.
        max_batch_tokens: Most tokens per forward.
        max_queue: Most texts waiting; a call that would exceed it is refused (a single call may have any size).
        cache: A path, ``":memory:"`` or a :class:`~millpond.VectorCache`; vectors are read from it and committed to it.
        compile: Compile the arithmetic around attention at load; the result is kept in a folder for the next start.
            Needs a C++ compiler on a CPU, Triton on a GPU; docs/engine.md lists what becomes faster.
        trust_remote_code: Never needed, and refused.
        score_template: Jinja source, or a .jinja file, that renders a query and a document for a reranker; the
            checkpoint's own by default.

    Raises:
        ModelLoadError: The checkpoint cannot be found, read or run; see its subclasses.
        InvalidRequestError: An invalid option.
        CacheError: The cache file cannot be used.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        revision: str | None = None,
        device: str | Sequence[str] = "auto",
        backend: str = "auto",
        dtype: str = "auto",
        max_length: int | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        activation: Activation | None = None,
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
            backend=backend,
            dtype=dtype,
            max_length=max_length,
            pooling=pooling,
            normalize=normalize,
            activation=activation,
            convert=convert,
            hf_overrides=hf_overrides,
            quantization=quantization,
            max_batch_tokens=max_batch_tokens,
            max_queue=max_queue,
            compile=compile,
            trust_remote_code=trust_remote_code,
            score_template=score_template,
        )
        # Before the model, which takes longer: a path that cannot be used is refused at once.
        self._cache = None if cache is None else _opened(cache)
        self._owns_cache = self._cache is not cache
        try:
            with loading():
                from millpond.engine.loading import load  # all that reads checkpoints: imported by the first load

                self._replicas = load(self.config)
        except BaseException:
            if self._owns_cache and self._cache is not None:
                self._cache.close()
            raise
        self._loaded = self._replicas.model
        self.dtype = self._replicas.dtype
        self.device = self._replicas.device
        default = _CPU_BATCH_TOKENS if self._replicas.runner.model.threads is not None else _GPU_BATCH_TOKENS
        self._budget = max_batch_tokens or default
        self._dispatcher = Dispatcher(self._replicas, budget=self._budget, max_queue=max_queue, cache=self._cache)
        self._routes = [
            (role, other.model, Dispatcher(other, budget=self._budget, max_queue=max_queue, cache=self._cache))
            for role, other in self._replicas.routes.items()
        ]
        routes = {role: Submission(model, dispatcher) for role, model, dispatcher in self._routes}
        self._submission = Submission(self._loaded, self._dispatcher, routes, self._replicas.unrouted)
        # The threads stop when the engine was dropped and its last call is over, or when the program ends.
        dispatchers = [self._dispatcher, *(dispatcher for _, _, dispatcher in self._routes)]
        self._finalizer = weakref.finalize(self._submission, _stop, dispatchers)

    @property
    def spec(self) -> ModelSpec:
        """The description of the checkpoint: architecture, pooling, widths, prompts, labels."""
        return self._loaded.spec

    @property
    def tasks(self) -> frozenset[Task]:
        """The tasks that the checkpoint serves."""
        return self._loaded.spec.tasks

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of the checkpoint; a copy that the engine itself does not use.

        Raises:
            MissingExtraError: transformers, which the extra ``torch`` brings, is not installed.
        """
        return self._loaded.encoder.texts.hf_tokenizer

    @property
    def text_tokenizer(self) -> TextTokenizer:
        """The tokenizer that the engine itself uses: ids of tokens, their names and texts, and the chat template."""
        return self._loaded.encoder.texts

    @property
    def cache(self) -> VectorCache | None:
        """The vector cache, if the engine has one."""
        return self._cache

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens per forward."""
        return self._budget

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._dispatcher.closed

    @property
    def lost_devices(self) -> tuple[DeviceLostError, ...]:
        """The errors of the devices that no batch can run on any more, in the order of their loss; empty if all work.

        While a device is left, it serves every call. After the last one every call fails with its error, and only a new
        process can use the devices again.
        """
        return tuple(lost.error() for lost in self._dispatcher.lost_devices)

    def embed_iter(self, texts: Iterable[str], **options: Unpack[EmbedOptions]) -> Iterator[npt.NDArray[Any]]:
        """One ``[d]`` vector per text, in order, from an iterable of any length, in bounded memory.

        At most a few thousand texts are read ahead of the vector handed out.

        Args:
            texts: Any iterable of texts.
            **options: The options of :meth:`embed`; ``int8`` and ``uint8`` are refused, since their range is found over
                a whole call.

        Returns:
            An iterator of float32 ``[d]`` (or of the ``output_dtype``), one for each text, in order.
        """
        params: dict[str, Any] = {**options}
        show_progress = params.pop("show_progress", False)
        return self._submission.stream(texts, PoolingParams(**params), show_progress)

    def submit(
        self,
        task: Task,
        inputs: Sequence[Any],
        params: PoolingParams | None = None,
        *,
        template: str | None = None,
        method: ScoreMethod = "auto",
        ranking: bool = False,
    ) -> CallFuture[Any]:
        """Queue a call and return its future; every other method is built on this one.

        Args:
            task: The task.
            inputs: Texts; (query, document) pairs for ``score``; or :class:`~millpond.TokenIds`.
            params: The options of the call.
            template: A score's Jinja source in place of the checkpoint's own, for a cross-encoder.
            method: ``"auto"``, ``"cosine"`` or ``"maxsim"``: how a score is computed.
            ranking: Whether ``method="auto"`` means what it means to :meth:`rerank`.

        Returns:
            A future of the task's output. Cancelling it drops what is still queued. Its ``timings``, a
            :class:`~millpond.Timings`, are set when the output is.
        """
        return submit_part(
            self, task, inputs, params or PoolingParams(), template=template, method=method, ranking=ranking
        )

    def tokenize(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, uncut, without any prompt.

        Args:
            texts: A list of texts.
            special_tokens: Put the tokenizer's special tokens around each text.

        Returns:
            A list of token ids for each text.
        """
        return self._ids(validate.check_texts(texts, "tokenize", self._loaded), special_tokens)

    def count_tokens(self, texts: Sequence[str], *, role: Role | None = None) -> list[int]:
        """How many tokens each text has for :meth:`embed`, uncut: with the role's prompt and special tokens.

        Args:
            texts: A list of texts; one with more tokens than ``spec.max_length`` would be cut.
            role: ``"query"`` or ``"document"`` counts the checkpoint's prompt for that role, if it has one.

        Returns:
            The number of tokens of each text.
        """
        checked = validate.check_texts(texts, "count_tokens", self._loaded)
        prompt = resolve.plan("embed", PoolingParams(role=role), self._loaded, count=2).prompt
        return [len(ids) for ids in self._ids([prompt + text for text in checked], True)]

    def _ids(self, texts: list[str], special_tokens: bool) -> list[list[int]]:
        tokenizer = self._loaded.encoder.texts
        return [
            ids
            for indices in split_by_size(texts)
            for ids in tokenizer.ids([texts[i] for i in indices], special_tokens=special_tokens)
        ]

    def token_spans(
        self, texts: Sequence[str], *, role: Role | None = None, truncate: Truncate = "auto"
    ) -> list[TokenSpans]:
        """Where in its text each row of :meth:`token_embed` comes from, for the same text, role and truncation.

        Args:
            texts: A list of texts.
            role: ``"query"`` or ``"document"``, as in the call of :meth:`token_embed`.
            truncate: ``"end"`` or ``"start"`` cuts that end of an over-long text, ``"auto"`` the end that the
                checkpoint's ``truncation_side`` names; ``"error"`` refuses the text.

        Returns:
            :class:`~millpond.TokenSpans` of each text: ``tokens`` and ``offsets [rows, 2]``, an entry for each row.
        """
        checked = validate.check_texts(texts, "token_spans", self._loaded)
        return token_spans(checked, self._loaded, role=role, truncate=truncate)

    def truncate_texts(self, texts: Sequence[str], tokens: int) -> list[str]:
        """Each text cut at its end to at most ``tokens`` tokens; special tokens are not counted.

        Args:
            texts: A list of texts.
            tokens: Most tokens of each text.

        Returns:
            The beginning of each text; a text that has no more tokens, as it is.
        """
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise InvalidRequestError(f"tokens={tokens!r} must be a positive int")
        tokenizer = self._loaded.encoder.texts
        checked = validate.check_texts(texts, "truncate_texts", self._loaded)
        parts = [tokenizer.long_texts.part(text, limit=tokens, truncate="end") for text in checked]
        return [
            parts[i][:end]
            for indices in split_by_size(parts)
            for i, end in zip(indices, tokenizer.ends([parts[i] for i in indices], tokens), strict=True)
        ]

    def token_ids(self, task: Task, item: Item, params: PoolingParams, *, template: str | None = None) -> list[int]:
        """The token ids that :meth:`submit` runs for one input, prompt and special tokens included.

        Args:
            task: The task.
            item: A text, a pair or token ids.
            params: The options of the call.
            template: The score template of the call, for a cross-encoder.

        Returns:
            The ids, cut to the limit of the call.
        """
        pairs = None if template is None else resolve.pairs_by(template, task, "auto", self._loaded)
        plan = resolve.plan(task, params, self._loaded, count=2, pairs=pairs)
        ids: list[int] = self._loaded.encoder.encode([item], plan, index_of=lambda i: i)[0].ids.tolist()
        return ids

    def check_room(self, texts: int) -> None:
        """Raise if the queue has no room for this many texts, without queueing anything.

        Args:
            texts: Number of texts.
        """
        self._dispatcher.check_room(texts)

    def stats(self) -> EngineStats:
        """Counters of finished and waiting work; cheap enough to be read every second.

        Returns:
            The counters now; a batch is counted before its callers get their results.
        """
        return self._dispatcher.stats()

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call ``observer`` after every batch, to keep a histogram of batch sizes, for example.

        Args:
            observer: Called with a :class:`~millpond.values.stats.BatchRun` by the thread that ran the batch, before
                its callers get their results; it should return quickly. An exception from it is logged once.

        Returns:
            A function that unregisters the observer.

        Raises:
            EngineClosedError: In a forked process.
        """
        self._dispatcher.check_process()
        return self._dispatcher.counters.observe(observer)

    def close(self, timeout: float | None = None, cancel: bool = False) -> None:
        """Finish what is queued, then stop; later calls raise :class:`~millpond.errors.EngineClosedError`.

        A call that is dropped raises :class:`~millpond.errors.EngineClosedError` in everyone who waits for it. What was
        computed for it is in the cache, if the engine has one. The batch that runs is always finished. Any thread may
        close an engine again: ``close(cancel=True)`` ends a ``close()`` that another thread waits in.

        A ``with`` block ends with ``close()``, but with ``close(cancel=True)`` if it is left by KeyboardInterrupt,
        SystemExit or a cancellation. In a future's callback, ``close()`` returns at once and closes the engine in a new
        thread: the thread that runs the callback still has work to finish.

        Args:
            timeout: Most seconds to wait for what is queued; the calls that are not finished then are dropped, and a
                warning is logged. ``None`` waits for all of them.
            cancel: Drop what is queued at once.

        Raises:
            InvalidRequestError: ``timeout`` is negative or no number; nothing was closed.
        """
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, Real) or not timeout >= 0):
            raise InvalidRequestError(f"timeout={timeout!r} must be a number of seconds from 0, or None to wait")
        if self._dispatcher.in_callback:
            close = partial(self.close, timeout, cancel)
            threading.Thread(target=close, name="millpond-close").start()
            return
        for _, _, dispatcher in self._routes:
            dispatcher.close(timeout=timeout, cancel=cancel)
        self._dispatcher.close(timeout=timeout, cancel=cancel)
        if self._owns_cache and self._cache is not None:
            self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=is_interrupt(error))

    def __repr__(self) -> str:
        return f"Engine({self._loaded.spec.name!r}, device={self.device!r}, dtype={self.dtype!r})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "an Engine cannot be pickled (it holds a loaded model); pass the model's name and load it there"
        )

    def _run(
        self,
        task: Task,
        inputs: Sequence[Any],
        params: PoolingParams,
        show_progress: bool,
        *,
        method: ScoreMethod = "auto",
        ranking: bool = False,
        finish: Callable[[Any], Any] | None = None,
    ) -> Any:
        output = self._submission.run(task, inputs, params, show_progress, method, ranking)
        return output if finish is None else finish(output)

    def _rank_timed(
        self,
        pairs: Sequence[Pair],
        params: PoolingParams,
        method: ScoreMethod,
        budget: TimeBudget,
        show_progress: bool,
    ) -> Any:
        ranking = timed_rerank.timed_ranking(self._submission, pairs, params, method, budget)
        return timed_rerank.run_timed(self._submission, ranking, params, method, show_progress)


def _stop(dispatchers: Sequence[Dispatcher]) -> None:
    for dispatcher in dispatchers:
        dispatcher.stop()


def _opened(cache: str | os.PathLike[str] | VectorCache) -> VectorCache:
    from millpond.cache.vector_cache import VectorCache  # imports sqlite

    return cache if isinstance(cache, VectorCache) else VectorCache(cache)


def submit_part(
    engine: Engine,
    task: Task,
    inputs: Sequence[Any],
    params: PoolingParams,
    indices: Sequence[int] | None = None,
    *,
    template: str | None = None,
    method: ScoreMethod = "auto",
    ranking: bool = False,
) -> CallFuture[Any]:
    """:meth:`Engine.submit` of inputs that have these ``indices`` in the caller's list, for errors."""
    pairs = None if template is None else resolve.pairs_by(template, task, method, engine._loaded)
    options = CallOptions(indices=indices)
    return engine._submission.start(task, inputs, params, options, pairs=pairs, method=method, ranking=ranking)


def submission_of(engine: Engine) -> Submission:
    """What queues the engine's calls, for :class:`~millpond.AsyncEngine`."""
    return engine._submission
