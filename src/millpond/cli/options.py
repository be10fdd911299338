"""Options that several commands have, each spelled and explained once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

Model = Annotated[str, typer.Option("--model", "-m", help="Hub id or local folder.", metavar="MODEL")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.", metavar="NAME")]
Device = Annotated[str, typer.Option(help="auto (cuda, then mps, then cpu) or a torch device.", metavar="DEVICE")]
Dtype = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.", metavar="DTYPE")]
Cache = Annotated[
    Path | None, typer.Option(help="File of vectors to read and fill; made if it is not there.", metavar="PATH")
]


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
