"""MillpondLateInteraction: retrieval by MaxSim of token vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from mteb.models.model_meta import ScoringFunction

from millpond.late_interaction import Ragged, maxsim
from millpond.mteb.search import CorpusSearch
from millpond.tasks import Role


class MillpondLateInteraction(CorpusSearch):
    """A ColBERT checkpoint, or the token vectors of an embedder: exact search by MaxSim.

    Not by an index, which L2-normalizes every row and trains centroids for large corpora: a checkpoint may leave its
    rows as they are, and the scores are to be the model's own. It serves tasks of retrieval and reranking, no others.
    """

    task = "token_embed"
    model_type = "late-interaction"

    @property
    def similarity_name(self) -> ScoringFunction:
        """MaxSim."""
        return ScoringFunction.MAX_SIM

    def _encode(self, texts: list[str], role: Role, *, show_progress: bool) -> Ragged:
        normalize = None if self.engine.spec.score_type == "late-interaction" else True
        return self.engine.token_embed(texts, role=role, normalize=normalize, show_progress=show_progress).embeddings

    def _select(self, encoded: Ragged, indices: Sequence[int]) -> Ragged:
        return Ragged.from_matrices([encoded[index] for index in indices], width=encoded.flat.shape[1])

    def _scores(self, queries: Ragged, documents: Ragged) -> npt.NDArray[np.float32]:
        return maxsim(queries, documents)
