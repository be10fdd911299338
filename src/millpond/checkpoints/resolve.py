"""Resolve a folder, a hub id, or a name as sentence-transformers reads it, to files on disk."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from millpond.checkpoints.gguf.folder import as_folder
from millpond.errors import ModelLoadError

logger = logging.getLogger(__name__)

_TEXT_FILES = ["*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "README.md", "artifact.metadata"]
# BGE-M3's two additional layers exist only as pickles; they are read without running code.
_SAFE_WEIGHTS = ["*.safetensors", "[0-9]*/pytorch_model.bin", "sparse_linear.pt", "colbert_linear.pt"]
_PICKLED_WEIGHTS = ["pytorch_model*.bin", "0_Transformer/pytorch_model*.bin"]
_EXPORTED_WEIGHTS = [f"{place}model{kind}.onnx*" for place in ("", "onnx/") for kind in ("", "_optimized", "_fp16")]
_OTHER_RUNTIMES = ["onnx/*", "openvino/*", "coreml/*", "gguf/*", "*/onnx/*", "*/openvino/*"]

# What a folder with a model has itself, by names and by endings, and the keys of a backbone's config.json.
_MARKS = ("config.json", "modules.json", "adapter_config.json", "gliner_config.json")
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".onnx", ".h5", ".msgpack")
_FAMILY = frozenset(("model_type", "architectures"))
_POINTER = b"version https://git-lfs"

# sentence-transformers 6.2.0, ORIGINAL_TRANSFORMER_MODELS: the names without an owner that it looks up as they are.
_WITHOUT_OWNER = re.compile(
    r"albert-(base|large|xlarge|xxlarge)-v[12]|camembert-base|ctrl|distilgpt2|gpt2(-(medium|large|xl))?|openai-gpt"
    r"|bert-base-(cased(-finetuned-mrpc)?|chinese|german-(cased|dbmdz-(un)?cased)|multilingual-(un)?cased|uncased)"
    r"|bert-large-(un)?cased(-whole-word-masking(-finetuned-squad)?)?"
    r"|distilbert-base-(cased(-distilled-squad)?|german-cased|multilingual-cased|uncased(-distilled-squad)?)"
    r"|distilbert-base-uncased-finetuned-sst-2-english|distilroberta-base|roberta-base(-openai-detector)?"
    r"|roberta-large(-mnli|-openai-detector)?|t5-(small|base|large|3b|11b)|transfo-xl-wt103"
    r"|xlm-(clm-en(de|fr)-1024|mlm-100-1280|mlm-17-1280|mlm-en-2048|mlm-en(de|fr|ro)-1024|mlm-(tlm-)?xnli15-1024)"
    r"|xlm-roberta-base|xlm-roberta-large(-finetuned-conll0(2-dutch|2-spanish|3-english|3-german))?"
    r"|xlnet-(base|large)-cased",
    re.IGNORECASE,
)
# What CrossEncoder loads and SentenceTransformer does not, and names that both have.
_CROSS_ENCODERS = re.compile(r"(ms-marco|mmarco|qnli|monoelectra)-.*")
_OF_BOTH = re.compile(r"(nli|quora|stsb)-.*")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a checkpoint is."""

    name: str  # the path that the user passed, or the hub id, with its owner
    folder: Path  # the folder on disk
    revision: str | None  # the hub's commit hash; `None` for a local folder, whose content is hashed instead


def hub_ids(name: str, *, scoring: bool = False) -> tuple[str, ...]:
    """The hub ids to look for, in order: a name without an owner is one of sentence-transformers' two owners.

    ``scoring``: a name that both have is that of the cross-encoder.
    """
    if "/" in name or _WITHOUT_OWNER.fullmatch(name):
        return (name,)
    owners = ["sentence-transformers", "cross-encoder"]
    if _CROSS_ENCODERS.fullmatch(name) or (scoring and _OF_BOTH.fullmatch(name)):
        owners.reverse()
    return tuple(f"{owner}/{name}" for owner in owners)


def resolve(model: str | os.PathLike[str], revision: str | None = None) -> Source:
    """Find a checkpoint: a local folder, or a hub id through the hub's cache, which downloads missing files."""
    name = os.fspath(model)
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        if revision is not None:
            raise ModelLoadError(f"revision={revision!r} means nothing for the folder {name}; leave it out")
        return Source(name=name, folder=_inner(folder, name), revision=None)
    if folder.is_file() and folder.suffix == ".gguf":
        check_pointer(folder)
        return Source(name=name, folder=as_folder(folder), revision=None)
    if folder.is_file():
        raise ModelLoadError(f"{name} is a file; {_instead_of(folder)}")
    parts = name.split("/")
    if len(parts) > 2 or not all(parts) or name.startswith((".", "~", "-")) or "\\" in name:
        raise ModelLoadError(f"{name} is no folder, and no hub id (owner/name) either; check the path")
    return _download(name, revision)


