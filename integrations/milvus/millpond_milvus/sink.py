"""MilvusSink: a collection of Milvus, with one vector field for each Matryoshka width."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc
from pymilvus import DataType, MilvusClient, MilvusException
from pymilvus.exceptions import ConnectionConfigException

from millpond.errors import InvalidRequestError, MissingExtraError, SinkError
from millpond.ingest.manifest import MARK_KEY, CollectionMark
from millpond.ingest.payload import check_payload
from millpond.ingest.record import Record, point_id
from millpond.ingest.search import Hit, plan_search
from millpond.ingest.sink import Batch, check_widths, record_bytes, slices, vector_name
from millpond.spec import ModelSpec
from millpond_milvus.filters import one_of, to_expression
from millpond_milvus.layout import LAYOUTS, MAX_VARCHAR

if TYPE_CHECKING:
    from millpond import Engine

# The server takes requests of 64 MB; half of that leaves room for what protobuf adds.
MAX_ROWS = 1000
MAX_BYTES = 32 << 20
MAX_RESULTS = 16_384
_FLOAT_BYTES = 4
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")


class MilvusSink:
    """Writes to one collection of Milvus, and searches it.

    The collection is created when it is first written to: a vector field ``d{width}`` for every width, the metric
    COSINE (an exact index in Milvus Lite, AUTOINDEX on a server), and the model's fingerprint in its properties.

    Args:
        uri: A ``*.db`` file (Milvus Lite, inside this process), a server's URL, or a ``MilvusClient`` (which stays
            yours to close). A server's token comes from ``MILVUS_TOKEN``.
        collection: Name of the collection: letters, digits and underscores.
        dimensions: The widths to store and search; by default the one that ``embed`` gives (full, for nearly every
            model). A search without them uses every width that the collection has.
        payload: ``plain`` (fields ``pk``, ``id``, ``text``, ``metadata``, ``content_hash``), ``langchain`` (``pk``,
            ``text``, the metadata's keys, ``record_id``, ``content_hash``) or ``llama_index`` (that store's own).
        timeout: Seconds any request may take; without one the client would retry for minutes.

    Raises:
        InvalidRequestError: A place, a name or an option that cannot be.
        MissingExtraError: A file was asked for and milvus-lite is not installed.
        SinkError: The server does not answer, or another process has the file.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | MilvusClient,
        collection: str,
        *,
        dimensions: Sequence[int] | None = None,
        payload: str = "plain",
        timeout: float = 60,
    ) -> None:
        if not isinstance(collection, str) or not _NAME.fullmatch(collection):
            raise InvalidRequestError(
                f"collection={collection!r} is no name for Milvus; use letters, digits and underscores, no digit first"
            )
        self._collection = collection
        self._dimensions = check_widths(dimensions)
        self._layout = LAYOUTS[check_payload(payload)]
        self._timeout = timeout
        self._mark: CollectionMark | None = None
        self._lite = False
        self._owned = not isinstance(uri, MilvusClient)
        self._where = "the client passed in" if isinstance(uri, MilvusClient) else os.path.expanduser(os.fspath(uri))
        with self._answering("the connection"):
            self._client = uri if isinstance(uri, MilvusClient) else _connect(self._where, timeout)

    @property
    def dimensions(self) -> tuple[int, ...] | None:
        """The widths asked for, ascending; ``None`` stands for the one that ``embed`` gives."""
        return self._dimensions

    @property
    def collection(self) -> str:
        """The collection's name."""
        return self._collection

    def prepare(self, spec: ModelSpec) -> None:
        """Create the collection, or make sure that this model, these widths and this payload made it.

        Raises:
            FingerprintMismatchError: Another model made it, or not millpond.
            InvalidRequestError: It has other widths or payloads, or the model does not have these widths.
            SinkError: Milvus does not answer, or refuses.
        """
        wanted = CollectionMark.of(spec, dimensions=self._dimensions, payload=self._layout.form)
        if not self._exists():
            self._create(wanted)
        self._read_mark().check_write(wanted, spec, collection=self._collection)
        with self._answering("the version"):
            self._lite = str(self._client.get_server_version(timeout=self._timeout)).startswith("milvus_lite")
        self._index(wanted)
        self._load()
        self._mark = wanted

    def check(self, record: Record) -> None:
        """Refuse a record that Milvus could not store: a text of more than 65,535 bytes, for one."""
        widths = self._mark.dimensions if self._mark is not None else self._dimensions or ()
        self._layout.row(record, point_id(record.id), vectors=frozenset(map(vector_name, widths)))

    def write(self, batch: Batch) -> None:
        """Upsert the rows, in requests that a server accepts, and wait until it has acknowledged them."""
        if self._mark is None:
            raise InvalidRequestError(f"collection {self._collection!r} is not prepared; call prepare(spec) first")
        if tuple(sorted(batch.vectors)) != self._mark.dimensions:
            raise InvalidRequestError(
                f"the batch holds the widths {sorted(batch.vectors)}, the collection {list(self._mark.dimensions)}"
            )
        names = frozenset(map(vector_name, batch.vectors))
        vectors_bytes = _FLOAT_BYTES * sum(batch.vectors)
        sizes = [vectors_bytes + record_bytes(record) for record in batch.records]
        for part in slices(sizes, max_rows=MAX_ROWS, max_bytes=MAX_BYTES):
            rows = [
                self._layout.row(record, point, vectors=names)
                for record, point in zip(batch.records[part], batch.ids[part], strict=True)
            ]
            for width, values in batch.vectors.items():
                for row, vector in zip(rows, values[part], strict=True):
                    row[vector_name(width)] = vector
            with self._answering(f"an upsert of {len(rows)} rows"):
                # A server's upsert replaces a row, and its insert may double it; Lite's insert replaces a row, and its
                # upsert merges the old metadata into the new.
                send = self._client.insert if self._lite else self._client.upsert
                send(self._collection, rows, timeout=self._timeout)

    def count(self) -> int:
        """How many rows the collection holds; 0 before it is created."""
        if not self._exists():
            return 0
        self._load()
        with self._answering("a count"):
            rows = self._client.query(
                self._collection,
                filter="",
                output_fields=["count(*)"],
                consistency_level="Strong",
                timeout=self._timeout,
            )
        return int(rows[0]["count(*)"])

    def search(
        self,
        engine: Engine,
        question: str,
        *,
        k: int = 10,
        funnel: bool = True,
        candidates: int | None = None,
        filter: Mapping[str, object] | str | None = None,
    ) -> list[Hit]:
        """The records nearest to a question.

        Args:
            engine: The engine that filled the collection; it embeds the question with the role ``query``.
            question: One question.
            k: How many hits; fewer come back where fewer records match. At most 16,384.
            funnel: Find candidates by the smallest width and score these by the largest, in two requests; ``False``
                searches the largest alone.
            candidates: How many candidates, ``max(100, 10 * k)`` by default. At most 16,384.
            filter: A dict of metadata values that must match (a list: one of them), or a Milvus expression. Milvus
                Lite cannot tell ``True`` from 1, or ``False`` from 0.

        Returns:
            At most ``k`` hits, best first; scores are cosine at the largest width.

        Raises:
            FingerprintMismatchError: Another model filled the collection.
            InvalidRequestError: No such collection, or an argument out of range.
            SinkError: Milvus does not answer, or refuses.
        """
        for name, value in (("k", k), ("candidates", candidates)):
            if isinstance(value, int) and value > MAX_RESULTS:
                raise InvalidRequestError(f"{name}={value} is more than Milvus hands out ({MAX_RESULTS})")
        if self._mark is None:
            if not self._exists():
                raise InvalidRequestError(
                    f"there is no collection {self._collection!r} at {self._where}; ingest into it first"
                )
            mark = self._read_mark()
            self._load()
            self._mark = mark
        mark = self._mark
        mark.check_model(engine.spec, collection=self._collection)
        widths = mark.widths_to_search(self._dimensions, collection=self._collection)
        layout = LAYOUTS[mark.payload]
        expression = to_expression(filter, layout)
        plan = plan_search(engine, question, widths=widths, k=k, funnel=funnel, candidates=candidates)
        if plan.coarse is not None:
            limit = min(plan.candidates, MAX_RESULTS)
            found = self._nearest(plan.vectors[plan.coarse], plan.coarse, limit, expression, [layout.primary])
            if not found:
                return []
            expression = one_of(layout.primary, [str(row[layout.primary]) for row in found])
        hits = []
        for row in self._nearest(plan.vectors[plan.full], plan.full, plan.k, expression, layout.output_fields()):
            identity, text, metadata = layout.record_fields(row["entity"], str(row[layout.primary]))
            hits.append(Hit(id=identity, score=float(row["distance"]), text=text, metadata=metadata))
        return hits

    def close(self) -> None:
        """Close the client, unless it was passed in."""
        if self._owned:
            self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"MilvusSink({self._where!r}, {self._collection!r}, dimensions={self._dimensions}, {self._layout.form!r})"
        )

    def _nearest(self, vector: Any, width: int, limit: int, expression: str, fields: list[str]) -> list[Any]:
        with self._answering("a search"):
            results = self._client.search(
                self._collection,
                data=[vector.tolist()],
                anns_field=vector_name(width),
                limit=limit,
                filter=expression,
                output_fields=fields,
                timeout=self._timeout,
            )
        return list(results[0])

    def _exists(self) -> bool:
        with self._answering("a look for the collection"):
            return bool(self._client.has_collection(self._collection, timeout=self._timeout))

    def _create(self, mark: CollectionMark) -> None:
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=self._layout.json is None)
        schema.add_field(self._layout.primary, DataType.VARCHAR, is_primary=True, max_length=MAX_VARCHAR)
        for name in self._layout.strings:
            schema.add_field(name, DataType.VARCHAR, max_length=MAX_VARCHAR)
        if self._layout.json is not None:
            schema.add_field(self._layout.json, DataType.JSON)
        for width in mark.dimensions:
            schema.add_field(vector_name(width), DataType.FLOAT_VECTOR, dim=width)
        try:
            with self._answering("creating the collection"):
                self._client.create_collection(
                    self._collection,
                    schema=schema,
                    properties={MARK_KEY: json.dumps(mark.to_dict())},
                    consistency_level="Session",  # a search sees what this client wrote
                    timeout=self._timeout,
                )
        except SinkError:
            if not self._exists():  # else another process was faster, and what it made is checked next
                raise

    def _index(self, mark: CollectionMark) -> None:
        """Index the vector fields that have none: those of a new collection, or of one left half made."""
        names = set(map(vector_name, mark.dimensions))
        with self._answering("indexing the collection"):
            names -= set(self._client.list_indexes(self._collection, timeout=self._timeout))
            # Lite's AUTOINDEX is a graph that may lose candidates under the funnel's filter; its size allows exactness.
            for name in sorted(names):
                index = self._client.prepare_index_params()
                index.add_index(
                    name, index_name=name, index_type="FLAT" if self._lite else "AUTOINDEX", metric_type="COSINE"
                )
                # Nothing to wait for: there are no rows, and waiting polls twice a second.
                self._client.create_index(self._collection, index, sync=False, timeout=self._timeout)

    def _load(self) -> None:
        with self._answering("loading the collection"):
            self._client.load_collection(self._collection, timeout=self._timeout)

    def _read_mark(self) -> CollectionMark:
        with self._answering("a look at the collection"):
            description = self._client.describe_collection(self._collection, timeout=self._timeout)
        text = (description.get("properties") or {}).get(MARK_KEY)
        try:
            data = None if text is None else json.loads(text)
        except ValueError:
            data = text
        return CollectionMark.from_dict(data, collection=self._collection)

    @contextmanager
    def _answering(self, request: str) -> Iterator[None]:
        """Turns what the client raises into a :class:`SinkError` that says who was asked what."""
        try:
            yield
        except MilvusException as error:
            raise SinkError(f"Milvus at {self._where} refused {request}: {error.message}") from error
        except grpc.RpcError as error:
            detail = error.details() if isinstance(error, grpc.Call) else error
            raise SinkError(f"Milvus at {self._where} did not answer {request}: {detail}") from error


