"""Explanation: where each token of a query found its best match in a document."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.values.outputs import TokenSpans

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenMatch:
    """The best match of one query token in a document.

    Attributes:
        token: The query's token as the vocabulary spells it: ``"##ing"``; ``"[MASK]"`` of a query's expansion.
        score: Its highest similarity to a document token. All scores of a query add up to MaxSim.
        start: Where that token begins in the document's text, in characters (code points).
        end: Where it ends; with ``start`` 0 if it stands for no text: a special token, a marker or a prompt.
        text: The document's text from ``start`` to ``end``.
    """

    token: str
    score: float
    start: int
    end: int
    text: str


def explain(
    query: TokenSpans,
    query_rows: npt.NDArray[Any],
    document: TokenSpans,
    document_rows: npt.NDArray[Any],
    document_text: str,
    *,
    pooled: tuple[npt.NDArray[Any], IndexArray] | None = None,
) -> list[TokenMatch]:
    """The best match of each query token; of equal similarities the first document token's.

    Args:
        query: The query's tokens, from ``token_spans``.
        query_rows: ``[query tokens, d]``, normalized as they are scored.
        document: The document's tokens.
        document_rows: ``[tokens, d]``.
        document_text: The text that ``document`` has offsets in.
        pooled: If the document was pooled: ``[rows, d]``, the rows that are scored, and int64 ``[tokens]``, the one
            that each token is a part of. A match is then the token of the best row that is the most similar itself.
    """
    scored = document_rows if pooled is None else pooled[0]
    if len(document) == 0 or len(scored) == 0:
        return [TokenMatch(token, -math.inf, 0, 0, "") for token in query.tokens]
    queries = query_rows.astype(np.float32, copy=False)
    similarities = queries @ scored.astype(np.float32, copy=False).T  # [query tokens, rows]
    best = similarities.argmax(axis=1)
    scores = similarities[np.arange(len(best)), best]
    if pooled is not None:
        similarities = queries @ document_rows.astype(np.float32, copy=False).T  # [query tokens, tokens]
        best = np.where(pooled[1] == best[:, None], similarities, -np.inf).argmax(axis=1)
    matches = []
    for token, score, (start, end) in zip(query.tokens, scores.tolist(), document.offsets[best].tolist(), strict=True):
        start, end = _trimmed(document_text, start, end)
        matches.append(TokenMatch(token, score, start, end, document_text[start:end]))
    return matches


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """A span without the spaces at its ends, which many tokenizers put into the word that follows."""
    piece = text[start:end]
    if not piece.strip():
        return start, end
    return start + len(piece) - len(piece.lstrip()), end - len(piece) + len(piece.rstrip())
