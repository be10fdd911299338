"""KaLM-Reranker: a T5Gemma 2 whose own module for sentence-transformers has its settings in a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from millpond.checkpoints.resolve import read_json_object

_FILE = "kalm_cross_encoder_config.json"


def is_kalm(folder: Path) -> bool:
    """Whether the checkpoint in ``folder`` is one."""
    return (folder / _FILE).is_file()


def read_kalm(folder: Path) -> dict[str, Any]:
    """Its settings, as fields of config.json: what the encoder's states are compressed to, and where texts are cut."""
    return dict(read_json_object(folder / _FILE)) if is_kalm(folder) else {}
