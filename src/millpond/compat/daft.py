"""MillpondProvider: Daft's ``embed_text`` and ``classify_text`` by models that run in Daft's own processes.

Only its users import this module: it needs daft, and pydantic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millpond.errors import MissingExtraError
from millpond.tasks import Role
from millpond.values.params import PoolingParams

try:
    from daft import DataType
    from daft.ai.protocols import TextClassifier, TextClassifierDescriptor, TextEmbedder, TextEmbedderDescriptor
    from daft.ai.provider import Provider
    from daft.ai.typing import EmbeddingDimensions, UDFOptions

    from millpond.compat.composed import Classifier, Embedder, ModelSource
except ImportError as error:
    raise MissingExtraError(f"MillpondProvider needs daft ({error}): pip install 'millpond[daft]'") from error


class MillpondProvider(Provider):
    """A provider of Daft: each process that runs a query loads a model once, and its threads share it.

    Options of ``embed_text``: ``role`` (``"document"`` by default, or ``"query"``) and the fields of
    :class:`millpond.compat.adapter.EmbeddingSource` and the classes that it derives from. Of ``classify_text``: the
    fields of :class:`millpond.compat.composed.Classifier`.

    Args:
        name: The name by which Daft knows it; ``millpond`` by default.
        num_gpus: GPUs that Daft reserves for a process that runs a model.
        concurrency: Most processes that run a model at once.
        **options: Options of every model that the provider is asked for; those of a call come first.
    """

    def __init__(
        self, name: str | None = None, *, num_gpus: int | None = None, concurrency: int | None = None, **options: Any
    ) -> None:
        self._name = name or "millpond"
        # What fails here fails again: a text that is too long, a model that is not there.
        self._udf = UDFOptions(concurrency=concurrency, num_gpus=num_gpus, max_retries=0)
        self._options = options

    @property
    def name(self) -> str:
        """The name by which Daft knows it."""
        return self._name

    def get_text_embedder(
        self, model: str | None = None, dimensions: int | None = None, **options: Any
    ) -> TextEmbedderDescriptor:
        """What ``embed_text`` asks for; ``ValueError`` for an option that is unknown or not valid."""
        given = self._given(options, model=model, dimensions=dimensions)
        role = PoolingParams(role=given.pop("role", "document")).role or "document"
        return _EmbedderDescriptor(provider=self._name, udf=self._udf, source=Embedder(**given), role=role)

    def get_text_classifier(self, model: str | None = None, **options: Any) -> TextClassifierDescriptor:
        """What ``classify_text`` asks for; ``ValueError`` for an option that is unknown or not valid."""
        source = Classifier(**self._given(options, model=model))
        return _ClassifierDescriptor(provider=self._name, udf=self._udf, source=source)

    def _given(self, options: dict[str, Any], **named: Any) -> dict[str, Any]:
        return self._options | options | {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class _ModelDescriptor:
    """A model as Daft sends it to its processes: options, and no weights."""

    provider: str
    udf: UDFOptions
    source: ModelSource

    def __post_init__(self) -> None:
        self.source.options()  # refuses engine=, which no other process could load

    def get_provider(self) -> str:
        return self.provider

    def get_model(self) -> str:
        return self.source.name

    def get_options(self) -> dict[str, Any]:
        return self.source.options()

    def get_udf_options(self) -> UDFOptions:
        return self.udf


@dataclass(frozen=True, kw_only=True)
class _EmbedderDescriptor(_ModelDescriptor, TextEmbedderDescriptor):
    """A model that ``embed_text`` names."""

    source: Embedder
    role: Role

    def get_dimensions(self) -> EmbeddingDimensions:
        """The width of the vectors, for which no weights are read."""
        width = self.source.describe().check_dimensions(self.source.dimensions)
        return EmbeddingDimensions(width, DataType.float32())

    def instantiate(self) -> TextEmbedder:
        return _Embedder(self.source, self.role)


class _Embedder(TextEmbedder):
    """Embeds the texts of a column: a vector for each, and null for null."""

    def __init__(self, source: Embedder, role: Role) -> None:
        source.load()
        self._source, self._role = source, role

    def embed_text(self, text: list[str]) -> list[Any]:
        found = self._source.embed([each for each in text if each is not None], self._role)
        return _with_nulls(text, np.asarray(found.embeddings, np.float32))


@dataclass(frozen=True, kw_only=True)
class _ClassifierDescriptor(_ModelDescriptor, TextClassifierDescriptor):
    """A model that ``classify_text`` names."""

    source: Classifier

    def instantiate(self) -> TextClassifier:
        return _Classifier(self.source)


class _Classifier(TextClassifier):
    """Classifies the texts of a column: a label for each, and null for null."""

    def __init__(self, source: Classifier) -> None:
        source.load()
        self._source = source

    def classify_text(self, text: list[str], labels: str | list[str]) -> list[Any]:
        named = [labels] if isinstance(labels, str) else labels
        return _with_nulls(text, self._source.label([each for each in text if each is not None], named))


def _with_nulls(texts: Sequence[str | None], results: Iterable[Any]) -> list[Any]:
    rows = iter(results)
    return [None if text is None else next(rows) for text in texts]
