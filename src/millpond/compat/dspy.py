"""For DSPy: an embedder, and a retriever over whatever ``millpond mcp`` searches.

Only users of DSPy import this module: it needs dspy, which the core does not.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from millpond.compat.composed import Embedder
from millpond.errors import InvalidRequestError, MissingExtraError
from millpond.mcp.service import open_target
from millpond.mcp.targets.target import Found, Target, TargetOptions
from millpond.search.stages import StagePlan
from millpond.support.blank import is_blank
from millpond.tasks import Role

try:
    import dspy
except ImportError as error:
    raise MissingExtraError("millpond.compat.dspy needs dspy: pip install dspy") from error


class _Texts(Embedder):
    """What a ``dspy.Embedder`` calls.

    DSPy's cache, in memory and on the disk, takes the dump of such an object as its key, but of a function its source,
    so that two engines behind equal functions would be given each other's vectors.
    """

    def __call__(self, texts: Sequence[str], role: Role = "document") -> Any:
        """``[n, d]`` float32."""
        return self.embed(list(texts), role).embeddings

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """The fields, and what changes the vectors of an engine beside them."""
        spec = self.load().spec
        model = f"{spec.fingerprint} {self.load().dtype} normalize={spec.normalize}"
        return {**super().model_dump(**options), "engine": model}


class MillpondEmbedder(dspy.Embedder):
    """``dspy.Embedder`` by a model in this process.

    For models with prompts of their own for queries: ``embedder("...", role="query")``, or another embedder with
    ``role="query"``; both share one engine.

    Args:
        model: Hub id or local folder; loaded at the first text.
        role: Which prompts of the model texts get, ``"document"`` or ``"query"``, unless a call says otherwise.
        batch_size: Texts per call of the engine, which forms its own batches, so larger is better.
        caching: Whether DSPy keeps the answer of each batch. With ``cache=``, a file, the engine keeps each text's.
        **options: The other fields of :class:`millpond.compat.adapter.EmbeddingSource`, as ``engine``.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        role: Role = "document",
        batch_size: int = 2048,
        caching: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(_Texts(model=model, **options), batch_size=batch_size, caching=caching, role=role)

    async def acall(self, *arguments: Any, **options: Any) -> Any:
        """As calling it, in a thread: DSPy's own method blocks the event loop."""
        return await asyncio.to_thread(self, *arguments, **options)


class _Place:
    """A target, opened at the first search; copies of a program share it, and another process opens its own."""

    def __init__(self, word: str, options: TargetOptions) -> None:
        self._word, self._options = word, options
        self._lock = threading.Lock()
        self._target: Target | None = None

    def search(self, query: str, k: int, filter: Mapping[str, Any] | None) -> list[Found]:
        with self._lock:
            if self._target is None:
                target = open_target(self._word, self._word, self._options)
                target.load()
                self._target = target
        return self._target.search(query, k, filter)

    def close(self) -> None:
        with self._lock:
            if self._target is not None:
                self._target.close()
            self._target = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Place:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Place, (self._word, self._options)


class MillpondRetriever(dspy.Module):
    """A module that retrieves passages from an index, a collection, or a folder of files.

    Its answer is a ``dspy.Prediction`` with ``passages``, and for each its place in ``ids``, ``scores`` and
    ``metadata``. :meth:`forward` is a tool of ``dspy.ReAct``, too.

    Args:
        place: As ``millpond mcp`` takes it: the folder of a late-interaction index, the URL of a collection, as
            ``qdrant+path:vectors#docs``, which know their model, or a folder of files.
        k: How many passages.
        filter: What their metadata must match, by key.
        plan: The stages of the search, as ``StagePlan(rerank="self")``, without its ``k``.
        **settings: Arguments of :class:`millpond.Engine`, as ``device`` and ``dtype``.
    """

    def __init__(
        self,
        place: str,
        k: int = 3,
        *,
        filter: Mapping[str, Any] | None = None,
        plan: StagePlan | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.k, self.filter = k, filter
        self._place = _Place(str(place), TargetOptions(plan=plan or StagePlan(), settings=settings))

    def forward(self, query: str, k: int | None = None, filter: dict[str, Any] | None = None) -> dspy.Prediction:
        """Search for passages that answer a query.

        Args:
            query: The query.
            k: Instead of that of the module.
            filter: Instead of that of the module.

        Returns:
            The passages, best first.
        """
        if is_blank(query):
            raise InvalidRequestError("query is blank; write what to look for")
        found = self._place.search(query, self.k if k is None else k, self.filter if filter is None else filter)
        return dspy.Prediction(
            passages=[each.text for each in found],
            ids=[each.id for each in found],
            scores=[each.score for each in found],
            metadata=[dict(each.metadata) for each in found],
        )

    async def aforward(self, query: str, k: int | None = None, filter: dict[str, Any] | None = None) -> dspy.Prediction:
        """As :meth:`forward`, without blocking the event loop."""
        return await asyncio.to_thread(self.forward, query, k, filter)

    def close(self) -> None:
        """Close the index; the next search opens it again."""
        self._place.close()
