"""Options that several commands have, each spelled and explained once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Model = Annotated[str, typer.Option("--model", "-m", help="Hub id or local folder.", metavar="MODEL")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.", metavar="NAME")]
Device = Annotated[
    str, typer.Option(help="auto (cuda, then mps, then cpu), or one or more: cuda:0,cuda:1.", metavar="DEVICE")
]
Dtype = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.", metavar="DTYPE")]
Convert = Annotated[
    Literal["auto", "embed", "classify", "none"],
    typer.Option(help="Make an embedder or a classifier of a checkpoint that is another; auto and none leave it."),
]
Runner = Annotated[
    Literal["auto", "pooling"], typer.Option(help="As vLLM's, whose commands run with it; millpond always pools.")
]
Cache = Annotated[
    Path | None, typer.Option(help="File of vectors to read and fill; made if it is not there.", metavar="PATH")
]
IdColumn = Annotated[str, typer.Option("--id", help="Key or column of the id.", metavar="COLUMN")]
TextColumn = Annotated[str, typer.Option("--text", help="Key or column of the text.", metavar="COLUMN")]


def read_object(text: str) -> dict[str, Any]:
    """The value of an option that takes a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object")
    return value


HfOverrides = Annotated[
    dict[str, Any] | None,
    typer.Option(
        parser=read_object,
        help="""Merged into the checkpoint's config.json, as '{"is_matryoshka": true}'.""",
        metavar="JSON",
    ),
]


def engine_convert(convert: str) -> str:
    """The engine's word for a value of :data:`Convert`."""
    return "auto" if convert == "none" else convert


Widths = Annotated[
    str | None, typer.Option("--dimensions", help="Matryoshka widths to store, as 128,768.", metavar="N,N")
]


def read_widths(text: str | None) -> list[int] | None:
    """The value of :data:`Widths`, which typer would take for an option that is given several times."""
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of widths; write them as 128,768", param_hint="--dimensions"
        ) from None
