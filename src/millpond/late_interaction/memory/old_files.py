"""The files that earlier versions of MemoryIndex.save wrote: arrays as .npy, documents as JSON lines."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.errors import IndexCorruptedError
from millpond.late_interaction.index.settings import IndexSettings
from millpond.late_interaction.kernels.centroids import Centroids
from millpond.late_interaction.memory.blocks import Batch

_MANIFEST = "index.json"
_FILES = re.compile(rf"{re.escape(_MANIFEST)}|[a-z_]+-[0-9a-f]{{32}}\.(npy|jsonl|json)")


def names(folder: Path) -> list[str]:
    """The files of such an index; none without its manifest."""
    if not (folder / _MANIFEST).is_file():
        return []
    return [name for name in os.listdir(folder) if _FILES.fullmatch(name)]


def read(folder: Path) -> dict[str, Any]:
    """The fields of :class:`millpond.late_interaction.memory.files.StoredIndex`.

    Raises:
        IndexCorruptedError: A file is missing, damaged, or of another version.
    """
    path = folder / _MANIFEST
    with _damage_of(path):
        content = json.loads(path.read_bytes())
        digest = content.pop("sha256")
        if digest != hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest():
            raise ValueError("its checksum is not the one it was written with")
        if (content["format"], content["version"]) != ("millpond MemoryIndex", 1):
            raise ValueError(f"it is of version {content['version']}")
        files = {name: _checked(folder / entry["name"], entry) for name, entry in content["files"].items()}
        documents = [json.loads(line) for line in files.pop("documents").read_bytes().splitlines()]
        arrays = {name: np.load(file, allow_pickle=False) for name, file in files.items()}
        settings = content["settings"] and IndexSettings.from_json(content["settings"], arrays.get("projection"))
        centroids = None
        if "centroids" in arrays:
            centroids = Centroids(rows=arrays["centroids"], scales=arrays["centroid_scales"])
        if (len(documents), int(arrays["lengths"].sum())) != (content["documents"], len(arrays["rows"])):
            raise ValueError("its documents do not fit its rows")
    return {
        "codec": content["codec"],
        "settings": settings,
        "dimensions": content["width"],
        "pool_factor": content["pool_factor"],
        "tokens": content["tokens"],
        "centroids": centroids,
        "trained_tokens": content["trained_tokens"],
        "batches": iter([_batch(documents, arrays, settings)] if documents else []),
    }


def _batch(documents: list[Any], arrays: dict[str, npt.NDArray[Any]], settings: IndexSettings | None) -> Batch:
    ids, texts, metadata = zip(*documents, strict=True)
    return Batch(
        ids=ids,
        texts=texts,
        metadata=metadata,
        lengths=arrays["lengths"],
        width=1 if settings is None else settings.width,
        rows=arrays["rows"],
        scales=arrays.get("scales"),
        codes=arrays.get("codes"),
    )


def _checked(path: Path, entry: dict[str, Any]) -> Path:
    """The file, once its checksum was compared."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise IndexCorruptedError(f"{path} is missing, which is a part of the index") from None
    if found != entry["sha256"]:
        raise IndexCorruptedError(f"{path} is damaged: its checksum is not the one it was written with")
    return path


@contextmanager
def _damage_of(path: Path) -> Iterator[None]:
    """Errors of reading content that is not what was written, as IndexCorruptedError."""
    try:
        yield
    except IndexCorruptedError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IndexCorruptedError(f"{path} is damaged: {error}; build the index again") from error
