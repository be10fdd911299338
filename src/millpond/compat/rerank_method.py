"""What a reranker over an embedding checkpoint computes, said once."""

from __future__ import annotations

import logging

from millpond.compat.notices import log_once
from millpond.spec import ModelSpec
from millpond.tasks import ScoreMethod

logger = logging.getLogger(__name__)


def log_rerank_method(spec: ModelSpec, method: ScoreMethod) -> None:
    """Log once for each checkpoint that ``auto`` is MaxSim, if it was trained to embed and not to rerank."""
    if method == "auto" and spec.score_type == "bi-encoder":
        log_once(
            logger,
            f"{spec.name} was trained to embed, not to rerank: its pairs are scored by MaxSim of their token vectors, "
            'at most one for each token of the query. Write method="maxsim" for these scores without this notice, '
            'method="cosine" for the similarity that its vectors were trained for, or name a cross-encoder',
        )
