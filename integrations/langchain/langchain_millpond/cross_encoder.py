"""MillpondCrossEncoder: LangChain's cross-encoder over a millpond engine in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from langchain_core.cross_encoders import BaseCrossEncoder

from langchain_millpond.source import LangChainSource
from millpond.compat.adapter import ScorerSource
from millpond.compat.notices import log_rerank_method


class MillpondCrossEncoder(ScorerSource, LangChainSource, BaseCrossEncoder):
    """Scores of text pairs by a model that runs in this process, for example for ``CrossEncoderReranker``.

    The scores are those that :class:`MillpondReranker` sorts by, for every kind of checkpoint. So with
    ``method="auto"`` an embedding checkpoint scores by MaxSim, as in ``Engine.rerank``; in ``Engine.score`` by cosine.

    The other fields: :class:`millpond.compat.adapter.ScorerSource` and the class that it derives from.

    Attributes:
        model: Hub id or local folder; also accepted as ``model_name``.
    """

    def score(self, text_pairs: Iterable[Sequence[str]]) -> list[float]:
        """The scores of pairs.

        Args:
            text_pairs: Pairs as tuples, lists or any other sequence of two texts.

        Returns:
            One Python float per (query, document) pair, in order.

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
        # The engine takes tuples, and refuses anything else by its index; a row of an array has tolist().
        pairs = [tuple(pair) if isinstance(pair, list) or hasattr(pair, "tolist") else pair for pair in text_pairs]
        engine = self._engine()
        from millpond import PoolingParams

        log_rerank_method(engine.spec, self.method)
        options = self._options()
        method = options.pop("method")
        output = engine.submit("score", pairs, PoolingParams(**options), method=method, ranking=True).result()
        scores: list[float] = output.scores.tolist()
        return scores