def resolve_texts(model: str) -> Path:
    """The folder of a checkpoint's configuration and tokenizer; of the hub, no weights are downloaded."""
    folder = Path(os.path.expanduser(model))
    return folder if folder.is_dir() else _download(model, None, weights=False).folder


def _inner(folder: Path, name: str) -> Path:
    """The folder with the model: ``folder``, or the only one below it with a model if it has none of its own."""
    if any(path.name in _MARKS or path.suffix in _WEIGHTS for path in folder.iterdir()):
        return folder
    # Two below it: `snapshots/COMMIT` of the hub's cache.
    inner = _models(folder.glob("*")) or _models(folder.glob("*/*"))
    modules = sorted(path.name for path in folder.glob("[0-9]_*") if (path / "config.json").is_file())
    if len(modules) > 1 and len(inner) == 1:
        raise ModelLoadError(
            f"{name} has the modules {', '.join(modules)} and no modules.json, which says how they follow each other; "
            f"fetch it again, or name {name}/{inner[0].name} for the backbone alone"
        )
    if len(inner) > 1:
        found = [str(path.relative_to(folder)) for path in inner]
        raise ModelLoadError(
            f"{name} holds several models ({', '.join(found[:4])}{' ...' if len(found) > 4 else ''}); name the folder "
            "of one of them"
        )
    return inner[0] if inner else folder


def _models(folders: Iterable[Path]) -> list[Path]:
    """Those of the folders that hold a model."""
    return sorted(
        path
        for path in folders
        if (path / "modules.json").is_file() or _FAMILY & read_json_object(path / "config.json", optional=True).keys()
    )


def _instead_of(file: Path) -> str:
    """What to pass in place of a file."""
    if file.suffix in (".safetensors", ".bin", ".json", ".onnx") and (file.parent / "config.json").is_file():
        return f"pass the folder that holds it, {file.parent}"
    if file.suffix == ".onnx":
        return (
            "ONNX is for another runtime; pass the folder or the hub id of the checkpoint that "
            "it was made from, with config.json and model.safetensors"
        )
    return "pass the folder that holds config.json, the tokenizer's files and model.safetensors"


def _download(name: str, revision: str | None, *, weights: bool = True) -> Source:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    ids = hub_ids(name)
    for hub_id in ids:
        try:
            folder = _fetch(hub_id, revision, weights=weights)
        except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
            absent = isinstance(error, LocalEntryNotFoundError | RepositoryNotFoundError)
            if absent and not isinstance(error, GatedRepoError) and hub_id != ids[-1]:
                continue
            looked = f", looked for as {' and as '.join(ids)}," if len(ids) > 1 else ""
            if isinstance(error, LocalEntryNotFoundError):
                raise ModelLoadError(
                    f"{name}{looked} is neither a folder here nor in the local hub cache, and the hub cannot be "
                    "reached; check the spelling, go online once, or pass a folder"
                ) from error
            raise ModelLoadError(
                f"{name}{looked} (revision {revision or 'main'}) is not a folder here, and the hub answered: "
                f"{type(error).__name__}; check the name, and HF_TOKEN if the repository is private"
            ) from error
        return Source(name=hub_id, folder=_inner(folder, name), revision=folder.name)
    raise AssertionError("there is at least one id")


def _fetch(hub_id: str, revision: str | None, *, weights: bool) -> Path:
    """The folder of a repository's files, those missing in the hub's cache downloaded."""
    from huggingface_hub import snapshot_download

    def fetch(patterns: list[str], ignored: list[str] = _OTHER_RUNTIMES) -> Path:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=ignored))

    folder = fetch(_TEXT_FILES + _SAFE_WEIGHTS * weights)
    if not weights:
        return folder
    safe = any(folder.glob("*.safetensors")) or any(folder.glob("0_*/*.safetensors"))
    if not safe and find_spec("torch") is not None:  # which reads pickles
        folder = fetch(_TEXT_FILES + _SAFE_WEIGHTS + _PICKLED_WEIGHTS)
        safe = any(folder.glob("*.bin")) or any(folder.glob("0_*/*.bin"))
    if not safe:
        folder = fetch(_TEXT_FILES + _EXPORTED_WEIGHTS, [])
    return folder


def check_pointer(path: Path) -> None:
    """Raise ModelLoadError if git-lfs has not fetched ``path`` yet."""
    if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(_POINTER):
        raise ModelLoadError(
            f"{path} is a pointer of git-lfs, not the file; run `git lfs install` and `git lfs pull` in {path.parent}"
        )


def read_json(path: Path) -> Any:
    """The content of a JSON file, with its path in every error."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} is missing; is {path.parent} a complete checkpoint?") from error
    except (OSError, ValueError) as error:
        check_pointer(path)
        raise ModelLoadError(f"{path} is not readable JSON: {error}; fetch it again") from error


def read_json_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The content of a JSON file that must hold an object; empty if it is optional and missing."""
    if optional and not path.is_file():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds a {type(content).__name__}; an object was expected")
    return content
