"""A reranking within a budget of time: checked, and its parts queued one after the other; both engines share it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait

from millpond.engine.composite import scoring
from millpond.engine.composite.timed_ranking import TimeBudget, TimedRanking
from millpond.engine.execute.interrupts import defer_sigint
from millpond.engine.input import resolve, validate
from millpond.engine.schedule.call import CallOptions
from millpond.engine.schedule.timing import CallFuture
from millpond.engine.submission import Submission
from millpond.errors import EngineOverloadedError, InvalidRequestError, MillpondError
from millpond.support.progress import progress_bar
from millpond.tasks import ScoreMeasure, ScoreMethod
from millpond.values.inputs import Pair
from millpond.values.outputs import RerankOutput, ScoreOutput
from millpond.values.params import PoolingParams


def timed_ranking(
    submission: Submission, pairs: Sequence[Pair], params: PoolingParams, method: ScoreMethod, budget: TimeBudget
) -> TimedRanking:
    """A reranking within a budget, after all checks that do not need tokens."""
    submission.dispatcher.check_process()
    resolve.check_params("score", params)
    score_type = resolve.check_method(method, submission.loaded, ranking=True)
    if method == "auto":
        resolve.check_task("score", params, submission.loaded)
    spec = submission.loaded.spec
    if score_type == "listwise":
        raise InvalidRequestError(
            f"budget_ms={1000 * budget.seconds:g}: {spec.name} is a listwise reranker, whose scores are comparable "
            "only if it reads all documents at once; leave budget_ms out and pass fewer documents, or load a "
            "cross-encoder"
        )
    measure: ScoreMeasure = "cross-encoder"
    if score_type != "cross-encoder":
        scoring.vector_params(params, "document")  # refuses options that mean nothing
        measure = "maxsim" if score_type == "late-interaction" else spec.similarity
        measure = "cosine" if method == "cosine" else measure
    else:
        submission.plan("score", params, 2)
    checked = validate.check_pairs(validate.check_items(pairs, "score", submission.loaded), submission.loaded)
    return TimedRanking(checked, budget, submission.time_model, limit=spec.max_length, method=measure)


def start_part(
    submission: Submission, ranking: TimedRanking, params: PoolingParams, method: ScoreMethod
) -> CallFuture[ScoreOutput] | None:
    """Queue the next part of a ranking whose turn it is; ``None``: none fits, or the queue has no room for it."""
    part = ranking.next_part(waiting=submission.turns.waiting)
    if not part:
        return None
    try:
        options = CallOptions(indices=part)
        pairs = [ranking.pairs[index] for index in part]
        return submission.start("score", pairs, params, options, method=method, ranking=True)
    except EngineOverloadedError:
        if not ranking.begun:
            raise
        ranking.cut_off()
        return None


def run_timed(
    submission: Submission, ranking: TimedRanking, params: PoolingParams, method: ScoreMethod, show_progress: bool
) -> RerankOutput:
    """Score a ranking's parts one after the other; what is not done at the end of its budget is dropped."""
    if submission.dispatcher.in_callback:
        raise MillpondError(
            "rerank(budget_ms=) would wait for the thread that it is called in: a future's callback runs in the "
            "engine's own thread; call it in a thread of yours"
        )
    with progress_bar(ranking.pairs, show=show_progress) as bar:
        while ranking.goes_on():
            turn = submission.turns.ask()
            try:
                wait([turn], timeout=ranking.left())
                bar.update(_run_part(submission, ranking, params, method) if turn.done() else ranking.cut_off())
            finally:
                submission.turns.leave(turn)
    return ranking.output()


def _run_part(submission: Submission, ranking: TimedRanking, params: PoolingParams, method: ScoreMethod) -> int:
    """Score the next part; returns the number of its pairs that were scored."""
    future = None
    try:
        with defer_sigint():
            future = start_part(submission, ranking, params, method)
        if future is None:
            return 0
        if not wait([future], timeout=ranking.left()).done and future.cancel():
            return ranking.cut_off()
        return ranking.took(future.result())
    except BaseException:
        if future is not None:
            future.cancel()  # the caller was interrupted and no longer waits
        raise
