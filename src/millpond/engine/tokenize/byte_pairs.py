"""Byte-level BPE without the ``tokenizers`` package: RoBERTa, GPT-2, ModernBERT, Qwen, Llama 3 and their relatives."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models

from millpond.engine.tokenize.native_tokenizer import NativeTokenizer, knows_characters, native
from millpond.native.library import portable

# The patterns of words.h by their places there; the first one is ByteLevel's own.
_START, _END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?", r"\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = (
    None,
    _START + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _END,  # Qwen 2 and 3
    _START + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _END,  # Llama 3, and cl100k as it is published there
    _START + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _END,  # Qwen 3.5
)
_COMPOSED, _WHOLE, _SPACED, _PLAIN = 1, 2, 4, 8  # of byte_pairs.cpp
_NORMALIZED, _SIDED = 1, 2  # of added_tokens.h
_PROBES = ("a", "", "It's 12,345 words:  they\n\n\tARE'NT alike -- 水车 Größe", " a  ")


class BytePairs(NativeTokenizer):
    """The tokens of texts as a tokenizer of byte-level BPE has them."""

    @classmethod
    def of(cls, backend: Tokenizer, *, prefix: int, suffix: int, file: Path | None) -> BytePairs | None:
        """What does as ``backend`` does; ``None`` if that has another part or setting, or there are no kernels.

        Args:
            backend: The tokenizer.
            prefix: Special tokens before a text.
            suffix: Those after it.
            file: The tokenizer.json that it was read from, whose model it still has; ``None``: there is none.
        """
        pattern = _pattern(backend.pre_tokenizer)
        options = None if pattern is None else _options(backend)
        if portable() is None or options is None:
            return None
        added = sorted(backend.get_added_tokens_decoder().items(), key=lambda item: -len(item[1].content.encode()))
        if not all(token.content and (token.content.isascii() or not token.normalized) for _, token in added):
            return None
        if options & _SPACED and any(len(token.content) == 1 for _, token in added):
            return None  # each part of a text may have one token more than bytes
        contents = [token.content.encode() for _, token in added]
        ends = np.fromiter(accumulate(map(len, contents)), dtype=np.int64, count=len(contents))
        ids = np.array([number for number, _ in added], dtype=np.int32)
        flags = np.array([_flags(token) for _, token in added], dtype=np.int32)
        probe = backend.encode("a").ids
        around = np.array([*probe[:prefix], *probe[len(probe) - suffix :]], dtype=np.int32)
        model = file.read_bytes() if file is not None else backend.model.__getstate__()
        handle = native().millpond_byte_pairs(
            model,
            len(model),
            b"".join(contents),
            ends.ctypes.data,
            ids.ctypes.data,
            flags.ctypes.data,
            len(added),
            pattern,
            options,
            around.ctypes.data,
            prefix,
            suffix,
        )
        if not handle:
            return None
        made = cls(handle, "byte_pairs", around=len(around))
        probes = [*_PROBES, " a".join(token.content for _, token in added if not _flags(token) & _SIDED)]
        found = zip(probes, made.split(probes), strict=True)
        return made if all(ids is None or ids.tolist() == backend.encode(text).ids for text, ids in found) else None


def _flags(token: Any) -> int:
    sided = token.lstrip or token.rstrip or token.single_word
    return (_NORMALIZED if token.normalized else 0) | (_SIDED if sided else 0)


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _pattern(words: Any) -> int | None:
    """The place of a pre-tokenizer's pattern; ``None``: it has none that is known."""
    state = _state(words)
    if state is None:
        return None
    if state["type"] == "ByteLevel":
        return 0 if state["use_regex"] else None
    parts = state.get("pretokenizers", [])
    if [part["type"] for part in parts] != ["Split", "ByteLevel"]:
        return None
    split, level = parts
    pattern = split["pattern"].get("Regex")
    if split["behavior"] != "Isolated" or split["invert"] or level["use_regex"] or level["add_prefix_space"]:
        return None
    return PATTERNS.index(pattern) if pattern in PATTERNS[1:] else None


def _options(backend: Tokenizer) -> int | None:
    """The options of byte_pairs.cpp; ``None``: a part has another one."""
    model: Any = backend.model
    if not isinstance(model, models.BPE) or backend.encode_special_tokens:
        return None
    if model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    normalizer, words = _state(backend.normalizer), _state(backend.pre_tokenizer)
    parts = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    if any(part != {"type": "NFC"} for part in parts):
        return None
    composed = _COMPOSED if parts else 0
    whole = _WHOLE if model.ignore_merges else 0
    return composed | whole | (_SPACED if words.get("add_prefix_space") else 0) | (0 if knows_characters() else _PLAIN)
