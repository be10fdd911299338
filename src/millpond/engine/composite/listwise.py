"""Listwise: the documents of a query read as one text, or as blocks of one that share their query.

The rules are those of jina-reranker-v3's own code: how many documents a block has, how queries and documents are cut,
and how the rows of several blocks become one score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from itertools import groupby
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.engine.composite.gather import combine
from millpond.engine.input.model import LoadedModel
from millpond.engine.input.validate import check_unicode
from millpond.engine.schedule.timing import CallFuture, CallTimer
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.engine.tokenize.tokenized import too_long
from millpond.errors import InputTooLongError, InvalidRequestError
from millpond.tasks import Truncate
from millpond.values.inputs import Pair, TokenIds
from millpond.values.outputs import ScoreOutput, TokenEmbeddingOutput
from millpond.values.params import PoolingParams

Rows = npt.NDArray[np.float32]  # [rows, d]

# A block ends once less than this part of the limit is left, or less than a whole document.
_SPARE = 16
_LEAST_ROOM = 8  # tokens of a query, which is read twice, and a document


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A part of one list: its text, and where its rows are."""

    text: int  # index among the texts
    places: npt.NDArray[np.int64]  # rows of the markers, that of the query last
    documents: int  # how many


@dataclass(kw_only=True, eq=False)
class Lists:
    """The lists of one call."""

    lists: list[list[_Block]]  # in the order of the pairs
    texts: list[TokenIds]  # of the blocks, distinct
    truncated: npt.NDArray[np.bool_]  # [pairs]
    seconds: float  # that tokenization took
    rows: dict[int, Rows] = field(default_factory=dict)  # of the markers, by text

    def take(
        self, slots: Sequence[int], matrices: Sequence[Rows], *, progress: Callable[[int], object] | None = None
    ) -> None:
        """Keep the rows of the markers."""
        blocks = [block for blocks in self.lists for block in blocks]
        for slot, matrix in zip(slots, matrices, strict=True):
            own = [block for block in blocks if block.text == slot]
            self.rows[slot] = matrix[own[0].places]
            if progress is not None:
                progress(sum(block.documents for block in own))

    def scored(self, queue: Callable[[CallTimer], Future[Any]], threads: Executor | None) -> CallFuture[ScoreOutput]:
        """The scores, once ``queue`` has run the texts."""
        timer = CallTimer()
        timer.tokenized(self.seconds)

        def assemble(outputs: list[TokenEmbeddingOutput]) -> ScoreOutput:
            scores = [_scores([self.rows[block.text] for block in blocks]) for blocks in self.lists]
            return ScoreOutput(
                scores=np.concatenate([np.zeros(0, np.float32), *scores]),
                method="listwise",
                truncated=self.truncated,
                usage=outputs[0].usage,
            )

        return combine([lambda: queue(timer)], assemble, threads, timer)


def rows_params(params: PoolingParams) -> PoolingParams:
    """Options to compute the rows of a text with."""
    unread = sorted(params.given() - {"task", "truncate", "truncate_prompt_tokens", "instruction"})
    if unread:
        raise InvalidRequestError(
            f"{unread[0]}={getattr(params, unread[0])!r} means nothing to the scores of a list; leave it out"
        )
    return PoolingParams(normalize=False, truncate_prompt_tokens=params.truncate_prompt_tokens)


def read(pairs: Sequence[Pair], params: PoolingParams, loaded: LoadedModel) -> Lists:
    """Tokenize ``pairs``: neighbours with the same query are a list, in this order."""
    begun = perf_counter()
    if params.instruction is not None:
        check_unicode(params.instruction, "instruction")
    limit = min(params.truncate_prompt_tokens or loaded.spec.max_length, loaded.spec.max_length)
    truncate = loaded.encoder.texts.side if params.truncate == "auto" else params.truncate
    reader = _Reader(loaded, limit, truncate, params.instruction)
    lists: list[list[_Block]] = []
    cut: list[bool] = []
    first = 0
    for query, group in groupby(pairs, key=lambda pair: pair.query):
        documents = [pair.document for pair in group]
        lists.append(reader.blocks(query, documents, first, cut))
        first += len(documents)
    return Lists(
        lists=lists,
        texts=[TokenIds(ids) for ids in reader.texts],
        truncated=np.array(cut, dtype=np.bool_),
        seconds=perf_counter() - begun,
    )


