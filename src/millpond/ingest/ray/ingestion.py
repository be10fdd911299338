"""ingest_dataset: a run of ingest whose engines are the workers of a Ray cluster."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, cast

from ray.data import Dataset

from millpond.engine.engine import Engine
from millpond.engine.loading import read_model
from millpond.errors import InvalidRequestError
from millpond.ingest.arguments import check_sink
from millpond.ingest.chunking import Chunking
from millpond.ingest.pipeline.dead_letter_file import DeadLetterFile
from millpond.ingest.pipeline.delivery import RetryPolicy
from millpond.ingest.pipeline.ingest import check_model, ingest
from millpond.ingest.ray.cluster import connected, count_workers
from millpond.ingest.ray.dataset import engine_config, read_dataset
from millpond.ingest.ray.engine import ClusterEngine
from millpond.ingest.ray.pool import WorkerPool
from millpond.ingest.ray.worker import WorkerSettings
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sinks.protocol import Sink
from millpond.ingest.sinks.url import open_sink
from millpond.ingest.sources.read import check_records, read
from millpond.ingest.telemetry.report import IngestReport
from millpond.ingest.telemetry.trace import RunTrace

Source = Dataset | Iterable[Any] | str | os.PathLike[str]


def ingest_dataset(
    source: Source,
    *,
    model: str | os.PathLike[str],
    sink: str | Callable[[], Sink] | Sink,
    engine_options: Mapping[str, Any] | None = None,
    sparse_model: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    dimensions: Sequence[int] | None = None,
    fields: str = "plain",
    sink_options: Mapping[str, Any] | None = None,
    id_column: str = "id",
    text_column: str = "text",
    metadata_columns: Collection[str] | None = None,
    types: Mapping[str, str] | None = None,
    journal: str | os.PathLike[str] | None = None,
    resume: bool = True,
    show_progress: bool = True,
    keep_empty: bool = False,
    dead_letters: str | os.PathLike[str] | DeadLetterFile | None = None,
    chunking: Chunking | None = None,
    sync: bool = False,
    verify: bool = False,
    retry: RetryPolicy | None = None,
    stop: threading.Event | None = None,
    trace: RunTrace | None = None,
    address: str | None = None,
    workers: int | None = None,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
) -> IngestReport:
    """Embed records on a Ray cluster and write them to a database: :func:`~millpond.ingest.ingest` with many engines.

    This process, the driver, reads the source, leaves out what the journal knows, and sends batches to the workers,
    two each ahead of what is finished. A worker embeds a batch and writes it; the driver marks its records when the
    database has acknowledged them. A database that one process alone can open (a folder, a file,
    memory) is written by the driver. Rows, ids, counts, dead letters and errors are those of a local run; batches with
    a record in common keep their order.

    A worker that dies is replaced, and its batches are embedded and written again, which replaces their rows. If the
    driver dies, the next run with the same journal goes on; without a journal, start over.

    Args:
        source: A Ray dataset, or what :func:`~millpond.ingest.read` takes. Of records
            with the same id, the last one stays; a dataset is therefore read in its order.
        model: Hub id or folder, which every machine must be able to read.
        sink: The URL of a collection, or a function without arguments that opens it and can be pickled: each worker
            opens its own. A sink object is used by the driver alone, and stays open.
        engine_options: Other arguments of :class:`~millpond.Engine`, as ``dtype``, but not ``cache``.
        sparse_model: The model of a hybrid sink's sparse vectors, if it is another one.
        cache: Path of the vector cache, on a local disk: the workers of a machine share it, and each machine has its
            own file there.
        dimensions: The widths to store, with a URL.
        fields: The layout of the stored fields, with a URL.
        sink_options: Other options of the URL's sink. Keys of databases are read from each machine's environment.
        id_column: Key or column of the id.
        text_column: Key or column of the text.
        metadata_columns: Keys or columns that become metadata; ``None``: all the others.
        types: Types of a CSV's other columns.
        journal: As for :func:`~millpond.ingest.ingest`, a file of the driver's machine; so are the next ones.
        resume: As there.
        show_progress: As there; Ray's own bars are off.
        keep_empty: As there.
        dead_letters: As there.
        chunking: As there; the driver cuts.
        sync: As there.
        verify: As there.
        retry: As there; each worker waits by itself.
        stop: As there; a batch that a worker has is still written.
        trace: As there.
        address: ``None`` or ``"local"`` starts Ray in this machine for the run, unless the program is connected; else
            the address of a cluster: ``auto``, ``ray://host:10001``.
        workers: How many workers; by default as many as fit the cluster.
        num_cpus: CPU cores of each worker, which its engine uses.
        num_gpus: GPUs of each; 0.25 puts four workers on a GPU.

    Raises:
        InvalidRequestError: No cluster answers, it is too small, or an argument is not valid; nothing was read.
        MillpondError: As :func:`~millpond.ingest.ingest`; what can be checked is checked before a worker starts.
    """
    options = dict(engine_options or {})
    config = engine_config(model, options)
    sparse_config = None if sparse_model is None else engine_config(sparse_model, options)
    described = read_model(config)
    spec = described.spec
    with ExitStack() as stack:
        if not isinstance(source, Dataset):
            check_records(source)
            source = stack.enter_context(
                closing(
                    read(
                        source,
                        id_column=id_column,
                        text_column=text_column,
                        metadata_columns=metadata_columns,
                        types=types,
                    )
                )
            )
        if isinstance(sink, str):
            check_model(spec, dimensions)
            opened, factory = _open_url(sink, dimensions, fields, dict(sink_options or {}))
            stack.enter_context(closing(opened))
        else:
            if dimensions is not None or fields != "plain" or sink_options:
                raise InvalidRequestError(
                    "dimensions, fields and sink_options are those of a URL; pass them to the sink that you make"
                )
            factory = None
            if isinstance(sink, type) or (callable(sink) and not hasattr(sink, "write")):
                factory = sink
                sink = stack.enter_context(closing(sink()))
            check_sink(sink)
            opened = cast(Sink, sink)
        widths = check_model(spec, getattr(opened, "dimensions", None))
        # One process alone can open an embedded database; a sink that does not say might be one.
        writes = factory is not None and not getattr(opened, "embedded", True)
        hybrid = bool(getattr(opened, "hybrid", False))
        stack.enter_context(connected(address))
        reads = isinstance(source, Dataset)
        workers = count_workers(workers, num_cpus=num_cpus, num_gpus=num_gpus, reads=reads)
        settings = WorkerSettings(
            engine=config,
            sparse=sparse_config,
            cache=None if cache is None else os.path.abspath(os.path.expanduser(cache)),
            fingerprint=spec.fingerprint,
            widths=tuple(widths),
            open_sink=factory if writes else None,
            hybrid=hybrid,
            chunked=chunking is not None,
            policy=RetryPolicy() if retry is None else retry,
        )
        pool = WorkerPool(settings, workers=workers, num_cpus=num_cpus, num_gpus=num_gpus)
        stack.callback(pool.close)
        engine = ClusterEngine(pool, described, cached=cache is not None, writes=writes)
        sparse = None
        if sparse_config is not None:
            sparse = ClusterEngine(pool, read_model(sparse_config), cached=False, sparse=True)
        records = source
        if isinstance(source, Dataset):
            records = stack.enter_context(
                closing(
                    read_dataset(
                        source, id_column=id_column, text_column=text_column, metadata_columns=metadata_columns
                    )
                )
            )
        return ingest(
            cast("Iterable[Record | Rejected]", records),
            engine=cast(Engine, engine),
            sparse_engine=cast("Engine | None", sparse),
            sink=opened,
            journal=journal,
            resume=resume,
            show_progress=show_progress,
            keep_empty=keep_empty,
            dead_letters=dead_letters,
            chunking=chunking,
            sync=sync,
            verify=verify,
            retry=retry,
            stop=stop,
            trace=trace,
        )


def _open_url(
    url: str, dimensions: Sequence[int] | None, fields: str, options: dict[str, Any]
) -> tuple[Sink, Callable[[], Sink]]:
    factory = partial(open_sink, url, dimensions=dimensions, fields=fields, **options)
    return factory(), factory
