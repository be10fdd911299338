"""A load test of a server of embeddings, scores or rankings, ours or another.

    python benchmarks/load_server.py http://127.0.0.1:8000 TEXTS.txt -n 32 -c 8 -d 10
    python benchmarks/load_server.py http://127.0.0.1:8000 TEXTS.txt -n 1 --rate 100 --words 10

Without --rate the load is a closed loop: --connections clients, each sending its next request after a response. With
--rate it is an open loop: requests are due at random times, and latency counts from when a request was due, so that
the time in which the server falls behind is included. The exit code is 1 if a request failed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from load_generator.drive import run
from load_generator.plan import LoadPlan
from load_generator.target import Target

from millpond.errors import MillpondError


def load(
    url: str,
    texts: Annotated[Path, typer.Argument(help="A file with one text per line.")],
    *,
    api: Literal["embeddings", "ollama", "rerank", "score", "tei-embed", "tei-rerank"] = "embeddings",
    model: Annotated[str | None, typer.Option(help="By default the server's only model.")] = None,
    words: Annotated[int | None, typer.Option(help="Cut every text after N words.", min=1)] = None,
    texts_per_request: Annotated[int, typer.Option("-n")] = 32,
    connections: Annotated[int | None, typer.Option("-c", help="Default: 8, and with --rate at most 1024.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second.")] = None,
    duration: Annotated[float | None, typer.Option("-d", help="Seconds, by default 10.")] = None,
    requests: Annotated[int | None, typer.Option(help="Send N requests, instead of --duration.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="MILLPOND_API_KEY")] = None,
    output: Literal["table", "json"] = "table",
) -> None:
    """Put a server under load, and print throughput, latencies and errors by status."""
    lines = [line for line in texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    plan = LoadPlan(
        texts_per_request=texts_per_request,
        connections=connections if connections is not None else 8 if rate is None else 1024,
        rate=rate,
        duration=10.0 if duration is None and requests is None else duration,
        requests=requests,
        warm_up=0.0 if requests is not None else 1.0,
    )
    try:
        target = Target(url=url, api=api, model=model, api_key=api_key)
        report = run(target, plan, [" ".join(line.split()[:words]) for line in lines], show_progress=True)
    except MillpondError as error:
        raise SystemExit(f"{error}") from None
    print(json.dumps(report.as_dict(), indent=2, ensure_ascii=False) if output == "json" else report.table())
    if report.failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(load)
