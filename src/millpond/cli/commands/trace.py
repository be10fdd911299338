"""``millpond trace``: where a row of a collection comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from millpond.cli.arguments import options
from millpond.cli.output.columns import aligned
from millpond.cli.output.results_table import one_line
from millpond.errors import InvalidRequestError

if TYPE_CHECKING:
    from millpond.ingest.sinks.manifest import CollectionManifest
    from millpond.ingest.sinks.origin import RowOrigin
    from millpond.ingest.sinks.run_note import RunNote

_FITS = {True: "that of the stored text", False: "of another text than the stored one", None: ""}


def trace(
    url: Annotated[str, typer.Argument(help="URL of the collection, {sinks}.", metavar="URL")],
    row_id: Annotated[str, typer.Argument(help="Id of a record, or of a row.", metavar="ID")],
    *,
    format: Annotated[Literal["table", "json"], typer.Option(help=options.FORMAT)] = "table",
) -> None:
    """Print where a row comes from: record and span, model and settings, file, and the runs that filled the collection.

    The id of a record prints all of its chunks. Whether the stored text is the one that the vectors were made of, and
    whether the file still has it, is looked up now.
    """
    from millpond.ingest.sinks.collection import CollectionSink
    from millpond.ingest.sinks.database import open_sink
    from millpond.ingest.sinks.origin import trace as trace_rows

    with closing(open_sink(url, must_exist=True)) as sink:
        if not isinstance(sink, CollectionSink):
            raise InvalidRequestError(f"{url.partition(':')[0]!r} only writes; its rows cannot be read")
        found = trace_rows(sink, row_id)
        if not found:
            raise InvalidRequestError(f"collection {sink.collection!r} has no record and no row of the id {row_id!r}")
        manifest = sink.open()
    if format == "json":
        print(json.dumps(_as_json(found, manifest), ensure_ascii=False, indent=2))
        return
    for origin in found:
        print(*aligned(_row_lines(origin)), "", sep="\n")
    print(*aligned(_collection_lines(manifest)), sep="\n")


def _as_json(found: list[RowOrigin], manifest: CollectionManifest) -> dict[str, Any]:
    return {
        "rows": [origin.to_json() for origin in found],
        **manifest.identity.to_json(),
        "dimensions": list(manifest.dimensions),
        "fields": manifest.fields,
        "chunked": manifest.chunked,
        "context": manifest.context,
        "runs": [note.to_json() for note in manifest.runs],
    }


def _row_lines(origin: RowOrigin) -> Iterator[tuple[str, str]]:
    yield "row", origin.row_id + (", written by a framework" if origin.by_framework else "")
    yield "record", one_line(origin.record_id)
    if origin.span is not None:
        start, end = origin.span
        yield "chunk", f"{origin.chunk}, characters {start:,} to {end:,} of the record"
    rest = "..." if len(origin.text) < origin.characters else ""
    yield "text", f"{one_line(origin.text)}{rest} ({origin.characters:,} characters)"
    if origin.metadata:
        yield "metadata", one_line(json.dumps(dict(origin.metadata), ensure_ascii=False))
    hashed = origin.content_hash
    yield "content hash", f"{hashed}, {_FITS[origin.hash_fits]}" if hashed else "none is stored"
    lengths = (f"{width} (length {norm:.6g})" for width, norm in sorted(origin.norms.items()))
    yield "vectors", ", ".join(lengths) or "none can be read"
    if origin.file is not None:
        yield "file", f"{one_line(origin.file.path)} {origin.file.state}"


def _collection_lines(manifest: CollectionManifest) -> Iterator[tuple[str, str]]:
    yield "model", manifest.model
    yield "fingerprint", manifest.fingerprint
    if manifest.folder is not None:
        yield "folder", manifest.folder
    if manifest.settings:
        yield "settings", _settings(manifest.settings)
    for note in reversed(manifest.runs):
        yield "run", _run(note)
    if not manifest.runs:
        yield "run", "none is known: an earlier version of millpond filled the collection"


def _run(note: RunNote) -> str:
    times = note.first if note.runs == 1 else f"{note.runs} times from {note.first} to {note.last}"
    chunks = f", cut by {note.chunking}" if note.chunking else ""
    return f"{note.command} of {one_line(note.source)}{chunks}, {times}, millpond {note.version} ({note.run})"


def _settings(settings: Mapping[str, Any]) -> str:
    return one_line(", ".join(f"{name}={value}" for name, value in settings.items() if value not in (None, "", [], {})))
