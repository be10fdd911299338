"""Results: a finished call's rows put together as what its caller gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from millpond import matryoshka
from millpond.engine.composite.windows import span_rows
from millpond.engine.output.entities import entities
from millpond.inputs import SpannedText, text_of
from millpond.outputs import (
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
from millpond.pooling.activations import activate
from millpond.quantization import quantize
from millpond.ragged import Ragged
from millpond.tasks import Task

if TYPE_CHECKING:
    from millpond.engine.schedule.call import Call


def assemble(call: Call) -> Any:
    """The output of a call whose every row is there."""
    return _BY_TASK[call.plan.task](call)


def _embedding(call: Call) -> EmbeddingOutput:
    rows = matryoshka.cut(call.rows, call.plan.width, normalize=call.plan.normalize, own=call.owns_rows)
    return EmbeddingOutput(
        embeddings=quantize(call.per_item(rows), call.plan.output_dtype),
        cached=call.per_item(call.cached),
        truncated=call.per_item(call.truncated),
        usage=_usage(call),
    )


def _token_embedding(call: Call) -> TokenEmbeddingOutput:
    stacked = _stacked(call)
    flat = matryoshka.cut(stacked.flat, call.plan.width, normalize=call.plan.normalize, own=True)
    return TokenEmbeddingOutput(
        embeddings=Ragged(flat=flat, offsets=stacked.offsets),
        truncated=call.per_item(call.truncated),
        usage=_usage(call),
    )


def _sparse(call: Call) -> SparseEmbeddingOutput:
    found = [dict(zip(m[:, 0].astype(int).tolist(), m[:, 1].tolist(), strict=True)) for m in call.in_order()]
    return SparseEmbeddingOutput(embeddings=found, truncated=call.per_item(call.truncated), usage=_usage(call))


def _classification(call: Call) -> ClassificationOutput:
    return ClassificationOutput(
        probs=call.per_item(activate(call.rows, call.plan.activation)),
        labels=call.labels,
        truncated=call.per_item(call.truncated),
        usage=_usage(call),
    )


def _scores(call: Call) -> ScoreOutput:
    scores = activate(call.rows, call.plan.activation)[:, 0]
    return ScoreOutput(
        scores=call.per_item(np.ascontiguousarray(scores)),
        truncated=call.per_item(call.truncated),
        usage=_usage(call),
    )


def _rewards(call: Call) -> RewardOutput:
    stacked = _stacked(call)
    return RewardOutput(
        rewards=Ragged(flat=activate(stacked.flat, call.plan.activation), offsets=stacked.offsets),
        truncated=call.per_item(call.truncated),
        usage=_usage(call),
    )


def _token_classification(call: Call) -> TokenClassificationOutput:
    stacked = _stacked(call)
    probs = Ragged(flat=activate(stacked.flat, call.plan.activation), offsets=stacked.offsets)
    found: list[list[Entity]] = []
    for slot, rows in zip(call.order(), probs, strict=True):
        places = call.places[slot]
        if places is None:  # token ids, which stand in no text, or the rows of step tags
            found.append([])
            continue
        found.append(
            entities(
                rows,
                places.offsets,
                places.special,
                places.words,
                text_of(call.items[slot]),
                call.labels,
                call.plan.aggregation,
            )
        )
    return TokenClassificationOutput(
        entities=tuple(found),
        probs=probs,
        labels=call.labels,
        truncated=call.per_item(call.truncated),
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
    """Every item's rows, in the caller's order; of a spanned text a row for each span."""
    if not call.per_token:
        rows = call.per_item(call.rows)
        return Ragged(flat=rows, offsets=np.arange(len(rows) + 1, dtype=np.int64))
    matrices = []
    for slot, matrix in zip(call.order(), call.in_order(), strict=True):
        item, places = call.items[slot], call.places[slot]
        if isinstance(item, SpannedText) and places is not None:
            matrix = span_rows(matrix, places.offsets, places.special, item.spans, index=call.position(slot))
        matrices.append(matrix)
    return Ragged.from_matrices(matrices, width=call.native_width)


def _usage(call: Call) -> Usage:
    return Usage(prompt_tokens=int(call.per_item(call.tokens).sum()))
