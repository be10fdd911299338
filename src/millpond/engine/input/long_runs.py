"""Long runs: stretches of a text that read as one token or as none, shortened without a change to any token.

WordPiece reads a word of more than 100 characters as one unknown token, however long it is; whitespace, control
characters and stripped accents make no token at all. A few tokens may therefore take megabytes of text, and every
character costs a tokenizer hundreds of bytes. Shortening looks at each character once, in arrays.

Each rule holds for a stretch whatever stands around it, so that a text may be shortened in parts.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

Classes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

# Characters that are looked at together: more would take more memory, and hold the GIL for longer.
_CHUNK = 1 << 17
_CODE_POINTS = 0x110000
# Characters of WordPiece's longest word: longer ones are unknown.
_WORD_CHARACTERS = 100
# Characters that stay at each end of a shortened stretch; no added token may be longer, since it could reach into one.
_EDGE = 64
# The classes of characters. A dropped one that stops the reordering of accents stands apart from the others.
_WORD, _BLANK, _DROPPED, _STARTER, _OTHER = 1, 2, 3, 4, 5
# Two spacing marks that canonical reordering swaps, unless a starter stands between them.
_SWAPPED = ("\u302e", "\U0001d165")
# The whitespace of Unicode.
_SPACES = "".join(filter(str.isspace, map(chr, range(0x3001))))


@dataclass(frozen=True, slots=True, eq=False)
class Excerpt:
    """A text, or a part of one, without the middle of its long runs.

    Attributes:
        text: What is left.
        end: The index in the whole text at which the part ends.
        origin: int64 ``[characters]`` the index of each character in the whole text; ``None``: its own index.
    """

    text: str
    end: int
    origin: npt.NDArray[np.int64] | None = None

    @classmethod
    def of(cls, text: str) -> Excerpt:
        """All of ``text``."""
        return cls(text, len(text))

    def offsets_in_whole(self, offsets: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Character spans ``[tokens, 2]`` of this text as spans of the whole one."""
        if self.origin is None or not len(self.origin):
            return offsets
        starts, ends = offsets[:, 0], offsets[:, 1]
        origin = np.append(self.origin, self.origin[-1] + 1)
        stops = np.where(ends > starts, origin[ends - 1] + 1, origin[starts])
        return np.stack((origin[starts], stops), axis=1).astype(np.int32)


class LongRuns:
    """Shortens the long runs of texts, by what a tokenizer does with each character.

    This class knows no tokenizer, and shortens nothing; its subclasses know a kind.
    """

    def shorten(self, text: str) -> Excerpt:
        """``text`` with the same tokens, and at most a few hundred characters for each of them."""
        return Excerpt.of(text)


class _RunsByClass(LongRuns):
    """Shortens runs of characters of one class."""

    def __init__(self) -> None:
        self._classes: Classes = np.zeros(_CODE_POINTS, dtype=np.uint8)  # [code points]; 0: not looked up yet

    def shorten(self, text: str) -> Excerpt:
        parts = list(self._parts(text))
        if all(kept is None for _, _, kept in parts):
            return Excerpt.of(text)
        origin = [np.arange(begin, begin + len(part)) if kept is None else kept + begin for begin, part, kept in parts]
        return Excerpt("".join(part for _, part, _ in parts), len(text), np.concatenate(origin))

    def _parts(self, text: str) -> Iterator[tuple[int, str, npt.NDArray[np.int64] | None]]:
        """Parts of the text, shortened: where each begins, what is left, and the indices of that; ``None``: all."""
        for begin in range(0, len(text), _CHUNK):
            part = text[begin : begin + _CHUNK]
            codes = np.frombuffer(part.encode("utf-32-le"), dtype=np.uint32)
            kept = self._kept(self._classes_of(codes))
            if len(kept) == len(codes):
                yield begin, part, None
            else:
                yield begin, codes[kept].tobytes().decode("utf-32-le"), kept

    def _classes_of(self, codes: npt.NDArray[np.uint32]) -> Classes:
        """uint8 ``[characters]``."""
        classes = self._classes[codes]
        if not classes.all():
            for code in np.unique(codes[classes == 0]).tolist():
                self._classes[code] = self._class_of(chr(code))
            classes = self._classes[codes]
        return classes

    def _class_of(self, character: str) -> int:
        raise NotImplementedError

    def _kept(self, classes: Classes) -> npt.NDArray[np.int64]:
        """Indices of the characters that stay."""
        raise NotImplementedError


