"""The outputs of the engine's methods: frozen values holding numpy arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidRequestError
from millpond.tasks import ScoreMeasure, Stop
from millpond.vectors.ragged import Ragged

Element = TypeVar("Element")

# Rows made into lists before an event loop gets its turn: about a millisecond's work.
_ROWS_PER_TURN = 128


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens read for one call.

    Attributes:
        prompt_tokens: Tokens of every input of the call after truncation, special tokens and prompts included.
            Duplicates and texts from the cache (which stores their token count) are counted, too.
    """

    prompt_tokens: int


class _Array(ABC):
    """A result that is an array with further attributes: it has its length, its rows and its conversion to numpy."""

    @property
    @abstractmethod
    def _array(self) -> npt.NDArray[Any] | Ragged: ...

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: Any) -> Any:
        """As of the array: row ``index``, several for a slice."""
        return self._array[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._array)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """The array itself, for ``np.asarray``; a copy for ``np.array``."""
        return np.array(self._array, dtype=dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        """The array in its own memory, for ``torch.as_tensor``."""
        return np.asarray(self._array).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Host memory, as numpy's arrays have it."""
        return np.asarray(self._array).__dlpack_device__()


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingOutput(_Array):
    """The result of ``embed``; ``len``, iteration, indexing and ``np.asarray`` go to its ``embeddings``.

    Attributes:
        embeddings: ``[n, d]`` (``[n, ceil(d / 8)]`` for the binary dtypes), in the order of the texts.
        cached: ``[n]`` bool: the vector came from the cache.
        truncated: ``[n]`` bool: the text was cut. The cache stores this with the vector.
        usage: Token counts.
    """

    embeddings: npt.NDArray[Any]
    cached: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    usage: Usage

    @property
    def _array(self) -> npt.NDArray[Any]:
        return self.embeddings

    def tolist(self) -> list[list[Any]]:
        """The rows as lists of Python numbers, ``[n][d]``, for libraries that take no arrays."""
        rows: list[list[Any]] = self.embeddings.tolist()
        return rows

    async def atolist(self) -> list[list[Any]]:
        """As :meth:`tolist`, for an event loop: other tasks run between every few rows.

        Returns:
            ``n`` lists of ``d`` numbers.
        """
        from asyncio import sleep  # not used by a program without an event loop, and takes 25 ms to import

        rows = []
        for start in range(0, len(self.embeddings), _ROWS_PER_TURN):
            if start:
                await sleep(0)
            rows += self.embeddings[start : start + _ROWS_PER_TURN].tolist()
        return rows


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenEmbeddingOutput(_Array):
    """The result of ``token_embed``; ``len``, iteration and indexing go to its ``embeddings``.

    ``np.asarray`` is a ValueError if the texts have different numbers of tokens.

    Attributes:
        embeddings: One ``[tokens_i, d]`` float32 matrix per text, special tokens and prompt included.
        truncated: ``[n]`` bool: the text was cut.
        usage: Token counts.
    """

    embeddings: Ragged
    truncated: npt.NDArray[np.bool_]
    usage: Usage

    @property
    def _array(self) -> Ragged:
        return self.embeddings


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSpans:
    """The tokens whose rows ``token_embed`` returns for one text, from ``token_spans``.

    Attributes:
        tokens: Each row's token as the vocabulary spells it: ``"##ing"``, ``"[CLS]"``.
        offsets: int32 ``[rows, 2]`` each row's characters (code points) in the caller's text, half open; ``(0, 0)`` for
            a token that stands for none: special tokens, marker, prompt, query expansion.
    """

    tokens: tuple[str, ...]
    offsets: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.tokens)


