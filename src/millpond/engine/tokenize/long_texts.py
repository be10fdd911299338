"""Long texts: only a part is tokenized, where its tokens are certain to be those of the whole text.

A tokenizer takes about two hundred bytes per character: a text as large as a whole request would take gigabytes.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from millpond.engine.tokenize.large_texts import turn
from millpond.support.cached_property import cached_property
from millpond.support.heap import HEAP
from millpond.tasks import Truncate

# Shorter texts are tokenized whole, which takes a moment: fewer characters than this, or fewer than this per token
# that is read.
_WHOLE_CHARACTERS = 1 << 18
_WHOLE_PER_TOKEN = 64
# Characters of the first part that is tokenized, for each token that is read: English has four to five.
_PART_PER_TOKEN = 16
_GROWTH = 4
# Tokens beside the cut that are not used: more than the short word there has.
_MARGIN = 64
# A short word, or a mark, between two others. Nothing beyond it changes a token before it, or after it.
_SHORT_WORD = re.compile(r"[\w!-~] [\w!-~]{1,16} [\w!-~]")
# Parts of a tokenizer that look at a few characters, or at a word.
_NORMALIZERS = frozenset(
    "BertNormalizer ByteLevel Lowercase NFC NFD NFKC NFKD Nmt Precompiled Prepend Replace Sequence Strip "
    "StripAccents".split()
)
_SPLITTERS = frozenset(
    "BertPreTokenizer ByteLevel Digits Metaspace Punctuation Sequence Split Whitespace WhitespaceSplit".split()
)
# A pattern that looks around itself may see any number of characters, to count digits from their end. The usual one
# looks at a single character.
_LOOKS_AROUND = re.compile(r"\(\?<?[=!](?!\\S\))")
# Runs that BERT's tokenizer reads as one unknown token, or as nothing, however long they are.
_RUN = re.compile(r"[0-9A-Za-z]{513,}|[ \t\n\r]{513,}")
_EDGE = 256  # characters that stay at both ends of a run
_RUN_CHARACTERS = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ \t\n\r")


def is_oversize(text: str, limit: int) -> bool:
    """Whether ``text`` is so long that a part of it is tokenized first, for a limit of ``limit`` tokens."""
    return len(text) > max(_WHOLE_CHARACTERS, _WHOLE_PER_TOKEN * limit)


class LongTexts:
    """Where the long texts of a tokenizer may be cut, and which of their runs may be collapsed."""

    def __init__(self, backend: Tokenizer, fold: Callable[[str], str]) -> None:
        self._backend = backend
        self._fold = fold
        added = [token.content for token in backend.get_added_tokens_decoder().values()]
        bert = isinstance(backend.pre_tokenizer, BertPreTokenizer) and isinstance(
            backend.normalizer, BertNormalizer | None
        )
        self.splits_at_spaces = bert and not any(" " in content for content in added)
        """Whether the tokens before a space never depend on what follows: BERT's tokenizer, no token with a space."""
        model: Any = backend.model
        self._collapses = (
            bert
            and isinstance(model, WordPiece)
            and model.max_input_chars_per_word <= _EDGE
            and all(len(content) <= _EDGE and set(content) - _RUN_CHARACTERS for content in added)
        )

    def collapse(self, text: str) -> str:
        """``text`` without the middle of its long runs: the tokens are the same, their offsets are not."""
        return _RUN.sub(lambda run: run[0][:_EDGE] + run[0][-_EDGE:], text) if self._collapses else text

    def part(self, text: str, *, limit: int, truncate: Truncate) -> str:
        """A part of an oversize text with more than ``limit`` tokens; ``text`` if none is certain to do.

        The tokens that truncation keeps of the part are those that it keeps of the whole, and if the part is cut or
        refused, so is the whole text.
        """
        if not is_oversize(text, limit):
            return text
        HEAP.trim_soon()
        size = _PART_PER_TOKEN * (limit + _MARGIN)
        while self._may_cut(truncate) and 2 * size < len(text):
            # It ends with a short word and a space, or begins with these.
            begin, end = (size, 2 * size) if truncate != "start" else (len(text) - 2 * size, len(text) - size)
            place = next((each for each in _SHORT_WORD.finditer(text, begin, end) if _is_plain(each[0])), None)
            if place is not None:
                part = text[: place.end() - 1] if truncate != "start" else text[place.start() + 1 :]
                if self._count(part) > limit + _MARGIN:
                    return part
            size *= _GROWTH
        return text

    def _count(self, text: str) -> int:
        """Number of tokens, special ones excluded."""
        with turn([text]):
            (encoding,) = self._backend.encode_batch_fast([self._fold(self.collapse(text))], add_special_tokens=False)
        return len(encoding.ids)

    def _may_cut(self, truncate: Truncate) -> bool:
        # Unigram sums the scores of a word's tokens from its beginning, and so rounds them.
        sums = isinstance(self._backend.model, Unigram)
        return self._words_apart or (self._tokens_apart and (truncate != "start" or not sums))

    @cached_property
    def _words_apart(self) -> bool:
        """Whether a space between letters ends a word, whatever else is in the text."""
        return self._looks_near and not any("b" in word and "c" in word for word in self._probe)

    @cached_property
    def _tokens_apart(self) -> bool:
        """Whether a space between letters begins a token, inside of words of any length."""
        model: Any = self._backend.model
        text = "".join(self._probe)
        space = text[text.rfind("b") + 1 : text.find("c")]
        if not self._looks_near or not isinstance(model, BPE | Unigram) or len(space) != 1:
            return False
        if isinstance(model, BPE) and (model.continuing_subword_prefix or model.end_of_word_suffix):
            return False
        vocabulary = self._backend.get_vocab()
        return space in vocabulary and not any(space in token.lstrip(space) for token in vocabulary)

    @property
    def _probe(self) -> list[str]:
        """The words of a text as the model gets them."""
        backend: Any = self._backend
        text = self._fold("ab cd")
        text = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
        return [text] if backend.pre_tokenizer is None else [w for w, _ in backend.pre_tokenizer.pre_tokenize_str(text)]

    @cached_property
    def _looks_near(self) -> bool:
        """Whether no part of the tokenizer looks farther than a word, as far as that is known."""
        added = self._backend.get_added_tokens_decoder().values()
        normalizers, splitters = (_parts(part) for part in (self._backend.normalizer, self._backend.pre_tokenizer))
        return (
            not getattr(self._backend.model, "dropout", None)
            and all(
                part["type"] in _NORMALIZERS
                and _pattern(part) in ("", " {2,}", r"\s+")
                and len(part.get("pattern", {}).get("String", "")) <= 2
                for part in normalizers
            )
            and all(part["type"] in _SPLITTERS and not _LOOKS_AROUND.search(_pattern(part)) for part in splitters)
            and not any(" " in token.content.lstrip() for token in added)
        )


def _is_plain(words: str) -> bool:
    """Whether normalizers neither combine the letters with anything nor make many of one."""
    letters = unicodedata.normalize("NFKD", words).replace(" ", "")
    return all(c.isalnum() or c.isascii() for c in letters) and len(letters.encode()) < _MARGIN


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """The parts of a normalizer or a pre-tokenizer, as its JSON has them."""
    state = None if component is None else json.loads(component.__getstate__())
    waiting = [] if state is None else [state]
    while waiting:
        part = waiting.pop()
        yield part
        waiting += part.get("normalizers") or part.get("pretokenizers") or []


def _pattern(part: dict[str, Any]) -> str:
    """The regular expression of a part; empty: it has none."""
    pattern = part.get("pattern")
    return str(pattern.get("Regex", "")) if isinstance(pattern, dict) else ""
