"""CorpusSearch: retrieval by results that are no vectors of one length, a part of the corpus at a time."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mteb._create_dataloaders import create_dataloader
from mteb.types import PromptType

from millpond.errors import InvalidRequestError
from millpond.mteb.base import EngineModel
from millpond.tasks import Role

Best = list[tuple[float, str]]


class CorpusSearch(EngineModel):
    """Search by mteb's protocol, exact, and reranking of what the task lists.

    Attributes:
        corpus_chunk_size: Documents whose results are in memory together.
    """

    corpus_chunk_size = 10_000
    _corpus: Any = None

    @abstractmethod
    def _encode(self, texts: list[str], role: Role, *, show_progress: bool) -> Any:
        """What is compared: a result for each text."""

    @abstractmethod
    def _select(self, encoded: Any, indices: Sequence[int]) -> Any:
        """Some of the results."""

    @abstractmethod
    def _scores(self, queries: Any, documents: Any) -> npt.NDArray[np.float32]:
        """The scores of all pairs, ``[q, n]``."""

    def index(self, corpus: Any, **kwargs: Any) -> None:
        """Keep the corpus; it is read when the queries are known.

        Args:
            corpus: mteb's dataset.
            **kwargs: What the protocol has besides; not read.
        """
        self._corpus = corpus

    def search(
        self,
        queries: Any,
        *,
        task_metadata: Any,
        top_k: int,
        encode_kwargs: Mapping[str, Any],
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        num_proc: int | None = None,
        **kwargs: Any,
    ) -> dict[str, dict[str, float]]:
        """The best documents of each query.

        Args:
            queries: mteb's dataset.
            task_metadata: The task, which says how its texts are read.
            top_k: Most documents of a query.
            encode_kwargs: ``show_progress_bar``.
            top_ranked: For each query the documents to score; ``None``: all.
            num_proc: Processes that prepare the texts.
            **kwargs: What the protocol has besides; not read.

        Returns:
            For each query ``{document id: score}``.
        """
        if self._corpus is None:
            raise InvalidRequestError("there is no corpus to search; call index() first")
        show = {"show_progress": encode_kwargs.get("show_progress_bar", True)}
        read = {"task_metadata": task_metadata, "num_proc": num_proc}
        ids = list(queries["id"])
        asked = self._encode(_texts(queries, prompt_type=PromptType.query, **read), "query", **show)
        best: dict[str, Best] = {id: [] for id in ids}
        for start in range(0, len(self._corpus), self.corpus_chunk_size):
            part = self._corpus.select(range(start, min(start + self.corpus_chunk_size, len(self._corpus))))
            encoded = self._encode(_texts(part, prompt_type=PromptType.document, **read), "document", **show)
            names = list(part["id"])
            found = (
                self._nearest(asked, encoded, names, top_k)
                if top_ranked is None
                else self._listed(asked, encoded, names, [top_ranked.get(id, ()) for id in ids])
            )
            for id, hits in zip(ids, found, strict=True):
                best[id] = heapq.nlargest(top_k, best[id] + hits)
        self._corpus = None
        return {id: {name: score for score, name in hits} for id, hits in best.items()}

    def _nearest(self, queries: Any, documents: Any, names: Sequence[str], k: int) -> Iterator[Best]:
        """For each query the best ``k`` of these documents."""
        for row in self._scores(queries, documents):
            kept = np.argpartition(-row, k - 1)[:k] if k < len(row) else range(len(row))
            yield [(float(row[index]), names[index]) for index in kept]

    def _listed(
        self, queries: Any, documents: Any, names: Sequence[str], listed: Sequence[Sequence[str]]
    ) -> Iterator[Best]:
        """For each query those of these documents that are listed for it."""
        index_of = {name: index for index, name in enumerate(names)}
        for number, candidates in enumerate(listed):
            here = [name for name in candidates if name in index_of]
            if not here:
                yield []
                continue
            some = self._select(documents, [index_of[name] for name in here])
            scores = self._scores(self._select(queries, [number]), some)[0]
            yield [(float(score), name) for score, name in zip(scores, here, strict=True)]


def _texts(dataset: Any, **options: Any) -> list[str]:
    """The texts as a model reads them: titles, instructions and conversations joined by mteb."""
    return list(create_dataloader(dataset, **options).dataset["text"])
