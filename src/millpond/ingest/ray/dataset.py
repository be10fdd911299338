"""Ray datasets: as the source of a run, and embed_dataset, which makes a dataset of vectors of a dataset of texts."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa
from ray.data import ActorPoolStrategy, Dataset

from millpond.engine.loading import describe
from millpond.errors import InvalidRequestError
from millpond.ingest.chunking import Chunker, Chunking, check_late
from millpond.ingest.pipeline.embedder import EmbeddedRecords, PlannedRecord, RecordEmbedder
from millpond.ingest.pipeline.ingest import check_model
from millpond.ingest.pipeline.options import check_blank, context_of
from millpond.ingest.ray.worker import load_engine
from millpond.ingest.record import Record, Rejected, check_int, content_hash, point_id
from millpond.ingest.sinks.batch import FloatArray
from millpond.ingest.sinks.protocol import vector_name
from millpond.ingest.sources.read import RecordReader
from millpond.ingest.sources.rows import Columns, RowReader
from millpond.support.blank import is_blank
from millpond.values.config import EngineConfig

logger = logging.getLogger(__name__)

_READ_ROWS = 2048
_TEXTS = ("id", "point_id", "text", "metadata", "content_hash")


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
    keep_blank: bool = False,
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
        keep_blank: Embed blank texts too.
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
        TypeError: ``ds`` is not a Ray dataset.
    """
    if not isinstance(ds, Dataset):
        raise TypeError(f"ds is of type {type(ds).__name__}; pass a ray.data.Dataset, like ray.data.from_items(...)")
    columns = Columns(id=id_column, text=text_column, metadata=metadata_columns)
    check_int("batch_size", batch_size)
    config = engine_config(model, engine_options or {})
    spec = describe(config)
    check_blank(keep_blank, chunking)
    if chunking is not None and chunking.context is not None:
        check_late(spec)
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
            "keep_blank": keep_blank,
            "keep_failed": keep_failed,
            "columns": columns,
        },
        batch_size=batch_size,
        batch_format="pyarrow",
        zero_copy_batch=True,
        compute=ActorPoolStrategy(min_size=least, max_size=most),
        num_cpus=num_cpus,
        num_gpus=num_gpus or None,
    )


def engine_config(model: str | os.PathLike[str], options: Mapping[str, Any]) -> EngineConfig:
    """The configuration of the workers' engines, which is the same wherever they run."""
    if "cache" in options:
        raise InvalidRequestError("engine_options holds a cache; pass its path as cache=")
    known = EngineConfig.__dataclass_fields__.keys() - {"model"}
    if unknown := sorted(options.keys() - known):
        raise InvalidRequestError(
            f"engine_options holds {unknown[0]!r}, which is not an argument of Engine; it takes "
            f"{', '.join(sorted(known))}"
        )
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    if isinstance(name, str) and os.path.isdir(os.path.expanduser(name)):
        name = os.path.abspath(os.path.expanduser(name))  # a worker has another working directory
    return EngineConfig(model=name, **options)


class DatasetReader(RecordReader):
    """The records of a Ray dataset, in its order; Ray reads and transforms it meanwhile, wherever there is room.

    Args:
        ds: The dataset.
        columns: The names of its columns.
    """

    def __init__(self, ds: Dataset, columns: Columns | None = None) -> None:
        super().__init__(_records(ds, RowReader("the dataset", columns)))
        self.name = "ray.data.Dataset"


def _records(ds: Dataset, rows: RowReader) -> Iterator[Record | Rejected]:
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
                yield rows.item(row, f"row {number}")
                number += 1
    finally:
        log.setLevel(level)
        context.execution_options.preserve_order, context.enable_progress_bars = former


@dataclass(kw_only=True)
class BatchEmbedder:
    """Embeds batches of rows, in an actor of Ray Data; its arguments are those of :func:`embed_dataset`."""

    config: EngineConfig
    fingerprint: str
    widths: Sequence[int]
    cache: str | None
    chunking: Chunking | None
    keep_blank: bool
    keep_failed: bool
    columns: Columns

    def __post_init__(self) -> None:
        engine = load_engine(self.config, self.cache, self.fingerprint)
        self._embedder = RecordEmbedder(engine, self.widths, context=context_of(self.chunking))
        self._chunker = None if self.chunking is None else Chunker.for_engine(engine, self.chunking)
        self._rows = RowReader("the dataset", self.columns)

    def __call__(self, table: pa.Table) -> pa.Table:
        """The rows of a batch with their vectors, in order."""
        items = [self._rows.item(row, f"row {index} of a batch") for index, row in enumerate(table.to_pylist())]
        chunks: dict[int, Sequence[Record]] = {}
        reasons: dict[int, str] = {}
        for index, item in enumerate(items):
            if isinstance(item, Rejected):
                reasons[index] = item.reason
            elif self.keep_blank or not is_blank(item.text):
                try:
                    chunks[index] = [item] if self._chunker is None else self._chunker.split(item)
                except InvalidRequestError as error:
                    reasons[index] = str(error)
        vectors = self._embed(items, chunks, reasons)
        rows: list[dict[str, Any]] = []
        for index, item in enumerate(items):
            if index in reasons:
                where = f"record {item.id!r}" if isinstance(item, Record) else item.where
                logger.warning("left out %s: %s", where, reasons[index])
                if self.keep_failed:
                    left_out = (
                        _row(item) if isinstance(item, Record) else {"id": item.record_id, "metadata": item.content}
                    )
                    rows.append(left_out | {"error": reasons[index]})
            for number, chunk in enumerate(chunks.get(index, ()) if index in vectors else ()):
                found = {vector_name(width): each[number] for width, each in vectors[index].items()}
                rows.append(_row(chunk) | {"point_id": point_id(chunk.id, chunk.chunk)} | found)
        return self._table(rows)

    def _embed(
        self, items: Sequence[Record | Rejected], chunks: Mapping[int, Sequence[Record]], reasons: dict[int, str]
    ) -> dict[int, dict[int, FloatArray]]:
        """For each record its vectors of each width; why there are none is added to ``reasons``."""
        # Rows may share an id, and those of a call may not: here the position in the batch is the id.
        planned = [
            PlannedRecord(
                record=Record(str(index), cast(Record, items[index]).text),
                chunks=[Record(str(index), chunk.text, chunk.metadata, number) for number, chunk in enumerate(each)],
            )
            for index, each in chunks.items()
        ]
        vectors: dict[int, dict[int, FloatArray]] = {}
        for result in self._embedder.complete(self._embedder.submit(planned)) if planned else ():
            if not isinstance(result, EmbeddedRecords):
                reasons[int(result.record.record.id)] = result.reason
                continue
            for record, start, end in zip(result.records, [0, *result.ends], result.ends, strict=False):
                found = {width: rows[start:end] for width, rows in result.batch.vectors.items()}
                vectors[int(record.record.id)] = found
        return vectors

    def _table(self, rows: list[dict[str, Any]]) -> pa.Table:
        fields = dict.fromkeys(_TEXTS, pa.string()) | {"chunk": pa.int32()}
        fields |= {vector_name(width): pa.list_(pa.float32(), width) for width in self.widths}
        if self.keep_failed:
            fields["error"] = pa.string()
        return pa.Table.from_pylist(rows, schema=pa.schema(fields.items()))


def _row(record: Record) -> dict[str, Any]:
    metadata, digest = json.dumps(record.metadata, ensure_ascii=False), content_hash(record.text)
    return {"id": record.id, "text": record.text, "metadata": metadata, "content_hash": digest, "chunk": record.chunk}