class _Reader:
    """Cuts and renders the lists of a call."""

    def __init__(self, loaded: LoadedModel, limit: int, truncate: Truncate, instruction: str | None) -> None:
        assert loaded.listwise is not None
        self._how, self._texts, self._truncate = loaded.listwise, loaded.encoder.texts, truncate
        markers = self._how.document_marker, self._how.query_marker
        self._ids = [self._texts.token_id(marker) for marker in markers]
        if None in self._ids:
            raise InvalidRequestError(f"the tokenizer of {loaded.spec.name} lacks {' or '.join(markers)}")
        self._instruction = None if instruction is None else self._plain(instruction)
        self._limit = limit
        one, two = (len(self._tokens("", [""] * count)) for count in (1, 2))
        self._frame, self._each = 2 * one - two, two - one + 4  # of a text, and of each document: its number grows
        self.texts: dict[tuple[int, ...], int] = {}  # distinct, with their indices

    def blocks(self, query: str, documents: Sequence[str], first: int, truncated: list[bool]) -> list[_Block]:
        """The blocks of one list, whose first pair has the index ``first``; ``truncated`` gets a flag for each pair."""
        how, room = self._how, self._limit - self._frame - self._each
        if room < _LEAST_ROOM:
            raise InputTooLongError(
                f"the template of a list takes {self._limit - room} of max_length={self._limit} tokens, which leaves "
                f"{max(room, 0)} for the query, twice, and a document; raise max_length"
            )
        (query,), (asked,), (query_cut,) = self._cut([query], min(how.query_length, room // 4), first, "query")
        most = min(how.document_length, room - 2 * asked)
        texts, lengths, cut = self._cut(documents, most, first, "document")
        truncated += [each or query_cut for each in cut]
        blocks, begin, left = [], 0, self._limit - 2 * asked
        for i, length in enumerate(lengths):
            left -= length
            # What the template itself takes is not counted, but where the limit is short.
            follows = lengths[i + 1] if i + 1 < len(lengths) else 0
            full = left - self._frame - (i - begin + 2) * self._each < follows
            ends = i + 1 == len(lengths) or i + 1 - begin == how.most_documents
            if ends or full or left <= min(how.document_length, self._limit // _SPARE):
                blocks.append(self._block(query, texts[begin : i + 1]))
                begin, left = i + 1, self._limit - 2 * asked
        return blocks

    def _block(self, query: str, documents: Sequence[str]) -> _Block:
        ids = np.array(self._tokens(query, documents), dtype=np.int64)
        if len(ids) > self._limit:
            raise InputTooLongError(
                f"a list of {len(documents)} documents has {len(ids)} tokens, more than max_length={self._limit}; "
                "shorten its documents or raise max_length"
            )
        ends, asks = (np.flatnonzero(ids == marker) for marker in self._ids)
        text = self.texts.setdefault(tuple(ids.tolist()), len(self.texts))
        return _Block(text=text, places=np.append(ends, asks[-1]), documents=len(documents))

    def _tokens(self, query: str, documents: Sequence[str]) -> list[int]:
        text = self._how.template.render_list(query, documents, instruction=self._instruction)
        return self._texts.ids([text], special_tokens=False)[0]

    def _plain(self, text: str) -> str:
        """``text`` without markers."""
        return text.replace(self._how.document_marker, "").replace(self._how.query_marker, "")

    def _cut(self, texts: Sequence[str], most: int, first: int, noun: str) -> tuple[list[str], list[int], list[bool]]:
        """Texts of at most so many tokens, their tokens, and which were cut."""
        plain = [self._plain(text) for text in texts]
        lengths = [len(ids) for ids in self._texts.ids(plain, special_tokens=False)]
        cut = [length > most for length in lengths]
        for i, length in enumerate(lengths):
            if cut[i] and self._truncate == "error":
                raise too_long(noun, first + i, length, most)
            if cut[i]:
                plain[i] = _part(self._texts, plain[i], most, self._truncate)
        return plain, [min(length, most) for length in lengths], cut


def _part(texts: TextTokenizer, text: str, most: int, truncate: Truncate) -> str:
    """The first or last ``most`` tokens of a text."""
    (end,) = texts.ends([text], most)
    if truncate == "end":
        return text[:end]
    low, high = end // 2, len(text)
    while low < high:  # the least start from which the rest is short enough
        middle = (low + high) // 2
        short = len(texts.ids([text[middle:]], special_tokens=False)[0]) <= most
        low, high = (low, middle) if short else (middle + 1, high)
    return text[low:]


def _scores(blocks: Sequence[Rows]) -> Rows:
    """Cosine of each document ``[n]`` with its list's query, from the rows of each block, the query's last.

    Of several blocks it is the mean of the queries' rows, each weighted by the best cosine of its block.
    """
    weights = [((1 + _cosines(rows[-1], rows[:-1])) / 2).max() for rows in blocks]
    query = np.average([rows[-1] for rows in blocks], axis=0, weights=weights) if len(blocks) > 1 else blocks[0][-1]
    return _cosines(query.astype(np.float32), np.concatenate([rows[:-1] for rows in blocks]))


def _cosines(query: Rows, documents: Rows) -> Rows:
    norms = np.linalg.norm(documents, axis=-1) * np.linalg.norm(query)
    out: Rows = documents @ query / np.maximum(norms, np.float32(1e-8))
    return out
