"""ChromaSink: a collection of Chroma, and one beside it for each narrower Matryoshka width."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from chromadb.api import ClientAPI
from chromadb.errors import NotFoundError

from millpond.errors import InvalidRequestError, SinkError
from millpond.ingest.sinks.batch import WriteBatch
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.driver import CollectionDriver
from millpond.ingest.sinks.manifest import MANIFEST_KEY, CollectionManifest
from millpond.ingest.sinks.protocol import StoredRow, vector_name
from millpond.ingest.sinks.search import Hit, SearchPlan
from millpond.support.filters import Condition
from millpond_chroma.connection import WIDTH, ChromaConnection
from millpond_chroma.fields import HASH, ID, is_exact, to_fields, to_filtered, to_metadata, to_where

_OWNER = f"{MANIFEST_KEY}.of"
_SPACE = {"hnsw": {"space": "cosine"}}


class ChromaSink(CollectionSink[str]):
    """Writes to one collection of Chroma, and searches it.

    Chroma holds one vector a record: the collection has those of the largest width, and ``NAME.d64`` beside it those of
    a narrower one. A record is there when the collection has it: it is written last, and deleted last.

    Args:
        location: A folder, ``http://HOST:8000``, or a client of chromadb.
        collection: Name of the collection.
        dimensions: The widths to store and search; by default those of the collection, and in a new one the width that
            ``embed`` returns.
        fields: ``plain``: the text is the document, and the metadata that of the record.
        timeout: Seconds that a server has for a request.

    Raises:
        InvalidRequestError: A location, name or option that is not valid.
        SinkUnavailableError: The server does not answer.
    """

    def __init__(
        self,
        location: str | os.PathLike[str] | ClientAPI,
        collection: str,
        *,
        dimensions: Sequence[int] | None = None,
        fields: str | None = None,
        timeout: float = 60,
    ) -> None:
        if fields not in ("plain", None):
            raise InvalidRequestError(f"fields={fields!r}: a sink of Chroma has no such fields; pass fields='plain'")
        driver = ChromaDriver(ChromaConnection(location, collection, timeout=timeout))
        super().__init__(driver, dimensions=dimensions, fields=fields)
        self.options = {"timeout": timeout}
        driver.connection.open()


class ChromaDriver(CollectionDriver[str]):
    """The requests of a sink."""

    layouts = ("plain",)

    def __init__(self, connection: ChromaConnection) -> None:
        self.connection: ChromaConnection = connection

    def create(self, manifest: CollectionManifest) -> None:
        """Create the collection."""
        metadata = {MANIFEST_KEY: json.dumps(manifest.to_dict())}
        self.connection.client.create_collection(
            self.connection.collection, configuration=_SPACE, metadata=metadata, embedding_function=None
        )

    def prepare(self, manifest: CollectionManifest) -> None:
        """Create what is missing of the collections of narrower widths, unless there are records already."""
        self.connection.request("creating the collections of its widths", lambda: self._create_narrow(manifest))

    def _create_narrow(self, manifest: CollectionManifest) -> None:
        main, client = self.connection.table(), self.connection.client
        for width in manifest.dimensions[:-1]:
            name = self._name(width)
            try:
                found = self.connection.of(name).metadata or {}
            except NotFoundError:
                found = None
            if found is not None and found.get(_OWNER) == str(main.id):
                continue
            if main.count():
                raise SinkError(
                    f"collection {main.name!r} of Chroma has lost {name!r}, which holds its vectors of width {width}; "
                    "rename that one, too, or ingest into another collection"
                )
            if found is not None and WIDTH in found:  # of a collection that was deleted
                client.delete_collection(name)
            client.create_collection(
                name, configuration=_SPACE, metadata={WIDTH: width, _OWNER: str(main.id)}, embedding_function=None
            )

    def store_manifest(self, manifest: CollectionManifest) -> None:
        """Replace the manifest in the collection's metadata."""
        main = self.connection.table()
        main.modify(metadata={**(main.metadata or {}), MANIFEST_KEY: json.dumps(manifest.to_dict())})

    def drop(self) -> None:
        """Delete the collection, and those of narrower widths."""
        main, client = self.connection.table(), self.connection.client
        prefix = f"{main.name}.d"
        for each in client.list_collections():
            if each.name.startswith(prefix) and (each.metadata or {}).get(_OWNER) == str(main.id):
                client.delete_collection(each.name)
        client.delete_collection(main.name)

    def datatype_of(self, manifest: CollectionManifest) -> str:
        """The only one."""
        return "float32"

    def upsert(self, batch: WriteBatch) -> None:
        """Store the records, those of the largest width last."""
        fields = [to_fields(record) for record in batch.records]
        narrow = [to_filtered(each) for each in fields]
        *others, full = sorted(batch.vectors)
        for width in others:
            self._put(self.connection.of(self._name(width)), batch, width, narrow)
        texts = [record.text for record in batch.records]
        self._put(self.connection.table(), batch, full, fields, documents=texts)

    @staticmethod
    def _put(collection: Any, batch: WriteBatch, width: int, fields: list[dict[str, Any]], **texts: Any) -> None:
        """Replace records: Chroma keeps the keys of the old metadata that the new one lacks, unless they are None."""
        found = collection.get(ids=list(batch.ids), include=["metadatas"])
        known = dict(zip(found["ids"], found["metadatas"], strict=True))
        metadatas = [
            dict.fromkeys(known.get(row_id) or ()) | each for row_id, each in zip(batch.ids, fields, strict=True)
        ]
        vectors = list(np.asarray(batch.vectors[width], np.float32))
        collection.upsert(ids=list(batch.ids), embeddings=vectors, metadatas=metadatas, **texts)

    def query(self, plan: SearchPlan, condition: str | None, manifest: CollectionManifest) -> list[Hit]:
        """The hits of a search: the nearest of a width, scored by their vectors of the largest one searched."""
        main, full = self.connection.table(), self._of_width(plan.full, manifest)
        where = {"where": json.loads(condition)} if condition else {}
        width, limit = (plan.full, plan.k) if plan.coarse is None else (plan.coarse, plan.candidates)
        searched = self._of_width(width, manifest)
        limit = min(limit, searched.count())
        if not limit:
            return []
        found = searched.query(query_embeddings=[plan.vectors[width]], n_results=limit, include=[], **where)
        nearest = found["ids"][0]
        rows = self._rows(full, nearest, ["embeddings"])
        if not rows:
            return []
        vectors = np.stack([row["embeddings"] for row in rows.values()]).astype(np.float32)  # [candidates, width]
        scores = vectors @ plan.vectors[plan.full] / np.linalg.norm(vectors, axis=1)
        best = [(list(rows)[n], float(scores[n])) for n in np.argsort(-scores, kind="stable")[: plan.k]]
        stored = self._rows(main, [row_id for row_id, _ in best], ["metadatas", "documents"])
        hits = []
        for row_id, score in best:
            if row_id not in stored:  # deleted meanwhile
                continue
            with self.reading(row_id, manifest):
                row = stored[row_id]
                metadata = to_metadata(row["metadatas"])
                hits.append(Hit(id=row["metadatas"][ID], score=score, text=row["documents"], metadata=metadata))
        return hits

    def delete(self, which: Sequence[str] | str, manifest: CollectionManifest) -> None:
        """Delete records, those of the largest width last."""
        if isinstance(which, str):
            which = self.connection.table().get(where=json.loads(which), include=[])["ids"]
        for ids in self._parts(which):
            for width in manifest.dimensions:
                self._of_width(width, manifest).delete(ids=ids)

    def count(self) -> int:
        """How many records there are."""
        return int(self.connection.table().count())

    def fetch(
        self, row_ids: Sequence[str], widths: Sequence[int], manifest: CollectionManifest
    ) -> dict[str, StoredRow]:
        """Those of these records that exist."""
        return self._stored(row_ids, widths, manifest, ["metadatas"])

    def read(self, row_ids: Sequence[str], widths: Sequence[int], manifest: CollectionManifest) -> dict[str, StoredRow]:
        """The same with texts and metadata."""
        return self._stored(row_ids, widths, manifest, ["metadatas", "documents"])

    def _stored(
        self, row_ids: Sequence[str], widths: Sequence[int], manifest: CollectionManifest, include: list[str]
    ) -> dict[str, StoredRow]:
        rows = self._rows(self.connection.table(), row_ids, include)
        vectors = {w: self._rows(self._of_width(w, manifest), [*rows], ["embeddings"]) for w in widths}
        stored = {}
        for row_id, row in rows.items():
            fields = row["metadatas"] or {}
            found = {w: vectors[w][row_id]["embeddings"] for w in widths if row_id in vectors[w]}
            stored[row_id] = StoredRow(
                record_id=str(fields.get(ID, row_id)),
                content_hash=str(fields.get(HASH, "")),
                vectors={w: np.asarray(vector, np.float32) for w, vector in found.items()},
                text=(row["documents"] or "") if "documents" in include else None,
                metadata=to_metadata(fields) if "documents" in include else None,
            )
        return stored

    def scan(self, manifest: CollectionManifest) -> Iterator[list[tuple[str, str]]]:
        """Pages of row ids and record ids; the ids are read first, since deletes move what an offset counts."""
        for rows in self._pages({}):
            yield [(row_id, str((row["metadatas"] or {}).get(ID, row_id))) for row_id, row in rows.items()]

    def condition(self, filter: Mapping[str, object] | str | None, manifest: CollectionManifest) -> str:
        """A ``where`` as JSON."""
        return to_where(filter)

    def is_exact(self, conditions: Mapping[str, Condition]) -> bool:
        """Whether the ``where`` matches no other rows."""
        return all(map(is_exact, conditions.values()))

    def matching(self, condition: str, manifest: CollectionManifest) -> Iterator[list[tuple[str, Any]]]:
        """Pages of row ids and metadata."""
        for rows in self._pages({"where": json.loads(condition)}):
            yield [(row_id, to_metadata(row["metadatas"] or {})) for row_id, row in rows.items()]

    def _pages(self, where: Mapping[str, Any]) -> Iterator[dict[str, dict[str, Any]]]:
        main = self.connection.table()
        for ids in self._parts(main.get(include=[], **where)["ids"]):
            yield self._rows(main, ids, ["metadatas"])

    def _rows(self, collection: Any, row_ids: Sequence[str], include: list[str]) -> dict[str, dict[str, Any]]:
        """Those of these records that exist, by their ids, with some of their columns."""
        rows: dict[str, dict[str, Any]] = {}
        for ids in self._parts(row_ids):
            found = collection.get(ids=ids, include=include)
            rows |= {row_id: {name: found[name][n] for name in include} for n, row_id in enumerate(found["ids"])}
        return rows

    def _parts(self, row_ids: Sequence[str]) -> Iterator[list[str]]:
        """As many ids as a request takes; never an empty list, which Chroma takes for an error."""
        size = self.connection.max_rows
        return (list(row_ids[start : start + size]) for start in range(0, len(row_ids), size))

    def _of_width(self, width: int, manifest: CollectionManifest) -> Any:
        full = width == manifest.dimensions[-1]
        return self.connection.table() if full else self.connection.of(self._name(width))

    def _name(self, width: int) -> str:
        return f"{self.connection.collection}.{vector_name(width)}"
