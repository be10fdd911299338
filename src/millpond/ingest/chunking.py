"""Chunking: texts longer than a model reads, cut at paragraphs, sentences and words into pieces that it reads."""

from __future__ import annotations

import math
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

from millpond.errors import InvalidRequestError, MissingExtraError
from millpond.ingest.record import Record, check_int
from millpond.support.blank import is_blank

if TYPE_CHECKING:
    from millpond.engine.engine import Engine
    from millpond.values.spec import ModelSpec

Context = Literal["late"]
"""What a chunk's vector knows beside its own text: ``late``, the whole document."""

CHUNK_KEYS = ("chunk", "chunk_start", "chunk_end")
"""The keys of a piece's metadata: its number, and the characters of the whole text that it holds."""

LINE_KEYS = ("first_line", "last_line")
"""The keys of a record's metadata that hold the lines of its file; those of a piece are its own."""

_MARKDOWN_SUFFIXES = (".md", ".markdown", ".mdx")
# Characters per token that are split at a time: the splitter's time grows with the square of a text without spaces.
_WINDOW_PER_TOKEN = 64
_WINDOW_GROWTH = 4
# Characters per token of which a longer piece is counted only so far, if that is too much already.
_COUNTED_PER_TOKEN = 6
_SPARE_TOKENS = 16  # near the end of such a part a few tokens may be others
# Pieces whose count is kept: the splitter asks for nearly half of them twice, within few calls.
_KEPT_COUNTS = 64
# Where a word begins: behind white space, and in scripts without spaces (of South-East Asia, Chinese, Japanese, emoji)
# with any character.
_WORD_BEGINS = re.compile(
    r"(?<=\s)(?=\S)|(?=[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\ua4cf\uf900-\ufaff\ufe30-\ufe4f\uff01-\uffef"
    r"\U0001f000-\U0003ffff])"
)
_JOINER = "\u200d"
_SKIN_TONES = "".join(map(chr, range(0x1F3FB, 0x1F400)))
# A text of ASCII has at most a token for each character, and a few for what a tokenizer puts before it.
_SPARE_CHARACTERS = 8


@dataclass(frozen=True, kw_only=True)
class Chunking:
    """How texts that are longer than the model reads are cut.

    Attributes:
        max_tokens: Most tokens of a piece, without special tokens and the prompt; ``None``: as many as the model reads.
        overlap: How many tokens a piece repeats of the one before, or which share of ``max_tokens``; fewer, where whole
            words have fewer. At most half of it.
        context: ``"late"`` pools the vector of each piece from the states of the whole document (Günther et al., 2024),
            read in windows if it is longer than the model reads; ``max_tokens`` is then at most three quarters of
            what that is. ``None`` embeds each piece by itself.

    Raises:
        InvalidRequestError: A value out of its range.
    """

    max_tokens: int | None = None
    overlap: int | float = 0.1
    context: Context | None = None

    def __post_init__(self) -> None:
        if self.context not in (None, "late"):
            raise InvalidRequestError(f"context={self.context!r} is unknown; choose late, or leave it out")
        if self.context is not None and self.max_tokens is None:
            raise InvalidRequestError(
                "context='late' needs max_tokens, since a chunk of as many tokens as the model reads has no context; "
                "choose 128"
            )
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens)
        if type(self.overlap) not in (int, float) or not 0 <= self.overlap < math.inf:
            raise InvalidRequestError(f"overlap={self.overlap!r} must be a number of tokens, or a share from 0 to 0.5")
        if isinstance(self.overlap, float) and self.overlap > 0.5:
            raise InvalidRequestError(f"overlap={self.overlap!r} is more than half of a piece; choose 0 to 0.5")
        if self.max_tokens is not None:
            self.overlap_tokens(self.max_tokens)

    def overlap_tokens(self, max_tokens: int) -> int:
        """The overlap as a number of tokens.

        Args:
            max_tokens: Most tokens of a piece.

        Returns:
            A number of tokens; a share is rounded down.

        Raises:
            InvalidRequestError: It is more than half of ``max_tokens``.
        """
        tokens = self.overlap if isinstance(self.overlap, int) else int(self.overlap * max_tokens)
        _check_overlap(tokens, max_tokens)
        return tokens


