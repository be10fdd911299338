"""VocabularyRows: logits of a few vocabulary entries, from the rows of a language model's head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from millpond.backends.native.heads.kernels import Floats, Linear
from millpond.checkpoints.resolve import read_json_object
from millpond.checkpoints.weights import find_tensor, stored_tensors
from millpond.errors import WeightMismatchError

# Names of a language model's head, and of its input embeddings, which are the head if the two are tied.
_HEAD_NAMES = ("lm_head", "output", "embed_out", "lm_head.out_proj")
_EMBEDDING_NAMES = ("embed_tokens", "tok_embeddings", "wte")


class VocabularyRows:
    """Logits of a few vocabulary entries; capped if the model caps its logits (Gemma 2)."""

    def __init__(self, weight: Floats, *, softcap: float | None) -> None:  # weight [entries, hidden]
        self.weight = weight
        self.softcap = softcap
        self._linear = Linear(weight)

    def __call__(self, hidden: Floats, threads: int) -> Floats:  # [n, hidden] -> [n, entries]
        """The logits."""
        logits = self._linear(hidden, threads)
        if self.softcap is None:
            return logits
        softcap = np.float32(self.softcap)
        capped: Floats = softcap * np.tanh(logits / softcap)
        return capped


def head_rows(folder: Path, tokens: tuple[int, ...]) -> VocabularyRows:
    """The rows of ``tokens`` in the language-model head of ``folder``, in float32; no others are read.

    Raises:
        WeightMismatchError: The files have no such head, or it has fewer rows.
    """
    tensors = stored_tensors(folder)
    config = read_json_object(folder / "config.json")
    name = _head_name(tensors, tied=bool(config.get("tie_word_embeddings", True)))
    if name is None:
        raise WeightMismatchError(
            f"{folder} has no language-model head to take the tokens' rows from; is it a bare backbone?"
        )
    head = tensors[name]
    if max(tokens) >= head.shape[0]:
        raise WeightMismatchError(f"{folder}: token {max(tokens)} is past the head's {head.shape[0]} rows")
    return VocabularyRows(head[list(tokens)].float32(), softcap=config.get("final_logit_softcapping"))


def _head_name(tensors: Mapping[str, object], *, tied: bool) -> str | None:
    names = (*_HEAD_NAMES, *(_EMBEDDING_NAMES if tied else ()))
    found = (find_tensor(tensors, f"{name}.weight") for name in names)
    return next((name for name in found if name is not None), None)
