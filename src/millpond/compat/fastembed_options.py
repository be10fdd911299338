"""The options of FastEmbedSparse, LangChain's class over fastembed, as those of millpond's sparse adapters.

Read from langchain-qdrant 1.1.0 and fastembed 0.7.3.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from millpond.compat.option_translation import OptionTranslation, Rule, flag, ignore, refuse
from millpond.compat.sentence_transformers_loading import LOADING
from millpond.errors import InvalidRequestError

# Of fastembed's sparse models, those that are no network with a vocabulary head. Compared in lower case.
_WORD_COUNTERS = ("qdrant/bm25", "qdrant/bm42-all-minilm-l6-v2-attentions", "qdrant/minicoil-v1")


def translate_sparse_options(options: Mapping[str, Any], *, own: Collection[str]) -> dict[str, Any]:
    """The arguments of a sparse adapter, with those of ``FastEmbedSparse`` translated.

    Args:
        options: What the caller passed; not changed.
        own: The adapter's own options, aliases included.

    Returns:
        Options of ``own``, the names that nobody knows, and what was translated.

    Raises:
        InvalidRequestError: An option or a model that would change vectors and is not available.
    """
    translation = OptionTranslation(options, own)
    if (translation.model or "").lower() in _WORD_COUNTERS:
        raise InvalidRequestError(
            f"{translation.model} counts words, with the collection's statistics, and runs in fastembed only; keep "
            "FastEmbedSparse for it, or write model= a SPLADE checkpoint or BAAI/bge-m3 and embed the collection again"
        )
    translation.top_level(_FASTEMBED | LOADING)
    return translation.result


def _providers(translation: OptionTranslation, source: str, value: Any) -> None:
    """ONNX's places of execution: of each, the name, or the name with its options."""
    given = value if isinstance(value, list | tuple) else [value]
    names = [provider[0] if isinstance(provider, tuple) and provider else provider for provider in given]
    devices = [_DEVICES[name] for name in names if isinstance(name, str) and name in _DEVICES]
    if not names or len(devices) < len(names):
        refuse("millpond runs by torch, not ONNX", 'write device="cpu" or device="cuda" instead')(
            translation, source, value
        )
    translation.set("device", devices[0], source)  # the others are for what the first cannot run


_DEVICES = {"CPUExecutionProvider": "cpu", "CUDAExecutionProvider": "cuda"}


def _cuda(translation: OptionTranslation, source: str, value: Any) -> None:
    if flag(source, value):
        ids = translation.options.get("device_ids")
        translation.set("device", ",".join(f"cuda:{i}" for i in ids) if ids else "cuda", source)


_FASTEMBED: dict[str, Rule] = {
    "threads": ignore,
    "parallel": ignore,
    "lazy_load": ignore,
    "providers": _providers,
    "cuda": _cuda,
    "device_ids": ignore,  # cuda reads it
    "specific_model_path": refuse(
        "its files are for ONNX", "pass a folder with the checkpoint's own weights as model="
    ),
    "max_active_dims": refuse(
        "every entry with a weight is kept", "leave it out"
    ),  # sentence-transformers' SparseEncoder
}
