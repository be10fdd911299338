"""``millpond ingest``: embed records and write them to a vector database."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from millpond.cli import options


def ingest(
    source: Annotated[
        str,
        typer.Argument(
            help="A .jsonl, .ndjson, .json or .csv file (each also as .gz or .zst), a folder of .txt and .md files, or "
            "- (JSONL on stdin)."
        ),
    ],
    *,
    model: options.Model,
    to: Annotated[
        str,
        typer.Option(
            help="URL of the collection: qdrant+path:DIR#docs, qdrant+http://host:6333#docs, milvus+file:X.db#docs or "
            "milvus+http://host:19530#docs. Keys are read from QDRANT_API_KEY and MILVUS_TOKEN.",
            metavar="URL",
        ),
    ],
    dimensions: options.Widths = None,
    payload: Annotated[
        str, typer.Option(help="Layout of the stored records: plain, langchain or llama_index.", metavar="FORM")
    ] = "plain",
    id_column: options.IdColumn = "id",
    text_column: options.TextColumn = "text",
    types: options.Types = None,
    keep_empty: Annotated[
        bool, typer.Option("--keep-empty", help="Store records without a visible character too.")
    ] = False,
    cache: options.Cache = None,
    journal: Annotated[Path | None, typer.Option(hidden=True)] = None,
    revision: options.Revision = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_length: options.MaxLength = None,
    pooling: options.Pooling = None,
    quantization: options.Quantization = None,
    hf_overrides: options.HfOverrides = None,
) -> None:
    """Embed records, write them to a database with their texts and metadata, and print the counts as JSON.

    A record has an id (default: the hash of its text), a text and metadata. They are read from the keys of JSON, the
    columns of CSV, or the path and content of a file; other keys and columns become metadata. A second run replaces
    records with the same id, and with --cache computes no vector twice. A blank text is left out and counted, and the
    row that its id had is deleted. A record that cannot be stored is reported, and the exit code is 1.
    """
    from millpond.ingest.sources import read

    widths = options.read_widths(dimensions)
    records = read(source, id_column=id_column, text_column=text_column, types=options.read_types(types))

    from millpond.cache import VectorCache
    from millpond.config import EngineConfig
    from millpond.engine.engine import Engine
    from millpond.engine.loading import describe
    from millpond.ingest.pipeline import check_model
    from millpond.ingest.pipeline import ingest as run
    from millpond.ingest.url import open_sink

    settings: dict[str, Any] = {
        "revision": revision,
        "device": device,
        "dtype": dtype,
        "max_length": max_length,
        "pooling": pooling,
        "quantization": quantization,
        "hf_overrides": hf_overrides,
    }
    # Opening a sink may create a database, so check first that the model can fill it. Loading the weights is the
    # slowest step and comes last.
    check_model(describe(EngineConfig(model=model, **settings)), widths)
    with ExitStack() as stack:
        vectors = None if cache is None else stack.enter_context(VectorCache(cache))
        sink = stack.enter_context(closing(open_sink(to, dimensions=widths, payload=payload)))
        engine = stack.enter_context(Engine(model, cache=vectors, **settings))
        report = run(records, engine=engine, sink=sink, journal=journal, keep_empty=keep_empty)
    print(json.dumps(asdict(report)))
    if report.failed:
        raise typer.Exit(1)
