"""The sources of adapters whose classes are no pydantic models, as Haystack's and Chroma's: they hold one of these.

As :mod:`millpond.compat.adapter`, only the adapters import this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import AliasChoices, ConfigDict, Field

from millpond.compat.adapter import EmbeddingSource, EngineSource, PathStr, PromptSource, RankerSource, Truncation
from millpond.compat.notices import log_rerank_method
from millpond.errors import InvalidRequestError
from millpond.tasks import Role
from millpond.values.config import EngineConfig

if TYPE_CHECKING:
    from millpond import EmbeddingOutput, Engine, ModelSpec, RerankOutput, TokenEmbeddingOutput

MACHINE = frozenset(["engine", "device", "cache", "compile", "max_batch_tokens", "trust_remote_code"])
"""What another process, or another machine, chooses for itself; no vector depends on it."""


class ModelSource(EngineSource):
    """A model, or a loaded engine.

    Attributes:
        model: Hub id or local folder; also accepted as ``model_name``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=())

    model: PathStr | None = Field(default=None, validation_alias=AliasChoices("model", "model_name"), min_length=1)

    @property
    def name(self) -> str:
        """The hub id or folder; with ``engine=``, that of the engine."""
        return self.engine.spec.name if self.engine is not None else self.model or ""

    def load(self) -> Engine:
        """The engine, which is loaded at the first call."""
        return self._engine()

    async def aload(self) -> Engine:
        """As :meth:`load`, without blocking the event loop."""
        return await self._aengine()

    def describe(self) -> ModelSpec:
        """The description of the model, whose weights are not read."""
        if self.engine is not None:
            return self.engine.spec
        from millpond.engine.loading import describe

        return describe(EngineConfig(**{k: value for k, value in self._configuration().items() if k != "cache"}))

    def options(self) -> dict[str, Any]:
        """The options that make an equal source in another process, as JSON.

        Raises:
            TypeError: The source holds an engine.
        """
        if self.engine is not None:
            raise TypeError(
                f"engine= cannot be serialized: an engine holds a loaded model; pass {self.named}= and the engine's "
                "options instead, and each process loads its own"
            )
        return self.model_dump(mode="json")


class Embedder(EmbeddingSource, ModelSource):
    """A model that makes a vector of each text."""

    def embed(self, texts: Sequence[str], role: Role, *, show_progress: bool = False) -> EmbeddingOutput:
        """The vectors of texts in a role, ``[n, d]``."""
        engine = self._engine()
        return engine.embed(texts, show_progress=show_progress, **self._options(engine, role))

    async def aembed(self, texts: list[str], role: Role) -> list[list[float]]:
        """The same as lists; it does not block the event loop."""
        return await self._aembed(texts, role)


class SparseEmbedder(PromptSource, ModelSource):
    """A model that makes weights of vocabulary entries for each text.

    Attributes:
        pooling: As of an embedder, with which it then shares an engine; the weights do not depend on it.
        cache: As of an embedder; sparse weights are computed anew.
    """

    kind = "sparse"
    loading = (*ModelSource.loading, "pooling", "cache")

    pooling: str | None = None
    cache: PathStr | None = None

    def embed(self, texts: Sequence[str], role: Role, *, show_progress: bool = False) -> list[dict[int, float]]:
        """For each text ``{token id: weight}``, by ascending id."""
        engine = self._engine()
        rows = engine.encode(texts, show_progress=show_progress, **self._task(engine, role))
        return [dict(sorted(row.items())) for row in rows]

    async def aembed(self, texts: Sequence[str], role: Role) -> list[dict[int, float]]:
        """As :meth:`embed`, without blocking the event loop."""
        engine = await self._aengine()
        from millpond import AsyncEngine

        rows = await AsyncEngine(engine).encode(texts, **self._task(engine, role))
        return [dict(sorted(row.items())) for row in rows]

    def _task(self, engine: Engine, role: Role) -> dict[str, Any]:
        from millpond import PoolingParams

        params = PoolingParams(role=role, prompt=self._prompt(engine, role), truncate=self.truncate)
        return {"task": "sparse_embed", "params": params}


