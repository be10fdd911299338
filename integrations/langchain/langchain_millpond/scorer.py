"""ScorerSource: an engine that scores pairs, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from langchain_millpond.source import EngineSource

if TYPE_CHECKING:
    from millpond import Engine


class ScorerSource(EngineSource):
    """The fields that the adapters over ``score`` and ``rerank`` have beside every adapter's.

    Attributes:
        instruction: Fills an LLM reranker's template slot, nothing else.
        truncate: Which end of an over-long text is cut, or ``"error"``.
        activation: Replaces what the checkpoint makes of its logits: ``identity``, ``sigmoid`` or ``softmax``.
        convert: ``auto``, ``embed`` or ``classify``, as in ``millpond.Engine``.
        score_template: Jinja source, or a .jinja file, that renders a pair; the checkpoint's own by default.
        quantization: As in ``millpond.Engine``.
    """

    loading = (*EngineSource.loading, "activation", "convert", "score_template", "quantization")

    instruction: str | None = None
    truncate: Literal["end", "start", "error"] = "end"
    activation: Literal["identity", "sigmoid", "softmax"] | None = None
    convert: str = "auto"
    score_template: str | None = None
    quantization: str | None = None

    def _by_tokens(self, engine: Engine) -> bool:
        """Whether an embedder is asked to rank, which it does here by its token states, not by two vectors.

        An instruction means nothing to either; the engine's own method says so.
        """
        return engine.spec.score_type == "bi-encoder" and self.instruction is None
