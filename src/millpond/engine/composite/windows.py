"""Windows: vectors of texts longer than the model reads, from windows over all of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.engine.composite.gather import combine
from millpond.engine.input.model import LoadedModel
from millpond.engine.input.plan import Plan
from millpond.engine.schedule.call import CallOptions
from millpond.engine.schedule.timing import CallFuture, CallTimer
from millpond.errors import InputTooLongError, InvalidRequestError
from millpond.values.inputs import Item, TokenIds
from millpond.values.outputs import EmbeddingOutput, Usage
from millpond.vectors import matryoshka
from millpond.vectors.quantization import quantize

FloatArray = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]
# Queues a call.
Queue = Callable[[Sequence[Item], Plan, CallOptions], Future[Any]]


def in_windows(
    items: Sequence[Item], plan: Plan, loaded: LoadedModel, queue: Queue, threads: Executor
) -> CallFuture[EmbeddingOutput]:
    """Embed ``items``; one with more than ``plan.limit`` tokens is read in windows whose vectors are averaged.

    Each of the text's tokens is in one window, and each window has its own special tokens and prompt. The windows'
    vectors, with the width and normalization of the plan, are averaged, weighted by their tokens of text; the mean is
    normalized again. The cache holds windows as it holds texts: text added at the end costs only its own windows.
    """
    timer = CallTimer()
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) < len(items):
        raise InvalidRequestError('long_texts="mean" takes texts only; cut token ids into windows yourself')
    pieces: list[TokenIds] = []
    begun = perf_counter()
    counts_of: dict[int, list[int]] = {}  # by index of a long text: its windows' tokens of text
    for i, (ids, front, back) in enumerate(loaded.encoder.texts.read_whole(texts, prompt=plan.prompt)):
        if len(front) + len(ids) + len(back) > plan.limit:
            parts = windows(ids, front, back, plan.limit)
            skip = len(front) if plan.skip else 0
            pieces += [TokenIds(tuple(part.tolist()), skip=skip) for part in parts]
            counts_of[i] = [len(part) - len(front) - len(back) for part in parts]
    timer.tokenized(perf_counter() - begun)
    short = [text for i, text in enumerate(texts) if i not in counts_of]
    unquantized = replace(plan, output_dtype="float32")
    starts = [
        partial(queue, short, unquantized, CallOptions(admit=len(short) + len(pieces), timer=timer)),
        partial(queue, pieces, unquantized, CallOptions(admit=0, timer=timer)),
    ]
    return combine(starts, lambda outputs: _averaged(outputs[0], outputs[1], counts_of, plan), threads, timer)


def _averaged(
    short: EmbeddingOutput, windowed: EmbeddingOutput, counts_of: Mapping[int, Sequence[int]], plan: Plan
) -> EmbeddingOutput:
    """The vectors of all texts: the short ones' own, and the means of the others' windows."""
    count = len(short.embeddings) + len(counts_of)
    rows = np.empty((count, short.embeddings.shape[1]), dtype=np.float32)
    cached = np.zeros(count, dtype=np.bool_)
    own = [i for i in range(count) if i not in counts_of]
    rows[own], cached[own] = short.embeddings, short.cached
    start = 0
    for i, counts in counts_of.items():
        piece_rows = slice(start, start + len(counts))
        start += len(counts)
        mean = weighted_mean(windowed.embeddings[piece_rows], np.array(counts))
        rows[i] = matryoshka.cut(mean[None], len(mean), normalize=plan.normalize)[0]
        cached[i] = windowed.cached[piece_rows].all()
    return EmbeddingOutput(
        embeddings=quantize(rows, plan.output_dtype, codes=plan.codes),
        cached=cached,
        truncated=np.zeros(count, dtype=np.bool_),
        usage=Usage(prompt_tokens=short.usage.prompt_tokens + windowed.usage.prompt_tokens),
    )


def windows(ids: Ids, prefix: Ids, suffix: Ids, limit: int) -> list[Ids]:
    """Cut a text's tokens into windows, each with its own special tokens and prompt: ``prefix`` and ``suffix``.

    Every window but the last is full. A short last window does no harm, since vectors are weighted by their tokens;
    full windows are the fewest, and text added at the end leaves all windows but the last as they were.
    """
    room = limit - len(prefix) - len(suffix)
    if room < 1:
        raise InputTooLongError(
            f"prompt and special tokens take {len(prefix) + len(suffix)} of max_length={limit} tokens, which leaves "
            "none for the text; shorten the prompt or raise max_length"
        )
    starts = range(0, max(len(ids), 1), room)
    return [np.concatenate((prefix, ids[start : start + room], suffix)) for start in starts]


def weighted_mean(rows: FloatArray, counts: npt.NDArray[Any]) -> FloatArray:
    """``[d]`` mean of ``rows [windows, d]``, each weighted by its tokens of text, ``counts [windows]``.

    Summed in float64. The mean of normalized rows is shorter than they are: normalize it again.
    """
    weights = np.asarray(counts, dtype=np.float64)  # [windows]
    if not weights.any():  # windows of special tokens only
        weights = np.ones(len(rows))
    mean: FloatArray = (weights @ rows.astype(np.float64) / weights.sum()).astype(np.float32)
    return mean