class WordpieceRuns(_RunsByClass):
    """Long runs of BERT's tokenizer.

    A character is dropped, blank, a part of a word, or a token of its own; which of these does not depend on its
    neighbours, since the normalizer decomposes and never composes. Dropped accents matter in one way: whether spacing
    marks around them trade places depends on whether there is a starter among them.

    Args:
        backend: The tokenizer.
        fold: Applied to texts before the tokenizer.
    """

    def __init__(self, backend: Tokenizer, fold: Callable[[str], str]) -> None:
        super().__init__()
        self._split: Any = backend.pre_tokenizer.pre_tokenize_str
        normalizer: Any = backend.normalizer
        self._normalize = fold if normalizer is None else lambda text: normalizer.normalize_str(fold(text))
        # Of four characters of a run at least one is no dropped one.
        self._side = 4 * max(_EDGE, backend.model.max_input_chars_per_word // 2 + 1)

    @classmethod
    def of(cls, backend: Tokenizer, fold: Callable[[str], str]) -> WordpieceRuns | None:
        """For ``backend``, if it is BERT's tokenizer; ``None`` if it is not, or has unusual added tokens."""
        if not (
            isinstance(backend.model, WordPiece)
            and backend.model.max_input_chars_per_word <= _WORD_CHARACTERS
            and isinstance(backend.pre_tokenizer, BertPreTokenizer)
            and isinstance(backend.normalizer, BertNormalizer | None)
        ):
            return None
        runs = cls(backend, fold)
        added = [token.content for token in backend.get_added_tokens_decoder().values()]
        return runs if all(runs._stays_whole(content) for content in added) else None

    def _stays_whole(self, content: str) -> bool:
        """Whether an added token cannot lie inside of a shortened stretch: it has a character that none has."""
        classes = {self._class_of(character) for character in content}
        return len(content) <= _EDGE and _OTHER in classes and not classes & {_DROPPED, _STARTER}

    def _class_of(self, character: str) -> int:
        normalized = self._normalize(character)
        if not normalized:
            first, second = _SWAPPED
            return _STARTER if self._normalize(first + character + second).startswith(first) else _DROPPED
        pieces = [piece for piece, _ in self._split(f"a{normalized}a")]
        if len(pieces) == 1:
            return _WORD
        return _BLANK if pieces == ["a", "a"] else _OTHER

    def _kept(self, classes: Classes) -> npt.NDArray[np.int64]:
        kept = np.flatnonzero(_stays_of_dropped(classes))
        classes = classes[kept]
        dropped = (classes == _DROPPED) | (classes == _STARTER)
        word = _middles(dropped | (classes == _WORD), self._side)
        blank = _middles(dropped | (classes == _BLANK), _EDGE)
        return kept[~(word | blank)]


class BlankRuns(_RunsByClass):
    """Long runs of whitespace, to a tokenizer that reads any number of such characters as one space.

    Args:
        blanks: The characters.
    """

    def __init__(self, blanks: str) -> None:
        super().__init__()
        self._classes[:] = _OTHER
        self._classes[[ord(blank) for blank in blanks]] = _BLANK

    @classmethod
    def of(cls, backend: Tokenizer, fold: Callable[[str], str]) -> BlankRuns | None:
        """For ``backend``; ``None`` if it reads no characters so, or has an added token with one of them."""

        def tokens(text: str) -> list[int]:
            return list(backend.encode(fold(text), add_special_tokens=False).ids)

        def reads_as_one(blanks: Sequence[str]) -> bool:
            return all(
                tokens(before + blank + after) == tokens(f"{before} {after}" if before and after else before + after)
                for before, after in (("a", "b"), ("a,", "b"), ("a", ""), ("", "b"))
                for blank in blanks
            )

        if tokens("a b") == tokens("ab"):
            return None
        blanks = [s for s in _SPACES if reads_as_one((s, 2 * s, 7 * s, f" {s}", f"{s} "))]
        joined = "".join(blanks)
        added = "".join(token.content for token in backend.get_added_tokens_decoder().values())
        if not blanks or not reads_as_one((joined, joined[::-1], 99 * joined)) or set(blanks) & set(added):
            return None
        return cls(joined)

    def _kept(self, classes: Classes) -> npt.NDArray[np.int64]:
        return np.flatnonzero(~_middles(classes == _BLANK, _EDGE))


def long_runs(backend: Tokenizer, fold: Callable[[str], str]) -> LongRuns:
    """What shortens the long runs of texts for ``backend``.

    Args:
        backend: The tokenizer.
        fold: Applied to texts before the tokenizer.
    """
    return WordpieceRuns.of(backend, fold) or BlankRuns.of(backend, fold) or LongRuns()


def has_moving_marks(text: str) -> bool:
    """Whether normalizers reorder characters of ``text`` that stay in it: then any may be the end of a long word."""
    return _moving_marks().search(text) is not None


@cache
def _moving_marks() -> re.Pattern[str]:
    letters = map(chr, range(_CODE_POINTS))
    return re.compile(
        f"[{''.join(c for c in letters if unicodedata.combining(c) and unicodedata.category(c) != 'Mn')}]"
    )


def _stays_of_dropped(classes: Classes) -> Mask:
    """bool ``[characters]``: all but the dropped ones inside of a run, of which the first starter stays.

    Both ends of a run stay, since an added token may look at the character beside it.
    """
    starter = classes == _STARTER
    dropped = (classes == _DROPPED) | starter
    first = dropped.copy()
    first[1:] &= ~dropped[:-1]
    stays: Mask = ~dropped | first
    stays[:-1] |= ~dropped[1:]
    stays[-1:] = True
    starters = np.flatnonzero(starter)
    if len(starters):
        runs = np.cumsum(first)[starters]  # [starters] the number of each one's run
        stays[starters[np.flatnonzero(np.diff(runs, prepend=0))]] = True
    return stays


def _middles(run: Mask, side: int) -> Mask:
    """bool ``[characters]``: those in a run that are further than ``side`` from both of its ends."""
    edges = np.flatnonzero(np.diff(run, prepend=False, append=False))
    begins, ends = edges[::2] + side, edges[1::2] - side
    long = begins < ends
    step = np.zeros(len(run) + 1, dtype=np.int8)
    step[begins[long]] = 1
    step[ends[long]] = -1
    middles: Mask = np.cumsum(step[:-1], dtype=np.int8) > 0
    return middles
