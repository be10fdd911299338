"""MemorySink: the smallest database, a dict in this process. It shows what a new database has to implement."""

import re
from dataclasses import replace

from millpond.errors import InvalidRequestError
from millpond.ingest import (
    CollectionDriver,
    CollectionSink,
    Connection,
    Fault,
    Hit,
    StoredRow,
    check_filter,
    content_hash,
    matches_filter,
)


class MemoryClient(dict):
    """``{collection: (manifest, {id: (record, {width: vector})})}``."""

    close = dict.clear


class MemoryConnection(Connection):
    database, max_rows, max_bytes = "Memory", 500, 1 << 20
    name_pattern, name_rule = re.compile(r"\w{1,99}"), "letters, digits and underscores"

    def __init__(self, location, collection):
        passed = isinstance(location, MemoryClient)
        super().__init__(location, collection, client=location if passed else None)
        self.client = location if passed else MemoryClient()

    def exists(self):
        return self.collection in self.client

    def names(self):
        return self.client

    def read_manifest(self):
        return self.client[self.collection][0]

    def fault(self, error, request):
        return Fault(words=f"refused {request}: {error!r}") if isinstance(error, LookupError) else None


class MemoryDriver(CollectionDriver):
    def __init__(self, connection):
        self.connection = connection

    def create(self, manifest):
        if self.connection.exists():
            raise LookupError("the collection exists already")
        self.connection.client[self.connection.collection] = (manifest.to_dict(), {})

    def upsert(self, batch):
        for index, (point, record) in enumerate(zip(batch.ids, batch.records, strict=True)):
            self.rows[point] = (record, {width: vectors[index] for width, vectors in batch.vectors.items()})

    def query(self, plan, condition, manifest):
        rows = [row for row in self.rows.values() if matches_filter(row[0].metadata, condition)]
        for width, limit in ((plan.coarse, plan.candidates), (plan.full, plan.k)):
            if width is not None:
                rows = sorted(rows, key=lambda row: row[1][width] @ plan.vectors[width], reverse=True)[:limit]
        scores = [float(vectors[plan.full] @ plan.vectors[plan.full]) for _, vectors in rows]
        return [Hit(id=r.id, score=s, text=r.text, metadata=r.metadata) for s, (r, _) in zip(scores, rows, strict=True)]

    def delete(self, which, manifest):
        if not isinstance(which, list):
            which = [point for point, row in self.rows.items() if matches_filter(row[0].metadata, which)]
        for point in which:
            self.rows.pop(point, None)

    def fetch(self, row_ids, widths, manifest):
        found = {row_id: self.rows[row_id] for row_id in row_ids if row_id in self.rows}
        return {
            row_id: StoredRow(
                record_id=record.id,
                content_hash=content_hash(record.text),
                vectors={width: vectors[width] for width in widths},
            )
            for row_id, (record, vectors) in found.items()
        }

    def read(self, row_ids, widths, manifest):
        rows = self.fetch(row_ids, widths, manifest)
        return {
            row_id: replace(row, text=self.rows[row_id][0].text, metadata=self.rows[row_id][0].metadata)
            for row_id, row in rows.items()
        }

    def store_manifest(self, manifest):
        self.connection.client[self.connection.collection] = (manifest.to_dict(), self.rows)

    def scan(self, manifest):
        yield [(row_id, record.id) for row_id, (record, _) in self.rows.items()]

    def count(self):
        return len(self.rows)

    def condition(self, filter, manifest):
        if not isinstance(filter, dict | None):
            raise InvalidRequestError(f"filter is of type {type(filter).__name__}; pass a dict of metadata")
        return check_filter(filter or {})

    @property
    def rows(self):
        return self.connection.client[self.connection.collection][1]


class MemorySink(CollectionSink):
    def __init__(self, location, collection, *, dimensions=None, fields=None):
        super().__init__(MemoryDriver(MemoryConnection(location, collection)), dimensions=dimensions, fields=fields)
