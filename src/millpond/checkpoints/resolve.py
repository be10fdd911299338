"""Resolve a hub id or a folder to files on disk."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millpond.errors import ModelLoadError

logger = logging.getLogger(__name__)

_TEXT_FILES = ["*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "README.md", "artifact.metadata"]
# BGE-M3's two additional layers exist only as pickles; they are read without running code.
_SAFE_WEIGHTS = ["*.safetensors", "[0-9]*/pytorch_model.bin", "sparse_linear.pt", "colbert_linear.pt"]
_PICKLED_WEIGHTS = ["pytorch_model*.bin", "0_Transformer/pytorch_model*.bin"]
_OTHER_RUNTIMES = ["onnx/*", "openvino/*", "coreml/*", "gguf/*", "*/onnx/*", "*/openvino/*"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a checkpoint is."""

    name: str  # the hub id or path that the user passed
    folder: Path  # the folder on disk
    revision: str | None  # the hub's commit hash; `None` for a local folder, whose content is hashed instead


def resolve(model: str | os.PathLike[str], revision: str | None = None) -> Source:
    """Find a checkpoint: a local folder, or a hub id through the hub's cache, which downloads missing files."""
    name = os.fspath(model)
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        if revision is not None:
            raise ModelLoadError(f"revision={revision!r} means nothing for the folder {name}; leave it out")
        return Source(name=name, folder=folder, revision=None)
    if folder.is_file():
        raise ModelLoadError(f"{name} is a file; pass the folder that holds config.json")
    parts = name.split("/")
    if len(parts) > 2 or not all(parts) or name.startswith((".", "~", "-")) or "\\" in name:
        raise ModelLoadError(f"{name} is no folder, and no hub id (owner/name) either; check the path")
    return _download(name, revision)


def _download(name: str, revision: str | None) -> Source:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch(patterns: list[str]) -> Path:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=_OTHER_RUNTIMES)
        )

    try:
        folder = fetch(_TEXT_FILES + _SAFE_WEIGHTS)
        if not any(folder.glob("*.safetensors")) and not any(folder.glob("0_Transformer/*.safetensors")):
            folder = fetch(_TEXT_FILES + _SAFE_WEIGHTS + _PICKLED_WEIGHTS)
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"{name} is neither a folder here nor in the local hub cache, and the hub cannot be reached; "
            "check the spelling, go online once, or pass a folder"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise ModelLoadError(
            f"{name} (revision {revision or 'main'}) is not a folder here, and the hub answered: "
            f"{type(error).__name__}; check the name, and HF_TOKEN if the repository is private"
        ) from error
    return Source(name=name, folder=folder, revision=folder.name)


def read_json(path: Path) -> Any:
    """The content of a JSON file, with its path in every error."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} is missing; is {path.parent} a complete checkpoint?") from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is not readable JSON: {error}") from error


def read_json_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The content of a JSON file that must hold an object; empty if it is optional and missing."""
    if optional and not path.is_file():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds a {type(content).__name__}; an object was expected")
    return content


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch off transformers' load report and progress bar; the report is checked where the model is loaded."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
