"""What the engine's methods return: frozen values holding numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.ragged import Ragged


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens read for one call.

    Attributes:
        prompt_tokens: Tokens of every input of the call, special tokens and prompts included, after truncation.
            A duplicate counts again, and so does a text answered from the cache (which remembers its count).
    """

    prompt_tokens: int


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingOutput:
    """The result of ``embed``.

    Attributes:
        embeddings: ``[n, d]`` (``[n, ceil(d / 8)]`` for the binary dtypes), in the order of the texts.
        cached: ``[n]`` bool: the vector came from the cache.
        truncated: ``[n]`` bool: the text was cut. A vector from the cache remembers whether its text was.
        usage: Token counts.
    """

    embeddings: npt.NDArray[Any]
    cached: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    usage: Usage


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenEmbeddingOutput:
    """The result of ``token_embed``.

    Attributes:
        embeddings: One ``[tokens_i, d]`` float32 matrix per text, special tokens and prompt included.
        truncated: ``[n]`` bool: the text was cut.
        usage: Token counts.
    """

    embeddings: Ragged
    truncated: npt.NDArray[np.bool_]
    usage: Usage
