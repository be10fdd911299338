"""Pairs to token ids: a query and a document for a cross-encoder, by pair template or by score template."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding

from millpond.checkpoints.templates.score_template import BREAK, ScoreTemplate
from millpond.engine.input.plan import IndexOf
from millpond.engine.tokenize.pair_ids import PairIds
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.engine.tokenize.tokenized import Tokenized, too_long
from millpond.errors import InputTooLongError, InvalidRequestError
from millpond.tasks import Truncate
from millpond.values.inputs import Pair

# A cross-encoder needs at least one token of each of the two texts.
_LEAST_ROOM = 2
# A query leaves its document at least a quarter of the tokens that both have, as the model cards' code does.
_DOCUMENT_SHARE = 4


class PairTokenizer:
    """Reads pairs by the tokenizer's template (``[CLS] query [SEP] document [SEP]``); never cuts special tokens."""

    def __init__(self, tokenizer: TextTokenizer, *, prompt: str = "", keeps_document: bool = False) -> None:
        """``keeps_document``: only the query is cut, as transformers' ``only_first`` does, if that is enough."""
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._keeps_document = keeps_document

    def keeping_document(self) -> PairTokenizer:
        """The same, but only the query is cut."""
        return PairTokenizer(self._tokenizer, prompt=self._prompt, keeps_document=True)

    def encode(
        self,
        pairs: Sequence[Pair],
        *,
        instruction: str | None = None,  # must be `None`: a pair template has no place for one
        limit: int,  # most tokens of each result
        truncate: Truncate,  # which end of the texts is cut
        index_of: IndexOf,  # a pair's index in the caller's list, for errors
    ) -> list[Tokenized]:
        """Tokenize each pair to at most ``limit`` tokens, cut as transformers' ``longest_first`` does."""
        if instruction is not None:
            raise InvalidRequestError(
                f"instruction={instruction!r} has no place in this cross-encoder, which reads bare pairs; leave it "
                "out, or load the model with a score_template that has one"
            )
        texts = [(self._prompt + pair.query, pair.document) for pair in pairs]
        return [
            self._finish(pair, limit, truncate, index_of(i))
            for i, pair in enumerate(self._tokenizer.encode_pairs(texts))
        ]

    def _finish(self, pair: PairIds, limit: int, truncate: Truncate, index: int) -> Tokenized:
        ids = pair.ids
        if len(ids) == 0:
            return self._tokenizer.placeholder(index)
        types = pair.type_ids if self._tokenizer.typed else None
        cut = len(ids) > limit
        if cut:
            if truncate == "error":
                raise too_long("pair", index, len(ids), limit)
            query, document = pair.places()
            room = _room(limit, len(ids) - len(query) - len(document), "special tokens")
            kept = _longest_first(len(query), len(document), room)
            if self._keeps_document and len(document) < room:
                kept = room - len(document), len(document)
            stay = _kept(len(ids), (query, document), kept, truncate)
            ids, types = ids[stay], None if types is None else types[stay]
        return Tokenized(ids=ids, truncated=cut, types=types if types is not None and types.any() else None)


