"""WordPiece of texts in ASCII without the ``tokenizers`` package, which takes most of the time of a small model."""

from __future__ import annotations

import ctypes
import json
import weakref
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from millpond.engine.tokenize.tokenized import fold
from millpond.native.library import portable

_LONGEST_WORD = 256  # of wordpiece.cpp
# What a tokenizer that is split here may have; a setting beside these is unknown.
_MODEL = {"type", "unk_token", "continuing_subword_prefix", "max_input_chars_per_word", "vocab"}
_NORMALIZER = {"type", "clean_text", "handle_chinese_chars", "strip_accents", "lowercase"}
_PROBES = ("a", "The mill, by 2 ponds: x9!", "a" * 300, "")


class AsciiWordPiece:
    """The tokens of texts as a tokenizer of BERT's kind has them; other texts are its own."""

    def __init__(self, handle: int, *, before: list[int], after: list[int]) -> None:
        self._handle = handle
        self._around = np.array([*before, *after], dtype=np.int32)
        self._around_address: int = self._around.ctypes.data
        self._before, self._after = len(before), len(after)
        weakref.finalize(self, _library().millpond_wordpiece_free, handle)

    @classmethod
    def of(cls, backend: Tokenizer, *, lower: bool, prefix: int, suffix: int) -> AsciiWordPiece | None:
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
        added = [token.content for token in backend.get_added_tokens_decoder().values()]
        mark, most = model["continuing_subword_prefix"], model["max_input_chars_per_word"]
        if unknown is None or not mark or not 0 < most < _LONGEST_WORD:
            return None
        if not all(content and content.isascii() and content.isprintable() and " " not in content for content in added):
            return None
        tokens = [(token, number) for token, number in vocabulary.items() if token.isascii()]
        begins, continues = tokens, [(token[len(mark) :], n) for token, n in tokens if token.startswith(mark)]
        listed = [*begins, *continues]
        texts = [*(token for token, _ in listed), *map(str.lower, added)]
        ids = np.array([number for _, number in listed], dtype=np.int32)
        ends = np.fromiter(accumulate(map(len, texts)), dtype=np.int64, count=len(texts))
        folds = lower or bool(backend.normalizer is not None and backend.normalizer.lowercase)
        handle = _library().millpond_wordpiece(
            "".join(texts).encode(),
            ends.ctypes.data,
            ids.ctypes.data,
            len(begins),
            len(listed),
            len(added),
            most,
            unknown,
            folds,
        )
        if not handle:
            raise MemoryError
        probe = backend.encode("a").ids
        before, after = probe[:prefix], probe[len(probe) - suffix :]
        made = cls(handle, before=before, after=after)
        same = all(
            ids is not None and ids.tolist() == backend.encode(fold(text) if lower else text).ids
            for text, ids in zip(_PROBES, made.split(_PROBES), strict=True)
        )
        return made if same else None

    def one(self, text: str) -> npt.NDArray[np.int32] | None:
        """As :meth:`split`, of one text."""
        if not text.isascii():
            return None
        ids = np.empty(len(text) + len(self._around), dtype=np.int32)
        end, count = ctypes.c_int64(len(text)), ctypes.c_int64()
        _library().millpond_wordpiece_split(
            self._handle,
            text.encode(),
            ctypes.addressof(end),
            1,
            self._around_address,
            self._before,
            self._after,
            ids.ctypes.data,
            ctypes.addressof(count),
        )
        return None if count.value < 0 else ids[: count.value]

    def split(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32] | None]:
        """int32 ``[tokens]`` of each text, special tokens included; ``None``: the tokenizer itself must split it."""
        plain = [text if text.isascii() else "\0" for text in texts]  # a text with a control character is refused
        joined = "".join(plain).encode()
        ends = np.fromiter(accumulate(map(len, plain)), dtype=np.int64, count=len(plain))
        ids = np.empty(len(joined) + len(plain) * len(self._around), dtype=np.int32)
        counts = np.empty(len(plain), dtype=np.int64)
        _library().millpond_wordpiece_split(
            self._handle,
            joined,
            ends.ctypes.data,
            len(plain),
            self._around.ctypes.data,
            self._before,
            self._after,
            ids.ctypes.data,
            counts.ctypes.data,
        )
        sizes: list[int] = counts.tolist()
        ids = ids[: int(counts.clip(min=0).sum())].copy()
        found: list[npt.NDArray[np.int32] | None] = []
        start = 0
        for size in sizes:
            found.append(None if size < 0 else ids[start : start + size])
            start += max(0, size)
        return found


def _library() -> ctypes.CDLL:
    loaded = portable()
    assert loaded is not None
    return loaded


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
