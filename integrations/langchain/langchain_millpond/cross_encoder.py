"""MillpondCrossEncoder: LangChain's cross-encoder over a millpond engine in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.cross_encoders import BaseCrossEncoder

from langchain_millpond.scorer import ScorerSource
from millpond.compat.rerank_method import log_rerank_method
from millpond.errors import InvalidRequestError


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
        revision: Branch, tag or commit of a hub id.
        device: ``auto`` or ``None`` (cuda, then mps, then cpu), a torch device, or a list of devices.
        dtype: ``auto``, ``float32``, ``float16`` or ``bfloat16``.
        max_length: Most tokens per pair, or per text if texts are encoded apart; the checkpoint's limit by default.
        hf_overrides: Merged into config.json.
        quantization: As in ``millpond.Engine``.
        max_batch_tokens: Most tokens per forward.
        compile: As in ``millpond.Engine``.
        trust_remote_code: A permission that is accepted and never needed: no code of a checkpoint is run.
    """

    def score(self, text_pairs: Iterable[Sequence[str]]) -> list[float]:
        """One Python float per (query, document) pair, in order.

        Args:
            text_pairs: Pairs as tuples, lists or any other sequence of two texts.

        Raises:
            TypeError: ``text_pairs`` is a bare str.
            MillpondError: The model cannot be loaded or does not score, or a pair cannot be encoded; the message says
                which and why.
        """
        if isinstance(text_pairs, str | bytes | Mapping):
            raise TypeError(
                f"text_pairs must be a list of (query, document) pairs, not a {type(text_pairs).__name__}; "
                "write score([(query, document)])"
            )
        pairs = [_pair(pair, index) for index, pair in enumerate(text_pairs)]
        engine = self._engine()
        from millpond import PoolingParams

        log_rerank_method(engine.spec, self.method)
        options = self._options()
        method = options.pop("method")
        output = engine.submit("score", pairs, PoolingParams(**options), method=method, ranking=True).result()
        scores: list[float] = output.scores.tolist()
        return scores


def _pair(pair: Any, index: int) -> Any:
    """A pair as a tuple, also one that is a list or a row of an array; the engine refuses what is none by its index."""
    if isinstance(pair, str | bytes) or not (isinstance(pair, Sequence) or hasattr(pair, "tolist")):
        return pair
    if len(pair) != 2:
        raise InvalidRequestError(f"the pair at index {index} has {len(pair)} parts; pass (query, document)")
    return tuple(pair)
