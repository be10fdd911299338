"""ingest_dataset: a run of ingest whose engines are the workers of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any, cast

from ray.data import Dataset

from millpond.engine.engine import Engine
from millpond.engine.loading import read_model
from millpond.errors import InvalidRequestError
from millpond.ingest.arguments import check_sink
from millpond.ingest.pipeline.delivery import RetryPolicy
from millpond.ingest.pipeline.ingest import check_model, run_ingest
from millpond.ingest.pipeline.options import RunOptions, chunk_form
from millpond.ingest.pipeline.run import IngestRun
from millpond.ingest.ray.cluster import connected, count_workers
from millpond.ingest.ray.dataset import DatasetReader, engine_config
from millpond.ingest.ray.pool import CALLS_PER_WORKER, ClusterEngine, WorkerPool
from millpond.ingest.ray.run import ClusterRun
from millpond.ingest.ray.worker import WorkerSettings
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.database import open_sink
from millpond.ingest.sinks.protocol import Sink
from millpond.ingest.sources.read import reader_for
from millpond.ingest.telemetry.report import IngestReport


def ingest_dataset(
    records: Dataset | Iterable[Any] | str | os.PathLike[str],
    *,
    model: str | os.PathLike[str],
    sink: str | Callable[[], Sink] | Sink,
    engine_options: Mapping[str, Any] | None = None,
    sparse_model: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    address: str | None = None,
    workers: int | None = None,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    **options: Any,
) -> IngestReport:
    """Embed records on a Ray cluster and write them to a database: :func:`~millpond.ingest.ingest` with many engines.

    This process, the driver, reads the source, leaves out what the journal knows, and sends batches to the workers,
    two each ahead of what is finished. A worker embeds a batch and writes it; the driver enters its records in the
    journal when the database has acknowledged them. A database that one process alone can open (a folder, a file,
    memory) is written by the driver. Rows, ids, counts, dead letters and errors are those of a local run. Ray restarts
    a worker that dies, and its batches are embedded and written again, which replaces their rows.

    Args:
        records: What :func:`~millpond.ingest.ingest` takes, as the result of :func:`~millpond.ingest.read`, or a Ray
            dataset, which is read in its order.
        model: Hub id or folder, which every machine must be able to read.
        sink: The URL of a collection, or a function without arguments that opens it and can be pickled, such as
            ``partial(open_sink, url, dimensions=[128, 768])``: each worker opens its own. Keys of databases are read
            from each machine's environment. A sink object is used by the driver alone, and stays open.
        engine_options: Other arguments of :class:`~millpond.Engine`, as ``dtype``, but not ``cache``.
        sparse_model: The model of a hybrid sink's sparse vectors, if it is another one.
        cache: Path of the vector cache, on a local disk: the workers of a machine share it, and each machine has its
            own file there.
        address: ``None`` or ``"local"`` starts Ray in this machine for the run, unless the program is connected; else
            the address of a cluster: ``auto``, ``ray://host:10001``.
        workers: How many workers; by default as many as fit the cluster.
        num_cpus: CPU cores of each worker, which its engine uses.
        num_gpus: GPUs of each; 0.25 puts four workers on a GPU.
        **options: The options of :func:`~millpond.ingest.ingest`; its files are those of the driver's machine, and a
            batch that a worker has is still written by a run that is stopped.

    Returns:
        The counts of the run.

    Raises:
        InvalidRequestError: No cluster answers, it is too small, or an argument is not valid; nothing was read.
        MillpondError: As :func:`~millpond.ingest.ingest`; what can be checked is checked before a worker starts.
    """
    run_options = RunOptions(**options)
    config = engine_config(model, engine_options or {})
    sparse_config = None if sparse_model is None else engine_config(sparse_model, engine_options or {})
    described = read_model(config)
    with ExitStack() as stack:
        reader = DatasetReader(records) if isinstance(records, Dataset) else reader_for(records)
        stack.enter_context(closing(reader))
        opened, factory = _open(sink, stack)
        widths = _stored_widths(opened) or check_model(described.spec, getattr(opened, "dimensions", None))
        # One process alone can open an embedded database; a sink that does not say might be one.
        writes = factory is not None and not getattr(opened, "embedded", True)
        stack.enter_context(connected(address))
        reads = isinstance(reader, DatasetReader)
        settings = WorkerSettings(
            engine=config,
            sparse=sparse_config,
            cache=None if cache is None else os.path.abspath(os.path.expanduser(cache)),
            fingerprint=described.spec.fingerprint,
            widths=tuple(widths),
            open_sink=factory if writes else None,
            form=chunk_form(run_options.chunking),
            policy=run_options.retry or RetryPolicy(),
        )
        workers = count_workers(workers, num_cpus=num_cpus, num_gpus=num_gpus, reads=reads)
        pool = WorkerPool(settings, workers=workers, num_cpus=num_cpus, num_gpus=num_gpus)
        stack.callback(pool.close)
        engine, sparse = ClusterEngine(pool, described, cached=cache is not None), None
        if sparse_config is not None:
            sparse = ClusterEngine(pool, read_model(sparse_config), cached=False, sparse=True)
        return run_ingest(
            reader,
            engine=cast(Engine, engine),
            sparse_engine=cast("Engine | None", sparse),
            sink=opened,
            options=run_options,
            runner=partial(ClusterRun, pool=pool)
            if writes
            else partial(IngestRun, calls_ahead=CALLS_PER_WORKER * pool.workers),
        )


def _stored_widths(sink: Sink) -> tuple[int, ...] | None:
    """The widths of a collection that exists, for a sink without widths of its own."""
    if isinstance(sink, CollectionSink) and sink.dimensions is None:
        with suppress(InvalidRequestError):  # there is none yet
            return sink.open().dimensions
    return None


def _open(sink: str | Callable[[], Sink] | Sink, stack: ExitStack) -> tuple[Sink, Callable[[], Sink] | None]:
    """The driver's sink, and how the workers open theirs."""
    factory: Callable[[], Sink] | None = None
    if isinstance(sink, str):
        factory = partial(open_sink, sink)
    elif isinstance(sink, type) or (callable(sink) and not hasattr(sink, "write")):
        factory = sink
    opened = cast(Sink, sink) if factory is None else stack.enter_context(closing(factory()))
    check_sink(opened)
    return opened, factory
