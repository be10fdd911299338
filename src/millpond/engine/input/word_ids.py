"""Words: which tokens are parts of one word, as transformers' token classification decides it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_SPACE = ord(" ")


def word_numbers(
    offsets: npt.NDArray[np.int32],
    special: npt.NDArray[np.bool_],
    unknown: npt.NDArray[np.bool_],
    text: str,
    *,
    tokens: Sequence[str] | None,
) -> npt.NDArray[np.int32]:
    """Number the words of a text.

    Not the tokenizer's own words, since models were evaluated with these: where continuing tokens carry a mark (the
    ``##`` of WordPiece), a token longer or shorter than its characters continues a word; elsewhere one that no space
    precedes, so that punctuation belongs to the word before it. An unknown token always begins a word.

    Args:
        offsets: int32 ``[tokens, 2]`` each token's characters, half open.
        special: bool ``[tokens]`` tokens that stand for no text.
        unknown: bool ``[tokens]`` tokens that stand for what the vocabulary lacks.
        text: What the offsets count in.
        tokens: The tokens as the vocabulary has them, from a tokenizer that marks continuing ones; else ``None``.

    Returns:
        int32 ``[tokens]`` from 0; -1 for the special ones.
    """
    starts, stops = offsets[:, 0], offsets[:, 1]
    if tokens is not None:
        lengths = np.fromiter((len(token) for token in tokens), dtype=np.int32, count=len(tokens))
        continues = lengths != stops - starts
    else:
        # One more space in front and behind: a token at the first character has none before it, nor needs one.
        padded = np.array([_SPACE, *map(ord, text), 0], dtype=np.int32)
        starts = starts.clip(max=len(text))
        continues = (padded[starts] != _SPACE) & (padded[starts + 1] != _SPACE)
    begins = ~special & ~(continues & ~unknown)
    begins[np.flatnonzero(~special)[:1]] = True
    return np.where(special, -1, np.cumsum(begins) - 1).astype(np.int32)