class LabelScore(NamedTuple):
    """A label and its probability.

    Attributes:
        label: The checkpoint's name of the label.
        prob: The probability, after the activation (the raw logit if the activation was switched off).
    """

    label: str
    prob: float


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassificationOutput(_Array):
    """The result of ``classify``; ``len``, iteration, indexing and ``np.asarray`` go to its ``probs``.

    Attributes:
        probs: ``[n, labels]`` float32, in the order of the texts.
        labels: The names of the columns.
        truncated: ``[n]`` bool: the text was cut.
        usage: Token counts.
    """

    probs: npt.NDArray[np.float32]
    labels: tuple[str, ...]
    truncated: npt.NDArray[np.bool_]
    usage: Usage

    @property
    def _array(self) -> npt.NDArray[np.float32]:
        return self.probs

    def top(self, k: int = 1) -> list[list[LabelScore]]:
        """The ``k`` likeliest labels of each text (all, if there are fewer).

        Args:
            k: Number of labels, from 1.

        Returns:
            ``n`` lists, best first; of equal labels the lower column comes first.

        Raises:
            InvalidRequestError: ``k`` is not a positive int.
        """
        _check_count("k", k)
        best = _descending(self.probs)[:, :k]  # [n, k]
        return [
            [LabelScore(self.labels[column], float(row[column])) for column in columns]
            for row, columns in zip(self.probs, best, strict=True)
        ]


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreOutput(_Array):
    """The result of ``score``; ``len``, iteration, indexing and ``np.asarray`` go to its ``scores``.

    Attributes:
        scores: ``[n]`` float32, one for each pair, in the order of the pairs.
        method: What the scores are: ``"cross-encoder"``, ``"listwise"``, ``"maxsim"``, or the similarity of two
            vectors: ``"cosine"``, or the checkpoint's own (``"dot"``, ``"euclidean"``, ``"manhattan"``).
        truncated: ``[n]`` bool: the pair was cut.
        usage: Token counts.
    """

    scores: npt.NDArray[np.float32]
    method: ScoreMeasure = "cross-encoder"
    truncated: npt.NDArray[np.bool_]
    usage: Usage

    @property
    def _array(self) -> npt.NDArray[np.float32]:
        return self.scores


class _Listed(Sequence[Element]):
    """A result that is a sequence of items, with further attributes."""

    @property
    @abstractmethod
    def _items(self) -> Sequence[Element]: ...

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Element: ...
    @overload
    def __getitem__(self, index: slice) -> list[Element]: ...
    def __getitem__(self, index: int | slice) -> Element | list[Element]:
        """Item ``index``; a slice gives a list of items."""
        return list(self._items[index]) if isinstance(index, slice) else self._items[index]


@dataclass(frozen=True, kw_only=True)
class RerankResult:
    """A document and how well it answers the query.

    Attributes:
        index: Index of the document in the caller's list.
        relevance_score: Higher is better; the scale depends on the checkpoint. NaN if it was not ``scored``.
        document: The document.
        scored: Whether it has a score; only with ``budget_ms`` a document may have none.
    """

    index: int
    relevance_score: float
    document: str
    scored: bool = True

    @property
    def score_or_none(self) -> float | None:
        """``relevance_score``, or ``None`` if it was not scored."""
        return self.relevance_score if self.scored else None


