"""MillpondCrossEncoder: LangChain's cross-encoder over a millpond engine in this process."""

from __future__ import annotations

from langchain_core.cross_encoders import BaseCrossEncoder

from langchain_millpond.scorer import ScorerSource


class MillpondCrossEncoder(ScorerSource, BaseCrossEncoder):
    """Scores of text pairs by a model that runs in this process, for example for ``CrossEncoderReranker``.

    The scores are those that :class:`MillpondReranker` sorts by, for every kind of checkpoint. So with
    ``method="auto"`` an embedding checkpoint scores by MaxSim, as in ``Engine.rerank``; in ``Engine.score`` by cosine.

    Attributes:
        model: Hub id or local folder; also accepted as ``model_name``.
        engine: A loaded engine, instead of ``model`` and every option that is read at loading. Never serialized.
        method: How a pair is scored: ``cosine`` of two vectors, ``maxsim`` of token vectors, or ``auto``, by what the
            checkpoint is.
        instruction: Text for the instruction slot of an LLM reranker's template; refused by a model without one.
        truncate: Which end of an over-long text is cut, or ``"error"``.
        activation: Replaces the checkpoint's activation of its logits: ``identity``, ``sigmoid`` or ``softmax``.
        convert: ``auto``, ``embed`` or ``classify``, as in ``millpond.Engine``.
        score_template: Jinja source, or a .jinja file, that renders a pair; the checkpoint's template by default.
        quantization: As in ``millpond.Engine``.
        revision: Branch, tag or commit of a hub id.
        device: ``auto`` (cuda, then mps, then cpu) or a torch device.
        dtype: ``auto``, ``float32``, ``float16`` or ``bfloat16``.
        max_length: Most tokens per pair, or per text if texts are encoded apart; the checkpoint's limit by default.
        hf_overrides: Merged into config.json.
        max_batch_tokens: Most tokens per forward.
        trust_remote_code: Never needed, and refused by the engine.
    """

    def score(self, text_pairs: list[tuple[str, str]]) -> list[float]:
        """One Python float per (query, document) pair, in order.

        Raises:
            TypeError: ``text_pairs`` is a bare str.
            MillpondError: The model cannot be loaded or does not score, or a pair cannot be encoded; the message says
                which and why.
        """
        engine = self._engine()
        from millpond import PoolingParams

        options = self._options()
        method = options.pop("method")
        output = engine.submit_score(text_pairs, PoolingParams(**options), method=method, ranking=True).result()
        scores: list[float] = output.scores.tolist()
        return scores
