"""The census: published names with their layouts, as facts, and a folder with the files that describe one.

``published.json`` is a list of layouts; each has the names that share it. What millpond makes of a layout is not in it:
that is found by reading the files like those of any checkpoint, in :mod:`millpond.engine.census`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_TABLE = Path(__file__).with_name("published.json")
# Sizes that a layout does not have to give: config.json's of a small model under every family's names.
_SIZES = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
_MODULES = "sentence_transformers.models"
# Ends of the names of modules that stand first; a list without one has a Transformer before.
_FIRST = ("Transformer", "StaticEmbedding", "Router", "CLIPModel", "SSE")
# What stands before a module's arguments in a layout, and the names of its arguments in config.json.
_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "Pooling": ("pooling_mode",),
    "Dense": ("in_features", "out_features", "module_input_name"),
    "LayerNorm": ("dimension",),
}


@dataclass(frozen=True, kw_only=True)
class Published:
    """A layout, and the published checkpoints that have it."""

    names: tuple[str, ...]  # hub ids
    config: Mapping[str, Any]  # the fields of config.json that matter, of sizes only unusual ones
    # The modules of modules.json, a Transformer first if there is none: the class and its arguments. `None`: no list
    modules: tuple[str, ...] | None = None
    files: Mapping[str, Any] = field(default_factory=dict)  # further files by name: JSON
    tensors: Mapping[str, list[int]] = field(default_factory=dict)  # shapes of tensors that say what the model is

    def write(self, folder: Path) -> None:
        """Write the files that describe a checkpoint of this layout; the weights are zeros of ``tensors`` alone."""
        folder.mkdir(parents=True)
        if self.config:
            known = {name: size for name, size in _SIZES.items() if self.config.get(name, size) is not None}
            _write_json(folder / "config.json", {**known, **self.config})
        listed = [] if self.modules is None else list(self.modules)
        if listed and not listed[0].endswith(_FIRST):
            listed.insert(0, "Transformer")
        entries: list[dict[str, Any]] = []
        for i, module in enumerate(listed):
            kind, *values = module.split()
            place = "" if kind.endswith("Transformer") else f"{i}_{kind.rsplit('.', 1)[-1]}"
            dotted = kind if "." in kind else f"{_MODULES}.{kind}"
            entries.append({"idx": i, "name": str(i), "path": place, "type": dotted})
            if place:
                (folder / place).mkdir()
                names = _ARGUMENTS.get(kind, ())
                read = [int(value) if value.isdigit() else value for value in values]
                _write_json(folder / place / "config.json", dict(zip(names, read, strict=False)))
        if listed:
            _write_json(folder / "modules.json", entries)
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_json(path, content)
            if path.name == "adapter_config.json":
                _write_zeros(path.with_name("adapter_model.safetensors"), {})
        if self.config or listed or self.tensors:
            first = folder / entries[0]["path"] if entries else folder
            _write_zeros(first / "model.safetensors", self.tensors)
            if not (first / "tokenizer.json").exists():
                _write_json(first / "tokenizer.json", {})


@cache
def published() -> tuple[Published, ...]:
    """The table."""
    rows = json.loads(_TABLE.read_text(encoding="utf-8"))
    return tuple(
        Published(
            names=tuple(row["names"]),
            config=row.get("config", {}),
            modules=tuple(row["modules"]) if "modules" in row else None,
            files=row.get("files", {}),
            tensors=row.get("tensors", {}),
        )
        for row in rows
    )


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _write_zeros(path: Path, shapes: Mapping[str, list[int]]) -> None:
    """A safetensors file of zeros in float16."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
