"""``millpond bench-serve``: load test of a server of embeddings, scores or rankings."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated, Literal

import typer

from millpond.cli import options
from millpond.cli.texts import read_texts
from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record

logger = logging.getLogger(__name__)


def bench_serve(
    url: Annotated[str, typer.Argument(help="The server.", metavar="URL")] = "http://127.0.0.1:8000",
    *,
    api: Annotated[
        Literal["embeddings", "rerank", "score", "tei-embed", "tei-rerank"],
        typer.Option(help="Request format: OpenAI's, Cohere's, vLLM's, or one of TEI's own."),
    ] = "embeddings",
    path: Annotated[str | None, typer.Option(help="The path, if it is not the usual one.", metavar="PATH")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The model's name on the server; by default its only model.")
    ] = None,
    texts: Annotated[
        str | None,
        typer.Option(
            help="A .jsonl, .csv or .parquet file, a folder of .txt and .md, another file with one text per line, or - "
            "(stdin); by default the documentation of Python's standard library.",
            metavar="SOURCE",
        ),
    ] = None,
    words: Annotated[int | None, typer.Option(help="Cut every text after N words.", metavar="N", min=1)] = None,
    lines: Annotated[bool, typer.Option("--lines", help="One text per line, whatever the type of SOURCE.")] = False,
    id_column: options.IdColumn = "id",
    text_column: options.TextColumn = "text",
    texts_per_request: Annotated[
        int, typer.Option("--texts-per-request", "-n", help="Texts in each request.", metavar="N")
    ] = 32,
    connections: Annotated[
        int | None,
        typer.Option(
            "--connections",
            "-c",
            help="Clients, each waiting for its answer (8); with --rate the most connections at once (1024).",
            metavar="N",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second, arriving independently of the answers.", metavar="R"),
    ] = None,
    duration: Annotated[
        float | None, typer.Option("--duration", "-d", help="Duration of the load (10).", metavar="SECONDS")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Send N requests, instead of --duration.", metavar="N")] = None,
    warm_up: Annotated[float, typer.Option(help="The same load before the measurement.", metavar="SECONDS")] = 1.0,
    timeout: Annotated[float, typer.Option(help="When to give up a request.", metavar="SECONDS")] = 60.0,
    encoding_format: Annotated[
        Literal["float", "base64"] | None, typer.Option(help="Encoding of the vectors; OpenAI's client uses base64.")
    ] = None,
    dimensions: Annotated[int | None, typer.Option(help="Matryoshka width.", metavar="N")] = None,
    truncate_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Cut longer texts, -1 at the model's limit; otherwise servers may refuse them.", metavar="N"),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="MILLPOND_API_KEY", help="Sent as a bearer token.", metavar="KEY"),
    ] = None,
    ca_file: Annotated[
        Path | None, typer.Option(help="Certificate authorities for the server's certificate.", metavar="PATH")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the arrival times.", metavar="N")] = 0,
    output: Annotated[Literal["table", "json"], typer.Option(help="Output format.")] = "table",
    output_file: Annotated[
        Path | None, typer.Option("--output-file", "-o", help="Also write the results as JSON.", metavar="PATH")
    ] = None,
) -> None:
    """Put a server under load, and print throughput, latencies and errors by status.

    Works with any server that has OpenAI's embeddings route, or a rerank or score route. Without --rate the load is a
    closed loop: --connections clients, each sending its next request after an answer. With --rate it is an open loop:
    requests are due at random times, and latency counts from when a request was due, so that the time in which the
    server falls behind is included.

    The exit code is 1 if a request failed.
    """
    from millpond.bench.drive import run
    from millpond.bench.plan import LoadPlan
    from millpond.bench.target import Target

    target = Target(
        url=url,
        api=api,
        path=path,
        model=model,
        api_key=api_key,
        encoding_format=encoding_format,
        dimensions=dimensions,
        truncate_prompt_tokens=truncate_prompt_tokens,
        ca_file=ca_file,
    )
    plan = LoadPlan(
        texts_per_request=texts_per_request,
        connections=connections if connections is not None else 8 if rate is None else 1024,
        rate=rate,
        duration=10.0 if duration is None and requests is None else duration,
        requests=requests,
        warm_up=warm_up,
        timeout=timeout,
        seed=seed,
    )
    if output_file is not None and not output_file.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(output_file.parent)!r}", param_hint="--output-file")
    sent_texts = _texts(texts, lines=lines, id_column=id_column, text_column=text_column)
    if words is not None:
        sent_texts = [" ".join(text.split()[:words]) for text in sent_texts]
    report = run(target, plan, sent_texts, show_progress=True)
    content = json.dumps(report.as_dict(), indent=2, ensure_ascii=False)
    print(content if output == "json" else report.table())
    if output_file is not None:
        try:
            output_file.write_text(content + "\n", encoding="utf-8")
        except OSError as error:
            raise typer.BadParameter(
                f"{str(output_file)!r} cannot be written ({error.strerror})", param_hint="--output-file"
            ) from None
    if report.failed:
        raise typer.Exit(1)


def _texts(source: str | None, *, lines: bool, id_column: str, text_column: str) -> list[str]:
    if source is None:
        from millpond.cli.demo.stdlib_docs import read_stdlib

        return [record.text for record in read_stdlib()]
    texts = []
    for item in read_texts(source, lines=lines, id_column=id_column, text_column=text_column):
        if isinstance(item, Record):
            texts.append(item.text)
        else:
            logger.error("%s: %s", item.where, item.reason)
    if not texts:
        raise InvalidRequestError(f"{source!r} holds no text")
    return texts
