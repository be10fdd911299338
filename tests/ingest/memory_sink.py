"""MemorySink: the smallest database, a dict in this process. It shows what a new database has to implement."""

import re

from millpond.errors import InvalidRequestError
from millpond.ingest import CollectionSink, Hit, StoredRow, content_hash
from millpond.metadata import check_filter


class MemoryClient(dict):
    """``{collection: (manifest, {id: (record, {width: vector})})}``."""

    close = dict.clear


class MemorySink(CollectionSink):
    database, max_rows, max_bytes, float_bytes = "Memory", 500, 1 << 20, 4
    name_pattern, name_rule = re.compile(r"\w{1,99}"), "letters, digits and underscores"

    def __init__(self, location, collection, *, dimensions=None, fields="plain"):
        passed = isinstance(location, MemoryClient)
        super().__init__(location, collection, dimensions=dimensions, fields=fields, owned=not passed)
        self._client = location if passed else MemoryClient()

    def _exists(self):
        return self._collection in self._client

    def _create(self, manifest):
        if self._collection in self._client:
            raise LookupError("the collection exists already")
        self._client[self._collection] = (manifest.to_dict(), {})

    def _read_manifest(self):
        return self._client[self._collection][0]

    def _upsert(self, batch):
        for index, (point, record) in enumerate(zip(batch.ids, batch.records, strict=True)):
            self._rows[point] = (record, {width: vectors[index] for width, vectors in batch.vectors.items()})

    def _query(self, plan, native, fields):
        rows = [row for row in self._rows.values() if _matches(row[0], native)]
        for width, limit in ((plan.coarse, plan.candidates), (plan.full, plan.k)):
            if width is not None:
                rows = sorted(rows, key=lambda row: row[1][width] @ plan.vectors[width], reverse=True)[:limit]
        scores = [float(vectors[plan.full] @ plan.vectors[plan.full]) for _, vectors in rows]
        return [Hit(id=r.id, score=s, text=r.text, metadata=r.metadata) for s, (r, _) in zip(scores, rows, strict=True)]

    def _delete(self, which, fields):
        for point in (
            which if isinstance(which, list) else [p for p, row in self._rows.items() if _matches(row[0], which)]
        ):
            self._rows.pop(point, None)

    def _fetch(self, row_ids, widths, fields):
        found = {row_id: self._rows[row_id] for row_id in row_ids if row_id in self._rows}
        return {
            row_id: StoredRow(
                record_id=record.id,
                content_hash=content_hash(record.text),
                vectors={width: vectors[width] for width in widths},
            )
            for row_id, (record, vectors) in found.items()
        }

    def _scan(self, fields):
        yield [(row_id, record.id) for row_id, (record, _) in self._rows.items()]

    def _count(self):
        return len(self._rows)

    def _to_native(self, filter, fields):
        if not isinstance(filter, dict | None):
            raise InvalidRequestError(f"filter is of type {type(filter).__name__}; pass a dict of metadata")
        return check_filter(filter or {})

    def _describe_error(self, error, request):
        return f"refused {request}: {error!r}" if isinstance(error, LookupError) else None

    @property
    def _rows(self):
        return self._client[self._collection][1]


def _matches(record, conditions):
    """Whether every key of the metadata has one of its values; a bool equals no number."""
    for key, values in conditions.items():
        stored = record.metadata.get(key)
        stored = stored if isinstance(stored, list) else [stored]
        if not any(a == b and isinstance(a, bool) == isinstance(b, bool) for a in values for b in stored):
            return False
    return True