class TokenEmbedder(PromptSource, ModelSource):
    """A model that makes a vector of each token of a text, for MaxSim.

    Attributes:
        dimensions: Matryoshka width of the vectors.
        normalize: Whether to L2-normalize the vectors.
        pooling: As of an embedder, with which it then shares an engine; token vectors do not depend on it.
        cache: As of an embedder; token vectors are computed anew.
    """

    kind = "embedding"
    loading = (*ModelSource.loading, "pooling", "cache")

    dimensions: int | None = Field(default=None, gt=0, strict=True)
    normalize: bool = True
    pooling: str | None = None
    cache: PathStr | None = None

    def embed(self, texts: Sequence[str], role: Role) -> TokenEmbeddingOutput:
        """A matrix of each text in a role, ``[tokens, d]``."""
        engine = self._engine()
        options = {name: getattr(self, name) for name in ("dimensions", "normalize", "truncate")}
        return engine.token_embed(texts, role=role, prompt=self._prompt(engine, role), **options)


class Scorer(RankerSource, ModelSource):
    """A model that sorts texts by how well they answer a query."""

    def rank(self, query: str, texts: Sequence[str], *, top_n: int | None, scaled: bool | None) -> RerankOutput:
        """The best texts, best first.

        Args:
            query: The query.
            texts: The texts.
            top_n: How many of the best to keep; ``None`` keeps all.
            scaled: Of a cross-encoder: ``True`` gives the sigmoid of logits, unless the checkpoint has an activation of
                its own, ``False`` the logits, and ``None`` what the checkpoint says.

        Returns:
            Their indices and scores.
        """
        engine = self._engine()
        log_rerank_method(engine.spec, self.method)
        return engine.rerank(query, texts, top_n=top_n, **self._scaled(engine, scaled))

    async def arank(self, query: str, texts: Sequence[str], *, top_n: int | None, scaled: bool | None) -> RerankOutput:
        """As :meth:`rank`, without blocking the event loop."""
        engine = await self._aengine()
        log_rerank_method(engine.spec, self.method)
        from millpond import AsyncEngine

        return await AsyncEngine(engine).rerank(query, texts, top_n=top_n, **self._scaled(engine, scaled))

    def _scaled(self, engine: Engine, scaled: bool | None) -> dict[str, Any]:
        activation: str | bool | None = None
        if scaled is not None and engine.spec.score_type == "cross-encoder" and self.method == "auto":
            activation = None if scaled and engine.spec.activation != "identity" else "sigmoid" if scaled else False
        return {"activation": activation, **self._ranking()}


class Classifier(ModelSource):
    """A model that chooses a label for each text: a classifier, or a model of natural language inference.

    Attributes:
        template: Of a model of natural language inference: the hypothesis, in which a label takes the place of ``{}``.
        truncate: Which end of an over-long text is cut, or ``"error"``.
    """

    template: str | None = None
    truncate: Truncation = "auto"

    def label(self, texts: Sequence[str], labels: Sequence[str]) -> list[str]:
        """The most probable one of some labels, for each text.

        Args:
            texts: The texts.
            labels: Labels of your own, for a model of natural language inference; else some of the checkpoint's.

        Raises:
            InvalidRequestError: A label that the checkpoint does not have.
        """
        engine = self._engine()
        own = engine.spec.labels
        named = labels if engine.spec.entailment_id is not None else None
        unknown = [] if named is not None else [label for label in labels if label not in own]
        if unknown or not labels:
            raise InvalidRequestError(
                f"labels={list(labels)!r}: {engine.spec.name} has the labels {list(own)}; choose among them, or name a "
                "model of natural language inference, which takes any"
            )
        probs = engine.classify(texts, labels=named, template=self.template, truncate=self.truncate).probs
        columns = probs if named is not None else probs[:, [own.index(label) for label in labels]]
        return [labels[best] for best in columns.argmax(axis=1)]
