"""The tokenizers of WordEmbeddings and BoW: white space and a vocabulary, or one of transformers read whole."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.models import BPE

from millpond.checkpoints.layouts.static import StaticTable
from millpond.checkpoints.layouts.words import Words
from millpond.engine.tokenize.large_texts import turn
from millpond.engine.tokenize.long_texts import LongTexts
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.engine.tokenize.tokenized import Tokenized
from millpond.errors import WeightMismatchError
from millpond.tasks import Truncate


def read_word_tokenizer(table: StaticTable, *, rows: int) -> TextTokenizer:
    """The tokenizer of a table with so many rows; the id after the last one stands for no word."""
    if table.words is not None:
        return WordTokenizer(table.words, table, rows=rows)
    tokenizer = WholeTokenizer.load(table.folder, lower=False)
    assert isinstance(tokenizer, WholeTokenizer)
    _check(tokenizer.vocabulary_size, table, rows)
    tokenizer.stand_in(rows, length=table.length)
    return tokenizer


def _check(count: int, table: StaticTable, rows: int) -> None:
    if count > rows:
        raise WeightMismatchError(
            f"{table.folder}: the tokenizer has {count} words, and the table {rows} rows; do the files belong together?"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """The words of a text that the vocabulary has, as the library's ``Encoding`` gives tokens."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    tokens: list[str]

    @property
    def special_tokens_mask(self) -> list[int]:
        return [0] * len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


class _WholeTexts(LongTexts):
    """A text is split in one pass, whatever its length; words that are not found count for no limit."""

    def part(self, text: str, *, limit: int, truncate: Truncate) -> str:
        return text


class WordTokenizer(TextTokenizer):
    """sentence-transformers' WhitespaceTokenizer."""

    def __init__(self, words: Words, table: StaticTable, *, rows: int) -> None:
        """``rows``: those of the table."""
        _check(max(words.ids.values(), default=-1) + 1, table, rows)
        # Knows the words by their ids, and reads no text.
        super().__init__(Tokenizer(BPE(words.ids, [])), lower=words.lower, limit=table.length, placeholder=rows)
        self._words = words
        self.long_texts = _WholeTexts(self._backend, self.fold)

    def fold(self, text: str) -> str:
        """``text`` in lower case, if words are; of another final sigma than the tokenizers library."""
        return text.lower() if self._lower else text

    def encode_rendered(self, texts: Sequence[str], *, special_tokens: bool, offsets: bool = False) -> list[Any]:
        """As :meth:`TextTokenizer.encode_rendered`; there are no special tokens."""
        with turn(texts):
            return [self._split(self.fold(text)) for text in texts]

    def _encode(self, texts: Sequence[str], *, offsets: bool = False) -> list[Any]:
        return self.encode_rendered(texts, special_tokens=True)

    def _split(self, text: str) -> _Found:
        found = [(self._words.ids[word], span, word) for word, span in self._spelled(text)]
        ids, offsets, tokens = zip(*found, strict=True) if found else ((), (), ())
        return _Found(ids=list(ids), offsets=list(offsets), tokens=list(tokens))

    def _spelled(self, text: str) -> Iterator[tuple[str, tuple[int, int]]]:
        """The words that are found, as the vocabulary spells them, and where they are.

        A word is looked for as it is, then without the punctuation around it, then that in lower case; a stop word in
        any of these forms ends the search.
        """
        known, stop_words, end = self._words.ids, self._words.stop_words, 0
        for word in text.split():
            begin = text.index(word, end)
            end = begin + len(word)
            bare = word.strip(string.punctuation)
            first = begin + (word.index(bare) if bare else 0)
            for form, start in ((word, begin), (bare, first), (bare.lower(), first)):
                if form in stop_words:
                    break
                if form in known:
                    yield form, (start, start + len(word if form is word else bare))
                    break


class WholeTokenizer(TextTokenizer):
    """A tokenizer of transformers in a WordEmbeddings: a text is cut with its special tokens, not between them."""

    def stand_in(self, row: int, *, length: int) -> None:
        """Take this id for a text without tokens, and a limit of so many tokens."""
        self._placeholder, self.limit = row, length

    def encode_one(self, text: str, **options: Any) -> Tokenized | None:
        """As :meth:`TextTokenizer.encode_one`, but for texts that are cut."""
        found = super().encode_one(text, **options)
        return None if found is None or found.truncated else found

    def _cut(self, length: int, text: str, prompt: str, limit: int, truncate: Truncate) -> npt.NDArray[np.int64]:
        return np.arange(limit) if truncate == "end" else np.arange(length - limit, length)
