"""Options shared by several commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Model = Annotated[str, typer.Option("--model", "-m", help="Hub id or local folder.", metavar="MODEL")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.", metavar="NAME")]
Device = Annotated[
    str, typer.Option(help="auto (cuda, else mps, else cpu), or one or more devices: cuda:0,cuda:1.", metavar="DEVICE")
]
Dtype = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.", metavar="DTYPE")]
Convert = Annotated[
    Literal["auto", "embed", "classify", "none"],
    typer.Option(help="Use the checkpoint as an embedder or a classifier; auto and none keep its own kind."),
]
Runner = Annotated[
    Literal["auto", "pooling"], typer.Option(help="Accepted so that vLLM's command lines work; millpond always pools.")
]
Cache = Annotated[
    Path | None, typer.Option(help="Vector cache file to read and fill; created if missing.", metavar="PATH")
]
MaxLength = Annotated[
    int | None,
    typer.Option(help="Maximum number of tokens of a text (default: the checkpoint's limit).", metavar="N", min=1),
]
Pooling = Annotated[
    str | None,
    typer.Option(help="Pooling method instead of the checkpoint's: mean, cls, lasttoken, ...", metavar="NAME"),
]
Quantization = Annotated[
    str | None, typer.Option("--quantization", help="int8, int8-all, or fp8 on a GPU.", metavar="NAME")
]
IdColumn = Annotated[str, typer.Option("--id", help="Key or column that holds the id.", metavar="COLUMN")]
TextColumn = Annotated[str, typer.Option("--text", help="Key or column that holds the text.", metavar="COLUMN")]


def read_object(text: str) -> dict[str, Any]:
    """Parse the value of an option that takes a JSON object."""
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
        help="""JSON object merged into the checkpoint's config.json, e.g. '{"is_matryoshka": true}'.""",
        metavar="JSON",
    ),
]


def engine_convert(convert: str) -> str:
    """The engine's value of ``convert`` for a value of :data:`Convert`."""
    return "auto" if convert == "none" else convert


Widths = Annotated[
    str | None, typer.Option("--dimensions", help="Matryoshka widths to store, e.g. 128,768.", metavar="N,N")
]


def read_widths(text: str | None) -> list[int] | None:
    """Parse the value of :data:`Widths`; typer's own lists would need the option once per value."""
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of widths; write them as 128,768", param_hint="--dimensions"
        ) from None


Types = Annotated[
    str | None,
    typer.Option(
        "--types",
        help="Types of a CSV's columns: year=int,price=float,flag=bool,day=date,at=datetime; the others are str.",
        metavar="COLUMN=TYPE,...",
    ),
]


def read_types(text: str | None) -> dict[str, str]:
    """Parse the value of :data:`Types`; the columns and types are checked when the file is opened."""
    types: dict[str, str] = {}
    for part in () if text is None else text.split(","):
        column, _, name = part.strip().rpartition("=")
        if not column or not name:
            raise typer.BadParameter(
                f"{part!r} names no column and type; write year=int,price=float", param_hint="--types"
            )
        if column in types:
            raise typer.BadParameter(f"{part!r} names the column again; write it once", param_hint="--types")
        types[column] = name
    return types
