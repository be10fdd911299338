"""Lookahead: which tokens of a part of a text are certain to be those of the whole text.

What follows a part may change its last tokens, and with words of any length that is not a matter of a few: a run of
one letter may be tokenized from its end. So a part is used only where the tokens that are kept are proven.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from millpond.cached_property import cached_property
from millpond.engine.input.large_texts import turn
from millpond.engine.input.long_runs import LongRuns, WordpieceRuns

# What follows a part may change its last words: the last one itself, and those that a pattern or an accent reaches.
_OPEN_WORDS = 3
# Characters at the end of a part that must not all be accents and joiners, which normalizers move and combine.
_TAIL = 16
# Tokens between those to be proven and the window of ends that proves them.
_GAP = 64
_SPACE_MARKS = "\u2581\u0120 "  # of SentencePiece and of byte-level tokenizers
_SPACE_INSIDE = re.compile(f"[^{_SPACE_MARKS}][{_SPACE_MARKS}]")
# Characters for each of the tokens after a stretch of places to resume from.
_RESUME_PER_TOKEN = 8
# A pattern that looks around itself, in JSON: it may see any number of characters, to count digits from their end.
# The usual one looks at a single character.
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]")
_LOOKS_AT_ONE = r"(?!\\S)"
# Types of normalizers that look at more than one character.
_COMPOSING = ("NFC", "NFD", "NFKC", "NFKD", "Precompiled", "StripAccents", "BertNormalizer")


class Lookahead:
    """What a tokenizer's tokens depend on.

    Args:
        backend: The tokenizer.
        fold: Applied to texts before the tokenizer.
        runs: What shortens the texts.
    """

    def __init__(self, backend: Tokenizer, fold: Callable[[str], str], runs: LongRuns) -> None:
        self._backend = backend
        self._fold = fold
        # What stands around a part changes one word of it at most, which has a token for each of 100 characters.
        self._short_words = isinstance(runs, WordpieceRuns)

    @cached_property
    def splits_at_spaces(self) -> bool:
        """Whether the tokens before a space never depend on what follows: BERT's tokenizer, no token with a space."""
        backend = self._backend
        return (
            isinstance(backend.pre_tokenizer, BertPreTokenizer)
            and isinstance(backend.normalizer, BertNormalizer | None)
            and not any(" " in token.content for token in backend.get_added_tokens_decoder().values())
        )

    def settles(self, part: str, tokens: int, normalized: Callable[[], str], *, aligned: bool = False) -> bool:
        """Whether the first ``tokens`` tokens of ``part`` are those of the whole text, whatever follows it there.

        Special tokens that the tokenizer adds are not counted.

        Args:
            part: The beginning of the text, with at least 128 tokens more than twice as many.
            tokens: How many are to be kept.
            normalized: Returns :meth:`normalize` of the whole text; called only if accents may move from far behind.
            aligned: Whether the offsets of these tokens must be those of the whole text too.
        """
        if self._short_words:
            return True
        if self._strips:
            part = part.rstrip()  # an added token that follows may take all of it
        if self._looks_far or not self._settles_normalized(part, tokens, aligned):
            return False
        if not self._composes or not all(_combines(character) for character in part[-_TAIL:]):
            return True
        return not self._adds_combining and normalized().startswith(self.normalize(part))

    def normalize(self, text: str) -> str:
        """``text`` as the pre-tokenizer gets it."""
        normalizer = self._backend.normalizer
        with turn([text]):
            text = self._fold(text)
            return text if normalizer is None else str(normalizer.normalize_str(text))

    def _settles_normalized(self, part: str, tokens: int, aligned: bool) -> bool:
        """As :meth:`settles`, if what follows ``part`` changes its normalized form in the last few characters only."""
        (encoding,) = self._backend.encode_batch([self._fold(part)], add_special_tokens=False)
        ids, words = encoding.ids, [-1 if word is None else word for word in encoding.word_ids]
        if len(ids) <= tokens + _GAP:
            return False
        # The bytes of unknown characters have the offsets of all unknown characters beside them.
        if aligned and encoding.offsets[tokens - 1][1] >= encoding.offsets[-1][1]:
            return False
        if words[tokens] + _OPEN_WORDS < words[-1]:
            return True
        if self._spaces_begin_tokens and _has_space_between(encoding.tokens[tokens:-_GAP]):
            return True
        first = words.index(words[-1])  # the first token of the last word
        return self._word_settles(self._model_word(part), ids[first:], max(tokens - first, 0) + 1)

    def resume(self, text: str, begin: int) -> int | None:
        """An index in ``text`` from which on its tokens are those that it has if it is tokenized from ``begin`` on.

        Somewhere in a stretch as long as the longest token one token of the whole text ends and another begins. If
        tokenizing from each place of the stretch leads to the same tokens, so does the whole text.
        """
        if self._short_words:
            return begin
        starts = range(begin, begin + max(self._longest, _TAIL))
        if self._looks_far or (self._strips and text[begin : starts.stop].isspace()):
            return None
        end = starts.stop + _RESUME_PER_TOKEN * _GAP
        if end + _TAIL > len(text):
            return None
        parts = [self._fold(text[start:end]) for start in starts]
        if any(len(part) != end - start for part, start in zip(parts, starts, strict=True)):
            return None
        tails = [
            [(token, start + at, start + to) for token, (at, to) in zip(e.ids[-_GAP:], e.offsets[-_GAP:], strict=True)]
            for e, start in zip(self._backend.encode_batch(parts, add_special_tokens=False), starts, strict=True)
        ]
        (first,) = self._backend.encode_batch(parts[:1], add_special_tokens=False)
        if len(first.ids) <= _GAP or any(tail != tails[0] for tail in tails):
            return None
        words = first.word_ids[-_GAP:]
        for i, (_, place, _) in enumerate(tails[0]):
            # Unigram adds the scores of a word from its beginning, and rounds.
            follows = isinstance(self._backend.model, BPE) or (i > 0 and words[i] != words[0])
            if place >= starts.stop and follows and not (self._composes and _combines(text[place])):
                return place
        return None

    @cached_property
    def _spaces_begin_tokens(self) -> bool:
        """Whether no token has a space after another character: then none reaches over the beginning of a word."""
        return not any(_SPACE_INSIDE.search(token) for token in self._backend.get_vocab())

    @cached_property
    def _looks_far(self) -> bool:
        """Whether where a pattern matches may depend on text that is far away."""
        states = (_state(self._backend.normalizer), _state(self._backend.pre_tokenizer))
        return any(_LOOKS_AROUND.search(state.replace(_LOOKS_AT_ONE, "")) for state in states)

    @cached_property
    def _composes(self) -> bool:
        """Whether the normalizer may move or combine characters."""
        return any(name in _state(self._backend.normalizer) for name in _COMPOSING)

    @cached_property
    def _adds_combining(self) -> bool:
        """Whether an added token begins with a character that a normalizer may combine with one before it."""
        added = self._backend.get_added_tokens_decoder().values()
        return any(_combines(token.content[0]) for token in added if token.content)

    @cached_property
    def _strips(self) -> bool:
        """Whether an added token takes the whitespace beside it, however much there is."""
        added = self._backend.get_added_tokens_decoder().values()
        return any(token.lstrip or token.rstrip for token in added)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._backend.get_vocab(with_added_tokens=False)), default=1)

    def _pieces(self, text: str) -> list[str]:
        """What the model gets of ``text``: its words, normalized."""
        splitter = self._backend.pre_tokenizer
        text = self.normalize(text)
        return [text] if splitter is None else [piece for piece, _ in splitter.pre_tokenize_str(text)]

    def _model_word(self, part: str) -> str:
        """The last word of ``part`` as the model gets it, without what a character after ``part`` could change."""
        tail = max((len(piece.encode()) for piece in self._pieces(part[-_TAIL:])), default=0)
        return self._pieces(part)[-1][: -tail - _TAIL]

    def _word_settles(self, word: str, expected: Sequence[int], tokens: int) -> bool:
        """Whether the first ``tokens`` tokens of every word that begins with ``word`` are the expected ones.

        A word has an end of a token in any stretch as long as the longest token, and its tokens up to there are those
        of the word that ends there. So it is enough to look at the words that end in one such stretch.
        """
        model: Any = self._backend.model
        if not isinstance(model, BPE | Unigram) or not expected:
            return False
        end = 2 * (tokens + _GAP)
        while len(head := model.tokenize(word[:end])) < tokens + _GAP:
            if end >= len(word):
                return False
            end *= 2
        if end + self._longest > len(word) or [token.id for token in head[:tokens]] != list(expected[:tokens]):
            return False
        ends = range(end, end + self._longest + 1)
        if isinstance(model, BPE):
            # Two encodings can be joined wherever the tokens on both sides may stand beside each other.
            if model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
                return False
            begins = np.cumsum([0, *(len(letter.encode()) for letter in word[:end])])  # [letters + 1] in bytes
            joints = [i for i in range(tokens, tokens + _GAP // 2) if head[i].offsets[0] in begins]
            if not joints:  # a letter may be several tokens
                return False
            begin = int(np.searchsorted(begins, head[joints[0]].offsets[0]))
            return all(model.tokenize(word[begin:each])[0].id == head[joints[0]].id for each in ends)
        return all(
            [token.id for token in model.tokenize(word[:each])[: tokens + 1]] == [t.id for t in head[: tokens + 1]]
            for each in ends
        )


def _state(component: Any) -> str:
    """A normalizer or pre-tokenizer in JSON; empty: none."""
    return "" if component is None else str(component.__getstate__().decode())


def _combines(character: str) -> bool:
    """Whether a normalizer may combine ``character`` with one before it: accents, joiners, parts of a syllable."""
    first = unicodedata.normalize("NFKD", character)[0]  # a halfwidth sound mark is an accent
    return unicodedata.category(first) in ("Mn", "Mc", "Me", "Cf") or "\u1100" <= first <= "\u11ff"


def _has_space_between(tokens: Sequence[str]) -> bool:
    """Whether a word begins with a space among ``tokens``."""
    return any(
        token[0] in _SPACE_MARKS and before[-1] not in _SPACE_MARKS
        for before, token in pairwise(tokens)
        if token and before
    )
