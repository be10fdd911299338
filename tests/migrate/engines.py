"""An engine for migrations, which needs no model: words have directions, and a call is done when it is submitted."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from millpond.testing import WordEngine


class WordModel(WordEngine):
    """A WordEngine that ingest takes."""

    def submit(self, task: str, inputs: Sequence[Any], params: Any = None) -> Any:
        done: Future[Any] = Future()
        done.set_result(self.embed(list(inputs), dimensions=params.dimensions, normalize=params.normalize))
        return done


class Turned(WordModel):
    """The vectors of another model, turned by an orthogonal matrix, and cut to some columns."""

    def __init__(self, model: WordModel, name: str = "turned", *, dimensions: int | None = None) -> None:
        width = model.spec.dimensions
        super().__init__(name, dimensions=dimensions or width)
        turn, _ = np.linalg.qr(np.random.default_rng(7).standard_normal((width, width)))
        self._model, self._turn = model, turn[:, : self.spec.dimensions].astype(np.float32)

    def embed(self, texts: Sequence[str], **options: Any) -> Any:
        found = self._model.embed(texts, normalize=options.get("normalize"))
        return replace(found, embeddings=found.embeddings @ self._turn)


class Scattered(WordModel):
    """Every text has a direction of its own, which says nothing of its words."""

    def embed(self, texts: Sequence[str], **options: Any) -> Any:
        seeds = [zlib.crc32(text.encode()) for text in texts]
        rows = [np.random.default_rng(seed).standard_normal(self.spec.dimensions) for seed in seeds]
        found = super().embed(texts)
        unit = np.array(rows, np.float32).reshape(len(texts), -1)
        unit /= np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-12)
        return replace(found, embeddings=unit)