class TemplateTokenizer:
    """Reads pairs by a score template, as one text; only the document, and if necessary the query, is cut.

    The template's own text stays, above all its end: that is where a decoder's answer is read.
    """

    def __init__(self, tokenizer: TextTokenizer, template: ScoreTemplate, *, parts: bool = False) -> None:
        """``parts``: the model reads two parts of the text, which are told apart by their token types."""
        self._tokenizer = tokenizer
        self._template = template.bound(tokenizer.specials)
        self._template.check()
        # A template that spells out the first special token brings all of them: the tokenizer must not add them again.
        first = tokenizer.specials.get("bos_token") or tokenizer.specials.get("cls_token")
        spelled = first is not None and self._template.render("q", "d").startswith(first)
        self._special_tokens = template.special_tokens and not spelled
        self._parts = BREAK in self._template.render("q", "d")
        self._typed = parts
        if parts and self._template.render("q", "d").count(BREAK) != 1:
            raise InvalidRequestError(
                f"the template {self._template.name} must have the character \\ue0f5 once, between what the encoder "
                "reads (the document) and what the decoder reads (the query)"
            )

    def encode(
        self,
        pairs: Sequence[Pair],
        *,
        instruction: str | None = None,  # fills the template's slot; `None`: the template's default
        limit: int,  # most tokens of each result
        truncate: Truncate,
        index_of: IndexOf,  # a pair's index in the caller's list, for errors
    ) -> list[Tokenized]:
        """Render and tokenize each pair to at most ``limit`` tokens."""
        if instruction is not None and not self._template.takes_instruction:
            raise InvalidRequestError(
                f"instruction={instruction!r} has no place in the template {self._template.name}; leave it out, "
                "or load the model with a score_template that reads `instruction`"
            )
        asked = [self._query(pair.query, truncate) for pair in pairs]
        whole = [Pair(query, pair.document) for query, pair in zip(asked, pairs, strict=True)]
        texts = [self._template.render(pair.query, pair.document, instruction=instruction) for pair in whole]
        longest = self._template.longest
        tokenized = []
        for i, (ids, first) in enumerate(self._ids(texts)):
            if self._typed and not 0 < first < len(ids):
                raise InvalidRequestError(
                    f"pair {index_of(i)} has no token for the {'decoder' if first else 'encoder'}; pass texts, or a "
                    "template that has some"
                )
            if len(ids) == 0:
                tokenized.append(self._tokenizer.placeholder(index_of(i)))
                continue
            types = (np.arange(len(ids)) >= first).astype(np.int8) if self._typed else None
            cut = asked[i] != pairs[i].query
            if len(ids) > limit or (longest is not None and first > longest.document):
                if truncate == "error":
                    most = limit if longest is None else min(limit, len(ids) - max(0, first - longest.document))
                    raise too_long("pair", index_of(i), len(ids), most)
                stay = self._cut(whole[i], texts[i], instruction, limit, truncate)
                ids, types, cut = ids[stay], None if types is None else types[stay], True
            if cut and truncate == "error":
                assert longest is not None
                raise too_long("query", index_of(i), len(self._bare(pairs[i].query).ids), longest.query)
            tokenized.append(Tokenized(ids=ids, truncated=cut, types=types))
        return tokenized

    def _query(self, query: str, truncate: Truncate) -> str:
        """The query, cut to the tokens that the template takes of it, if it says so; they are counted without it."""
        longest = self._template.longest
        if longest is None or len(query) <= longest.query:  # a token has a character at least
            return query
        offsets = self._bare(query).offsets
        if len(offsets) <= longest.query:
            return query
        return query[offsets[-longest.query][0] :] if truncate == "start" else query[: offsets[longest.query - 1][1]]

    def _bare(self, text: str) -> Encoding:
        return self._tokenizer.encode_rendered([text], special_tokens=False, offsets=True)[0]

    def _cut(
        self, pair: Pair, text: str, instruction: str | None, limit: int, truncate: Truncate
    ) -> npt.NDArray[np.int64]:
        """Which tokens of an over-long ``text`` stay, as indices."""
        # Offsets are slow, and over-long pairs are rare: only these are tokenized again, with offsets.
        encoding, first = self._encoding(text)
        query, document = self._tokens_of(encoding, text, pair, instruction)
        total = len(encoding.ids)
        room = _room(limit, total - len(query) - len(document), f"the template {self._template.name}")
        longest, most = self._template.longest, len(document)
        if longest is not None:  # what the first part has besides the document stays
            most = min(most, max(1, longest.document - (first - most)))
        kept = _document_first(len(query), most, room)
        return _kept(total, (query, document), kept, truncate)

    def _tokens_of(
        self, encoding: Encoding, text: str, pair: Pair, instruction: str | None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Indices of the tokens that lie inside the query, and inside the document; int64 ``[tokens]`` each."""
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        added = np.array(encoding.special_tokens_mask, dtype=np.bool_)
        length = self._length(text)
        tokens = []
        for before, after in self._template.around(pair.query, pair.document, text, instruction=instruction):
            begin, end = self._length(before), length - self._length(after)
            inside = (offsets[:, 0] >= begin) & (offsets[:, 1] <= end) & (offsets[:, 1] > begin) & ~added
            tokens.append(np.flatnonzero(inside))
        return tokens[0], tokens[1]

    def _ids(self, texts: Sequence[str]) -> list[tuple[npt.NDArray[np.int32], int]]:
        """Each text, uncut, and the tokens of its first part; one with breaks is tokenized in parts.

        The first of them has the special tokens.
        """
        read, special = self._tokenizer.id_arrays, self._special_tokens
        if not self._parts:
            return [(ids, len(ids)) for ids in read(texts, special_tokens=special)]
        merged = []
        for text in texts:
            first, *others = text.split(BREAK)
            parts = [*read([first], special_tokens=special), *read(others, special_tokens=False)]
            merged.append((np.concatenate(parts), len(parts[0])))
        return merged

    def _encoding(self, text: str) -> tuple[Encoding, int]:
        """As :meth:`_ids` of one text, with offsets."""
        first, *others = text.split(BREAK) if self._parts else [text]
        read, special = self._tokenizer.encode_rendered, self._special_tokens
        parts = read([first], special_tokens=special, offsets=True)
        if others:
            parts += read(others, special_tokens=False, offsets=True)
        return Encoding.merge(parts, growing_offsets=True), len(parts[0].ids)

    def _length(self, text: str) -> int:
        """Characters of a text as it is tokenized."""
        return len(self._tokenizer.fold(text.replace(BREAK, "")))


def _room(limit: int, fixed: int, holder: str) -> int:
    """Tokens left for the query and the document."""
    room = limit - fixed
    if room < _LEAST_ROOM:
        raise InputTooLongError(
            f"{holder} takes {fixed} of max_length={limit} tokens, which leaves {max(room, 0)} for query and document; "
            "raise max_length"
        )
    return room


def _longest_first(query: int, document: int, room: int) -> tuple[int, int]:
    """How many tokens of each stay, by the rule of tokenizers' ``longest_first``: the shorter stays whole if possible.

    If neither fits into half the room, both get half, and an odd token goes to the longer one (if equal, the document).
    """
    shorter = min(query, document)
    less = shorter if 2 * shorter <= room else room // 2
    kept = less, room - less
    return (kept[1], kept[0]) if query > document else kept


def _document_first(query: int, document: int, room: int) -> tuple[int, int]:
    """How many tokens of each stay: all of the query's, unless the document would keep less than its share."""
    share = max(1, room // _DOCUMENT_SHARE)
    kept = min(document, max(room - query, share))
    return min(query, room - kept), kept


def _kept(
    total: int, sides: Sequence[npt.NDArray[np.int64]], counts: Sequence[int], truncate: Truncate
) -> npt.NDArray[np.int64]:
    """Indices of the tokens that stay: all but those of each side beyond its count."""
    stay = np.ones(total, dtype=np.bool_)
    for tokens, count in zip(sides, counts, strict=True):
        stay[tokens[count:] if truncate == "end" else tokens[: len(tokens) - count]] = False
    return np.flatnonzero(stay)