def _connect(uri: str, timeout: float) -> MilvusClient:
    if uri.startswith(("http://", "https://", "tcp://", "unix:")):
        if "@" in uri.partition("//")[2].split("/")[0]:
            raise InvalidRequestError("the URL holds credentials; leave them out and set MILVUS_TOKEN")
        try:
            return MilvusClient(uri, token=os.environ.get("MILVUS_TOKEN", ""), timeout=timeout)
        except ValueError as error:
            raise InvalidRequestError(
                f"uri={uri!r} is no URL of a Milvus ({error}); write http://host:19530"
            ) from error
    if "://" in uri or "\0" in uri or uri.startswith("~") or not uri.endswith(".db"):
        raise InvalidRequestError(
            f"uri={uri!r} is no place for Milvus; pass a *.db file, a server's URL or a MilvusClient"
        )
    if not Path(uri).absolute().parent.is_dir():
        raise InvalidRequestError(
            f"uri={uri!r}: there is no folder {str(Path(uri).absolute().parent)!r}; create it first"
        )
    try:
        import milvus_lite  # noqa: F401
    except ImportError:
        raise MissingExtraError("a *.db file needs Milvus Lite: pip install milvus-lite") from None
    # The client pings every 10 s; Lite's server takes that from an idle connection for an attack, and hangs up.
    quiet = {"grpc.keepalive_time_ms": 2**31 - 1, "grpc.keepalive_permit_without_calls": False}
    try:
        return MilvusClient(uri, timeout=timeout, grpc_options=quiet)
    except ConnectionConfigException as error:
        raise SinkError(
            f"{uri!r} cannot be opened: another process uses it (Milvus Lite serves one at a time, until it ends), "
            "or it is no database of Milvus Lite"
        ) from error
