"""DirectItem: vector or token vectors of one text, or the score of one pair, without a queue; see :mod:`.direct`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.backends.backend import Model, PackedBatch
from millpond.engine.execute.direct import MOST_CHARACTERS, Direct
from millpond.engine.input.encode import InputEncoder
from millpond.engine.input.plan import Plan
from millpond.engine.tokenize.tokenized import Tokenized
from millpond.values.inputs import Pair, size_of
from millpond.values.outputs import EmbeddingOutput, ScoreOutput, TokenEmbeddingOutput, Usage
from millpond.vectors import matryoshka
from millpond.vectors.activations import activate
from millpond.vectors.ragged import Ragged


class DirectItem(Direct):
    """Runs single texts and pairs by one plan: a batch of one, without what leads to a batch."""

    def __init__(self, model: Model, plan: Plan, encoder: InputEncoder, *, native_width: int, **parts: Any) -> None:
        """``native_width``: columns of a row before the cut."""
        super().__init__(**parts)
        self._model, self._plan, self._encoder, self._native_width = model, plan, encoder, native_width

    def _read(self, item: str | Pair, part: int) -> tuple[int, Tokenized | None]:
        if size_of(item) > MOST_CHARACTERS:
            return 0, None
        for text in (item,) if isinstance(item, str) else item:
            text.encode()  # raises for a lone surrogate
        (tokenized,) = self._encoder.encode([item], self._plan, index_of=lambda i: i)
        return (0 if tokenized.truncated else len(tokenized.ids)), tokenized

    def _outputs(
        self, read: list[Tokenized], threads: int
    ) -> list[EmbeddingOutput | TokenEmbeddingOutput | ScoreOutput]:
        output = self._output(read[0], threads)
        return [] if output is None else [output]

    def _output(self, read: Tokenized, threads: int) -> EmbeddingOutput | TokenEmbeddingOutput | ScoreOutput | None:
        plan, tokens, offset = self._plan, len(read.ids), self._model.position_offset
        batch = PackedBatch(
            bounds=np.array([0, tokens], dtype=np.int32),
            ids=read.ids,
            positions=np.arange(offset, offset + tokens, dtype=np.int32),
            types=None if read.types is None else read.types.astype(np.int32),
            adapters=None,
            skip=np.array([min(plan.skip, tokens - 1)], dtype=np.int32) if plan.skip and tokens > 1 else None,
            keys=None if read.attended is None else [read.attended],
            prefixes=None,
        )
        with self._threads.running(threads, awake=False):
            rows = self._model.run(batch, {plan.output})[plan.output][0]
        rows = rows if read.kept is None else rows[read.kept]
        if not np.isfinite(rows).all():
            return None
        truncated, usage = np.zeros(1, dtype=np.bool_), Usage(prompt_tokens=tokens)
        if plan.task == "score":
            scores: npt.NDArray[np.float32] = np.ascontiguousarray(activate(rows[None], plan.activation)[:, 0])
            return ScoreOutput(scores=scores, truncated=truncated, usage=usage)
        if plan.task == "embed":
            vectors = matryoshka.cut(rows[None], plan.width, normalize=plan.normalize, own=True)
            cached = np.zeros(1, dtype=np.bool_)
            return EmbeddingOutput(embeddings=vectors, cached=cached, truncated=truncated, usage=usage)
        matrix = Ragged.from_matrices([rows], width=self._native_width)
        flat = matryoshka.cut(matrix.flat, plan.width, normalize=plan.normalize, own=True)
        return TokenEmbeddingOutput(
            embeddings=Ragged(flat=flat, offsets=matrix.offsets), truncated=truncated, usage=usage
        )
