"""Chunking: vectors of texts longer than the model reads, from windows over all of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from millpond.engine.composite.gather import combine
from millpond.engine.composite.windows import weighted_mean, windows
from millpond.engine.input.model import LoadedModel
from millpond.engine.input.plan import Plan
from millpond.engine.schedule.timing import CallFuture, CallTimer
from millpond.errors import InvalidRequestError
from millpond.inputs import Item, TokenIds
from millpond.outputs import EmbeddingOutput, Usage
from millpond.vectors import matryoshka
from millpond.vectors.quantization import quantize


class Submit(Protocol):
    """Queues a call if the queue has room for ``admit`` more texts; ``timer`` measures it."""

    def __call__(self, items: Sequence[Item], plan: Plan, *, admit: int, timer: CallTimer) -> Future[Any]:
        """A future of the call's output."""
        ...


def in_windows(
    items: Sequence[Item], plan: Plan, loaded: LoadedModel, submit: Submit, threads: Executor
) -> CallFuture[EmbeddingOutput]:
    """Embed ``items``; one with more than ``plan.limit`` tokens is read in windows whose vectors are averaged.

    Each of the text's tokens is in one window, and each window has its own special tokens and prompt. The windows'
    vectors, with the width and normalization of the plan, are averaged, weighted by their tokens of text; the mean is
    normalized again. The cache holds windows as it holds texts: text added at the end costs only its own windows.

    Raises:
        InvalidRequestError: Token ids, which do not say where special tokens belong.
        InputTooLongError: Prompt and special tokens leave no room in a window.
    """
    timer = CallTimer()
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) < len(items):
        raise InvalidRequestError("chunking takes texts only; cut token ids into windows yourself")
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
    short = [i for i in range(len(texts)) if i not in counts_of]

    def assemble(results: list[EmbeddingOutput]) -> EmbeddingOutput:
        whole, windowed = results
        rows = np.empty((len(texts), whole.embeddings.shape[1]), dtype=np.float32)
        cached = np.zeros(len(texts), dtype=np.bool_)
        rows[short], cached[short] = whole.embeddings, whole.cached
        start = 0
        for i, counts in counts_of.items():
            piece_rows = slice(start, start + len(counts))
            start += len(counts)
            mean = weighted_mean(windowed.embeddings[piece_rows], np.array(counts))
            rows[i] = matryoshka.cut(mean[None], len(mean), normalize=plan.normalize)[0]
            cached[i] = windowed.cached[piece_rows].all()
        return EmbeddingOutput(
            embeddings=quantize(rows, plan.output_dtype),
            cached=cached,
            truncated=np.zeros(len(texts), dtype=np.bool_),
            usage=Usage(prompt_tokens=whole.usage.prompt_tokens + windowed.usage.prompt_tokens),
        )

    unquantized = replace(plan, output_dtype="float32")
    calls: list[Future[Any]] = []
    try:
        calls.append(submit([texts[i] for i in short], unquantized, admit=len(short) + len(pieces), timer=timer))
        calls.append(submit(pieces, unquantized, admit=0, timer=timer))
    except BaseException:
        for call in calls:
            call.cancel()
        raise
    return combine(calls, assemble, threads, timer)
