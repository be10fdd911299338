"""Embedding and rerank functions with the methods of pymilvus.model, which is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from millpond.engine.engine import Engine
from millpond.errors import InvalidRequestError
from millpond.ingest.arguments import check_engine
from millpond.tasks import Role

FloatArray = npt.NDArray[np.float32]


class _Function:
    """An engine, opened here if a model was named."""

    def __init__(self, engine: Engine | str, **options: Any) -> None:
        self._owned = isinstance(engine, str)
        if isinstance(engine, str):
            engine = Engine(engine, **options)
        elif options:
            raise InvalidRequestError(
                f"{sorted(options)[0]} is an option of a model; pass its name instead of an engine"
            )
        check_engine(engine)
        self.engine = engine

    def close(self) -> None:
        """Close the engine, unless it was passed in."""
        if self._owned:
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MillpondEmbeddingFunction(_Function):
    """Embeds texts as ``pymilvus.model.dense`` functions do.

    Args:
        engine: An engine, or the name of a model to open.
        dimensions: The width; by default the one that ``embed`` returns.
        options: Options of :class:`~millpond.Engine`, if a model is named.

    Raises:
        TypeError: ``engine`` is something else.
        InvalidDimensionsError: The model's vectors cannot have this width.
    """

    def __init__(self, engine: Engine | str, *, dimensions: int | None = None, **options: Any) -> None:
        super().__init__(engine, **options)
        try:
            self.dim = self.engine.spec.check_dimensions(dimensions)
            """The width of the vectors."""
        except BaseException:
            self.close()
            raise

    def __call__(self, texts: Sequence[str]) -> list[FloatArray]:
        """Embed texts without a role, one float32 ``[dim]`` each."""
        return self._embed(texts, None)

    def encode_documents(self, documents: Sequence[str]) -> list[FloatArray]:
        """Embed texts to be found, one float32 ``[dim]`` each.

        Args:
            documents: The texts.

        Returns:
            ``n`` arrays ``[dim]``, in order.
        """
        return self._embed(documents, "document")

    def encode_queries(self, queries: Sequence[str]) -> list[FloatArray]:
        """Embed questions, one float32 ``[dim]`` each.

        Args:
            queries: The questions.

        Returns:
            ``n`` arrays ``[dim]``, in order.
        """
        return self._embed(queries, "query")

    def _embed(self, texts: Sequence[str], role: Role | None) -> list[FloatArray]:
        return list(self.engine.embed(texts, role=role, dimensions=self.dim, normalize=True).embeddings)


@dataclass(frozen=True)
class RerankResult:
    """A document with its score.

    Attributes:
        text: The document.
        score: Higher is more relevant.
        index: Its place in the call.
    """

    text: str
    score: float
    index: int

    def to_dict(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


class MillpondRerankFunction(_Function):
    """Ranks documents as ``pymilvus.model.reranker`` functions do, by :meth:`~millpond.Engine.rerank`.

    Args:
        engine: An engine, or the name of a model to open: a cross-encoder, or an embedder, whose tokens are compared.
        options: Options of :class:`~millpond.Engine`, if a model is named.

    Raises:
        TypeError: ``engine`` is something else.
    """

    def __call__(self, query: str, documents: Sequence[str], top_k: int = 5) -> list[RerankResult]:
        """The ``top_k`` documents most relevant to a query, best first; of equal scores the earlier one first."""
        ranked = self.engine.rerank(query, documents, top_n=top_k)
        return [RerankResult(each.document, float(each.relevance_score), each.index) for each in ranked]
