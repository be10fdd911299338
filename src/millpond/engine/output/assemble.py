"""Assemble: the rows of a finished call put together as its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from millpond.engine.output.entities import entities
from millpond.engine.output.spans import span_rows
from millpond.engine.schedule.call import Call
from millpond.pooling.activations import activate
from millpond.tasks import Task
from millpond.values.inputs import SpannedText, text_of
from millpond.values.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    Entity,
    RewardOutput,
    ScoreOutput,
    SparseEmbeddingOutput,
    TokenClassificationOutput,
    TokenEmbeddingOutput,
    Usage,
)
from millpond.vectors import matryoshka
from millpond.vectors.quantization import quantize
from millpond.vectors.ragged import Ragged


def assemble(call: Call) -> Any:
    """The output of a call that has all of its rows."""
    return _BY_TASK[call.plan.task](call)


def _embedding(call: Call) -> EmbeddingOutput:
    rows = matryoshka.cut(call.result.rows, call.plan.width, normalize=call.plan.normalize, own=call.owns_rows)
    return EmbeddingOutput(
        embeddings=quantize(call.per_item(rows), call.plan.output_dtype),
        cached=call.per_item(call.result.cached),
        truncated=call.per_item(call.result.truncated),
        usage=_usage(call),
    )


def _token_embedding(call: Call) -> TokenEmbeddingOutput:
    stacked = _empty(call) if call.hands_matrices_on else _stacked(call)
    flat = matryoshka.cut(stacked.flat, call.plan.width, normalize=call.plan.normalize, own=True)
    return TokenEmbeddingOutput(
        embeddings=Ragged(flat=flat, offsets=stacked.offsets),
        truncated=call.per_item(call.result.truncated),
        usage=_usage(call),
    )


def _sparse(call: Call) -> SparseEmbeddingOutput:
    weights = [dict(zip(m[:, 0].astype(int).tolist(), m[:, 1].tolist(), strict=True)) for m in call.matrices_per_item()]
    return SparseEmbeddingOutput(embeddings=weights, truncated=call.per_item(call.result.truncated), usage=_usage(call))


def _classification(call: Call) -> ClassificationOutput:
    return ClassificationOutput(
        probs=call.per_item(activate(call.result.rows, call.plan.activation)),
        labels=call.labels,
        truncated=call.per_item(call.result.truncated),
        usage=_usage(call),
    )


def _scores(call: Call) -> ScoreOutput:
    scores = activate(call.result.rows, call.plan.activation)[:, 0]
    return ScoreOutput(
        scores=call.per_item(np.ascontiguousarray(scores)),
        truncated=call.per_item(call.result.truncated),
        usage=_usage(call),
    )


def _rewards(call: Call) -> RewardOutput:
    stacked = _stacked(call)
    return RewardOutput(
        rewards=Ragged(flat=activate(stacked.flat, call.plan.activation), offsets=stacked.offsets),
        truncated=call.per_item(call.result.truncated),
        usage=_usage(call),
    )


def _token_classification(call: Call) -> TokenClassificationOutput:
    stacked = _stacked(call)
    probs = Ragged(flat=activate(stacked.flat, call.plan.activation), offsets=stacked.offsets)
    per_item: list[list[Entity]] = []
    for slot, rows in zip(call.slots(), probs, strict=True):
        alignment = call.result.alignments[slot]
        if alignment is None:  # token ids, which have no text, or rows of step tags
            per_item.append([])
            continue
        per_item.append(
            entities(
                rows,
                alignment.offsets,
                alignment.special,
                alignment.words,
                text_of(call.items[slot]),
                call.labels,
                call.plan.aggregation,
            )
        )
    return TokenClassificationOutput(
        entities=tuple(per_item),
        probs=probs,
        labels=call.labels,
        truncated=call.per_item(call.result.truncated),
        usage=_usage(call),
    )


_BY_TASK: dict[Task, Callable[[Call], Any]] = {
    "embed": _embedding,
    "token_embed": _token_embedding,
    "sparse_embed": _sparse,
    "classify": _classification,
    "token_classify": _token_classification,
    "score": _scores,
    "reward": _rewards,
}


def _stacked(call: Call) -> Ragged:
    """Every item's rows, in the caller's order; a text with spans has a row for each span."""
    if not call.per_token:
        rows = call.per_item(call.result.rows)
        return Ragged(flat=rows, offsets=np.arange(len(rows) + 1, dtype=np.int64))
    matrices = []
    for slot, matrix in zip(call.slots(), call.matrices_per_item(), strict=True):
        item, alignment = call.items[slot], call.result.alignments[slot]
        if isinstance(item, SpannedText) and alignment is not None:
            index = call.index_of(slot)
            matrix = span_rows(matrix, alignment.offsets, alignment.special, item.spans, index=index)
        matrices.append(matrix)
    return Ragged.from_matrices(matrices, width=call.native_width)


def _empty(call: Call) -> Ragged:
    """Matrices without rows: theirs were taken as they came."""
    flat = np.empty((0, call.native_width), dtype=np.float32)
    return Ragged(flat=flat, offsets=np.zeros(call.size + 1, dtype=np.int64))


def _usage(call: Call) -> Usage:
    return Usage(prompt_tokens=int(np.add.reduce(call.per_item(call.result.tokens))))
