"""``millpond bench-serve``: a server of embeddings, scores or rerankings under load."""

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
        typer.Option(help="What is asked: OpenAI's, Cohere's or vLLM's shape, or one of TEI's own."),
    ] = "embeddings",
    path: Annotated[str | None, typer.Option(help="The route, where it is another than usual.", metavar="PATH")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="What the server calls it; by default its only one.")
    ] = None,
    texts: Annotated[
        str | None,
        typer.Option(
            help="A .jsonl or .csv, a folder of .txt and .md, any other file of lines, or - (stdin); by default the "
            "documentation of Python's standard library.",
            metavar="SOURCE",
        ),
    ] = None,
    words: Annotated[int | None, typer.Option(help="Cut every text after N words.", metavar="N", min=1)] = None,
    lines: Annotated[bool, typer.Option("--lines", help="One text a line, whatever SOURCE looks like.")] = False,
    id_column: options.IdColumn = "id",
    text_column: options.TextColumn = "text",
    texts_per_request: Annotated[int, typer.Option("--texts-per-request", "-n", help="Texts.", metavar="N")] = 32,
    connections: Annotated[
        int | None,
        typer.Option(
            "--connections",
            "-c",
            help="Clients that each wait for their answer (8); with --rate the most connections at once (1024).",
            metavar="N",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second, arriving whether or not others are answered.", metavar="R"),
    ] = None,
    duration: Annotated[
        float | None, typer.Option("--duration", "-d", help="For how long (10).", metavar="SECONDS")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Send N requests, in the place of --duration.", metavar="N")
    ] = None,
    warm_up: Annotated[float, typer.Option(help="The same load before it counts.", metavar="SECONDS")] = 1.0,
    timeout: Annotated[float, typer.Option(help="When a request is given up.", metavar="SECONDS")] = 60.0,
    encoding_format: Annotated[
        Literal["float", "base64"] | None, typer.Option(help="Of the vectors; OpenAI's client asks for base64.")
    ] = None,
    dimensions: Annotated[int | None, typer.Option(help="Matryoshka width.", metavar="N")] = None,
    truncate_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Cut longer texts, -1 at the model's own limit; else servers may refuse them.", metavar="N"),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="MILLPOND_API_KEY", help="Sent as a bearer token.", metavar="KEY"),
    ] = None,
    ca_file: Annotated[
        Path | None, typer.Option(help="Authorities that sign the server's certificate.", metavar="PATH")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the arrivals.", metavar="N")] = 0,
    output: Annotated[Literal["table", "json"], typer.Option(help="How the figures are printed.")] = "table",
    output_file: Annotated[
        Path | None, typer.Option("--output-file", "-o", help="Write the figures as JSON too.", metavar="PATH")
    ] = None,
) -> None:
    """Put a server under load, and print how it did: throughput, latencies and errors by status.

    Any server with OpenAI's embeddings route, or with a rerank or score route, will do. Without --rate the load is a
    closed loop: --connections clients, each of which sends its next request when it has its answer. With --rate it is
    an open one: requests are due at random times, and a latency runs from when the request was due, so that one which
    had to wait for the server to catch up has waited.

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
    found = _texts(texts, lines=lines, id_column=id_column, text_column=text_column)
    if words is not None:
        found = [" ".join(text.split()[:words]) for text in found]
    report = run(target, plan, found, show_progress=True)
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
        from millpond.cli.stdlib_docs import read_stdlib

        return [record.text for record in read_stdlib()]
    found = []
    for item in read_texts(source, lines=lines, id_column=id_column, text_column=text_column):
        if isinstance(item, Record):
            found.append(item.text)
        else:
            logger.error("%s: %s", item.where, item.reason)
    if not found:
        raise InvalidRequestError(f"{source!r} holds no text")
    return found
