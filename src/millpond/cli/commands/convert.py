"""``millpond convert``: a checkpoint's pickled weights as safetensors, which are read without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millpond.backends.devices import INSTALL, has_torch
from millpond.errors import InvalidRequestError, MissingExtraError


def convert(
    folder: Annotated[Path, typer.Argument(help="Local folder of the checkpoint.", metavar="FOLDER")],
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            help="New folder for the converted checkpoint with its other files (default: beside the pickles).",
            metavar="DIR",
        ),
    ] = None,
) -> None:
    """Write a checkpoint's pickled weights as safetensors, which are read without torch.

    The tensors keep their names and types. Files that are there already are not written again; the pickles stay.
    """
    if not folder.is_dir():
        raise InvalidRequestError(
            f"{folder} is no folder; pass a checkpoint's folder (of the hub: hf download {folder} --local-dir NEW)"
        )
    if not has_torch():
        raise MissingExtraError(f"millpond convert reads pickles with torch: {INSTALL}")
    from millpond.backends.torch.loading.convert import convert as write

    for file in write(folder, output):
        size = file.path.stat().st_size / 1e6
        print(f"wrote {file.path} ({file.tensors} tensors, {size:,.1f} MB) from {file.source}")