class Chunker:
    """Cuts the texts of records into pieces of a number of tokens.

    Args:
        count_tokens: The number of tokens of a text, as the model counts them, without special tokens and prompt.
        max_tokens: Most tokens of a piece.
        overlap: Most tokens that a piece repeats of the one before, in whole words; at most half of ``max_tokens``.
        context: As in :class:`Chunking`.

    Attributes:
        settings: All but the tokenizer that decides where a text is cut: with another value, texts are cut again.

    Raises:
        InvalidRequestError: A number out of its range.
        MissingExtraError: The splitter is not installed.
    """

    def __init__(
        self,
        count_tokens: Callable[[str], int],
        *,
        max_tokens: int,
        overlap: int = 0,
        context: Context | None = None,
    ) -> None:
        check_int("max_tokens", max_tokens)
        _check_overlap(overlap, max_tokens)
        try:
            library = import_module("semantic_text_splitter")
        except ImportError:
            raise MissingExtraError(
                "cutting texts into chunks needs semantic-text-splitter: pip install 'millpond[chunking]'"
            ) from None
        self._library = library
        self._count = lru_cache(_KEPT_COUNTS)(count_tokens)
        self.max_tokens = max_tokens
        self.overlap = overlap
        self.context = context
        self.settings = (
            f"semantic-text-splitter {version('semantic-text-splitter')}, {max_tokens} tokens, {overlap} twice"
            f"{'' if context is None else f', {context}'}"
        )
        # The splitter's own overlap repeats whole sentences or paragraphs only: nothing, at most cuts.
        self._texts = library.TextSplitter.from_callback(self._size, max_tokens - overlap)
        self._markdown = library.MarkdownSplitter.from_callback(self._size, max_tokens - overlap)

    @classmethod
    def for_engine(cls, engine: Engine, chunking: Chunking) -> Chunker:
        """A chunker whose pieces an engine reads whole, as documents.

        Args:
            engine: The engine that counts tokens and embeds the pieces.
            chunking: The length of a piece, and its overlap.

        Returns:
            A chunker for this engine.

        Raises:
            InvalidRequestError: The engine does not read as many tokens, or none of a text, or its vectors are no means
                of token rows, of which late chunks are made.
        """
        if chunking.context == "late":
            check_late(engine.spec)
        # Special tokens, and the prompt of documents.
        (added,) = engine.count_tokens([""], role="document")
        room = engine.spec.max_length - added
        if room < 1:
            raise InvalidRequestError(
                f"the prompt and special tokens take {added} of max_length={engine.spec.max_length}, which leaves none "
                "for a chunk; raise max_length"
            )
        max_tokens = room if chunking.max_tokens is None else chunking.max_tokens
        if max_tokens > room:
            raise InvalidRequestError(
                f"max_tokens={max_tokens} is more than {engine.spec.name} reads of a text: max_length="
                f"{engine.spec.max_length} without {added} for prompt and special tokens; choose at most {room}"
            )

        if chunking.context == "late" and 4 * max_tokens > 3 * room:
            raise InvalidRequestError(
                f"max_tokens={max_tokens} is more than three quarters of the {room} tokens of text that "
                f"{engine.spec.name} reads, which leaves a late chunk little context; choose at most {3 * room // 4}"
            )

        def count(text: str) -> int:
            return engine.count_tokens([text], role="document")[0] - added

        overlap = chunking.overlap_tokens(max_tokens)
        return cls(count, max_tokens=max_tokens, overlap=overlap, context=chunking.context)

    def split(self, record: Record) -> list[Record]:
        """The pieces of a record's text, in order.

        A piece has its parent's id and metadata, its number in ``chunk``, and in its metadata ``chunk``,
        ``chunk_start`` and ``chunk_end``: ``text[chunk_start:chunk_end]`` of the parent is the piece. If the parent has
        the lines of its file in ``first_line`` and ``last_line``, a piece has its own there. A record is returned as it
        is if its text fits or is blank, or if it is a piece itself.

        Args:
            record: The record, or a piece of one.

        Returns:
            Records, at least one.

        Raises:
            InvalidRequestError: One character alone has more tokens than a piece may have; or the vector of a piece is
                to be made of its whole document, which is not there.
        """
        text = record.text
        if self.context is not None and is_chunk(record):
            raise InvalidRequestError(
                "it is a chunk of a document, and late chunks are made of whole documents; ingest the document"
            )
        if is_chunk(record) or self._fits(text) or is_blank(text):
            return [record]
        path = record.metadata.get("path")  # of a section of a file, whose id has more
        markdown = (path if isinstance(path, str) else record.id).lower().endswith(_MARKDOWN_SUFFIXES)
        lines = _LineCounter(record)
        spans = self._spans(text, self._markdown if markdown else self._texts)
        pieces: list[Record] = []
        former = 0
        for own, end in spans:
            if is_blank(text[own:end]):
                continue
            start = former = self._with_overlap(text, former, own, end) if pieces and self.overlap else own
            piece = text[start:end]
            number = len(pieces)
            span = {**dict(zip(CHUNK_KEYS, (number, start, end), strict=True)), **lines.of(start, end)}
            pieces.append(Record(record.id, piece, {**record.metadata, **span}, chunk=number))
        return pieces

    def _with_overlap(self, text: str, former: int, start: int, end: int) -> int:
        """Where the piece from ``start`` to ``end`` begins with the words before it that it repeats."""
        first = max(former + 1, start - _COUNTED_PER_TOKEN * self.overlap)
        begins = [match.start() for match in _WORD_BEGINS.finditer(text, first, start)]
        begins = [begin for begin in begins if not _is_joined(text, begin)]
        chosen = bisect_left(begins, True, key=lambda begin: self._count(text[begin:start]) <= self.overlap)
        for begin in begins[chosen:]:
            if self._count(text[begin:end]) <= self.max_tokens:
                return begin
        return start

    def _fits(self, text: str) -> bool:
        if len(text) <= self.max_tokens - _SPARE_CHARACTERS and text.isascii():
            return True
        return self._size(text) <= self.max_tokens

    def _size(self, text: str) -> int:
        """The tokens of a text; of one that has too many, at least more than a piece may have."""
        counted = _COUNTED_PER_TOKEN * self.max_tokens
        if len(text) > 2 * counted:
            size = self._count(text[:counted])
            if size > self.max_tokens + _SPARE_TOKENS:
                return size
        return self._count(text)

    def _spans(self, text: str, splitter: Any) -> Iterator[tuple[int, int]]:
        """Where the pieces of a text begin and end, split a window at a time."""
        start = 0
        window = _WINDOW_PER_TOKEN * self.max_tokens
        while True:
            part = text[start : start + window]
            pieces = [(start + offset, start + offset + len(piece)) for offset, piece in splitter.chunk_indices(part)]
            last = start + window >= len(text)
            if len(pieces) < 2 and not last:
                window *= _WINDOW_GROWTH
                continue
            # The last piece may end where the window does; the next window begins with it.
            for span in pieces if last else pieces[:-1]:
                yield from self._checked(text, span)
            if last:
                return
            start, window = pieces[-1][0], _WINDOW_PER_TOKEN * self.max_tokens

    def _checked(self, text: str, span: tuple[int, int], limit: int | None = None) -> Iterator[tuple[int, int]]:
        """The span, or parts of it if it has too many tokens: tokens do not add up for every tokenizer."""
        start, end = span
        if self._size(text[start:end]) <= self.max_tokens:
            yield span
            return
        limit = (limit or self.max_tokens) // 2
        if end - start == 1 or limit == 0:
            raise InvalidRequestError(
                f"the text at character {start} has more than max_tokens={self.max_tokens} tokens in one word of "
                f"{end - start} characters that cannot be cut; raise max_tokens"
            )
        for offset, piece in self._library.TextSplitter.from_callback(self._size, limit).chunk_indices(text[start:end]):
            yield from self._checked(text, (start + offset, start + offset + len(piece)), limit)