@dataclass(frozen=True, kw_only=True, eq=False)
class RerankOutput(_Listed[RerankResult]):
    """The result of ``rerank``: a sequence of the best documents, the best one first.

    Attributes:
        results: The same, as a tuple.
        method: What the scores are: ``"cross-encoder"``, ``"listwise"`` (-1 to 1, comparable within the list only),
            ``"cosine"`` (-1 to 1) or ``"maxsim"`` (a sum over the tokens of the query).
        truncated: ``[documents]`` bool: the pair was cut; one for each document passed in, in that order.
        scored: ``[documents]`` bool, in the same order: the pair was scored. The others are behind all that were.
        stopped: Why no more were scored: ``"all"`` are, it is ``"certain"`` (with a probability of 0.99) that the best
            ones would stay the same, or the ``"time"`` was over.
        elapsed_ms: With ``budget_ms``: milliseconds from the beginning of the call to the answer; else ``None``.
        usage: Token counts.
    """

    results: tuple[RerankResult, ...]
    method: ScoreMeasure = "cross-encoder"
    truncated: npt.NDArray[np.bool_]
    scored: npt.NDArray[np.bool_]
    stopped: Stop = "all"
    elapsed_ms: float | None = None
    usage: Usage

    @property
    def _items(self) -> Sequence[RerankResult]:
        return self.results

    @classmethod
    def ranked(
        cls,
        scores: npt.NDArray[np.float32],
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        method: ScoreMeasure = "cross-encoder",
        truncated: npt.NDArray[np.bool_],
        usage: Usage,
        rest: Sequence[int] = (),
        stopped: Stop = "all",
        elapsed_ms: float | None = None,
    ) -> RerankOutput:
        """Sort documents by their scores, best first; of equal scores the earlier document comes first.

        Args:
            scores: ``[documents]``.
            documents: The documents that were scored.
            top_n: Keep the best only; ``None`` keeps all.
            method: What the scores are.
            truncated: ``[documents]`` bool, in the order of the documents.
            usage: Token counts.
            rest: Indices of the documents that have no score (NaN), in the order in which they follow the others.
            stopped: Why they have none.
            elapsed_ms: Milliseconds that a call with a budget took.

        Returns:
            The results, at most ``top_n``, best first.

        Raises:
            InvalidRequestError: ``top_n`` is not a positive int.
        """
        if top_n is not None:
            _check_count("top_n", top_n)
        scored = np.ones(len(documents), dtype=np.bool_)
        scored[list(rest)] = False
        order = [*_descending(scores)[: len(documents) - len(rest)].tolist(), *rest]  # NaN sorts behind all numbers
        results = tuple(
            RerankResult(
                index=index,
                relevance_score=float(scores[index]),
                document=documents[index],
                scored=bool(scored[index]),
            )
            for index in order[:top_n]
        )
        return cls(
            results=results,
            method=method,
            truncated=truncated,
            scored=scored,
            stopped=stopped,
            elapsed_ms=elapsed_ms,
            usage=usage,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class RewardOutput(_Array):
    """The result of ``reward``; ``len``, iteration and indexing go to its ``rewards``.

    ``np.asarray`` is a ValueError if the texts have different numbers of rows.

    Attributes:
        rewards: One ``[rows_i, labels]`` float32 matrix per text: a single row if the checkpoint rewards whole texts,
            else a row for each token or step. Raw, unless an activation was requested.
        truncated: ``[n]`` bool: the text was cut.
        usage: Token counts.
    """

    rewards: Ragged
    truncated: npt.NDArray[np.bool_]
    usage: Usage

    @property
    def _array(self) -> Ragged:
        return self.rewards


@dataclass(frozen=True, kw_only=True)
class Entity:
    """A span of a text, and its label.

    Attributes:
        label: The label; without its ``B-`` or ``I-`` if tokens were aggregated.
        score: The probability of the label.
        start: Index of the first character (code point) of the span.
        end: Index after its last character.
        text: The span itself, ``text[start:end]`` of the caller's text.
    """

    label: str
    score: float
    start: int
    end: int
    text: str


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenClassificationOutput(_Listed[list[Entity]]):
    """The result of ``token_classify``: a sequence of one list of entities per text.

    Attributes:
        entities: The same, as a tuple. Each list is in the order of the text.
        probs: One ``[tokens_i, labels]`` float32 matrix per text, special tokens included; for labels of the caller's
            ``[entities_i, labels]``.
        labels: The names of the columns.
        truncated: ``[n]`` bool: the text was cut.
        usage: Token counts.
    """

    entities: tuple[list[Entity], ...]
    probs: Ragged
    labels: tuple[str, ...]
    truncated: npt.NDArray[np.bool_]
    usage: Usage

    @property
    def _items(self) -> Sequence[list[Entity]]:
        return self.entities


@dataclass(frozen=True, kw_only=True, eq=False)
class SparseEmbeddingOutput(_Listed[dict[int, float]]):
    """The result of ``sparse_embed``: a sequence of one ``{token id: weight}`` per text.

    Attributes:
        embeddings: The same, as a list. Tokens of weight 0 are left out.
        truncated: ``[n]`` bool: the text was cut.
        usage: Token counts.
    """

    embeddings: list[dict[int, float]]
    truncated: npt.NDArray[np.bool_]
    usage: Usage

    @property
    def _items(self) -> Sequence[dict[int, float]]:
        return self.embeddings


def _descending(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.intp]:
    """Indices along the last axis, the highest score first; of equal scores the lower index first."""
    return np.argsort(-scores, axis=-1, kind="stable")


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise InvalidRequestError(f"{name}={value!r} must be an int from 1")
