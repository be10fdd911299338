"""Chunking: vectors of texts longer than the model reads, from windows over all of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from millpond import matryoshka
from millpond.engine.composite.gather import combine
from millpond.engine.composite.windows import weighted_mean, windows
from millpond.engine.input.plan import Plan
from millpond.engine.loading import LoadedModel
from millpond.engine.schedule.timing import CallFuture, CallTimer
from millpond.errors import InvalidRequestError
from millpond.inputs import Item, TokenIds
from millpond.outputs import EmbeddingOutput, Usage
from millpond.quantization import quantize


class Submit(Protocol):
    """Queues a call; ``admit`` items ask for room, and its time is taken by ``clock``."""

    def __call__(self, items: Sequence[Item], plan: Plan, *, admit: int, timer: CallTimer) -> Future[Any]:
        """A future of the call's output."""
        ...


def in_windows(
    items: Sequence[Item], plan: Plan, loaded: LoadedModel, submit: Submit, threads: Executor
) -> CallFuture[EmbeddingOutput]:
    """Embed ``items``; one that does not fit ``plan.limit`` is read in windows whose vectors are averaged.

    The windows hold the text's tokens, each once, behind special tokens and prompt of their own. Their vectors, at the
    width and with the normalization that the caller asked for, are averaged in proportion to their tokens of text; the
    mean is normalized again. A cache holds windows as it holds texts: text added at the end costs its own windows only.

    Raises:
        InvalidRequestError: Token ids, which say nothing of where special tokens belong.
        InputTooLongError: Prompt and special tokens leave no room in a window.
    """
    timer = CallTimer()
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) < len(items):
        raise InvalidRequestError("chunking takes texts only; cut token ids into windows yourself")
    pieces: list[TokenIds] = []
    begun = perf_counter()
    own: dict[int, list[int]] = {}  # of each long text, its windows' tokens of text
    for i, (ids, front, back) in enumerate(loaded.encoder.texts.read_whole(texts, prompt=plan.prompt)):
        if len(front) + len(ids) + len(back) > plan.limit:
            parts = windows(ids, front, back, plan.limit)
            skip = len(front) if plan.skip else 0
            pieces += [TokenIds(tuple(part.tolist()), skip=skip) for part in parts]
            own[i] = [len(part) - len(front) - len(back) for part in parts]
    timer.tokenized(perf_counter() - begun)
    short = [i for i in range(len(texts)) if i not in own]

    def assemble(results: list[EmbeddingOutput]) -> EmbeddingOutput:
        plain, windowed = results
        rows = np.empty((len(texts), plain.embeddings.shape[1]), dtype=np.float32)
        cached = np.zeros(len(texts), dtype=np.bool_)
        rows[short], cached[short] = plain.embeddings, plain.cached
        at = 0
        for i, counts in own.items():
            these = slice(at, at + len(counts))
            at += len(counts)
            mean = weighted_mean(windowed.embeddings[these], np.array(counts))
            rows[i] = matryoshka.cut(mean[None], len(mean), normalize=plan.normalize)[0]
            cached[i] = windowed.cached[these].all()
        return EmbeddingOutput(
            embeddings=quantize(rows, plan.output_dtype),
            cached=cached,
            truncated=np.zeros(len(texts), dtype=np.bool_),
            usage=Usage(prompt_tokens=plain.usage.prompt_tokens + windowed.usage.prompt_tokens),
        )

    whole = replace(plan, output_dtype="float32")
    calls: list[Future[Any]] = []
    try:
        calls.append(submit([texts[i] for i in short], whole, admit=len(short) + len(pieces), timer=timer))
        calls.append(submit(pieces, whole, admit=0, timer=timer))
    except BaseException:
        for call in calls:
            call.cancel()
        raise
    return combine(calls, assemble, threads, timer)
