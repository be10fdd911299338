"""Arrow sources: Parquet and Arrow files, and tables in memory, read batch by batch."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from millpond.errors import InvalidRequestError, MissingExtraError
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.arrow_cells import BATCH_ROWS, cell_bytes, parts, rows_of_batch
from millpond.ingest.sources.compression import COMPRESSIONS
from millpond.ingest.sources.lines import MAX_RECORD_BYTES, too_long
from millpond.ingest.sources.rows import METADATA_KEY, Columns, RowReader

ARROW_SUFFIXES = (".parquet", ".arrow", ".feather")

_READ_BYTES = 1 << 20  # of a column at a time, instead of all that a row group has of it


def pyarrow(purpose: str) -> Any:
    """The library; raises MissingExtraError with the command that installs it."""
    try:
        return import_module("pyarrow")
    except ImportError:
        raise MissingExtraError(f"{purpose} needs pyarrow: pip install 'millpond[parquet]'") from None


class ArrowReader:
    """The records of a schema's batches. The columns are checked at construction."""

    def __init__(self, schema: Any, name: str, columns: Columns) -> None:
        self._types = pyarrow("reading a table").types
        names: list[str] = list(schema.names)
        nested, keys = False, None
        if METADATA_KEY in names and METADATA_KEY not in (columns.id, *columns.texts):
            metadata = schema.field(METADATA_KEY).type
            nested = self._types.is_struct(metadata) or self._types.is_map(metadata)
            keys = [field.name for field in metadata] if self._types.is_struct(metadata) else None
        columns.check(name, names, keys if nested else ())
        kept = set(names if columns.metadata is None else columns.metadata) | {columns.id, *columns.texts}
        if nested and columns.metadata is not None and (set(columns.metadata) - set(names)):
            kept.add(METADATA_KEY)
        self.columns = [column for column in names if column in kept]
        self._name = name
        self._check_types({column: schema.field(column).type for column in self.columns}, columns)
        self._rows = RowReader(name, columns, nested=nested)

    def records(self, batches: Iterable[Any], *, item: str) -> Generator[Record | Rejected, None, None]:
        """The records of ``pyarrow`` batches or tables."""
        first = 0
        for whole in batches:
            # A table has columns of several chunks, which have other bounds in each.
            for batch in whole.to_batches() if hasattr(whole, "to_batches") else (whole,):
                yield from self._batch(batch, first, item)
                first += batch.num_rows

    def _batch(self, batch: Any, first: int, item: str) -> Iterator[Record | Rejected]:
        cells = {column: cell_bytes(batch.column(column)) for column in self.columns}  # [rows] each
        for start, stop in parts(np.sum(list(cells.values()), axis=0)):
            long = next((name for name, sizes in cells.items() if sizes[start] > MAX_RECORD_BYTES), None)
            if long is not None:
                reason = too_long(f"cell of column {long!r}", int(cells[long][start]))
                yield Rejected(where=item % (first + start), reason=reason)
                continue
            values = [_values(batch.column(column).slice(start, stop - start)) for column in self.columns]
            for number, row in enumerate(zip(*values, strict=True), start=first + start):
                yield self._record(dict(zip(self.columns, row, strict=True)), item % number)

    def _record(self, row: dict[str, Any], where: str) -> Record | Rejected:
        try:
            for column, value in row.items():
                if isinstance(value, Exception):
                    reason = f"{type(value).__name__}: {value}"
                    raise InvalidRequestError(f"column {column!r} cannot be read ({reason})")
            return self._rows.record(row)
        except InvalidRequestError as error:
            return self._rows.rejected(row, where, str(error))

    def _check_types(self, types: dict[str, Any], columns: Columns) -> None:
        for column, kind in ((each, types[each]) for each in columns.texts):
            if not (self._is_text(kind) or (columns.composed and self._is_number(kind))):
                raise InvalidRequestError(
                    f"{self._name}: column {column!r} is of type {kind}, no text; name another column, or cast it"
                )
        identity = types.get(columns.id)
        if identity is not None and not (
            self._is_text(identity) or self._types.is_integer(self._plain(identity)) or _is_uuid(identity)
        ):
            raise InvalidRequestError(
                f"{self._name}: column {columns.id!r} is of type {identity}; an id is a str, an integer or a UUID: "
                "name another column, or cast it"
            )
        with_bytes = [column for column, kind in types.items() if self._holds_bytes(kind)]
        if with_bytes:
            others = [column for column in types if column not in (*with_bytes, columns.id, columns.body)]
            option = ",".join(others) or "''"
            raise InvalidRequestError(
                f"{self._name}: {', '.join(map(repr, with_bytes))} holds bytes, which cannot be metadata; choose "
                f"columns without bytes, metadata_columns={others} (in the shell --metadata {option})"
            )

    def _plain(self, kind: Any) -> Any:
        """The type of the values, without dictionary, run ends and extension."""
        while True:
            if self._types.is_dictionary(kind) or self._types.is_run_end_encoded(kind):
                kind = kind.value_type
            elif hasattr(kind, "storage_type") and not _is_uuid(kind):
                kind = kind.storage_type
            else:
                return kind

    def _is_text(self, kind: Any) -> bool:
        return str(self._plain(kind)) in ("string", "large_string", "string_view", "null")

    def _is_number(self, kind: Any) -> bool:
        plain = self._plain(kind)
        return bool(self._types.is_integer(plain) or self._types.is_floating(plain))

    def _holds_bytes(self, kind: Any) -> bool:
        plain = self._plain(kind)
        if self._types.is_nested(plain):
            return any(self._holds_bytes(plain.field(index).type) for index in range(plain.num_fields))
        return "binary" in str(plain)


