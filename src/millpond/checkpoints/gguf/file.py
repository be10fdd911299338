"""A GGUF file's metadata and the places of its tensors, by the library gguf."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millpond.checkpoints.gguf.rows import ROWS, GgufRow
from millpond.checkpoints.gguf.tensors import Place, library
from millpond.errors import ModelLoadError, UnsupportedArchitectureError

_IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
# Tensors that the model computes nothing with: a language model's head, and frequencies that config.json gives.
_UNREAD = ("output.weight", "rope_freqs.weight")


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """A file."""

    path: Path
    name: str  # of its architecture
    row: GgufRow
    metadata: dict[str, Any]
    places: dict[str, Place]  # by the tensors' names in the file

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key of the architecture's own."""
        return self.metadata.get(f"{self.name}.{key}", default)

    def backbone(self) -> dict[str, Place]:
        """The tensors of the backbone under the names that they had before the conversion."""
        renamed = {}
        for name, place in self.places.items():
            stem, _, kind = name.rpartition(".")
            if name in _UNREAD or stem in self.row.dense:
                continue
            layer = _IN_LAYER.fullmatch(stem)
            part = self.row.names.get(stem) if layer is None else self.row.parts.get(layer[2])
            if part is None:
                raise UnsupportedArchitectureError(
                    f"{self.path} has a tensor {name}, which no {self.name} that millpond reads has; name the "
                    "checkpoint that it was converted from"
                )
            less_one = self.row.centred and stem.endswith("_norm")
            path = part if layer is None else f"{self.row.layers}.{layer[1]}.{part}"
            renamed[f"{path}.{kind}"] = replace(place, less_one=less_one)
        return renamed


def read_gguf(path: Path) -> GgufFile:
    """The file at ``path``; no tensor is read.

    Raises:
        MissingExtraError: The library gguf is not installed.
        UnsupportedArchitectureError: It is of an architecture that is not read here.
        ModelLoadError: It is damaged.
    """
    try:
        reader = library().GGUFReader(path)
        metadata = {key: value.contents() for key, value in reader.fields.items()}
        places = {
            tensor.name: Place(
                kind=tensor.tensor_type.name,
                shape=tuple(int(size) for size in reversed(tensor.shape)),
                first=int(tensor.data_offset),
                size=int(tensor.n_bytes),
            )
            for tensor in reader.tensors
        }
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelLoadError(f"{path} is no GGUF file that can be read: {error}; fetch it again") from error
    name = str(metadata.get("general.architecture"))
    if name not in ROWS:
        raise UnsupportedArchitectureError(
            f"{path} is a GGUF of {name}, which millpond does not read; it reads {', '.join(ROWS)}: name the folder or "
            "hub id of the checkpoint that it was converted from"
        )
    return GgufFile(path=path, name=name, row=ROWS[name], metadata=metadata, places=places)
