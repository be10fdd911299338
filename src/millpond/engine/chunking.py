"""Chunking: vectors of texts longer than the model reads, from windows over all of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import numpy as np

from millpond import matryoshka
from millpond.engine.combine import combine
from millpond.engine.items import Item, TokenIds
from millpond.engine.loading import Loaded
from millpond.engine.plan import Plan
from millpond.engine.windows import weighted_mean, windows
from millpond.errors import InvalidRequestError
from millpond.outputs import EmbeddingOutput, Usage
from millpond.quantization import quantize

Submit = Callable[[Sequence[Item], Plan], "Future[Any]"]


def in_windows(
    items: Sequence[Item], plan: Plan, loaded: Loaded, submit: Submit, threads: Executor
) -> Future[EmbeddingOutput]:
    """Embed ``items``; one that does not fit ``plan.limit`` is read in windows whose vectors are averaged.

    The windows hold the text's tokens, each once, behind special tokens and prompt of their own. Their vectors, at the
    width and with the normalization that the caller asked for, are averaged in proportion to their tokens of text; the
    mean is normalized again.

    Raises:
        InvalidRequestError: Token ids, which say nothing of where special tokens belong.
    """
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) < len(items):
        raise InvalidRequestError("chunking takes texts only; cut token ids into windows yourself")
    whole = replace(plan, output_dtype="float32")
    read = loaded.forms.texts.read_whole(texts, prompt=plan.prompt)
    cut = [windows(ids, front, back, plan.limit) if len(ids) + len(front) + len(back) > plan.limit else None
           for ids, front, back in read]  # fmt: skip
    short = [text for text, parts in zip(texts, cut, strict=True) if parts is None]
    # A window's own tokens: without special ones and prompt, which are not text.
    own = [[len(part) - len(front) - len(back) for part in parts or ()]
           for parts, (_, front, back) in zip(cut, read, strict=True)]  # fmt: skip
    pieces = [TokenIds(tuple(part.tolist())) for parts in cut if parts is not None for part in parts]

    def assemble(results: list[EmbeddingOutput]) -> EmbeddingOutput:
        plain, windowed = results
        width = plain.embeddings.shape[1]
        rows = np.zeros((len(texts), width), dtype=np.float32)
        cached = np.zeros(len(texts), dtype=np.bool_)
        at, place = 0, 0
        for i, counts in enumerate(own):
            if counts:
                vectors = windowed.embeddings[at : at + len(counts)]
                rows[i] = weighted_mean(vectors, np.array(counts))
                at += len(counts)
            else:
                rows[i], cached[i] = plain.embeddings[place], plain.cached[place]
                place += 1
        return EmbeddingOutput(
            embeddings=quantize(matryoshka.cut(rows, width, normalize=plan.normalize), plan.output_dtype),
            cached=cached,
            truncated=np.zeros(len(texts), dtype=np.bool_),
            usage=Usage(prompt_tokens=plain.usage.prompt_tokens + windowed.usage.prompt_tokens),
        )

    parts: list[Future[Any]] = []
    try:
        parts += [submit(short, whole), submit(pieces, whole)]
    except BaseException:
        for part in parts:
            part.cancel()
        raise
    return combine(parts, assemble, threads)
