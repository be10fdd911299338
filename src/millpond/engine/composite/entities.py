"""Entities by labels of the caller's: a GLiNER's scores of words or spans, decoded as the library gliner does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from millpond.backends.entity_head import EntityHead
from millpond.checkpoints.layouts.gliner import Gliner
from millpond.engine.composite.gather import combine
from millpond.engine.input.entity_prompt import EntityPrompt, EntityText
from millpond.engine.schedule.call import OnMatrices
from millpond.engine.schedule.timing import CallFuture, CallTimer
from millpond.errors import InvalidRequestError, UnsupportedTaskError
from millpond.values.inputs import Item, TokenIds
from millpond.values.outputs import Entity, TokenClassificationOutput, TokenEmbeddingOutput, Usage
from millpond.values.params import PoolingParams
from millpond.vectors.activations import activate
from millpond.vectors.ragged import Ragged

FloatArray = npt.NDArray[np.float32]
# Queues token ids, whose states the function gets as they are computed.
Queue = Callable[[Sequence[TokenIds], OnMatrices, CallTimer], Future[TokenEmbeddingOutput]]

THRESHOLD = 0.5


class _Span(NamedTuple):
    """Words ``start`` to ``end``, the last one included, and how surely they have the label of a column."""

    start: int
    end: int
    column: int
    score: float
    scores: FloatArray  # [labels]


def check(params: PoolingParams, prompt: EntityPrompt | None, name: str) -> EntityPrompt:
    """The reader of a model that takes labels of the caller's."""
    if prompt is None:
        raise UnsupportedTaskError(
            f"{name} has labels of its own; labels= needs a GLiNER, such as urchade/gliner_medium-v2.1; leave it out"
        )
    if params.labels is None:
        raise InvalidRequestError(f"{name} is a GLiNER, which finds what you name; pass labels=[...]")
    if params.activation not in (None, True) or params.aggregation != "none":
        raise InvalidRequestError("activation and aggregation mean nothing to a GLiNER; leave them out")
    prompt.check(params.labels)
    return prompt


def find(
    items: Sequence[Item],
    params: PoolingParams,
    prompt: EntityPrompt,
    head: EntityHead,
    queue: Queue,
    threads: Executor | None,
    *,
    limit: int,
) -> CallFuture[TokenClassificationOutput]:
    """The entities of each text."""
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) < len(items):
        raise InvalidRequestError("token_classify with labels takes texts only, no token ids")
    assert params.labels is not None
    labels, timer = params.labels, CallTimer()
    inputs = prompt.read(texts, labels, limit=limit, truncate=params.truncate)
    read = [each for each in inputs if each is not None]
    distinct = list({each.ids: each for each in read}.values())  # a call computes equal items once, in this order
    slot_of = {each.ids: slot for slot, each in enumerate(distinct)}
    found: list[list[_Span]] = [[]] * len(distinct)

    def take(slots: Sequence[int], matrices: Sequence[FloatArray]) -> None:
        words = [_rows(matrix, distinct[slot].words) for slot, matrix in zip(slots, matrices, strict=True)]
        of_labels = [matrix[distinct[slot].labels] for slot, matrix in zip(slots, matrices, strict=True)]
        for slot, logits in zip(slots, head.logits(words, of_labels), strict=True):
            found[slot] = decode(logits, params, head.layout)

    def assemble(outputs: list[TokenEmbeddingOutput]) -> TokenClassificationOutput:
        spans = [[] if each is None else _inside(found[slot_of[each.ids]], each) for each in inputs]
        rows = [np.array([span.scores for span in each]).reshape(-1, len(labels)) for each in spans]
        entities = tuple(
            [] if each is None else [_entity(span, each, text, labels) for span in own]
            for each, own, text in zip(inputs, spans, texts, strict=True)
        )
        return TokenClassificationOutput(
            entities=entities,
            probs=Ragged.from_matrices(rows, width=len(labels)),
            labels=labels,
            truncated=np.array([each is not None and each.truncated for each in inputs], dtype=np.bool_),
            usage=Usage(prompt_tokens=sum(output.usage.prompt_tokens for output in outputs)),
        )

    pieces = [TokenIds(each.ids) for each in read]
    return combine([lambda: queue(pieces, take, timer)], assemble, threads, timer)


def _rows(matrix: FloatArray, words: npt.NDArray[np.int64]) -> FloatArray:
    """``[words, d]`` the state of each word's first token; zeros for a word without one."""
    rows: FloatArray = np.where(words[:, None] < 0, np.float32(0), matrix[words])
    return rows


def _inside(spans: list[_Span], text_input: EntityText) -> list[_Span]:
    """The spans with characters of the text, to whose end a sign may have been added."""
    return [span for span in spans if text_input.spans[span.start][0] < text_input.spans[span.end][1]]


def _entity(span: _Span, text_input: EntityText, text: str, labels: Sequence[str]) -> Entity:
    start, end = text_input.spans[span.start][0], text_input.spans[span.end][1]
    return Entity(label=labels[span.column], score=span.score, start=start, end=end, text=text[start:end])


def decode(logits: FloatArray, params: PoolingParams, layout: Gliner) -> list[_Span]:
    """The spans of a text, from its ``logits [w, width, c]`` of spans or ``[w, c, 3]`` of words.

    The surest come first, and exclude those that overlap with them: all, or, if they may be nested, those of which
    neither is inside the other. Two labels of one span exclude each other unless ``multi_label``. GLiNER2's labels
    exclude no others' spans, and a span of its may be as probable as the threshold.
    """
    threshold = THRESHOLD if params.threshold is None else params.threshold
    probs = activate(logits, "sigmoid")
    if layout.span_mode == "token_level":
        candidates = list(_from_words(probs, threshold))
    else:
        sure = probs >= threshold if layout.counting else probs > threshold
        candidates = list(_from_spans(probs, sure & np.isfinite(logits)))
    kept: list[_Span] = []
    for span in sorted(candidates, key=lambda span: -span.score):
        others = [other for other in kept if other.column == span.column or not layout.counting]
        if not any(_excludes(other, span, params) for other in others):
            kept.append(span)
    return sorted(kept, key=lambda span: span.start)


def _from_spans(probs: FloatArray, chosen: npt.NDArray[np.bool_]) -> Iterator[_Span]:
    for start, more, column in zip(*(axis.tolist() for axis in np.nonzero(chosen)), strict=True):
        scores = probs[start, more]
        yield _Span(start, start + more, column, float(scores[column]), scores)


def _from_words(probs: FloatArray, threshold: float) -> Iterator[_Span]:
    """Spans whose first word begins an entity, whose last one ends it, and which goes on in every word."""
    begins, ends, inside = np.moveaxis(probs, -1, 0)  # [w, c] each
    last = np.nonzero(ends > threshold)
    for start, column in zip(*(axis.tolist() for axis in np.nonzero(begins > threshold)), strict=True):
        for end in last[0][(last[1] == column) & (last[0] >= start)].tolist():
            within = inside[start : end + 1, column]
            if within.min() < threshold:
                continue
            scores = np.minimum(np.minimum(begins[start], ends[end]), inside[start : end + 1].min(axis=0))
            yield _Span(start, end, column, float(scores[column]), scores)


def _excludes(surer: _Span, span: _Span, params: PoolingParams) -> bool:
    if (surer.start, surer.end) == (span.start, span.end):
        return not params.multi_label
    if surer.start > span.end or span.start > surer.end:
        return False
    nested = (surer.start <= span.start and surer.end >= span.end) or (
        span.start <= surer.start and span.end >= surer.end
    )
    return not (params.nested and nested)
