"""Tables in memory as sources: Hugging Face's datasets, tables of Arrow, and DataFrames of pandas and polars."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.arrow import ArrowReader, pyarrow
from millpond.ingest.sources.arrow_cells import BATCH_ROWS
from millpond.ingest.sources.rows import METADATA_KEY, Columns, RowReader, read_items

_ITEM = "row %d"


def check_table(source: object) -> None:
    """Raise TypeError for several tables in one object: the splits of a DatasetDict."""
    if isinstance(source, Mapping) and source and all(map(_is_dataset, source.values())):
        names = ", ".join(map(str, source))
        raise TypeError(
            f"records is a {type(source).__name__} with the splits {names}; pass one of them: "
            f"records[{next(iter(source))!r}]"
        )


def is_table(source: object) -> bool:
    """Whether :func:`read_table` reads this object."""
    return (
        _is_dataset(source)
        or _is_frame(source)
        or hasattr(source, "__arrow_c_stream__")  # tables, batches and readers of Arrow, polars, DuckDB
        or (hasattr(source, "__arrow_c_array__") and hasattr(source, "schema"))
        or (hasattr(source, "scanner") and hasattr(source, "to_batches"))
    )


def read_table(source: Any, columns: Columns) -> Generator[Record | Rejected, None, None]:
    """The records of a table."""
    if _is_dataset(source):
        return _dataset(source, columns)
    if _is_frame(source):
        return _frame(source, columns)
    arrow = pyarrow(f"reading a {type(source).__name__}")
    if hasattr(source, "scanner"):  # a pyarrow.dataset.Dataset, such as a folder of Parquet files
        stream = source.scanner(batch_size=BATCH_ROWS, batch_readahead=2, fragment_readahead=1).to_reader()
    elif hasattr(source, "__arrow_c_stream__"):
        stream = arrow.RecordBatchReader.from_stream(source)
    else:
        batch = arrow.record_batch(source)
        stream = arrow.RecordBatchReader.from_batches(batch.schema, [batch])
    return ArrowReader(stream.schema, f"the {type(source).__name__}", columns).records(stream, item=_ITEM)


def _is_dataset(source: object) -> bool:
    """Whether this is a Dataset or IterableDataset of the package datasets."""
    return all(hasattr(source, name) for name in ("with_format", "iter", "features", "column_names", "select_columns"))


def _is_frame(source: object) -> bool:
    """Whether this is a DataFrame of pandas."""
    return all(hasattr(source, name) for name in ("iloc", "columns", "notna", "itertuples"))


def _dataset(dataset: Any, columns: Columns) -> Generator[Record | Rejected, None, None]:
    form = getattr(dataset, "format", None) or {}
    # A transform is Python code for each example, and a generator's examples have no types before they are there.
    if dataset.features is not None and form.get("type") != "custom":
        schema = dataset.features.arrow_schema
        shown = form.get("columns")
        if shown:
            schema = pyarrow("reading a Dataset").schema([schema.field(column) for column in shown])
        reader = ArrowReader(schema, f"the {type(dataset).__name__}", columns)
        dataset = dataset.select_columns(reader.columns)
        # A stream may make its tables of examples that differ in type.
        if hasattr(dataset, "num_rows"):
            return reader.records(dataset.with_format("arrow").iter(batch_size=BATCH_ROWS), item=_ITEM)
    return read_items(dataset, RowReader("the dataset", columns))


def _frame(frame: Any, columns: Columns) -> Generator[Record | Rejected, None, None]:
    header = list(frame.columns)
    if not all(isinstance(column, str) for column in header):
        raise InvalidRequestError(f"the DataFrame has columns that are no str: {header[:8]}; rename them")
    columns.check("the DataFrame", header, None if METADATA_KEY in header else ())
    rows = RowReader("the DataFrame", columns)

    def records() -> Generator[Record | Rejected, None, None]:
        for start in range(0, len(frame), BATCH_ROWS):
            part = frame.iloc[start : start + BATCH_ROWS]
            values = part.astype(object)
            values = values.where(part.notna(), None)  # NaN, NaT and NA are pandas' words for a missing value
            for number, row in enumerate(values.to_dict("records"), start=start):
                yield rows.item(row, _ITEM % number)

    return records()
