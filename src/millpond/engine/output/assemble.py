"""Assemble: the rows of a finished call put together as its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.engine.output.entities import entities
from millpond.engine.output.spans import span_rows
from millpond.engine.schedule.call import Call
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
from millpond.vectors.activations import activate
from millpond.vectors.quantization import quantize
from millpond.vectors.ragged import Ragged

Fields = dict[str, Any]


def assemble(call: Call) -> Any:
    """The output of a call that has all of its rows."""
    output, fields = _BY_TASK[call.plan.task]
    return output(
        **fields(call),
        truncated=call.per_item(call.result.truncated),
        usage=Usage(prompt_tokens=int(np.add.reduce(call.per_item(call.result.tokens)))),
    )


def _embedding(call: Call) -> Fields:
    rows = matryoshka.cut(call.result.rows, call.plan.width, normalize=call.plan.normalize, own=call.owns_rows)
    embeddings = quantize(call.per_item(rows), call.plan.output_dtype, codes=call.plan.codes)
    return {"embeddings": embeddings, "cached": call.per_item(call.result.cached)}


def _token_embedding(call: Call) -> Fields:
    stacked = _stacked(call)
    flat = matryoshka.cut(stacked.flat, call.plan.width, normalize=call.plan.normalize, own=True)
    return {"embeddings": Ragged(flat=flat, offsets=stacked.offsets)}


def _sparse(call: Call) -> Fields:
    most = call.plan.most_entries
    matrices = [matrix if most is None else _largest(matrix, most) for matrix in call.matrices_per_item()]
    weights = [dict(zip(m[:, 0].astype(int).tolist(), m[:, 1].tolist(), strict=True)) for m in matrices]
    return {"embeddings": weights}


def _largest(matrix: npt.NDArray[np.float32], most: int) -> npt.NDArray[np.float32]:
    """The ``most`` entries of ``[k, 2]`` with the largest weights, ascending."""
    if len(matrix) <= most:
        return matrix
    return matrix[np.sort(np.argpartition(-matrix[:, 1], most - 1)[:most])]


def _classification(call: Call) -> Fields:
    return {"probs": call.per_item(activate(call.result.rows, call.plan.activation)), "labels": call.labels}


def _scores(call: Call) -> Fields:
    scores = activate(call.result.rows, call.plan.activation)[:, 0]
    return {"scores": call.per_item(np.ascontiguousarray(scores))}


def _activated(call: Call) -> Ragged:
    stacked = _stacked(call)
    return Ragged(flat=activate(stacked.flat, call.plan.activation), offsets=stacked.offsets)


def _token_classification(call: Call) -> Fields:
    probs = _activated(call)
    per_item: list[list[Entity]] = []
    for slot, rows in zip(call.slots(), probs, strict=True):
        alignment = call.result.alignments[slot]
        # Token ids have no text, and neither do rows of step tags.
        text = text_of(call.items[slot])
        found = [] if alignment is None else entities(rows, alignment, text, call.labels, call.plan.aggregation)
        per_item.append(found)
    return {"entities": tuple(per_item), "probs": probs, "labels": call.labels}


_BY_TASK: dict[Task, tuple[type, Callable[[Call], Fields]]] = {
    "embed": (EmbeddingOutput, _embedding),
    "token_embed": (TokenEmbeddingOutput, _token_embedding),
    "sparse_embed": (SparseEmbeddingOutput, _sparse),
    "classify": (ClassificationOutput, _classification),
    "token_classify": (TokenClassificationOutput, _token_classification),
    "score": (ScoreOutput, _scores),
    "reward": (RewardOutput, lambda call: {"rewards": _activated(call)}),
}


def _stacked(call: Call) -> Ragged:
    """Every item's rows, in the caller's order; a text with spans has a row for each span."""
    if call.hands_matrices_on:  # matrices without rows: theirs were taken as they came
        flat = np.empty((0, call.native_width), dtype=np.float32)
        return Ragged(flat=flat, offsets=np.zeros(call.size + 1, dtype=np.int64))
    if not call.per_token:
        rows = call.per_item(call.result.rows)
        return Ragged(flat=rows, offsets=np.arange(len(rows) + 1, dtype=np.int64))
    matrices = []
    for slot, matrix in zip(call.slots(), call.matrices_per_item(), strict=True):
        item, alignment = call.items[slot], call.result.alignments[slot]
        if isinstance(item, SpannedText) and alignment is not None:
            index = call.index_of(slot)
            matrix = span_rows(matrix, alignment, item.spans, index=index)
        matrices.append(matrix)
    return Ragged.from_matrices(matrices, width=call.native_width)
