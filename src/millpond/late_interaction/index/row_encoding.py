"""RowEncoding: how token rows become the rows of an index, which the first ones that are added decide."""

from __future__ import annotations

import threading

from millpond.errors import InvalidRequestError
from millpond.late_interaction.encoding import projection
from millpond.late_interaction.encoding.projection import Projection
from millpond.late_interaction.encoding.token_pooling import pool_tokens
from millpond.late_interaction.index.arguments import check_count, unit_rows
from millpond.late_interaction.index.settings import IndexSettings
from millpond.values.fingerprint import ModelIdentity
from millpond.values.spec import ModelSpec
from millpond.vectors.ragged import Ragged

# Rows that a projection is fitted on.
_SAMPLE_ROWS = 1 << 16


class RowEncoding:
    """Cuts and pools rows, as the options of an index and the model ``spec`` of its engine say.

    ``settings`` are ``None`` until the first rows decide them, and never change after that; ``dimensions`` and
    ``pool_factor`` are then those of the stored rows.
    """

    def __init__(self, spec: ModelSpec | None, *, dimensions: int | None, pool_factor: int | None) -> None:
        check_count("dimensions", dimensions, optional=True)
        check_count("pool_factor", pool_factor, optional=True)
        self.spec = spec
        self.dimensions = dimensions
        self.pool_factor = pool_factor
        self.settings: IndexSettings | None = None
        self._lock = threading.Lock()

    def restore(self, settings: IndexSettings, *, owner: str) -> None:
        """Take the settings that rows were stored with; ``owner`` is the index in errors: ``index '/data/docs'``."""
        settings.check(self.spec, dimensions=self.dimensions, pool_factor=self.pool_factor, owner=owner)
        self.dimensions, self.pool_factor = settings.width, settings.pool_factor
        self.settings = settings

    def settings_without_rows(self, native: int) -> IndexSettings:
        """The settings of an index whose first documents have no rows, for one that must store them with these."""
        if self.dimensions is not None:
            raise InvalidRequestError(
                f"dimensions={self.dimensions} are fitted on the rows of the first documents, and these have none; "
                "add others first"
            )
        return self._settings(native, None)

    def documents(self, embeddings: Ragged) -> Ragged:
        """Rows of length 1 as they are stored: cut to the index's dimensions, then pooled."""
        if not len(embeddings.flat):
            return Ragged(flat=embeddings.flat[:, : self.dimensions], offsets=embeddings.offsets)
        cut = self.decide(embeddings).projection
        return pool_tokens(embeddings if cut is None else cut.apply(embeddings), self.pool_factor or 1)

    def queries(self, embeddings: Ragged) -> Ragged:
        """Rows of length 1 as they are compared: cut to the index's dimensions, never pooled."""
        settings = self.settings
        return embeddings if settings is None or settings.projection is None else settings.projection.apply(embeddings)

    def check(self, name: str, matrices: Ragged) -> None:
        """Refuse rows that are not as wide as the rows of the index (of an empty one: of its engine)."""
        width, native, of = matrices.flat.shape[1], None, "the rows of this index"
        if self.settings is not None:
            native = self.settings.native
        elif self.spec is not None:
            native, of = self.spec.hidden_size, f"the token vectors of {self.spec.name}"
        if native is not None and len(matrices.flat) and width != native:
            raise InvalidRequestError(f"{name} are {width} wide, and {of} {native}; pass rows of that width")

    def decide(self, first: Ragged) -> IndexSettings:
        """The settings, decided by the first rows that are added, which a projection is fitted on."""
        with self._lock:
            if self.settings is None:
                self.settings = self._settings(first.flat.shape[1], self._fitted(first))
            settings = self.settings
        if first.flat.shape[1] != settings.native:  # another thread or process added the first rows meanwhile
            self.check("embeddings", first)
        return settings

    def _settings(self, native: int, fitted: Projection | None) -> IndexSettings:
        model = None if self.spec is None else ModelIdentity.of(self.spec)
        return IndexSettings(model=model, native=native, pool_factor=self.pool_factor or 1, projection=fitted)

    def _fitted(self, sample: Ragged) -> Projection | None:
        dimensions, native = self.dimensions, sample.flat.shape[1]
        if dimensions is None or dimensions == native:
            return None
        if dimensions > native:
            raise InvalidRequestError(
                f"dimensions={dimensions} is more than the rows have ({native}); choose 1 to {native}"
            )
        if self.spec is not None and projection.is_trained(self.spec, dimensions):
            return Projection.matryoshka(native, dimensions)
        every = -(-len(sample.flat) // _SAMPLE_ROWS)
        return Projection.fit(unit_rows(sample.flat[::every]), dimensions)
