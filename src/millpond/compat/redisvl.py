"""For redisvl, Redis's library for vectors: a vectorizer and a reranker.

Only users of redisvl import this module: it needs redisvl, which the core does not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from millpond.compat.composed import Embedder, Scorer
from millpond.errors import MissingExtraError
from millpond.support.blank import is_blank
from millpond.tasks import Role

try:
    from redisvl.utils.rerank.base import BaseReranker
    from redisvl.utils.vectorize.base import BaseVectorizer
except ImportError as error:
    raise MissingExtraError("millpond.compat.redisvl needs redisvl: pip install redisvl") from error

if TYPE_CHECKING:
    from millpond import RerankOutput

_FLOATS = ("float16", "float32", "float64", "bfloat16")
_RENAMED = {"engine_dtype": "dtype", "vector_cache": "cache"}  # redisvl has fields of these names
_TEXT = "content"  # the field of a document that redisvl's rerankers read

Documents = Sequence[dict[str, Any]] | Sequence[str]


class MillpondVectorizer(BaseVectorizer):
    """A redisvl vectorizer by a model in this process, which is loaded here.

    For models with prompts of their own for queries, make two, one with ``role="query"``: they share one engine. Where
    queries are compared with queries, as in a ``SemanticCache``, one is enough.

    Args:
        model: Hub id or local folder.
        role: Which prompts of the model texts get, ``"document"`` or ``"query"``.
        dtype: Of the buffers for Redis: float16, float32, float64 or bfloat16.
        cache: An ``EmbeddingsCache`` of redisvl.
        **options: The other fields of :class:`millpond.compat.adapter.EmbeddingSource`, as ``dimensions`` and
            ``engine``; its ``dtype`` is ``engine_dtype`` here, and its ``cache`` ``vector_cache``.

    Attributes:
        model: The name with a digest of all that changes a vector: it is the key of redisvl's caches.
    """

    _source: Embedder
    _role: Role

    def __init__(
        self,
        model: str | None = None,
        *,
        role: Role = "document",
        dtype: str = "float32",
        cache: Any = None,
        **options: Any,
    ) -> None:
        if dtype.lower() not in _FLOATS:
            raise ValueError(
                f"dtype={dtype!r} would store the parts of a vector as whole numbers, nearly all of them 0; "
                f"take one of {', '.join(_FLOATS)}"
            )
        source = Embedder(model=model, **{_RENAMED.get(name, name): value for name, value in options.items()})
        spec = source.load().spec
        identity = [spec.fingerprint, source.load().dtype, spec.normalize, role, source.model_dump(mode="json")]
        digest = blake2b(json.dumps(identity, sort_keys=True, default=str).encode(), digest_size=6).hexdigest()
        width = source.dimensions or spec.dimensions
        super().__init__(model=f"{source.name}@{digest}", dtype=dtype, dims=width, cache=cache)
        self._source, self._role = source, role

    @property
    def type(self) -> str:
        """The name of this kind of vectorizer."""
        return "millpond"

    def _embed(self, content: str) -> list[float]:
        return self._embed_many([content])[0]

    def _embed_many(self, contents: list[str], batch_size: int = 10) -> list[list[float]]:
        return self._source.embed(contents, self._role).tolist()  # the engine forms its own batches

    async def _aembed(self, content: str) -> list[float]:
        return (await self._aembed_many([content]))[0]

    async def _aembed_many(self, contents: list[str], batch_size: int = 10) -> list[list[float]]:
        return await self._source.aembed(contents, self._role)


class MillpondReranker(BaseReranker):
    """A redisvl reranker by a model in this process: a cross-encoder, an LLM reranker, a ColBERT or an embedder.

    Args:
        model: Hub id or local folder; loaded at the first ranking.
        limit: How many of the best documents to keep.
        rank_by: The fields of a document that the model reads, joined by spaces; ``content`` by default.
        return_score: Whether the scores are returned, too.
        **options: The other fields of :class:`millpond.compat.adapter.RankerSource`, as ``method`` and ``engine``.
    """

    _source: Scorer

    def __init__(
        self,
        model: str | None = None,
        *,
        limit: int = 3,
        rank_by: list[str] | None = None,
        return_score: bool = True,
        **options: Any,
    ) -> None:
        source = Scorer(model=model, **options)
        super().__init__(model=source.name, limit=limit, rank_by=rank_by, return_score=return_score)
        self._source = source

    def rank(self, query: str, docs: Documents, **options: Any) -> Any:
        """Sort documents by how well they answer a query.

        Args:
            query: The query.
            docs: Texts, or dicts with a field of ``rank_by``.
            **options: ``limit``, ``rank_by`` and ``return_score`` instead of those of the reranker.

        Returns:
            The best documents, best first, a text as ``{"content": text}``; with ``return_score`` also their scores.

        Raises:
            ValueError: The query is blank, a document has none of the fields, or a limit below 1.
            TypeError: ``docs`` is no list of texts or dicts, or an unknown option.
        """
        found, texts, limit, scores = self._asked(query, docs, **options)
        best = self._source.rank(query, texts, top_n=limit, scaled=None) if texts else None
        return _answer(found, best, scores=scores)

    async def arank(self, query: str, docs: Documents, **options: Any) -> Any:
        """As :meth:`rank`, without blocking the event loop."""
        found, texts, limit, scores = self._asked(query, docs, **options)
        best = await self._source.arank(query, texts, top_n=limit, scaled=None) if texts else None
        return _answer(found, best, scores=scores)

    def _asked(
        self,
        query: str,
        docs: Documents,
        *,
        limit: int | None = None,
        rank_by: Sequence[str] | None = None,
        return_score: bool | None = None,
    ) -> tuple[list[dict[str, Any]], list[str], int, bool]:
        """The documents as dicts, what the model reads of each, and the other options."""
        if is_blank(query):
            raise ValueError("query is blank; write what the documents are to answer")
        if isinstance(docs, str | dict):
            raise TypeError(f"docs is a {type(docs).__name__}; pass a list of texts or dicts")
        fields, found, texts = rank_by or self.rank_by or [_TEXT], [], []
        for number, doc in enumerate(docs):
            if not isinstance(doc, str | dict):
                raise TypeError(f"docs[{number}] is a {type(doc).__name__}; pass texts or dicts")
            read = [doc] if isinstance(doc, str) else [str(doc[name]) for name in fields if doc.get(name) is not None]
            if not read:
                raise ValueError(
                    f"docs[{number}] has the fields {list(doc)!r} and none of {fields!r}; name what to read by rank_by="
                )
            found.append({_TEXT: doc} if isinstance(doc, str) else doc)
            texts.append(" ".join(read))
        limit = self.limit if limit is None else limit
        return found, texts, limit, self.return_score if return_score is None else return_score


def _answer(found: Sequence[dict[str, Any]], best: RerankOutput | None, *, scores: bool) -> Any:
    ranked = [] if best is None else list(best)
    docs = [found[each.index] for each in ranked]
    return (docs, [each.score_or_none for each in ranked]) if scores else docs
