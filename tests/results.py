"""The raw results of an engine's tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tests.tiny import TEXTS

from millpond import Engine, PoolingParams

Values = dict[str, list[np.ndarray]]


def values(engine: Engine, texts: tuple[str, ...] = TEXTS) -> Values:
    """The results of every task, by its name."""
    found: Values = {}
    for task in sorted(engine.tasks - {"score"}):
        params = PoolingParams(activation=False) if task in ("classify", "token_classify", "reward") else None
        output: Any = engine.encode(list(texts), task=task, params=params)
        if task == "sparse_embed":
            found[task] = [_dense(row) for row in output.embeddings]
        else:
            rows = next(getattr(output, name) for name in ("embeddings", "probs", "rewards") if hasattr(output, name))
            found[task] = [np.asarray(row) for row in rows]
    if "score" in engine.tasks:
        found["score"] = [np.asarray(engine.score(list(texts[:4]), list(texts[4:8])).scores)]
    return found


def _dense(weights: Mapping[int, float]) -> np.ndarray:
    row = np.zeros(1000, np.float32)
    row[list(weights.keys())] = list(weights.values())
    return row