class _LineCounter:
    """Counts the lines of a record's pieces, which begin in order, in its file."""

    def __init__(self, record: Record) -> None:
        first, last = (record.metadata.get(key) for key in LINE_KEYS)
        self._text = record.text
        # A title may stand before the lines, as of a section that another program wrote: then they say nothing.
        self._counts = type(first) is int and type(last) is int and first + record.text.rstrip("\n").count("\n") == last
        self._place, self._line = 0, first if type(first) is int else 0

    def of(self, start: int, end: int) -> dict[str, int]:
        """The lines from one character to before another; nothing, if the record has none."""
        if not self._counts:
            return {}
        self._line += self._text.count("\n", self._place, start)
        self._place = start
        return dict(zip(LINE_KEYS, (self._line, self._line + self._text.count("\n", start, end)), strict=True))


def text_span(record: Record, chunk: Record) -> tuple[int, int]:
    """The characters of a record's text that a piece of it holds, or the record itself."""
    if chunk.text == record.text:
        return 0, len(record.text)
    return chunk.metadata[CHUNK_KEYS[1]], chunk.metadata[CHUNK_KEYS[2]]


def check_late(spec: ModelSpec) -> None:
    """Raise unless late chunks can be made of a model's token rows.

    Args:
        spec: The model.

    Raises:
        InvalidRequestError: It pools in another way than by the mean of its token rows, or has layers behind that.
    """
    reason = None
    if "token_embed" not in spec.tasks:
        reason = "it has no token rows"
    elif spec.pooling != ("mean",):
        reason = f"its pooling is {'+'.join(spec.pooling)}, which reads no span of a text"
    elif spec.has_layers:
        reason = "layers follow its pooling"
    if reason is not None:
        raise InvalidRequestError(
            f"context='late' averages the token rows of each chunk as a model with mean pooling does, and "
            f"{spec.name} is none: {reason}; leave context out, or choose a model with mean pooling"
        )


def is_chunk(record: Record) -> bool:
    """Whether a record is a piece that :meth:`Chunker.split` made, also if it was stored and read again."""
    if record.chunk:
        return True
    if CHUNK_KEYS[0] not in record.metadata:
        return False
    number, start, end = (record.metadata.get(key) for key in CHUNK_KEYS)
    return number == 0 and type(start) is int and type(end) is int and end - start == len(record.text)


def _is_joined(text: str, index: int) -> bool:
    """Whether a character belongs to the one before it: an accent, or a part of an emoji."""
    character = text[index]
    is_joiner = _JOINER in (character, text[index - 1 : index])
    return is_joiner or unicodedata.category(character)[0] == "M" or character in _SKIN_TONES


def _check_overlap(overlap: int, max_tokens: int) -> None:
    check_int("overlap", overlap, 0)
    if 2 * overlap > max_tokens:
        raise InvalidRequestError(
            f"overlap={overlap} is more than half of max_tokens={max_tokens}; choose at most {max_tokens // 2}"
        )
