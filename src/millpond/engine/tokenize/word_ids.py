"""Word ids: which tokens are parts of one word, by the rule of transformers' token-classification pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_SPACE = ord(" ")


def word_numbers(
    offsets: npt.NDArray[np.int32],  # int32 `[tokens, 2]` each token's character span, half open
    special: npt.NDArray[np.bool_],  # bool `[tokens]` tokens that stand for no text
    unknown: npt.NDArray[np.bool_],
    text: str,  # the text that the offsets refer to
    *,
    tokens: Sequence[str] | None,
) -> npt.NDArray[np.int32]:
    """Number the words of a text.

    These are not the tokenizer's own words: models are evaluated with the pipeline's rule. Where continuing tokens
    carry a mark (the ``##`` of WordPiece), a token continues a word if its length differs from that of its characters;
    elsewhere, if no space precedes it, so that punctuation belongs to the word before it. An unknown token always
    begins a word.

    Returns:
        int32 ``[tokens]`` from 0; -1 for the special ones.
    """
    starts, stops = offsets[:, 0], offsets[:, 1]
    if tokens is not None:
        lengths = np.fromiter((len(token) for token in tokens), dtype=np.int32, count=len(tokens))
        continues = lengths != stops - starts
    else:
        # With a leading space, a token at the first character begins a word; the trailing 0 only avoids an index error.
        letters = np.frombuffer(text.encode("utf-32-le"), dtype=np.int32)
        padded = np.concatenate(([_SPACE], letters, [0]))
        starts = starts.clip(max=len(text))
        continues = (padded[starts] != _SPACE) & (padded[starts + 1] != _SPACE)
    begins = ~special & ~(continues & ~unknown)
    begins[np.flatnonzero(~special)[:1]] = True
    return np.where(special, -1, np.cumsum(begins) - 1).astype(np.int32)
