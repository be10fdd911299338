"""An engine whose vectors are the words of a text, so that tests of folders need no model."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

WIDTH = 64


class WordsEngine:
    """Embeds a text as the sum of a random direction for each of its words."""

    def __init__(self) -> None:
        self.embedded: list[str] = []

    def embed(self, texts: Sequence[str], **_: Any) -> Any:
        self.embedded += texts
        rows = [
            np.sum([_direction(word) for word in re.findall(r"\w+", text.lower()) or [""]], axis=0) for text in texts
        ]
        matrix = np.array(rows, np.float32).reshape(len(texts), WIDTH)
        return SimpleNamespace(embeddings=matrix / np.linalg.norm(matrix, axis=1, keepdims=True))


def _direction(word: str) -> Any:
    return np.random.default_rng(zlib.crc32(word.encode())).standard_normal(WIDTH)
