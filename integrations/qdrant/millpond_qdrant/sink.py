"""QdrantSink: a collection of Qdrant, with one named vector for each Matryoshka width."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from qdrant_client import QdrantClient, models
from qdrant_client.common.client_exceptions import QdrantException, ResourceExhaustedResponse
from qdrant_client.http.exceptions import ApiException, ResponseHandlingException, UnexpectedResponse

from millpond.errors import InvalidRequestError, SinkError
from millpond.ingest.manifest import MARK_KEY, CollectionMark
from millpond.ingest.payload import check_payload
from millpond.ingest.record import Record
from millpond.ingest.search import Hit, plan_search
from millpond.ingest.sink import Batch, check_widths, record_bytes, slices, vector_name
from millpond.spec import ModelSpec
from millpond_qdrant.filters import to_filter
from millpond_qdrant.folder import open_journal, settle
from millpond_qdrant.points import payload_of, record_fields

if TYPE_CHECKING:
    from millpond import Engine

# The server takes requests of 32 MB by default; a float costs it up to 20 bytes of JSON.
MAX_ROWS = 256
MAX_BYTES = 16 << 20
_FLOAT_BYTES = 20
_FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f]')


class QdrantSink:
    """Writes to one collection of Qdrant, and searches it.

    The collection is created when it is first written to: a vector ``d{width}`` for every width, cosine distance, and
    the model's fingerprint in the collection's metadata (Qdrant 1.16 or newer).

    Args:
        location: ``":memory:"``, an http(s) URL, a folder for a database inside this process, or a ``QdrantClient``
            (which stays yours to close). A URL's key comes from ``QDRANT_API_KEY``.
        collection: Name of the collection.
        dimensions: The widths to store and search; by default the one that ``embed`` gives (full, for nearly every
            model). A search without them uses every width that the collection has.
        payload: ``plain`` (``id``, ``text``, ``metadata``), ``langchain`` (``page_content``, ``metadata``, and ``id``)
            or ``llama_index`` (that store's own fields). Each has a ``content_hash`` too.
        timeout: Seconds a server may take to answer.

    Raises:
        InvalidRequestError: A place, a name or an option that cannot be.
        SinkError: The folder is in use by another process, or damaged, or cannot be made.
    """

    def __init__(
        self,
        location: str | os.PathLike[str] | QdrantClient,
        collection: str,
        *,
        dimensions: Sequence[int] | None = None,
        payload: str = "plain",
        timeout: int = 60,
    ) -> None:
        self._collection = _check_name(collection)
        self._dimensions = check_widths(dimensions)
        self._payload = check_payload(payload)
        self._mark: CollectionMark | None = None
        self._owned = not isinstance(location, QdrantClient)
        self._where, self._client = _connect(location, timeout)
        self._folder = self._owned and not self._where.startswith((":memory:", "http://", "https://"))
        self._journal: sqlite3.Connection | None = None

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
            SinkError: Qdrant does not answer, or refuses.
        """
        wanted = CollectionMark.of(spec, dimensions=self._dimensions, payload=self._payload)
        if not self._exists():
            self._create(wanted)
        self._read_mark().check_write(wanted, spec, collection=self._collection)
        self._mark = wanted
        if self._folder:
            self._journal = open_journal(self._client, self._collection)

    def check(self, record: Record) -> None:
        """Refuse a record that no request could carry."""
        if (size := record_bytes(record)) > MAX_BYTES:
            raise InvalidRequestError(f"{size} bytes of text and metadata; a point takes at most {MAX_BYTES}")

    def write(self, batch: Batch) -> None:
        """Upsert the rows, in requests that a server accepts, and wait until it has applied them."""
        if self._mark is None:
            raise InvalidRequestError(f"collection {self._collection!r} is not prepared; call prepare(spec) first")
        if tuple(sorted(batch.vectors)) != self._mark.dimensions:
            raise InvalidRequestError(
                f"the batch holds the widths {sorted(batch.vectors)}, the collection {list(self._mark.dimensions)}"
            )
        vectors_bytes = _FLOAT_BYTES * sum(batch.vectors)
        sizes = [vectors_bytes + record_bytes(record) for record in batch.records]
        for rows in slices(sizes, max_rows=MAX_ROWS, max_bytes=MAX_BYTES):
            records, ids = batch.records[rows], batch.ids[rows]
            points = models.Batch(
                ids=list(ids),
                vectors={vector_name(width): values[rows].tolist() for width, values in batch.vectors.items()},
                payloads=[payload_of(record, point, self._payload) for record, point in zip(records, ids, strict=True)],
            )
            with self._answering(f"an upsert of {len(records)} points"):
                self._client.upsert(self._collection, points=points, wait=True)
        if self._journal is not None:
            with self._answering("a checkpoint"):
                settle(self._journal)

    def count(self) -> int:
        """How many points the collection holds; 0 before it is created."""
        if not self._exists():
            return 0
        with self._answering("a count"):
            return self._client.count(self._collection, exact=True).count

    def search(
        self,
        engine: Engine,
        question: str,
        *,
        k: int = 10,
        funnel: bool = True,
        candidates: int | None = None,
        filter: Mapping[str, object] | models.Filter | None = None,
    ) -> list[Hit]:
        """The records nearest to a question.

        Args:
            engine: The engine that filled the collection; it embeds the question with the role ``query``.
            question: One question.
            k: How many hits; fewer come back where fewer records match.
            funnel: Find candidates by the smallest width and score these by the largest, in one request; ``False``
                searches the largest alone.
            candidates: How many candidates, ``max(100, 10 * k)`` by default.
            filter: A dict of metadata values that must match (a list: one of them), or a Qdrant filter.

        Returns:
            At most ``k`` hits, best first; scores are cosine at the largest width.

        Raises:
            FingerprintMismatchError: Another model filled the collection.
            InvalidRequestError: No such collection, or an argument out of range.
            SinkError: Qdrant does not answer, or refuses.
        """
        if self._mark is None:
            if not self._exists():
                raise InvalidRequestError(
                    f"there is no collection {self._collection!r} at {self._where}; ingest into it first"
                )
            self._mark = self._read_mark()
        mark = self._mark
        mark.check_model(engine.spec, collection=self._collection)
        widths = mark.widths_to_search(self._dimensions, collection=self._collection)
        wanted = to_filter(filter, mark.payload)
        plan = plan_search(engine, question, widths=widths, k=k, funnel=funnel, candidates=candidates)
        prefetch = None
        if plan.coarse is not None:
            prefetch = models.Prefetch(
                query=plan.vectors[plan.coarse].tolist(),
                using=vector_name(plan.coarse),
                filter=wanted,
                limit=plan.candidates,
            )
        with self._answering("a search"):
            points = self._client.query_points(
                self._collection,
                prefetch=prefetch,
                query=plan.vectors[plan.full].tolist(),
                using=vector_name(plan.full),
                query_filter=wanted,
                limit=plan.k,
                with_payload=True,
            ).points
        hits = []
        for point in points:
            identity, text, metadata = record_fields(point.payload or {}, str(point.id), mark.payload)
            hits.append(Hit(id=identity, score=point.score, text=text, metadata=metadata))
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
        return f"QdrantSink({self._where!r}, {self._collection!r}, dimensions={self._dimensions}, {self._payload!r})"

    def _exists(self) -> bool:
        with self._answering("a look for the collection"):
            return self._client.collection_exists(self._collection)

    def _create(self, mark: CollectionMark) -> None:
        vectors = {
            vector_name(width): models.VectorParams(size=width, distance=models.Distance.COSINE)
            for width in mark.dimensions
        }
        try:
            with self._answering("creating the collection"):
                self._client.create_collection(
                    self._collection, vectors_config=vectors, metadata={MARK_KEY: mark.to_dict()}
                )
        except SinkError:
            if not self._exists():  # else another process was faster, and what it made is checked next
                raise

    def _read_mark(self) -> CollectionMark:
        with self._answering("a look at the collection"):
            config = self._client.get_collection(self._collection).config
        return CollectionMark.from_dict((config.metadata or {}).get(MARK_KEY), collection=self._collection)

    @contextmanager
    def _answering(self, request: str) -> Iterator[None]:
        """Turns what the client raises into a :class:`SinkError` that says who was asked what."""
        try:
            yield
        except UnexpectedResponse as error:
            detail = error.content[:300].decode(errors="replace")
            raise self._failed(
                f"answered {request} with {error.status_code} {error.reason_phrase}: {detail}"
            ) from error
        except ResourceExhaustedResponse as error:
            raise self._failed(f"is too busy for {request}; it asks to wait {error.retry_after_s} s") from error
        except ResponseHandlingException as error:
            raise self._failed(f"did not answer {request}: {error.source!r}") from error
        except JSONDecodeError as error:
            raise self._failed(f"answered {request} with something that is not JSON ({error})") from error
        except (ApiException, QdrantException, ValueError, RuntimeError, OSError, sqlite3.Error) as error:
            raise self._failed(f"refused {request}: {error}") from error

    def _failed(self, how: str) -> SinkError:
        return SinkError(f"Qdrant at {self._where} {how}")


def _connect(location: str | os.PathLike[str] | QdrantClient, timeout: int) -> tuple[str, QdrantClient]:
    """A printable name of the place, and a client of it."""
    if isinstance(location, QdrantClient):
        return "the client passed in", location
    place = os.path.expanduser(os.fspath(location))
    if place == ":memory:":
        return place, QdrantClient(":memory:")
    if place.startswith(("http://", "https://")):
        if "@" in place.split("/")[2]:
            raise InvalidRequestError("the URL holds credentials; leave them out and set QDRANT_API_KEY")
        key = os.environ.get("QDRANT_API_KEY") or None
        try:
            if not urlsplit(place).hostname:
                raise ValueError("it names no host")
            return place, QdrantClient(url=place, api_key=key, timeout=timeout, check_compatibility=False)
        except ValueError as error:
            raise InvalidRequestError(
                f"location={place!r} is no URL of a Qdrant ({error}); write http://host:6333"
            ) from error
    if "://" in place or "\0" in place or place.startswith("~") or not place:
        raise InvalidRequestError(
            f"location={place!r} is no place for Qdrant; pass ':memory:', an http(s) URL, a folder or a QdrantClient"
        )
    if Path(place).exists() and not Path(place).is_dir():
        raise InvalidRequestError(f"location={place!r} is a file; Qdrant keeps its data in a folder")
    try:
        return place, QdrantClient(path=place)
    except RuntimeError as error:
        raise SinkError(
            f"the folder {place!r} is in use by another process or client; close that one, or run a Qdrant server"
        ) from error
    except OSError as error:
        raise SinkError(f"the folder {place!r} cannot be opened or made ({error.strerror}); choose another") from error
    except (ValueError, LookupError, TypeError, AttributeError, sqlite3.Error) as error:
        # Whatever the client stumbles over in files that are not as it wrote them.
        raise SinkError(
            f"the folder {place!r} holds no database that this qdrant-client can read "
            f"({type(error).__name__}: {error}); restore it, or choose another folder"
        ) from error


def _check_name(collection: str) -> str:
    named = isinstance(collection, str) and 0 < len(collection) <= 255 and collection not in (".", "..")
    if not named or _FORBIDDEN.search(collection):
        raise InvalidRequestError(
            f'collection={collection!r} is no name; use 1 to 255 characters without < > : " / \\ | ? *'
        )
    return collection
