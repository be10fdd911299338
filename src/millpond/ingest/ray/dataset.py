"""embed_dataset: a Ray dataset of texts as a Ray dataset of vectors."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
from ray.data import ActorPoolStrategy, Dataset

from millpond.blank import is_blank
from millpond.config import EngineConfig
from millpond.engine.loading import describe
from millpond.errors import InvalidRequestError
from millpond.ingest.chunking import Chunker, Chunking
from millpond.ingest.pipeline.embedder import EmbeddedRecords, PlannedRecord, RecordEmbedder
from millpond.ingest.pipeline.ingest import check_model
from millpond.ingest.ray.worker import load_engine
from millpond.ingest.record import Record, Rejected, content_hash
from millpond.ingest.sinks.protocol import vector_name
from millpond.ingest.sources.rows import RowReader

logger = logging.getLogger(__name__)

_READ_ROWS = 2048


def embed_dataset(
    ds: Dataset,
    *,
    model: str | os.PathLike[str],
    engine_options: Mapping[str, Any] | None = None,
    dimensions: Sequence[int] | None = None,
    id_column: str = "id",
    text_column: str = "text",
    metadata_columns: Collection[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    chunking: Chunking | None = None,
    keep_empty: bool = False,
    keep_failed: bool = False,
    concurrency: int | tuple[int, int] = 1,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    batch_size: int = 2048,
) -> Dataset:
    """Embed the rows of a Ray dataset, as a stream: nothing is computed until the result is consumed.

    Each actor has an engine, which it loads once; Ray Data reads ahead of the actors as far as its limits allow. A row
    becomes a record as in a run of :func:`~millpond.ingest.ingest`, and has the same ids and vectors. Rows with the
    same id all stay. Blank texts are left out, and so are rows that hold no record or cannot be embedded, which the
    actor's log names.

    Args:
        ds: The dataset.
        model: Hub id or folder, which every machine must be able to read.
        engine_options: Other arguments of :class:`~millpond.Engine`, as ``dtype``, but not ``cache``.
        dimensions: The widths to return; by default the width that ``embed`` returns.
        id_column: Column of the id; a missing one becomes the text's content hash.
        text_column: Column of the text.
        metadata_columns: Columns that become metadata; ``None``: all the others.
        cache: Path of the vector cache, on a local disk: the actors of a machine share it, and each machine has its own
            file there.
        chunking: Cut the texts that are longer than the model reads, or than this says, into chunks: each is a row.
        keep_empty: Embed blank texts too.
        keep_failed: Keep the rows that are left out for an error, with the reason in a column ``error``, which is null
            in the others.
        concurrency: How many actors, or the fewest and the most.
        num_cpus: CPU cores of each actor, which its engine uses.
        num_gpus: GPUs of each; 0.25 puts four actors on a GPU.
        batch_size: Rows of one engine call.

    Returns:
        A dataset with the columns ``id``, ``point_id`` (the row's id in a database), ``text``, ``metadata`` (JSON),
        ``content_hash``, ``chunk``, and for each width a column like ``d384``, a list of so many float32.

    Raises:
        ModelLoadError: The checkpoint cannot be found or run.
        InvalidRequestError: An argument is not valid, or the model does not have these widths.
        TypeError: ``ds`` is no Ray dataset.
    """
    if not isinstance(ds, Dataset):
        raise TypeError(f"ds is of type {type(ds).__name__}; pass a ray.data.Dataset, like ray.data.from_items(...)")
    if id_column == text_column:
        raise InvalidRequestError(f"id_column and text_column are both {id_column!r}; name two columns")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InvalidRequestError(f"batch_size={batch_size!r} must be an int from 1")
    config = engine_config(model, engine_options or {})
    spec = describe(config)
    least, most = (concurrency, concurrency) if isinstance(concurrency, int) else concurrency
    if not (type(least) is type(most) is int and 1 <= least <= most):
        raise InvalidRequestError(f"concurrency={concurrency!r} must be an int from 1, or a range like (1, 8)")
    return ds.map_batches(
        BatchEmbedder,
        fn_constructor_kwargs={
            "config": config,
            "fingerprint": spec.fingerprint,
            "widths": check_model(spec, dimensions),
            "cache": None if cache is None else os.path.abspath(os.path.expanduser(cache)),
            "chunking": chunking,
            "keep_empty": keep_empty,
            "keep_failed": keep_failed,
            "columns": {
                "id_column": id_column,
                "text_column": text_column,
                "metadata_columns": None if metadata_columns is None else list(metadata_columns),
            },
        },
        batch_size=batch_size,
        batch_format="pyarrow",
        zero_copy_batch=True,
        compute=ActorPoolStrategy(min_size=least, max_size=most),
        num_cpus=num_cpus,
        num_gpus=num_gpus or None,
    )


def engine_config(model: str | os.PathLike[str], options: Mapping[str, Any]) -> EngineConfig:
    """The configuration of the workers' engines, which is the same wherever they run.

    Raises:
        InvalidRequestError: An unknown option, or one with a wrong value.
    """
    if "cache" in options:
        raise InvalidRequestError("engine_options holds a cache; pass its path as cache=")
    known = EngineConfig.__dataclass_fields__.keys() - {"model"}
    if unknown := sorted(options.keys() - known):
        raise InvalidRequestError(
            f"engine_options holds {unknown[0]!r}, which is no argument of Engine; it takes {', '.join(sorted(known))}"
        )
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    if isinstance(name, str) and os.path.isdir(os.path.expanduser(name)):
        name = os.path.abspath(os.path.expanduser(name))  # a worker has another working directory
    return EngineConfig(model=name, **options)


def read_dataset(
    ds: Dataset, *, id_column: str, text_column: str, metadata_columns: Collection[str] | None
) -> Generator[Record | Rejected, None, None]:
    """The records of a dataset, in its order; Ray reads and transforms it meanwhile, wherever there is room."""
    rows = RowReader("the dataset", id_column=id_column, text_column=text_column, metadata_columns=metadata_columns)
    context = ds.context
    former = context.execution_options.preserve_order, context.enable_progress_bars
    context.execution_options.preserve_order, context.enable_progress_bars = True, False
    number = 0
    log = logging.getLogger("ray.data")
    level = log.level
    log.setLevel(logging.ERROR)  # it tells every step, and that its bars are off
    try:
        for table in ds.iter_batches(batch_size=_READ_ROWS, batch_format="pyarrow"):
            for row in cast(pa.Table, table).to_pylist():
                yield _record(rows, row, f"row {number}")
                number += 1
    finally:
        log.setLevel(level)
        context.execution_options.preserve_order, context.enable_progress_bars = former


def _record(rows: RowReader, row: Mapping[str, Any], where: str) -> Record | Rejected:
    try:
        return rows.record(row)
    except InvalidRequestError as error:
        return rows.rejected(row, where, str(error))


class BatchEmbedder:
    """Embeds batches of rows, in an actor of Ray Data."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        fingerprint: str,
        widths: Sequence[int],
        cache: str | None,
        chunking: Chunking | None,
        keep_empty: bool,
        keep_failed: bool,
        columns: Mapping[str, Any],
    ) -> None:
        self._engine = load_engine(config, cache, fingerprint)
        self._embedder = RecordEmbedder(self._engine, widths)
        self._widths = widths
        self._chunker = None if chunking is None else Chunker.for_engine(self._engine, chunking)
        self._keep_empty = keep_empty
        self._keep_failed = keep_failed
        self._rows = RowReader("the dataset", **columns)
        self._schema = _schema(widths, failed=keep_failed)

    def __call__(self, table: pa.Table) -> pa.Table:
        """The rows of a batch with their vectors, in order."""
        planned: list[PlannedRecord | Rejected] = []
        for number, row in enumerate(table.to_pylist()):
            item = _record(self._rows, row, f"row {number} of a batch")
            if isinstance(item, Rejected):
                planned.append(item)
            elif self._keep_empty or not is_blank(item.text):
                planned.append(self._split(item))
        found = self._embed([each for each in planned if isinstance(each, PlannedRecord)])
        parts: list[pa.Table] = []
        for each in planned:
            result = found[id(each)] if isinstance(each, PlannedRecord) else each.reason
            if not isinstance(result, str):
                parts.append(result)
                continue
            where = f"record {each.record.id!r}" if isinstance(each, PlannedRecord) else each.where
            logger.warning("left out %s: %s", where, result)
            if self._keep_failed:
                parts.append(self._failed(each, result))
        return pa.concat_tables([self._schema.empty_table(), *parts]).combine_chunks()

    def _split(self, record: Record) -> PlannedRecord | Rejected:
        try:
            chunks = [record] if self._chunker is None else self._chunker.split(record)
        except InvalidRequestError as error:
            return Rejected(where=f"record {record.id!r}", reason=str(error), record_id=record.id)
        return PlannedRecord(record=record, chunks=chunks)

    def _embed(self, records: Sequence[PlannedRecord]) -> dict[int, pa.Table | str]:
        """For each record, by its identity, its rows, or why it has none."""
        found: dict[int, pa.Table | str] = {}
        rounds: list[dict[str, PlannedRecord]] = []  # an engine call of rows to write has no id twice
        for record in records:
            free = next((each for each in rounds if record.record.id not in each), None)
            if free is None:
                free = {}
                rounds.append(free)
            free[record.record.id] = record
        for each in rounds:
            for result in self._embedder.complete(self._embedder.submit(list(each.values()))):
                if isinstance(result, EmbeddedRecords):
                    table = self._table(result)
                    for record, start, end in zip(result.records, [0, *result.ends], result.ends, strict=False):
                        found[id(record)] = table.slice(start, end - start)
                else:
                    found[id(result.record)] = result.reason
        return found

    def _table(self, embedded: EmbeddedRecords) -> pa.Table:
        batch = embedded.batch
        columns = _record_columns(batch.records)
        columns["point_id"] = list(batch.ids)
        for width in self._widths:
            rows = np.ascontiguousarray(batch.vectors[width], dtype=np.float32)  # [rows, width]
            columns[vector_name(width)] = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), width)
        if self._keep_failed:
            columns["error"] = [None] * len(batch)
        return pa.table(columns, schema=self._schema)

    def _failed(self, left_out: PlannedRecord | Rejected, reason: str) -> pa.Table:
        if isinstance(left_out, PlannedRecord):
            columns = _record_columns([left_out.record])
        else:
            columns = {"id": [left_out.record_id], "text": [None], "metadata": [left_out.content]}
            columns |= {"content_hash": [None], "chunk": [None]}
        columns |= {"point_id": [None], "error": [reason]}
        columns |= {vector_name(width): [None] for width in self._widths}
        return pa.table(columns, schema=self._schema)


def _record_columns(records: Sequence[Record]) -> dict[str, Any]:
    return {
        "id": [record.id for record in records],
        "text": [record.text for record in records],
        "metadata": [json.dumps(record.metadata, ensure_ascii=False) for record in records],
        "content_hash": [content_hash(record.text) for record in records],
        "chunk": [record.chunk for record in records],
    }


def _schema(widths: Sequence[int], *, failed: bool) -> pa.Schema:
    fields = [(name, pa.string()) for name in ("id", "point_id", "text", "metadata", "content_hash")]
    fields.append(("chunk", pa.int32()))
    fields += [(vector_name(width), pa.list_(pa.float32(), width)) for width in widths]
    return pa.schema([*fields, ("error", pa.string())] if failed else fields)
