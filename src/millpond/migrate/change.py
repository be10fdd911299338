"""Change: what a migration makes different, and the name of the collection that has it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from millpond.errors import InvalidDimensionsError, InvalidRequestError
from millpond.ingest.chunking import Chunking
from millpond.ingest.pipeline.ingest import check_model
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sinks.manifest import CollectionManifest, sparse_spec
from millpond.ingest.sinks.succession import bridge_name
from millpond.values.spec import ModelSpec

Records = Callable[[], Iterable[Record | Rejected]]
"""Reads a source from its beginning."""

_SHORT = 30  # characters of a name that is cut, so that what is appended fits into every database


@dataclass(frozen=True, kw_only=True)
class Change:
    """What the new collection has.

    Attributes:
        spec: Its model.
        dimensions: Its widths; ``None`` for those of the old one, if the model has them and they end with its full
            width or it is the same model, else the width that ``embed`` returns.
        sparse: The model of its sparse vectors; ``None`` for the one of ``spec``. Only of a collection that has some.
        chunking: How texts are cut anew; ``None`` leaves the chunks as they are.
        records: Reads the records from their source again; ``None`` takes them from the old collection.
        options: Options of the new collection's sink, as ``datatype``.
        to: The URL of the new collection, if it is elsewhere.
    """

    spec: ModelSpec
    dimensions: Sequence[int] | None = None
    sparse: ModelSpec | None = None
    chunking: Chunking | None = None
    records: Records | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    to: str | None = None

    @property
    def rechunks(self) -> str:
        """The settings by which texts are cut anew, as a migration keeps them; empty if chunks stay."""
        if self.chunking is None and self.records is None:
            return ""
        return "whole" if self.chunking is None else f"{self.chunking.max_tokens} {self.chunking.overlap}"

    def manifest(self, old: CollectionManifest) -> CollectionManifest:
        """The manifest of the new collection.

        Args:
            old: The manifest of the collection that serves now.

        Returns:
            The manifest.

        Raises:
            UnsupportedTaskError: The model does not embed, or makes no sparse vectors for a collection that has some.
            InvalidDimensionsError: The model cannot have one of the widths.
        """
        check_model(self.spec, self.dimensions)
        widths = self._kept(old) if self.dimensions is None else tuple(self.dimensions)
        form = CollectionManifest.of(
            self.spec,
            dimensions=widths,
            fields=old.fields,
            sparse=None if old.sparse is None else sparse_spec(self.spec, self.sparse),
            chunked=old.chunked or self.chunking is not None,
        )
        form = replace(form, runs=old.runs)
        return form if self.records is None or self.chunking is not None else replace(form, chunked=old.chunked)

    def check(self, old: CollectionManifest) -> None:
        """Raise InvalidRequestError if there is nothing to change, or if the chunks cannot be cut anew.

        Args:
            old: The manifest of the collection that serves now.

        Raises:
            InvalidRequestError: The message says what to do.
        """
        new = self.manifest(old)
        form = (new.fingerprint, new.dimensions, new.sparse and new.sparse.fingerprint)
        same = form == (old.fingerprint, old.dimensions, old.sparse and old.sparse.fingerprint)
        if same and not (self.rechunks or self.options.get("datatype") or self.to):
            raise InvalidRequestError(
                f"the collection has the vectors of {old.model} with these settings and the widths "
                f"{list(old.dimensions)} already; there is nothing to migrate"
            )
        if self.chunking is not None and self.chunking.context is not None:
            raise InvalidRequestError(
                "a migration embeds row by row, and late chunks are made of whole documents; ingest the source into "
                "another collection by millpond ingest --chunk-context late"
            )
        if old.context is not None and not self.rechunks:
            raise InvalidRequestError(
                "the collection holds late chunks, which are made of whole documents, and a migration embeds row by "
                "row; ingest the source into another collection, or name it with --source and --chunk for plain chunks"
            )
        if self.chunking is not None and old.chunked and self.records is None:
            raise InvalidRequestError(
                "the collection holds chunks, which cannot be joined to the texts that they were cut from; name the "
                "source with --source, or leave --chunk out to keep them as they are"
            )

    def name(self, head: str, old: CollectionManifest, check: Callable[[str], object]) -> str:
        """The name of the new collection, which is the same for the same change.

        Args:
            head: The name by which the collection is used.
            old: The manifest of the collection that serves now.
            check: Raises InvalidRequestError for a name that the database does not take.

        Returns:
            ``head``, ``__`` and eight digits, or the URL of ``to``.
        """
        if self.to is not None:
            return self.to
        new = self.manifest(old)
        facts = [new.fingerprint, new.dimensions, new.sparse and new.sparse.fingerprint, self.rechunks]
        stored = json.dumps([*facts, sorted(self.options.items())], default=str)
        mark = hashlib.sha256(stored.encode()).hexdigest()[:8]
        name = f"{head}__{mark}"
        try:
            check(bridge_name(name))
        except InvalidRequestError:
            schema, dot, table = head.rpartition(".")
            name = f"{schema}{dot}{table[:_SHORT]}__{mark}"
            check(bridge_name(name))
        return name

    def _kept(self, old: CollectionManifest) -> tuple[int, ...] | None:
        """The widths of the old collection, if they make sense for the model."""
        spec = self.spec
        if spec.fingerprint != old.fingerprint and old.dimensions[-1] != spec.dimensions:
            return None
        try:
            return tuple(spec.check_dimensions(width) for width in old.dimensions)
        except InvalidDimensionsError:
            return None