def _is_uuid(kind: Any) -> bool:
    return getattr(kind, "extension_name", "") == "arrow.uuid"


def _values(column: Any) -> Sequence[Any]:
    """The values of a column; in place of one that Python cannot have, such as a time after 9999, its error."""
    try:
        values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
        return values
    except Exception:  # of a library or of Python, by the type of the value
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py(maps_as_pydicts="strict")
    except Exception as error:
        return error


def read_arrow(path: Path, kind: str, columns: Columns) -> Generator[Record | Rejected, None, None]:
    """The records of a Parquet or Arrow file."""
    arrow = pyarrow(f"reading {kind}")
    if path.suffix.lower() in COMPRESSIONS:
        raise InvalidRequestError(f"{str(path)!r}: a {kind} is compressed inside; write it without {path.suffix}")
    opened = _parquet if kind == ".parquet" else _ipc
    with opened(arrow, path, None) as (schema, _):
        reader = ArrowReader(schema, repr(str(path)), columns)

    def records() -> Generator[Record | Rejected, None, None]:
        with opened(arrow, path, reader.columns) as (_, batches):
            yield from reader.records(batches, item=f"{str(path).replace('%', '%%')}[%d]")

    return records()


@contextmanager
def _parquet(arrow: Any, path: Path, columns: list[str] | None) -> Iterator[tuple[Any, Iterable[Any]]]:
    """The schema of a Parquet file, and the batches of some columns."""
    parquet = import_module("pyarrow.parquet")
    with _named_errors(arrow, path), parquet.ParquetFile(path, buffer_size=_READ_BYTES, pre_buffer=False) as file:
        groups = (file.metadata.row_group(index) for index in range(file.num_row_groups))
        rows = min((rows_of_batch(group.total_byte_size, group.num_rows) for group in groups), default=BATCH_ROWS)
        yield file.schema_arrow, file.iter_batches(rows, columns=columns, use_threads=False)


@contextmanager
def _ipc(arrow: Any, path: Path, columns: list[str] | None) -> Iterator[tuple[Any, Iterable[Any]]]:
    """The schema of an Arrow file or stream, and the batches of some columns."""
    with _named_errors(arrow, path), arrow.memory_map(str(path)) as file:  # a batch may be all of it
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        open_ipc = arrow.ipc.open_file if is_file else arrow.ipc.open_stream
        schema = open_ipc(file).schema
        file.seek(0)
        # Whole batches are not copied into memory; of others, what is kept is.
        some = columns is not None and columns != schema.names
        fields = [schema.get_field_index(column) for column in columns or ()] if some else []
        opened = open_ipc(file, options=arrow.ipc.IpcReadOptions(included_fields=fields, use_threads=False))
        batches = (opened.get_batch(index) for index in range(opened.num_record_batches)) if is_file else opened
        yield schema, batches


@contextmanager
def _named_errors(arrow: Any, path: Path) -> Iterator[None]:
    try:
        yield
    except (arrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidRequestError(
            f"{str(path)!r} is damaged, or not a {path.suffix} file ({reason}); write it again"
        ) from error
