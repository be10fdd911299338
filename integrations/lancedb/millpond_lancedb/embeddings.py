"""MillpondEmbeddings: the embedding function "millpond" of LanceDB's registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from lancedb.embeddings import TextEmbeddingFunction, register
from pydantic import AliasChoices, ConfigDict, Field

from millpond.compat.adapter import EmbeddingSource, PathStr
from millpond.compat.composed import MACHINE
from millpond.tasks import Role
from millpond.values.fingerprint import ModelIdentity, stored_folder

if TYPE_CHECKING:
    from millpond import Engine

_VARIABLE = "$var:"  # LanceDB's: a value that each process sets for itself


@register("millpond")  # type: ignore[no-untyped-call]
class MillpondEmbeddings(EmbeddingSource, TextEmbeddingFunction):
    """Embeds the texts of a table and its queries by a model that runs in this process.

    ``get_registry().get("millpond").create(name=...)`` makes one for the ``SourceField()`` and ``VectorField()`` of a
    ``LanceModel``. Documents and queries get the checkpoint's own prompts, if it has any. LanceDB stores the function
    with the table: the model's name, the options that decide a vector, and the model's fingerprint. A process that
    has imported this package finds it again with the table, and refuses a model whose files are others.

    The model is loaded at first use, and all functions of one configuration share one engine. The other fields:
    :class:`millpond.compat.adapter.EmbeddingSource` and the classes that it derives from.

    Attributes:
        name: Hub id or local folder; also accepted as ``model`` and ``model_name``.
        identity: What LanceDB stored of the model; leave it out.
        max_retries: LanceDB's, for services; a model in this process fails at once.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True, protected_namespaces=())

    named = "name"

    name: PathStr | None = Field(
        default=None, validation_alias=AliasChoices("name", "model", "model_name"), min_length=1
    )
    identity: dict[str, Any] | None = Field(default=None, repr=False)
    max_retries: int = 0

    def ndims(self) -> int:
        """The width of the vectors.

        Returns:
            Their number of columns.
        """
        return self._engine().spec.check_dimensions(self.dimensions)

    def generate_embeddings(self, texts: Any, *args: Any, **kwargs: Any) -> list[npt.NDArray[np.float32] | None]:
        """The vectors of documents.

        Args:
            texts: Texts.
            *args: Accepted because LanceDB's base class has them, and ignored.
            **kwargs: The same.

        Returns:
            For each text ``[d]`` float32, for each null ``None``.
        """
        return self._vectors(texts, "document")

    def compute_query_embeddings(self, query: Any, *args: Any, **kwargs: Any) -> list[npt.NDArray[np.float32] | None]:
        """The vector of a query.

        Args:
            query: A text, or several.
            *args: As of :meth:`generate_embeddings`.
            **kwargs: As of :meth:`generate_embeddings`.

        Returns:
            For each text ``[d]`` float32.
        """
        return self._vectors(list(self.sanitize_input(query)), "query")

    def compute_query_embeddings_with_retry(self, *args: Any, **kwargs: Any) -> list[npt.NDArray[np.float32] | None]:
        """As :meth:`compute_query_embeddings`: what fails here fails again.

        Args:
            *args: As of :meth:`compute_query_embeddings`.
            **kwargs: As of :meth:`compute_query_embeddings`.

        Returns:
            For each text ``[d]`` float32.
        """
        return self.compute_query_embeddings(*args, **kwargs)

    def compute_source_embeddings_with_retry(self, *args: Any, **kwargs: Any) -> list[npt.NDArray[np.float32] | None]:
        """The vectors of documents: what fails here fails again.

        Args:
            *args: Texts, in any form of LanceDB's.
            **kwargs: As of :meth:`generate_embeddings`.

        Returns:
            For each text ``[d]`` float32, for each null ``None``.
        """
        return self.compute_source_embeddings(*args, **kwargs)

    def safe_model_dump(self) -> dict[str, Any]:
        """What LanceDB stores with a table: ``$var:`` names as they were given, of other options their values.

        Returns:
            JSON.
        """
        given: dict[str, Any] = super().safe_model_dump()  # type: ignore[no-untyped-call]
        spec = self._engine().spec
        own = {"name", "identity", "max_retries"}
        stored = self.model_dump(mode="json", exclude={*MACHINE, *own}, exclude_defaults=True)
        stored |= {"name": stored_folder(spec) or self.name, "identity": ModelIdentity.of(spec).to_json()}
        return stored | {key: value for key, value in given.items() if str(value).startswith(_VARIABLE)}

    def _engine(self) -> Engine:
        engine = super()._engine()
        if self.identity is not None:
            ModelIdentity(**self.identity).check(engine.spec, owner="table of this function", another="another table")
        return engine

    def _vectors(self, texts: Sequence[str | None], role: Role) -> list[npt.NDArray[np.float32] | None]:
        present = [text for text in texts if text is not None]
        engine = self._engine()
        rows = engine.embed(present, **self._options(engine, role)).embeddings
        found = iter(np.asarray(rows, np.float32))
        return [None if text is None else next(found) for text in texts]
