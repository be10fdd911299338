"""Late chunks: a row for each span of a text, pooled from the states of the whole text, or of windows of a long one."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from millpond.engine.composite.gather import combine
from millpond.engine.input.model import LoadedModel
from millpond.engine.input.plan import Plan
from millpond.engine.schedule.call import CallOptions
from millpond.engine.schedule.timing import CallFuture, CallTimer
from millpond.engine.tokenize.tokenized import Tokenized, span_tokens
from millpond.errors import InputTooLongError
from millpond.values.inputs import Item, SpannedText, TokenIds
from millpond.values.outputs import TokenEmbeddingOutput, Usage
from millpond.vectors import matryoshka
from millpond.vectors.ragged import Ragged

FloatArray = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]
# Queues a call.
Queue = Callable[[Sequence[Item], Plan, CallOptions], Future[Any]]

CONTEXT = 16
"""One part in so many of a window is context that a span has on each side, unless the text begins or ends there."""


class _Part(NamedTuple):
    """What is pooled of a window: the row of the result, and the window's tokens."""

    row: int
    tokens: Tokens


def late_chunks(
    items: Sequence[Item], plan: Plan, loaded: LoadedModel, queue: Queue, threads: Executor
) -> CallFuture[TokenEmbeddingOutput]:
    """A row for each span of each text: the mean of its tokens' states, without special tokens and the prompt.

    A text that the model reads whole is one forward. A longer one is read in :func:`windows`, each with special tokens
    and prompt, and a span is pooled from one of them. A span without tokens gets a row of zeros.
    """
    timer = CallTimer()
    texts = [item for item in items if isinstance(item, SpannedText)]
    begun = perf_counter()
    encoded = loaded.encoder.texts.encode(
        [text.text for text in texts],
        prompt=plan.prompt,
        limit=sys.maxsize >> 8,
        truncate="end",
        index_of=lambda index: index,
        align=True,
    )
    timer.tokenized(perf_counter() - begun)
    parts: dict[TokenIds, list[_Part]] = {}  # a call computes equal windows once, in this order
    row = read = 0
    for index, (text, tokenized) in enumerate(zip(texts, encoded, strict=True)):
        for piece, found in _pieces(text, tokenized, plan, index, row):
            parts.setdefault(piece, []).extend(found)
            read += len(piece.ids)  # of equal ones, too, as everywhere
        row += len(text.spans)
    pieces = list(parts)
    rows = np.zeros((row, loaded.spec.hidden_size), dtype=np.float32)

    def take(slots: Sequence[int], matrices: Sequence[FloatArray]) -> None:
        for slot, matrix in zip(slots, matrices, strict=True):
            for part in parts[pieces[slot]]:
                rows[part.row] = matrix[part.tokens - plan.first_kept].mean(axis=0, dtype=np.float64)

    def assemble(_outputs: list[TokenEmbeddingOutput]) -> TokenEmbeddingOutput:
        offsets = np.cumsum([0, *(len(text.spans) for text in texts)], dtype=np.int64)
        return TokenEmbeddingOutput(
            embeddings=Ragged(flat=matryoshka.cut(rows, plan.width, normalize=plan.normalize), offsets=offsets),
            truncated=np.zeros(len(texts), dtype=np.bool_),
            usage=Usage(prompt_tokens=read),
        )

    options = CallOptions(on_matrices=take, timer=timer)
    return combine([lambda: queue(pieces, plan, options)], assemble, threads, timer)


def _pieces(
    text: SpannedText, tokenized: Tokenized, plan: Plan, index: int, row: int
) -> list[tuple[TokenIds, list[_Part]]]:
    """The windows of a text, and what is pooled of each; ``row``: that of its first span."""
    assert tokenized.alignment is not None
    ids, own = tokenized.ids, np.flatnonzero(~tokenized.alignment.special)
    if not len(own):
        return []
    front, end = int(own[0]), int(own[-1]) + 1
    before, behind = ids[:front], ids[end:]
    room = plan.limit - len(before) - len(behind)
    if room < 1:
        raise InputTooLongError(
            f"prompt and special tokens take {plan.limit - room} of max_length={plan.limit} tokens, which leaves none "
            "for the text; shorten the prompt or raise max_length"
        )
    spans = {row + i: tokens - front for i, tokens in enumerate(span_tokens(tokenized.alignment, text.spans))}
    spans = {i: tokens for i, tokens in spans.items() if len(tokens)}
    longest = max((int(tokens[-1] - tokens[0]) + 1 for tokens in spans.values()), default=0)
    if longest > room:
        raise InputTooLongError(
            f"a span of the text at index {index} has {longest} tokens, more than the {room} that max_length="
            f"{plan.limit} leaves for text; make it shorter",
            index=index,
            tokens=longest,
            limit=room,
        )
    ranges = {i: (int(tokens[0]), int(tokens[-1]) + 1) for i, tokens in spans.items()}
    read = windows(list(ranges.values()), end - front, room)
    found: dict[tuple[int, int], list[_Part]] = {window: [] for window in read}
    for i, tokens in spans.items():
        window = widest(read, ranges[i], end - front)
        found[window].append(_Part(i, tokens - window[0] + front))
    return [
        (TokenIds((*before.tolist(), *ids[front + first : front + last].tolist(), *behind.tolist())), parts)
        for (first, last), parts in found.items()
        if parts
    ]


def windows(ranges: Sequence[tuple[int, int]], tokens: int, room: int) -> list[tuple[int, int]]:
    """Half-open windows of at most ``room`` of a text's tokens, one of which holds each of ``ranges`` whole.

    Beside a range, that window has at least one part in :data:`CONTEXT` of it on each side, as far as the text goes on
    there and the window has room. All windows but that of a text which fits are full; they are in order.
    """
    if tokens <= room:
        return [(0, tokens)]
    context = room // CONTEXT
    found = [(0, room)]
    for start, end in sorted(ranges):
        last = found[-1][1]
        spare = (room - (end - start)) // 2  # a range longer than most of a window has less context
        if min(end + min(context, spare), tokens) > last:
            first = min(start - min(context, spare), tokens - room)
            found.append((first, first + room))
    return sorted(set(found))


def widest(found: Sequence[tuple[int, int]], span: tuple[int, int], tokens: int) -> tuple[int, int]:
    """The window in which a range of tokens is farthest from the nearer edge at which the text was cut."""

    def context(window: tuple[int, int]) -> float:
        left = span[0] - window[0] if window[0] else math.inf
        right = window[1] - span[1] if window[1] < tokens else math.inf
        return min(left, right)

    room = found[0][1] - found[0][0]  # of each
    holding = found[bisect_left(found, (span[1] - room, 0)) : bisect_right(found, (span[0], sys.maxsize))]
    return max(holding, key=context)
