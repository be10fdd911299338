"""A checkpoint's config.json and tensors in the terms of transformers' own class."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from millpond.checkpoints.architecture import RELATIVE, Architecture
from millpond.checkpoints.families.renaming import AnyTensor
from millpond.checkpoints.weights import tensor_shapes
from millpond.errors import ModelLoadError, UnsupportedArchitectureError

# The table of word vectors, also under the name that it has when an adapter is trained on it.
_WORD_TABLE = re.compile(
    r"(^|\.)(word_embeddings|embed_tokens|tok_embeddings)\.(parametrizations\.weight\.original|weight)$"
)


def translate(row: Architecture, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """``config`` as the native class reads it."""
    hook = getattr(row.terms(), "translate", None)
    try:
        native: dict[str, Any] = dict(config) if hook is None else hook(config, name)
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:  # of a number that is none
        raise ModelLoadError(f"{name}: config.json cannot be read: {type(error).__name__}: {error}") from error
    if row.unmasked:
        native |= {"model_type": row.unmasked, "is_causal": False}
    refusal = _changed_arithmetic(row, native)
    if refusal:
        raise UnsupportedArchitectureError(f"{name}: {refusal}, which millpond does not run for {row.model_class}")
    return native


def rename(row: Architecture, tensors: Mapping[str, AnyTensor], config: Mapping[str, Any]) -> Mapping[str, AnyTensor]:
    """A checkpoint's tensors under the native names, without adapters; ``config`` is in the native terms."""
    hook = getattr(row.terms(), "rename", None)
    return tensors if hook is None else cast("Mapping[str, AnyTensor]", hook(tensors, config))


def with_stored_vocabulary(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """``config`` with the rows that the table of word vectors has, for families that may pad it.

    ``pad_vocab_size_multiple`` says to what multiple the training code rounded ``vocab_size`` up. Whether the file has
    the added rows, and whether ``vocab_size`` counts them, differs from checkpoint to checkpoint. A table with fewer
    rows than padding explains is left to the loader, which refuses it.
    """
    multiple, size = config.get("pad_vocab_size_multiple"), config.get("vocab_size")
    if type(multiple) is not int or type(size) is not int:
        return dict(config)
    try:
        shapes = tensor_shapes(folder)
    except ModelLoadError:  # the loader says what is wrong
        return dict(config)
    tables = {shape[0] for name, shape in shapes.items() if _WORD_TABLE.search(name) and shape}
    if len(tables) != 1:
        return dict(config)
    (rows,) = tables
    padded = -(-size // max(multiple, 1)) * max(multiple, 1)
    return {**config, "vocab_size": rows} if rows > padded - max(multiple, 1) else dict(config)


def _changed_arithmetic(row: Architecture, config: Mapping[str, Any]) -> str | None:
    """The field of a config that would make the native class compute something the checkpoint was not trained with."""
    positions = config.get("position_embedding_type", "absolute")
    known = ("absolute", *(RELATIVE if row.takes_distances else ()))
    if row.positions == "absolute" and positions not in known:
        return f"position_embedding_type {positions!r}"
    if config.get("lora_adaptations") and not row.adapters:
        return "lora_adaptations"
    for key in ("is_decoder", "add_cross_attention"):
        if config.get(key) and not row.decoder:  # a BERT trained to attend to earlier tokens only
            return f"{key} {config[key]!r}"
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    by_layer = rope.values() if isinstance(rope, Mapping) else ()  # Gemma 3 has one for each type of layer
    for scaling in (rope, *by_layer):
        kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else None
        if kind in ("dynamic", "longrope") and not config.get("positions_end"):
            return f"rope scaling {kind!r} (it would make one text's vector depend on its neighbours')"
    return None
