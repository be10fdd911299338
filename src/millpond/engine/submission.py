"""Submission: a call checked, planned and queued, and its result waited for; Engine and AsyncEngine share it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from millpond.engine.composite import entities, listwise, scoring, zero_shot
from millpond.engine.composite.late_chunks import late_chunks
from millpond.engine.composite.time_model import TimeModel
from millpond.engine.composite.turns import Turns
from millpond.engine.composite.windows import in_windows
from millpond.engine.dispatcher import Dispatcher
from millpond.engine.execute.direct import Direct
from millpond.engine.execute.interrupts import defer_sigint
from millpond.engine.input import resolve, validate
from millpond.engine.input.model import LoadedModel
from millpond.engine.input.plan import EncodesPairs, Plan
from millpond.engine.schedule.call import CallOptions, OnMatrices
from millpond.engine.schedule.intake import INLINE_TEXTS
from millpond.engine.schedule.timing import CallFuture, CallTimer
from millpond.engine.schedule.truncation import TruncatedTexts
from millpond.errors import EngineOverloadedError, InvalidRequestError
from millpond.support.progress import progress_bar
from millpond.tasks import Role, ScoreMethod, ScoreType, Similarity, Task
from millpond.values.inputs import Item, Pair, TokenIds
from millpond.values.outputs import EmbeddingOutput
from millpond.values.params import PoolingParams

if TYPE_CHECKING:
    from millpond.engine.composite.comparison import Comparison

# A stream reads this many texts at a time, and keeps this many calls queued ahead of the vector it hands out.
_STREAM_WINDOW = 1024
_STREAM_CALLS = 3
_KEPT_PLANS = 64


class Submission:
    """Turns the arguments of a call into a queued call.

    It owns every queued call until the call is over, so the engine's threads keep running for a future whose engine
    was dropped.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        dispatcher: Dispatcher,
        routes: Mapping[Role, Submission] | None = None,
        unrouted: Set[Role] = frozenset(),
    ) -> None:
        """``routes``: what queues the texts of a role that a Router sends to another model; none of ``unrouted``."""
        self.routes = routes or {}
        self.unrouted = unrouted
        self.loaded = loaded
        self.dispatcher = dispatcher
        self.time_model = TimeModel()
        self.turns = Turns()
        # By task and options of the calls that were made before.
        self._direct: dict[tuple[Task, PoolingParams], Direct | None] = {}
        self._sides: dict[
            tuple[PoolingParams, ScoreMethod, bool], scoring.Sides
        ] = {}  # of scores that were made before
        # Calls with equal options share a plan, so that their texts are tokenized together.
        self._plan = lru_cache(_KEPT_PLANS)(
            lambda task, params, single: resolve.plan(task, params, loaded, count=1 if single else 2)
        )

    def run(
        self,
        task: Task,
        inputs: Sequence[Any],
        params: PoolingParams,
        show_progress: bool,
        method: ScoreMethod = "auto",
        ranking: bool = False,
    ) -> Any:
        """The output of a call, which is queued unless it is short and nothing else runs.

        A small call is worked on in the calling thread.
        """
        direct = None if show_progress else self.direct(task, inputs, params, method)
        if direct is not None and (output := direct(inputs[0])) is not None:
            return output
        if task == "score" and not show_progress:
            scored = self._score_pair(inputs, params, method, ranking)
            if scored is not None:
                return scored
        return self._run_queued(task, inputs, params, show_progress, method, ranking)

    def _run_queued(
        self,
        task: Task,
        inputs: Sequence[Any],
        params: PoolingParams,
        show_progress: bool,
        method: ScoreMethod = "auto",
        ranking: bool = False,
    ) -> Any:
        with progress_bar(inputs, show=show_progress) as bar:
            few = isinstance(inputs, Sequence) and len(inputs) <= INLINE_TEXTS
            inline = not self.routes and (self.dispatcher.in_callback or few)
            progress = bar.update if show_progress else None
            with defer_sigint():
                options = CallOptions(inline=inline, progress=progress)
                future = self.start(task, inputs, params, options, method=method, ranking=ranking)
            try:
                if inline:
                    self.dispatcher.run_in_caller(future)
                return future.result()
            except BaseException:
                future.cancel()  # the caller was interrupted and no longer waits
                raise

    def direct(
        self, task: Task, inputs: Sequence[Any], params: PoolingParams, method: ScoreMethod = "auto"
    ) -> Direct | None:
        """What runs the one item of a call while nothing else runs, by options that were checked before."""
        if type(inputs) is not list or len(inputs) != 1 or not isinstance(params, PoolingParams):
            return None
        item = inputs[0]
        if type(item) is str:
            return self._direct.get((task, params)) if task != "score" else None
        if task != "score" or method != "auto" or type(item) is not Pair:
            return None
        return self._direct.get((task, params)) if type(item.query) is type(item.document) is str else None

    def direct_sides(
        self, inputs: Sequence[Any], params: PoolingParams, method: ScoreMethod, ranking: bool
    ) -> tuple[scoring.Sides, Direct, Direct] | None:
        """What runs the two texts of a score's only pair while nothing else runs, and how its vectors are compared."""
        if type(inputs) is not list or len(inputs) != 1 or not isinstance(params, PoolingParams):
            return None
        sides = self._sides.get((params, method, ranking))
        if sides is None or type(inputs[0]) is not Pair:
            return None
        query, document = inputs[0]
        directs = self.direct("embed", [query], sides.query), self.direct("embed", [document], sides.document)
        return None if directs[0] is None or directs[1] is None else (sides, directs[0], directs[1])

    def _score_pair(self, inputs: Sequence[Any], params: PoolingParams, method: ScoreMethod, ranking: bool) -> Any:
        """The score of one pair by two vectors, each of which is computed here while nothing else runs, or ``None``."""
        found = self.direct_sides(inputs, params, method, ranking)
        if found is None:
            return None
        sides, of_query, of_document = found
        query, document = inputs[0]
        left = of_query(query)
        if left is None:
            return None
        right = of_document(document)
        if right is None:
            with TruncatedTexts.called("documents"):
                right = self._run_queued("embed", [document], sides.document, False)
        return scoring.scored_pair(sides, left, right)

    def start_here(
        self, task: Task, inputs: Sequence[Any], params: PoolingParams, method: ScoreMethod = "auto"
    ) -> CallFuture[Any]:
        """As :meth:`start`, in a thread that may compute: one item is, while nothing else runs."""
        direct = self.direct(task, inputs, params, method)
        return (direct and direct.here(inputs[0])) or self.start(task, inputs, params, method=method)

    async def in_thread(self, work: Callable[[], Future[Any]], *, large: bool = False) -> Future[Any]:
        """Call ``work`` in a thread of the engine instead of the event loop's pool, and return what it returns.

        ``large``: in the thread of large texts.
        """
        self.dispatcher.check_process()
        threads = self.dispatcher.large_thread if large else self.dispatcher.threads
        try:
            running = threads.submit(work)
        except RuntimeError:  # the engine was closed; `work` raises the error that says so
            return work()
        from asyncio import wrap_future

        return await wrap_future(running)

    def start(
        self,
        task: Task,
        inputs: Sequence[Any],
        params: PoolingParams,
        options: CallOptions | None = None,  # how to queue the call
        *,
        pairs: EncodesPairs | None = None,  # reads the pairs of this call, instead of the checkpoint's own way
        method: ScoreMethod = "auto",  # how a score is computed
        ranking: bool = False,  # the scores are for `rerank`, whose `method="auto"` is another
    ) -> CallFuture[Any]:
        """Check everything, then queue."""
        options = options or CallOptions()
        resolve.check_params(task, params)
        other = self._route(params.role)
        if other is not None:
            return other.start(task, inputs, params, options, pairs=pairs, method=method, ranking=ranking)
        score_type = resolve.check_method(method, self.loaded, ranking=ranking)
        if method == "auto":  # for another, check_method has refused what the checkpoint does not serve
            task = resolve.check_task(task, params, self.loaded)
        if task == "reward":
            inputs = validate.rendered_conversations(inputs, self.loaded.encoder.texts)
        items = validate.check_items(inputs, task, self.loaded, first=options.first_index)
        if task == "score" and score_type == "listwise":
            return self._score_lists(items, params, options)
        if task == "score" and score_type != "cross-encoder":
            return self._score_apart(items, params, score_type, options, (method, ranking))
        if task == "classify" and params.labels is not None:
            return self._zero_shot(items, params, options)
        if task == "token_classify" and (params.labels is not None or self.loaded.entities is not None):
            return self._entities(items, params, options)
        plan = self.plan(task, params, len(items), pairs)
        resolve.check_spans(items, task, plan, windows=params.long_texts == "windows")
        if params.long_texts is not None:
            queue = partial(self.dispatcher.submit, owner=self)
            composed: Any = late_chunks if params.long_texts == "windows" else in_windows
            whole: CallFuture[Any] = composed(items, plan, self.loaded, queue, self.dispatcher.threads)
            return whole
        if pairs is None and (task, params) not in self._direct:
            if len(self._direct) == _KEPT_PLANS:
                self._direct.clear()
            self._direct[task, params] = self.dispatcher.direct(plan)
        return self.dispatcher.submit(items, plan, options, owner=self)

    def _route(self, role: Role | None) -> Submission | None:
        """What queues the texts of a role, if a Router sends them to another model."""
        if role in self.unrouted:
            raise InvalidRequestError(f"role={role!r}: the Router of {self.loaded.spec.name} has no such route")
        return None if role is None else self.routes.get(role)

    def plan(self, task: Task, params: PoolingParams, count: int, pairs: EncodesPairs | None = None) -> Plan:
        """The plan of a call."""
        if pairs is not None or params.returned_token_ids is not None:  # looked up for each call
            return resolve.plan(task, params, self.loaded, count=count, pairs=pairs)
        return self._plan(task, params, count == 1)

    def stream(self, texts: Any, params: PoolingParams, show_progress: bool) -> Iterator[npt.NDArray[Any]]:
        """One vector per text, in order; a few calls are queued ahead of the vector handed out."""
        if isinstance(texts, str | bytes):
            raise TypeError("embed_iter takes an iterable of texts, not a str; write embed_iter([text])")
        other = self._route(params.role)
        if other is not None:
            return other.stream(texts, params, show_progress)
        if params.output_dtype in ("int8", "uint8"):
            raise InvalidRequestError(
                f"output_dtype={params.output_dtype!r} finds its range over a whole call, which a stream does not "
                "have; choose float16 or binary, or call embed"
            )
        plan = resolve.plan(resolve.check_task("embed", params, self.loaded), params, self.loaded, count=2)
        return self._vectors(iter(texts), params, show_progress, TruncatedTexts(plan.limit))

    def _vectors(
        self, texts: Iterator[str], params: PoolingParams, show_progress: bool, truncated: TruncatedTexts
    ) -> Iterator[npt.NDArray[Any]]:
        ahead: deque[Future[EmbeddingOutput]] = deque()
        read = 0

        def oldest() -> Iterator[npt.NDArray[Any]]:
            output = ahead.popleft().result()
            truncated.note(output.truncated)
            for row in output.embeddings:
                yield row
                bar.update()

        try:
            with progress_bar(texts, show=show_progress) as bar:
                while window := list(islice(texts, _STREAM_WINDOW)):
                    while True:
                        try:
                            with truncated.quiet():
                                ahead.append(self.start("embed", window, params, CallOptions(first_index=read)))
                            break
                        except EngineOverloadedError as error:  # our own texts wait, too: hand some vectors out first
                            if ahead:
                                yield from oldest()
                            else:
                                time.sleep(error.retry_after)
                        except InvalidRequestError:
                            while ahead:  # the texts before the bad one are good
                                yield from oldest()
                            raise
                    read += len(window)
                    if len(ahead) == _STREAM_CALLS:
                        yield from oldest()
                while ahead:
                    yield from oldest()
        finally:
            for future in ahead:
                future.cancel()
            truncated.log(self.dispatcher.truncation_log)

    def _zero_shot(self, items: Sequence[Item], params: PoolingParams, options: CallOptions) -> CallFuture[Any]:
        """Classes of the caller's: a text and a label are a pair, of which the progress knows nothing."""
        zero_shot.check_model(self.loaded)
        self.plan("classify", params, len(items))  # refuses options that mean nothing
        pairs = zero_shot.hypotheses(items, params)
        threads = None if options.inline and len(pairs) <= INLINE_TEXTS else self.dispatcher.threads
        raw = replace(params, labels=None, template=None, multi_label=False, activation=False)

        def queue(pairs: Sequence[Pair], reader: EncodesPairs | None, timer: CallTimer) -> CallFuture[Any]:
            progress = zero_shot.per_text(options.progress, len(params.labels or ()))
            with TruncatedTexts.called("pairs of a text and a label"):
                queued = CallOptions(inline=options.inline, progress=progress, timer=timer)
                plan = self.plan("classify", raw, len(pairs), reader)
                return self.dispatcher.submit(pairs, plan, queued, owner=self)

        return zero_shot.classify(pairs, params, self.loaded, queue, threads)

    def _entities(self, items: Sequence[Item], params: PoolingParams, options: CallOptions) -> CallFuture[Any]:
        """Entities by labels of the caller's, from the states of each text's tokens."""
        prompt = entities.check(params, self.loaded.entities, self.loaded.spec.name)
        self.plan("token_classify", params, len(items))  # refuses options that mean nothing
        states = PoolingParams(normalize=False, truncate_prompt_tokens=params.truncate_prompt_tokens)
        plan = self.plan("token_embed", states, len(items))
        threads = None if options.inline and len(items) <= INLINE_TEXTS else self.dispatcher.threads

        def queue(pieces: Sequence[TokenIds], take: OnMatrices, timer: CallTimer) -> CallFuture[Any]:
            queued = CallOptions(
                inline=options.inline, progress=options.progress, on_matrices=take, admit=len(items), timer=timer
            )
            return self.dispatcher.submit(pieces, plan, queued, owner=self)

        head = self.dispatcher.entity_head
        return entities.find(items, params, prompt, head, queue, threads, limit=plan.limit)

    def _score_lists(self, items: Sequence[Item], params: PoolingParams, options: CallOptions) -> CallFuture[Any]:
        """Scores of lists: the documents of neighbouring pairs with one query are read as one text."""
        lists = listwise.read(validate.check_pairs(items, self.loaded), params, self.loaded)
        threads = None if options.inline and len(items) <= INLINE_TEXTS else self.dispatcher.threads
        plan = self.plan("token_embed", listwise.rows_params(params), len(lists.texts))

        def queue(timer: CallTimer) -> CallFuture[Any]:
            take = partial(lists.take, progress=options.progress)
            with TruncatedTexts.quiet():  # each text is as long as it may be
                queued = CallOptions(inline=options.inline, on_matrices=take, timer=timer)
                return self.dispatcher.submit(lists.texts, plan, queued, owner=self)

        return lists.scored(queue, threads)

    def _score_apart(
        self,
        items: Sequence[Item],
        params: PoolingParams,
        score_type: ScoreType | None,
        options: CallOptions,
        way: tuple[ScoreMethod, bool],
    ) -> CallFuture[Any]:
        """A score from two calls: token matrices for late interaction, else vectors; the documents are the progress.

        If ``inline``, this thread tokenizes both, and a small score is put together by the thread that ran its batch.
        """
        pairs = validate.check_pairs(items, self.loaded)
        threads = None if options.inline and len(pairs) <= INLINE_TEXTS else self.dispatcher.threads
        late = score_type == "late-interaction"
        task: Task = "token_embed" if late else "embed"
        similarity: Similarity = "cosine" if way[0] == "cosine" else self.loaded.spec.similarity
        # Token vectors of a late-interaction checkpoint may have any length, and so may those of other similarities.
        as_is = self.loaded.spec.score_type == "late-interaction" if late else similarity != "cosine"
        normalize = None if as_is else True
        # sentence-transformers leaves the lengths of the normalized vectors that it cuts; `embed` normalizes again.
        cut = None if late or not as_is else self.loaded.spec.default_dimensions
        width = None if cut is None else self.loaded.spec.dimensions
        sides = scoring.Sides(
            query=scoring.vector_params(params, "query", normalize=normalize, dimensions=width),
            document=scoring.vector_params(params, "document", normalize=normalize, dimensions=width),
            similarity=similarity,
            cut=cut,
        )
        comparison: Comparison | None = None
        if late:
            from millpond.engine.composite import comparison as matrices  # imports what indexes are made of

            plan = self.plan(task, sides.query, len(pairs))
            comparison = matrices.Comparison(
                pairs, width=plan.width, normalize=plan.normalize, mean=self.loaded.mean_maxsim
            )

        def embed(texts: Sequence[str], role: Role, admit: int, timer: CallTimer) -> CallFuture[Any]:
            side = CallOptions(
                inline=options.inline,
                progress=options.progress if role == "document" else None,
                indices=options.indices if role == "document" else None,
                on_matrices=None if comparison is None else partial(comparison.take, role),
                admit=admit,
                timer=timer,
            )
            with TruncatedTexts.called("queries" if role == "query" else "documents"):  # each has its own indices
                return self.start(task, texts, sides.query if role == "query" else sides.document, side)

        if comparison is None:
            if len(self._sides) == _KEPT_PLANS:
                self._sides.clear()
            self._sides[params, *way] = sides
            return scoring.apart(pairs, embed, partial(scoring.compare, similarity, cut), threads, method=similarity)
        future = scoring.apart(pairs, embed, lambda *_: comparison.scores(), threads, method="maxsim")
        future.add_done_callback(lambda _: comparison.drop())
        return future
