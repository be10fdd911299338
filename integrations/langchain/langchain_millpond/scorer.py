"""ScorerSource: the fields of an adapter that scores pairs."""

from __future__ import annotations

from typing import Any, Literal

from langchain_millpond.source import EngineSource
from millpond.compat.sentence_transformers_options import translate_scoring_options


class ScorerSource(EngineSource):
    """The fields that the adapters over ``score`` and ``rerank`` add to those of every adapter.

    Attributes:
        method: How a pair is scored, as in ``millpond.Engine.rerank``: ``auto``, ``cosine`` or ``maxsim``.
        instruction: Text for the instruction slot of an LLM reranker's template; refused by a model without one.
        truncate: Which end of an over-long text is cut, or ``"error"``.
        activation: Replaces the checkpoint's activation of its logits: ``identity``, ``sigmoid`` or ``softmax``.
        convert: ``auto``, ``embed`` or ``classify``, as in ``millpond.Engine``.
        score_template: Jinja source, or a .jinja file, that renders a pair; the checkpoint's template by default.
    """

    loading = (*EngineSource.loading, "activation", "convert", "score_template")

    method: Literal["auto", "cosine", "maxsim"] = "auto"
    instruction: str | None = None
    truncate: Literal["end", "start", "error"] = "end"
    activation: Literal["identity", "sigmoid", "softmax"] | None = None
    convert: str = "auto"
    score_template: str | None = None

    @classmethod
    def _translated(cls, options: dict[str, Any]) -> dict[str, Any]:
        return translate_scoring_options(options, own=cls._own_options())

    def _options(self) -> dict[str, Any]:
        """The options of ``rerank``."""
        return {"method": self.method, "instruction": self.instruction, "truncate": self.truncate}
