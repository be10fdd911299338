"""EntityPrompt: a GLiNER's input of a text: labels behind markers, then the text's words, as token ids."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from millpond.checkpoints.layouts.gliner import Gliner
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.errors import InputTooLongError, InvalidRequestError, ModelLoadError
from millpond.tasks import Truncate

_WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")  # joined by hyphens and underscores; every other sign is a word
_ENDS = (".", "!", "?")


@cache
def _words_of_gliner2() -> re.Pattern[str]:
    """Addresses are words, and marks belong to the letters that they stand on."""
    marks = "".join(chr(code) for code in range(0x110000) if unicodedata.category(chr(code)).startswith("M"))
    letter = rf"[\w{marks}\u200c\u200d]"
    addresses = r"https?://\S+|www\.\S+|[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}|@[a-z0-9_]+"
    return re.compile(rf"{addresses}|{letter}+(?:[-_]{letter}+)*|\S", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, eq=False)
class EntityText:
    """A text as a GLiNER reads it."""

    ids: tuple[int, ...]  # with the labels' and special tokens
    words: npt.NDArray[np.int64]  # [words] index of each word's first token; -1: it has none, or it was cut
    # [labels] index of the token that stands for each label; of GLiNER2 behind that of the first marker
    labels: npt.NDArray[np.int64]
    spans: tuple[tuple[int, int], ...]  # [words] characters of each word in the text
    truncated: bool


class EntityPrompt:
    """Reads texts with labels."""

    def __init__(self, layout: Gliner, tokenizer: TextTokenizer) -> None:
        self._layout, self._tokenizer = layout, tokenizer
        self._word = _words_of_gliner2() if layout.counting else _WORD
        if tokenizer.token_id(layout.ent_token) is None:
            raise ModelLoadError(f"{layout.tokenizer}: the tokenizer has no token {layout.ent_token}")

    def check(self, labels: Sequence[str]) -> None:
        """Refuse labels that the model would misread."""
        for label in labels:
            for marker in (self._layout.ent_token, self._layout.sep_token):
                if marker in label:
                    raise InvalidRequestError(f"the label {label!r} holds {marker}, which separates labels; reword it")

    def read(
        self, texts: Sequence[str], labels: Sequence[str], *, limit: int, truncate: Truncate
    ) -> list[EntityText | None]:
        """Each text's input of at most ``limit`` tokens; ``None`` for a text without words."""
        words = [self._words(text) for text in texts]
        kept = [self._cut(each, truncate, i) for i, each in enumerate(words)]
        prompt, markers = self._prompt(labels)
        read = [i for i, each in enumerate(kept) if each]
        encodings = self._tokenizer.encode_words(
            [prompt + [word for word, _, _ in kept[i]] for i in read], special_tokens=not self._layout.counting
        )
        inputs: list[EntityText | None] = [None] * len(texts)
        for i, encoding in zip(read, encodings, strict=True):
            ids = np.array(encoding.ids, dtype=np.int64)
            of_word = np.array([-1 if word is None else word for word in encoding.word_ids], dtype=np.int64)
            first = np.full(len(prompt) + len(kept[i]), -1, dtype=np.int64)
            numbers, places = np.unique(of_word, return_index=True)
            first[numbers[numbers >= 0]] = places[numbers >= 0]
            if (first[: len(prompt)] < 0).any():
                label = prompt[int(np.argmin(first[: len(prompt)]))]
                raise InvalidRequestError(f"the label {label!r} has no tokens; choose words that the model can read")
            cut = len(ids) > limit
            if cut:
                if truncate == "error":
                    raise InputTooLongError(
                        f"the text at index {i} and its labels have {len(ids)} tokens, more than {limit}; shorten it"
                    )
                ids, first = self._cut_tokens(ids, of_word, first, len(prompt), limit)
            of_labels = first[markers]
            inputs[i] = EntityText(
                ids=tuple(ids.tolist()),
                words=first[len(prompt) :],
                labels=of_labels if self._layout.marks_label else of_labels + 1,
                spans=tuple((start, end) for _, start, end in kept[i]),
                truncated=cut or len(kept[i]) < len(words[i]),
            )
        return inputs

    def _words(self, text: str) -> list[tuple[str, int, int]]:
        """Each word as the model reads it, and its characters; GLiNER2 folds words, and ends every text with a sign."""
        words = [(match.group(), *match.span()) for match in self._word.finditer(text)]
        if not self._layout.counting or not words:
            return words
        end = [] if text.endswith(_ENDS) else [(".", len(text), len(text))]
        return [(word.lower(), start, stop) for word, start, stop in words] + end

    def _prompt(self, labels: Sequence[str]) -> tuple[list[str], list[int]]:
        """What stands before a text, and which parts of it are the markers whose states are read."""
        named = [part for label in labels for part in (self._layout.ent_token, label)]
        if not self._layout.counting:
            return [*named, self._layout.sep_token], [*range(0, len(named), 2)]
        before = ["(", "[P]", "entities", "("]
        markers = [1, *range(len(before), len(before) + len(named), 2)]
        return [*before, *named, ")", ")", self._layout.sep_token], markers

    def _cut(self, words: list[tuple[str, int, int]], truncate: Truncate, index: int) -> list[tuple[str, int, int]]:
        """At most as many words as the model reads."""
        most = self._layout.max_words
        if len(words) > most and truncate == "error":
            raise InputTooLongError(
                f"the text at index {index} has {len(words)} words, more than this model reads ({most}); shorten it"
            )
        return words[:most] if truncate != "start" else words[-most:]

    @staticmethod
    def _cut_tokens(
        ids: npt.NDArray[np.int64],
        of_word: npt.NDArray[np.int64],
        first: npt.NDArray[np.int64],
        prompt: int,
        limit: int,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The ids without the last of the text's tokens; the special tokens behind them stay."""
        end = int(np.flatnonzero(of_word >= 0)[-1]) + 1
        last = end - (len(ids) - limit)
        if last <= first[prompt - 1] + 1:
            raise InputTooLongError(
                f"the labels take {first[prompt - 1] + 1} of {limit} tokens, which leaves none for the text; pass fewer"
            )
        return np.concatenate((ids[:last], ids[end:])), np.where(first >= last, -1, first)
