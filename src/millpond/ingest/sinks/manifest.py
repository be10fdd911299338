"""CollectionManifest: metadata of a collection that records the model and settings of its vectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from millpond.errors import FingerprintMismatchError, InvalidRequestError, UnsupportedTaskError
from millpond.ingest.sinks.fields import FieldLayout
from millpond.ingest.sinks.run_note import RunNote
from millpond.ingest.sinks.succession import Succession
from millpond.values.fingerprint import ModelIdentity, stored_folder, stored_name, stored_settings
from millpond.values.spec import ModelSpec

MANIFEST_KEY = "millpond"
_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class CollectionManifest:
    """The model, widths and field layout of a collection, stored in its metadata when it is created.

    Attributes:
        fingerprint: :attr:`~millpond.values.spec.ModelSpec.fingerprint` of the model.
        model: The model's name, for error messages.
        dimensions: The stored widths, ascending.
        fields: The layout of the stored fields.
        settings: The model's settings, as :func:`~millpond.values.fingerprint.stored_settings` makes them; empty for a
            collection of an earlier version. Only error messages use them.
        sparse: The model of the sparse vectors; ``None`` if the collection has none.
        chunked: Whether its rows are chunks of records, of which a record may have several.
        context: ``late`` if the vectors of its rows are pooled from the states of whole documents; ``None`` if each is
            of its own text.
        folder: Where the model's files were, if that was a local folder; ``None`` if not, or if it was not stored.
        run: The id of the run that changed the collection last; empty if none has.
        runs: The runs that filled it, the oldest first; those of earlier versions are not known.
        succession: Which collections answer by this one's name since ``millpond migrate``; ``None``: this one.
    """

    fingerprint: str
    model: str
    dimensions: tuple[int, ...]
    fields: FieldLayout
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    sparse: ModelIdentity | None = None
    chunked: bool = False
    context: str | None = None
    folder: str | None = None
    run: str = ""
    runs: tuple[RunNote, ...] = ()
    succession: Succession | None = None

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        *,
        dimensions: tuple[int, ...] | None,
        fields: FieldLayout,
        sparse: ModelSpec | None = None,
        chunked: bool = False,
        context: str | None = None,
    ) -> CollectionManifest:
        """The manifest of a new collection.

        Args:
            spec: The model of the vectors.
            dimensions: Widths to store; ``None`` for the width that ``embed`` returns.
            fields: The field layout.
            sparse: The model of the sparse vectors; ``None`` if there are none.
            chunked: Whether records are cut into chunks.
            context: What the vectors of chunks know beside their own text, as in :class:`~millpond.ingest.Chunking`.

        Returns:
            The manifest, with its widths in ascending order.

        Raises:
            InvalidDimensionsError: The model cannot have one of the widths.
        """
        widths = tuple(sorted({spec.check_dimensions(width) for width in dimensions or (None,)}))
        return cls(
            fingerprint=spec.fingerprint,
            model=stored_name(spec),
            dimensions=widths,
            fields=fields,
            settings=stored_settings(spec),
            sparse=None if sparse is None else ModelIdentity.of(sparse),
            chunked=chunked,
            context=context,
            folder=stored_folder(spec),
        )

    @property
    def identity(self) -> ModelIdentity:
        """The model of the vectors."""
        return ModelIdentity(fingerprint=self.fingerprint, model=self.model, settings=self.settings, folder=self.folder)

    def to_dict(self) -> dict[str, Any]:
        """The manifest as JSON."""
        return {
            "schema": _SCHEMA,
            "fingerprint": self.fingerprint,
            "model": self.model,
            "dimensions": list(self.dimensions),
            "payload": self.fields,
            **({"settings": dict(self.settings)} if self.settings else {}),
            **({"chunked": True} if self.chunked else {}),
            **({} if self.context is None else {"context": self.context}),
            **({} if self.sparse is None else {"sparse": self.sparse.to_json()}),
            **({} if self.folder is None else {"folder": self.folder}),
            **({"run": self.run} if self.run else {}),
            **({"runs": [note.to_json() for note in self.runs]} if self.runs else {}),
            **({} if self.succession is None else {"succession": self.succession.to_dict()}),
        }

    @classmethod
    def from_dict(cls, data: object, *, collection: str) -> CollectionManifest:
        """The manifest as read from a collection.

        Args:
            data: The manifest's JSON as stored; ``None`` if the collection has none.
            collection: Name of the collection, for error messages.

        Returns:
            The manifest.

        Raises:
            FingerprintMismatchError: The collection has no manifest, or one that this version cannot read.
        """
        with readable(data, collection):
            if not isinstance(data, Mapping) or data["schema"] != _SCHEMA:
                raise ValueError("another schema")
            sparse = data.get("sparse")
            return cls(
                fingerprint=str(data["fingerprint"]),
                model=str(data["model"]),
                dimensions=tuple(int(width) for width in data["dimensions"]),
                fields=data["payload"],
                settings=settings if isinstance(settings := data.get("settings"), Mapping) else {},
                sparse=None if sparse is None else ModelIdentity(**sparse),
                chunked=bool(data.get("chunked", False)),
                context=None if (context := data.get("context")) is None else str(context),
                folder=folder if isinstance(folder := data.get("folder"), str) else None,
                run=str(data.get("run", "")),
                runs=tuple(RunNote.from_json(note) for note in data.get("runs", ())),
                succession=Succession.from_dict(data.get("succession")),
            )

    def of_copy(
        self, *, dimensions: tuple[int, ...] | None, fields: FieldLayout | None, sparse: bool
    ) -> CollectionManifest:
        """The manifest of a collection that holds the vectors of this one.

        Args:
            dimensions: Widths to store; ``None`` for all.
            fields: The field layout; ``None`` for that of this collection.
            sparse: Whether it stores the sparse vectors too.

        Returns:
            The manifest, of the same model.

        Raises:
            InvalidRequestError: This collection lacks one of the widths: no vector is computed.
        """
        widths = self.dimensions if dimensions is None else dimensions
        if missing := sorted(set(widths) - set(self.dimensions)):
            raise InvalidRequestError(
                f"dimensions={list(widths)}: the source holds the widths {list(self.dimensions)}, not {missing}, and a "
                f"copy computes no vectors; choose among {list(self.dimensions)}"
            )
        kept = self.sparse if sparse else None
        return replace(self, dimensions=widths, fields=fields or self.fields, sparse=kept, run="", succession=None)

    def noting(self, run: str, note: RunNote | None) -> CollectionManifest:
        """The manifest with the id of the run that changes the collection now.

        Args:
            run: The id.
            note: What that run reads and how; ``None`` if it is not known.

        Returns:
            The manifest.
        """
        return replace(self, run=run, runs=self.runs if note is None else replace(note, run=run).after(self.runs))

    def check_model(self, spec: ModelSpec, *, collection: str) -> None:
        """Raises FingerprintMismatchError for any model but the one that filled the collection.

        Args:
            spec: The model to check.
            collection: Name of the collection, for error messages.

        Raises:
            FingerprintMismatchError: It is another model, or has other settings.
        """
        self.identity.check(spec, owner=f"collection {collection!r}", another="another collection name")

    def check_sparse(self, spec: ModelSpec, *, collection: str) -> None:
        """Raises unless this model made the collection's sparse vectors.

        Args:
            spec: The model to check.
            collection: Name of the collection, for error messages.

        Raises:
            InvalidRequestError: The collection holds no sparse vectors.
            FingerprintMismatchError: Another model made them.
        """
        if self.sparse is None:
            raise InvalidRequestError(
                f"collection {collection!r} holds no sparse vectors; leave hybrid out, or ingest into another "
                "collection with hybrid=True"
            )
        owner = f"collection {collection!r}, in its sparse vectors,"
        self.sparse.check(spec, owner=owner, another="another collection name")

    def check_write(
        self, wanted: CollectionManifest, spec: ModelSpec, *, collection: str, sparse: ModelSpec | None = None
    ) -> None:
        """Raises unless ``wanted`` has the same models, widths and field layout as this collection.

        Args:
            wanted: The manifest of the sink that is to write.
            spec: The model of its vectors.
            collection: Name of the collection, for error messages.
            sparse: The model of its sparse vectors; ``None`` if it has none.

        Raises:
            FingerprintMismatchError: Another model filled the collection.
            InvalidRequestError: The collection has other widths or another field layout, or differs in sparse vectors
                or chunks.
        """
        self.check_model(spec, collection=collection)
        if sparse is not None:
            self.check_sparse(sparse, collection=collection)
        elif self.sparse is not None:
            raise InvalidRequestError(
                f"collection {collection!r} holds sparse vectors too; pass hybrid=True, or another collection name"
            )
        self._check_form(wanted, collection)

    def check_copy(self, wanted: CollectionManifest, *, collection: str) -> None:
        """Raises unless rows of another collection may be written to this one as they are.

        Args:
            wanted: The manifest that :meth:`of_copy` made of the other collection's.
            collection: Name of this collection, for error messages.

        Raises:
            FingerprintMismatchError: Another model filled this collection.
            InvalidRequestError: It has other widths or another field layout, or differs in sparse vectors or chunks.
        """
        another = "copy into another collection"
        if (self.sparse is None) != (wanted.sparse is None):
            has, had = ("no ", "") if self.sparse is None else ("", "no ")
            raise InvalidRequestError(
                f"collection {collection!r} holds {has}sparse vectors, and the copied rows have {had}such; {another}"
            )
        if self.chunked != wanted.chunked:
            kinds = ("whole records", "chunks of records")
            raise InvalidRequestError(
                f"collection {collection!r} holds {kinds[self.chunked]}, and the source {kinds[wanted.chunked]}; "
                f"{another}"
            )
        if self.context != wanted.context:
            kinds = ("late chunks", "rows that are embedded by themselves")
            raise InvalidRequestError(
                f"collection {collection!r} holds {kinds[self.context is None]}, and the source "
                f"{kinds[wanted.context is None]}, whose vectors do not compare; {another}"
            )
        for own, copied, which in ((self.identity, wanted.identity, ""), (self.sparse, wanted.sparse, "sparse ")):
            if own is not None and copied is not None and own.fingerprint != copied.fingerprint:
                raise FingerprintMismatchError(
                    f"the {which}vectors of collection {collection!r} are by {own.model} (fingerprint "
                    f"{own.fingerprint[:12]}), and the copied ones by {copied.model} ({copied.fingerprint[:12]}); "
                    f"vectors of two models do not compare. {another.capitalize()}"
                )
        self._check_form(wanted, collection)

    def _check_form(self, wanted: CollectionManifest, collection: str) -> None:
        chunked = "chunks of records, and this run writes whole ones; cut them too"
        whole = "whole records, and this run cuts them into chunks; leave that out"
        late = "late chunks, pooled from whole documents, and this run writes others; pass context='late'"
        plain = "rows that are embedded by themselves, and this run writes late chunks; leave context out"
        widths, others = list(self.dimensions), list(wanted.dimensions)
        for stored, own, words in (
            (widths, others, f"the widths {widths}, and this sink writes {others}; pass dimensions={widths}"),
            (self.chunked, wanted.chunked, chunked if self.chunked else whole),
            (self.context, wanted.context, plain if self.context is None else late),
            (
                self.fields,
                wanted.fields,
                f"fields of the layout {self.fields!r}, and this sink writes {wanted.fields!r}; pass "
                f"fields={self.fields!r}",
            ),
        ):
            if stored != own:
                raise InvalidRequestError(f"collection {collection!r} holds {words}, or another collection name")

    def widths_to_search(self, wanted: tuple[int, ...] | None, *, collection: str) -> tuple[int, ...]:
        """The widths a search uses: ``wanted``, or by default all stored ones.

        Args:
            wanted: The widths to search; ``None`` for all.
            collection: Name of the collection, for error messages.

        Returns:
            Widths that the collection holds.

        Raises:
            InvalidRequestError: The collection does not hold one of them.
        """
        missing = sorted(set(wanted or ()) - set(self.dimensions))
        if missing:
            raise InvalidRequestError(
                f"collection {collection!r} holds the widths {list(self.dimensions)}, not {missing}; "
                f"choose among {list(self.dimensions)}"
            )
        return wanted or self.dimensions


@contextmanager
def readable(data: object, collection: str) -> Iterator[None]:
    """Raise FingerprintMismatchError for a collection without a manifest, or with one that the block cannot read."""
    if data is None:
        raise FingerprintMismatchError(
            f"collection {collection!r} was not made by millpond (it carries no fingerprint of a model), so its "
            "vectors cannot be trusted to compare; choose another collection name"
        )
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise FingerprintMismatchError(
            f"collection {collection!r} carries a manifest that this version of millpond cannot read ({error}); "
            "upgrade millpond, or choose another collection name"
        ) from None


def sparse_spec(spec: ModelSpec, sparse: ModelSpec | None) -> ModelSpec:
    """The model of a hybrid sink's sparse vectors: by default that of the dense ones."""
    chosen = spec if sparse is None else sparse
    if "sparse_embed" not in chosen.tasks:
        raise UnsupportedTaskError(
            f"hybrid=True needs sparse vectors, and {chosen.name} serves {', '.join(sorted(chosen.tasks))}; pass "
            "the engine of a sparse model (SPLADE, or BGE-M3) as sparse_engine, or leave hybrid out"
        )
    return chosen
