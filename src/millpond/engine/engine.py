"""Engine: a checkpoint, loaded once, answering many callers."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Literal, Self

import numpy.typing as npt

from millpond.cache import VectorCache
from millpond.config import EngineConfig
from millpond.engine.composite import scoring
from millpond.engine.composite.chunking import in_windows
from millpond.engine.composite.scoring import pair_up
from millpond.engine.dispatcher import Dispatcher
from millpond.engine.execute.interrupts import defer_sigint
from millpond.engine.input import resolve, validate
from millpond.engine.input.oversize import bunches, part_of
from millpond.engine.input.plan import EncodesPairs, Plan
from millpond.engine.loading import load
from millpond.engine.progress import Bar, progress_bar
from millpond.engine.schedule.counters import Observer
from millpond.engine.schedule.intake import INLINE_TEXTS
from millpond.engine.schedule.timing import CallFuture, CallTimer
from millpond.errors import EngineOverloadedError, InvalidRequestError
from millpond.inputs import Item
from millpond.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    RerankOutput,
    RewardOutput,
    ScoreOutput,
    SparseEmbeddingOutput,
    TokenClassificationOutput,
    TokenEmbeddingOutput,
)
from millpond.params import PoolingParams
from millpond.spec import ModelSpec
from millpond.stats import EngineStats
from millpond.tasks import Activation, Aggregation, OutputDtype, Role, Task, Truncate

# Tokens per batch: on a CPU what keeps a layer's activations in the cache, on a GPU what fills it.
_CPU_BATCH_TOKENS = 4096
_GPU_BATCH_TOKENS = 32768
_ITER_WINDOW = 1024
_ITER_CALLS = 3
_KEPT_PLANS = 64


class Engine:
    """A pooling engine over one checkpoint; thread-safe, and callers that come together share batches.

    Args:
        model: Hub id or local folder.
        revision: Branch, tag or commit of a hub id.
        device: ``auto`` (cuda, then mps, then cpu), a torch device, or several of a kind (``["cuda:0", "cuda:1"]``):
            each gets a replica of the model, and all work off one queue.
        dtype: ``auto``, ``float32``, ``float16`` or ``bfloat16``. ``auto`` is half precision on a GPU, bfloat16 on a
            CPU that has it in hardware, else float32. Pooling and heads are float32 always.
        max_length: Most tokens per text, special tokens and prompt included; the checkpoint's own by default.
        pooling: Replaces the checkpoint's pooling: ``cls``, ``mean``, ``max``, ``mean_sqrt_len``, ``weightedmean``,
            ``lasttoken``, or several joined by ``+``.
        normalize: Replaces the checkpoint's normalization.
        activation: Replaces what the checkpoint makes of its logits: ``identity``, ``sigmoid`` or ``softmax``.
        convert: ``embed`` makes an embedder of a language model or a classifier, ``classify`` a classifier of a
            language model or a backbone that comes with a head; ``auto`` goes by the checkpoint's architecture.
        hf_overrides: Merged into config.json, for example ``{"is_matryoshka": True}``.
        quantization: ``int8`` or ``fp8`` keeps the weights of the linear layers in eight bits and quantizes each
            token's activations as they come. ``fp8`` needs a GPU of compute capability 8.9; on a GPU both need the
            ``quantization`` extra.
        max_batch_tokens: Most tokens per forward.
        max_queue: Most texts waiting; a call that finds more is refused (a call alone may be of any size).
        cache: A path or a :class:`~millpond.VectorCache`; vectors are read from it and committed to it.
        compile: Compile the arithmetic around attention at load, kept in a folder for the next start. Needs a C++
            compiler on a CPU, Triton on a GPU; see docs/engine.md for what gains by it.
        trust_remote_code: Never needed, and refused.
        score_template: Jinja source, or a .jinja file, that renders a query and a document for a reranker; the
            checkpoint's own by default.

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
        device: str | Sequence[str] = "auto",
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
        self._replicas = load(self.config)
        self._loaded = self._replicas.model
        self._plans: dict[tuple[Task, PoolingParams, bool], Plan] = {}
        self.dtype = self._replicas.dtype
        self.device = self._replicas.device
        self._owns_cache = cache is not None and not isinstance(cache, VectorCache)
        self._cache = cache if cache is None or isinstance(cache, VectorCache) else VectorCache(cache)
        default = _CPU_BATCH_TOKENS if self._replicas.runner.device.type == "cpu" else _GPU_BATCH_TOKENS
        self._budget = max_batch_tokens or default
        self._dispatcher = Dispatcher(self._replicas, budget=self._budget, max_queue=max_queue, cache=self._cache)
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
    def tokenizer(self) -> Any:
        """transformers' tokenizer of the checkpoint; a copy, which the engine itself does not use."""
        return self._loaded.encoder.texts.hf_tokenizer

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
        adapter: str | None = None,
        chunking: Literal["mean"] | None = None,
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
            adapter: One of ``spec.adapters``; by default the one for the role.
            chunking: ``"mean"`` reads over-long texts to their end: in windows of ``max_length`` with special tokens
                and prompt of their own, whose vectors are averaged, weighted by their tokens. Nothing is truncated.
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
            adapter=adapter,
            chunking=chunking,
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
        adapter: str | None = None,
        chunking: Literal["mean"] | None = None,
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
            adapter=adapter,
            chunking=chunking,
            truncate=truncate,
        )
        if isinstance(texts, str | bytes):
            raise TypeError("embed_iter takes an iterable of texts, not a str; write embed_iter([text])")
        if output_dtype in ("int8", "uint8"):
            raise InvalidRequestError(
                f"output_dtype={output_dtype!r} finds its range over a whole call, which a stream does not have; "
                "choose float16 or binary, or call embed"
            )
        resolve.plan(resolve.check_task("embed", params, self._loaded), params, self._loaded, count=2)
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
        adapter: str | None = None,
        spans: Sequence[Sequence[tuple[int, int]]] | None = None,
        truncate: Truncate = "end",
        show_progress: bool = False,
    ) -> TokenEmbeddingOutput:
        """One matrix per text: a row for each token, special tokens and prompt included.

        A late-interaction checkpoint encodes a query or a document as it was trained to (marker, expansion, skiplist);
        without a role, a document. Arguments and errors as :meth:`embed`. ``normalize=None`` follows the checkpoint's
        habit for its vectors.

        Args:
            texts: A list of texts.
            role: ``"query"`` or ``"document"``.
            prompt: As :meth:`embed`.
            prompt_name: As :meth:`embed`.
            dimensions: As :meth:`embed`, of each row.
            normalize: As :meth:`embed`, of each row.
            adapter: As :meth:`embed`.
            spans: For each text its chunks, as half-open character spans: late chunking. The matrix has a row for each
                span then, the mean of its tokens in the context of the whole text (Günther et al., 2024).
            truncate: As :meth:`embed`.
            show_progress: As :meth:`embed`.

        Returns:
            ``embeddings``, a :class:`~millpond.ragged.Ragged` of n ``[tokens_i, d]`` matrices.
        """
        params = PoolingParams(
            role=role,
            prompt=prompt,
            prompt_name=prompt_name,
            dimensions=dimensions,
            normalize=normalize,
            adapter=adapter,
            truncate=truncate,
        )
        items = texts if spans is None else validate.spanned(texts, spans)
        output: TokenEmbeddingOutput = self._run("token_embed", items, params, show_progress)
        return output

    def sparse_embed(
        self,
        texts: Sequence[str],
        *,
        role: Role | None = None,
        truncate: Truncate = "end",
        show_progress: bool = False,
    ) -> SparseEmbeddingOutput:
        """Weights of vocabulary entries for each text: SPLADE checkpoints and BGE-M3.

        Returns:
            A sequence of ``{token id: weight}``, entries of weight 0 left out. Errors as :meth:`embed`.
        """
        params = PoolingParams(role=role, truncate=truncate)
        output: SparseEmbeddingOutput = self._run("sparse_embed", texts, params, show_progress)
        return output

    def classify(
        self,
        texts: Sequence[str],
        *,
        activation: bool | Activation | None = None,
        truncate: Truncate = "end",
        show_progress: bool = False,
    ) -> ClassificationOutput:
        """Probabilities of the checkpoint's classes for each text.

        Args:
            texts: A list of texts.
            activation: ``False`` gives raw logits; or ``"identity"``, ``"sigmoid"``, ``"softmax"``. By default what the
                checkpoint says (``problem_type``, sentence-transformers' key), else softmax over several classes and
                sigmoid for one.
            truncate: As :meth:`embed`.
            show_progress: As :meth:`embed`.

        Returns:
            ``probs [n, labels]`` with ``labels`` and ``top(k)``. Errors as :meth:`embed`.
        """
        params = PoolingParams(activation=activation, truncate=truncate)
        output: ClassificationOutput = self._run("classify", texts, params, show_progress)
        return output

    def token_classify(
        self,
        texts: Sequence[str],
        *,
        aggregation: Aggregation = "none",
        activation: bool | Activation | None = None,
        truncate: Truncate = "end",
        show_progress: bool = False,
    ) -> TokenClassificationOutput:
        """Entities of each text, with their character spans.

        Args:
            texts: A list of texts.
            aggregation: ``"none"`` gives every token; ``"simple"``, ``"first"``, ``"average"`` and ``"max"`` join
                tokens into entities as transformers' pipeline does.
            activation: As :meth:`classify`.
            truncate: As :meth:`embed`.
            show_progress: As :meth:`embed`.

        Returns:
            A sequence of n lists of :class:`~millpond.Entity`, with ``probs``, a
            :class:`~millpond.ragged.Ragged` of ``[tokens_i, labels]``. Errors as :meth:`embed`.
        """
        params = PoolingParams(aggregation=aggregation, activation=activation, truncate=truncate)
        output: TokenClassificationOutput = self._run("token_classify", texts, params, show_progress)
        return output

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        activation: bool | Activation | None = None,
        instruction: str | None = None,
        truncate: Truncate = "end",
        show_progress: bool = False,
    ) -> ScoreOutput:
        """How well documents answer queries: 1-1, 1-N or N-N.

        A cross-encoder reads both together (an LLM reranker in its own template), a late-interaction checkpoint gives
        MaxSim, an embedder the cosine; see ``spec.score_type``.

        Args:
            queries: One query, or one for each document.
            documents: One document, or several.
            activation: As :meth:`classify`; cross-encoders only.
            instruction: Fills an LLM reranker's template slot, nothing else.
            truncate: As :meth:`embed`; special tokens and a template's suffix are never cut.
            show_progress: As :meth:`embed`.

        Returns:
            ``scores [n]``. Errors as :meth:`embed`.

        Raises:
            InvalidRequestError: The numbers do not pair up.
        """
        params = PoolingParams(activation=activation, instruction=instruction, truncate=truncate)
        output: ScoreOutput = self._run("score", pair_up(queries, documents), params, show_progress)
        return output

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate: Truncate = "end",
        show_progress: bool = False,
    ) -> RerankOutput:
        """Documents by how well they answer a query, as :meth:`score` has it, best first.

        Args:
            query: The query.
            documents: A list of documents.
            top_n: Keep the best only.
            instruction: As :meth:`score`.
            truncate: As :meth:`score`.
            show_progress: As :meth:`embed`.

        Returns:
            A sequence of :class:`~millpond.RerankResult`. Errors as :meth:`score`.
        """
        pairs = validate.reranked(query, documents, top_n)
        params = PoolingParams(instruction=instruction, truncate=truncate)
        scored: ScoreOutput = self._run("score", pairs, params, show_progress)
        return validate.ranked(scored, pairs, top_n)

    def reward(
        self,
        texts_or_conversations: Sequence[str | Sequence[Mapping[str, str]]],
        *,
        step_tag_id: int | None = None,
        returned_token_ids: Sequence[int] | None = None,
        activation: bool | Activation | None = None,
        truncate: Truncate = "end",
        show_progress: bool = False,
    ) -> RewardOutput:
        """Rewards, raw by default: one row for a text, or one for each of its steps.

        Args:
            texts_or_conversations: Texts, or lists of ``{"role": ..., "content": ...}`` messages, which go through the
                checkpoint's chat template.
            step_tag_id: Only the rows of this token; by default the checkpoint's own (``<extra_0>`` of Qwen's process
                reward models).
            returned_token_ids: Of a language model, the logits of these vocabulary entries are the columns
                (math-shepherd: good and bad).
            activation: ``True`` turns logits into probabilities (softmax over several columns, sigmoid for one).
            truncate: As :meth:`embed`.
            show_progress: As :meth:`embed`.

        Returns:
            ``rewards``, a :class:`~millpond.ragged.Ragged` of n ``[rows_i, columns]``. Errors as :meth:`embed`.
        """
        params = PoolingParams(
            step_tag_id=step_tag_id,
            returned_token_ids=returned_token_ids,  # type: ignore[arg-type]  # checked, and made a tuple, there
            activation=activation,
            truncate=truncate,
        )
        output: RewardOutput = self._run("reward", texts_or_conversations, params, show_progress)
        return output

    def encode(
        self,
        texts: Sequence[Any],
        *,
        task: Task,
        params: PoolingParams | None = None,
        show_progress: bool = False,
    ) -> Any:
        """Any task by its name; ``score`` takes (query, document) pairs.

        Returns:
            What the task's own method returns, with its errors.
        """
        return self._run(task, texts, params or PoolingParams(), show_progress)

    def submit(self, task: Task, inputs: Sequence[Any], params: PoolingParams | None = None) -> CallFuture[Any]:
        """Queue a call; what every other method uses.

        Args:
            task: The task.
            inputs: Texts; (query, document) pairs for ``score``; or :class:`~millpond.inputs.TokenIds`.
            params: Its options.

        Returns:
            A future of the task's output. Cancelling it drops what is still queued. Its ``timings``, a
            :class:`~millpond.Timings`, are there when the output is.

        Raises:
            TypeError: ``inputs`` is a bare str.
            InvalidRequestError: A text or an option that cannot be served; nothing was queued.
            EngineOverloadedError: Too many texts are waiting.
            EngineClosedError: The engine was closed.
        """
        return self._start(task, inputs, params or PoolingParams())

    def submit_score(
        self,
        pairs: Sequence[tuple[str, str]],
        params: PoolingParams,
        *,
        template: str | None = None,
        maxsim: bool = False,
    ) -> CallFuture[ScoreOutput]:
        """As :meth:`submit` for ``score``, with a score template of this call's own, or by MaxSim in any case.

        Args:
            pairs: (query, document) pairs.
            params: The options of a score.
            template: Jinja source, for a cross-encoder.
            maxsim: Compare the token states of both texts, L2-normalized, whatever the checkpoint scores by.

        Raises:
            InvalidRequestError: The template cannot be used, or the checkpoint reads no pairs.
            UnsupportedTaskError: MaxSim was asked of a checkpoint that has no token states.
        """
        if maxsim:
            resolve.check_params(params)
            return self._score_apart(validate.check_items(pairs, "score", self._loaded), params, late=True)
        if template is None:
            return self._start("score", pairs, params)
        if self.spec.score_type != "cross-encoder":
            raise InvalidRequestError(
                f"{self.spec.name} scores by {self.spec.score_type}, which reads no template; leave it out"
            )
        return self._start("score", pairs, params, pairs=self._loaded.pairs_by(template))

    def tokenize(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, uncut, without any prompt.

        Raises:
            TypeError: ``texts`` is a bare str.
            InvalidRequestError: A text that is none.
        """
        items = [item for item in validate.check_items(texts, "tokenize", self._loaded) if isinstance(item, str)]
        tokenizer = self._loaded.encoder.texts
        return [
            ids
            for places in bunches(items)
            for ids in tokenizer.ids([items[i] for i in places], special_tokens=special_tokens)
        ]

    def clip(self, texts: Sequence[str], tokens: int) -> list[str]:
        """The beginning of each text, of at most ``tokens`` tokens; special tokens are not counted.

        Raises:
            TypeError: ``texts`` is a bare str.
            InvalidRequestError: A text that is none, or ``tokens`` is no positive int.
        """
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise InvalidRequestError(f"tokens={tokens!r} must be a positive int")
        items = [item for item in validate.check_items(texts, "clip", self._loaded) if isinstance(item, str)]
        tokenizer = self._loaded.encoder.texts
        items = [part_of(item, tokenizer, limit=tokens, truncate="end") for item in items]
        return [text for places in bunches(items) for text in tokenizer.clipped([items[i] for i in places], tokens)]

    def token_ids(self, task: Task, item: Item, params: PoolingParams, *, template: str | None = None) -> list[int]:
        """The token ids that :meth:`submit` (or :meth:`submit_score`, with a ``template``) would run for one input."""
        pairs = None if template is None else self._loaded.pairs_by(template)
        plan = resolve.plan(task, params, self._loaded, count=2, pairs=pairs)
        ids: list[int] = self._loaded.encoder.encode([item], plan, index_of=lambda i: i)[0].ids.tolist()
        return ids

    def check_room(self, texts: int) -> None:
        """Raise at once what :meth:`submit` would raise of so many texts, were they checked and good.

        Raises:
            EngineOverloadedError: Too many texts are waiting.
            EngineClosedError: The engine was closed.
        """
        self._dispatcher.check_room(texts)

    def stats(self) -> EngineStats:
        """What the engine has done until now, and what is waiting; cheap enough to be asked every second.

        Returns:
            The counters at this moment. Numbers of batches have a batch in them as soon as its callers hear of it.
        """
        return self._dispatcher.stats()

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Have every batch told, for a histogram of their sizes, say.

        Args:
            observer: Called with a :class:`~millpond.BatchRun` by the thread that ran the batch, before the callers in
                it get their results; it should be quick. What it raises is logged once, and changes nothing.

        Returns:
            Call it to end that.
        """
        return self._dispatcher.counters.observe(observer)

    def close(self) -> None:
        """Finish what is queued, then stop; later calls raise :class:`~millpond.errors.EngineClosedError`.

        In a future's callback it returns at once, and the engine closes behind it: the thread that runs the callback is
        one of those that have work to finish.
        """
        if self._dispatcher.inside:
            threading.Thread(target=self.close, name="millpond-close").start()
            return
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

    def _run(self, task: Task, texts: Sequence[Any], params: PoolingParams, show_progress: bool) -> Any:
        with progress_bar(texts, show=show_progress) as bar:
            inline = self._dispatcher.inside or (isinstance(texts, Sequence) and len(texts) <= INLINE_TEXTS)
            with defer_sigint():
                future = self._start(task, texts, params, inline=inline, progress=bar.update if show_progress else None)
            try:
                if inline:
                    self._dispatcher.assist(future)
                return future.result()
            except BaseException:
                future.cancel()  # the caller was interrupted: nobody waits for the rest
                raise

    async def _in_thread(self, work: Callable[[], Future[Any]]) -> Future[Any]:
        """What ``work`` returns, called in a thread of the engine's instead of the event loop's pool."""
        try:
            running = self._dispatcher.threads.submit(work)
        except RuntimeError:  # closed, as ``work`` is going to say
            return work()
        return await asyncio.wrap_future(running)

    def _start(
        self,
        task: Task,
        inputs: Sequence[Any],
        params: PoolingParams,
        *,
        inline: bool = False,
        progress: Callable[[int], object] | None = None,
        pairs: EncodesPairs | None = None,
        first: int = 0,
        admit: int | None = None,
        timer: CallTimer | None = None,
    ) -> CallFuture[Any]:
        """Check everything, then queue; ``first`` is the index of the first input in the caller's list."""
        resolve.check_params(params)
        task = resolve.check_task(task, params, self._loaded)
        if task == "reward":
            inputs = validate.conversed(inputs, self._loaded.encoder.texts)
        items = validate.check_items(inputs, task, self._loaded, first=first)
        if task == "score" and self.spec.score_type != "cross-encoder":
            return self._score_apart(items, params, late=self.spec.score_type == "late-interaction")
        plan = self._plan(task, params, len(items), pairs)
        resolve.check_spans(items, task, plan)
        if params.chunking is not None:
            return in_windows(items, plan, self._loaded, self._submit, self._dispatcher.threads)
        return self._submit(items, plan, inline=inline, progress=progress, first=first, admit=admit, timer=timer)

    def _plan(self, task: Task, params: PoolingParams, count: int, pairs: EncodesPairs | None) -> Plan:
        """A call's plan; the same one for calls that ask for the same, which are tokenized together where they meet."""
        if pairs is not None or params.returned_token_ids is not None:  # which are looked up for each call
            return resolve.plan(task, params, self._loaded, count=count, pairs=pairs)
        key = (task, params, count == 1)
        plan = self._plans.get(key)
        if plan is None:
            plan = resolve.plan(task, params, self._loaded, count=count)
            while len(self._plans) >= _KEPT_PLANS:
                self._plans.pop(next(iter(self._plans)), None)
            self._plans[key] = plan
        return plan

    def _submit(
        self,
        items: Sequence[Item],
        plan: Plan,
        *,
        inline: bool = False,
        progress: Callable[[int], object] | None = None,
        first: int = 0,
        admit: int | None = None,
        timer: CallTimer | None = None,
    ) -> CallFuture[Any]:
        return self._dispatcher.submit(
            items, plan, inline=inline, progress=progress, owner=self, first_index=first, admit=admit, timer=timer
        )

    def _score_apart(self, items: Sequence[Item], params: PoolingParams, *, late: bool) -> CallFuture[Any]:
        """A score from two calls: vectors for an embedder, token matrices for late interaction."""
        task: Task = "token_embed" if late else "embed"
        measure = partial(scoring.late_interaction, mean=self._loaded.mean_maxsim) if late else scoring.cosine
        # A late-interaction checkpoint may compare vectors that are no unit vectors.
        normalize = None if self.spec.score_type == "late-interaction" else True

        def embed(texts: Sequence[str], role: Role, admit: int, timer: CallTimer) -> CallFuture[Any]:
            wanted = scoring.vector_params(params, role, normalize=normalize)
            return self._start(task, texts, wanted, admit=admit, timer=timer)

        pairs = validate.check_pairs(items, self._loaded)
        return scoring.apart(pairs, embed, measure, self._dispatcher.threads)

    def _stream(self, texts: Iterator[str], params: PoolingParams, show_progress: bool) -> Iterator[npt.NDArray[Any]]:
        ahead: deque[Future[EmbeddingOutput]] = deque()
        read = 0
        try:
            with progress_bar(texts, show=show_progress) as bar:
                while window := list(islice(texts, _ITER_WINDOW)):
                    while True:
                        try:
                            ahead.append(self._start("embed", window, params, first=read))
                            break
                        except EngineOverloadedError as error:  # ours are among those that wait: hand some out first
                            if ahead:
                                yield from _rows(ahead.popleft().result(), bar)
                            else:
                                time.sleep(error.retry_after)
                        except InvalidRequestError:
                            while ahead:  # what came before the bad text is good
                                yield from _rows(ahead.popleft().result(), bar)
                            raise
                    read += len(window)
                    if len(ahead) == _ITER_CALLS:
                        yield from _rows(ahead.popleft().result(), bar)
                while ahead:
                    yield from _rows(ahead.popleft().result(), bar)
        finally:
            for future in ahead:
                future.cancel()


def _rows(output: EmbeddingOutput, bar: Bar) -> Iterator[npt.NDArray[Any]]:
    for row in output.embeddings:
        yield row
        bar.update()
