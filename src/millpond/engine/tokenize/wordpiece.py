"""WordPiece of texts in ASCII without the ``tokenizers`` package, which takes most of the time of a small model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from millpond.engine.tokenize.native_tokenizer import NativeTokenizer, knows_characters, native
from millpond.engine.tokenize.tokenized import fold
from millpond.native.library import portable

_LONGEST_WORD = 256  # of wordpiece.cpp
# What a tokenizer that is split here may have; a setting beside these is unknown.
_MODEL = {"type", "unk_token", "continuing_subword_prefix", "max_input_chars_per_word", "vocab"}
_NORMALIZER = {"type", "clean_text", "handle_chinese_chars", "strip_accents", "lowercase"}
_PROBES = ("a", "The mill, by 2 ponds: x9!", "a" * 300, "")


class WordPiece(NativeTokenizer):
    """The tokens of texts as a tokenizer of BERT's kind has them; other texts are its own."""

    @classmethod
    def of(cls, backend: Tokenizer, *, lower: bool, prefix: int, suffix: int) -> WordPiece | None:
        """What does as ``backend`` does; ``None`` if that has another part or setting, or there are no kernels.

        Args:
            backend: The tokenizer.
            lower: Whether texts are folded to lower case before it.
            prefix: Special tokens before a text.
            suffix: Those after it.
        """
        if portable() is None or not _is_plain(backend):
            return None
        model = json.loads(backend.model.__getstate__())
        vocabulary, unknown = model["vocab"], model["vocab"].get(model["unk_token"])
        added = list(backend.get_added_tokens_decoder().values())
        mark, most = model["continuing_subword_prefix"], model["max_input_chars_per_word"]
        if unknown is None or not mark or not 0 < most < _LONGEST_WORD:
            return None
        if not all(_is_found(token, lower=lower) for token in added):
            return None
        begins = list(vocabulary.items())
        continues = [(token[len(mark) :], number) for token, number in begins if token.startswith(mark)]
        listed = [*begins, *continues]
        ids = np.array([number for _, number in listed], dtype=np.int32)
        bytes_, ends = _joined([token.encode() for token, _ in listed], np.uint32)
        added_bytes, added_ends = _joined([token.content.encode().lower() for token in added], np.int64)
        probe = backend.encode("a").ids
        around = np.array([*probe[:prefix], *probe[len(probe) - suffix :]], dtype=np.int32)
        handle = native().millpond_wordpiece(
            bytes_,
            ends.ctypes.data,
            ids.ctypes.data,
            len(begins),
            len(listed),
            added_bytes,
            added_ends.ctypes.data,
            len(added),
            most,
            unknown,
            _options(backend, lower=lower),
            around.ctypes.data,
            prefix,
            suffix,
        )
        if not handle:
            raise MemoryError
        made = cls(handle, "wordpiece", around=len(around))
        same = all(
            ids is not None and ids.tolist() == backend.encode(fold(text) if lower else text).ids
            for text, ids in zip(_PROBES, made.split(_PROBES), strict=True)
        )
        return made if same else None


def _is_found(token: Any, *, lower: bool) -> bool:
    """Whether an added token is where its bytes are in a text: what the normalizer does may make others."""
    content = token.content
    plain = content.isascii() and content.isprintable() and " " not in content
    return bool(content) and (plain or not (lower or token.normalized))


def _joined(tokens: Sequence[bytes], kind: type[np.integer[Any]]) -> tuple[bytes, npt.NDArray[Any]]:
    """The tokens one after another, and where each ends."""
    return b"".join(tokens), np.fromiter(accumulate(map(len, tokens)), dtype=kind, count=len(tokens))


def _options(backend: Tokenizer, *, lower: bool) -> int:
    """The options of wordpiece.cpp."""
    normalizer: Any = backend.normalizer
    clean, chinese, strip, folds = False, False, False, False
    if normalizer is not None:
        clean, chinese, folds = normalizer.clean_text, normalizer.handle_chinese_chars, normalizer.lowercase
        strip = folds if normalizer.strip_accents is None else normalizer.strip_accents
    loose = lower or any(token.normalized for token in backend.get_added_tokens_decoder().values())
    flags = (clean, chinese, strip, folds, lower, loose, not knows_characters())
    return sum(1 << place for place, flag in enumerate(flags) if flag)


def _is_plain(backend: Tokenizer) -> bool:
    """Whether the tokenizer has the parts of BERT's, and no other."""
    parts = [backend.model, backend.normalizer, backend.pre_tokenizer]
    model, normalizer, splitter = (json.loads(part.__getstate__()) if part is not None else None for part in parts)
    return (
        model is not None
        and model.get("type") == "WordPiece"
        and set(model) <= _MODEL
        and (normalizer is None or (normalizer.get("type") == "BertNormalizer" and set(normalizer) <= _NORMALIZER))
        and splitter == {"type": "BertPreTokenizer"}
    )
