"""Pairs to token ids by the tokenizer's pair template; in C++ where it reads both texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from millpond.engine.tokenize.native_tokenizer import NativeTokenizer

Ids = npt.NDArray[np.int32]


@dataclass(kw_only=True, slots=True, eq=False)  # one for every pair, as Tokenized
class PairIds:
    """A pair, uncut."""

    ids: Ids  # int32 `[tokens]`, special tokens included
    type_ids: npt.NDArray[np.int8]  # int8 `[tokens]` token types
    places: Callable[[], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]  # indices of either text's tokens


class PairTemplate:
    """What stands before the two texts of a pair, between them and behind them."""

    def __init__(self, parts: Sequence[Ids], types: npt.NDArray[np.int8], *, prefix: int, suffix: int) -> None:
        """``parts``: ids before, between and behind; ``types``: of the parts and the texts, int8 ``[5]``."""
        self._before, self._between, self._behind = parts
        self._types = types
        self._prefix, self._suffix = prefix, suffix

    @classmethod
    def of(cls, backend: Tokenizer, *, prefix: int, suffix: int) -> PairTemplate | None:
        """The template that ``backend`` has; ``None`` if it is none of this kind.

        ``prefix`` and ``suffix``: special tokens around a single text.
        """
        encoding, single = backend.encode("a a", "a"), backend.encode("a a")
        sides = [-1 if side is None else side for side in encoding.sequence_ids]
        order = [side for i, side in enumerate(sides) if i == 0 or side != sides[i - 1]]
        if [side for side in order if side >= 0] != [0, 1] or prefix + suffix >= len(single.ids):
            return None
        ids, types = np.array(encoding.ids, dtype=np.int32), np.array(encoding.type_ids, dtype=np.int8)
        first, second = (np.flatnonzero(np.array(sides) == side) for side in (0, 1))
        cuts = [int(first[0]), int(first[-1]) + 1, int(second[0]), int(second[-1]) + 1]
        parts = np.split(ids, cuts)
        kinds = [part[:1] if len(part) else np.zeros(1, dtype=np.int8) for part in np.split(types, cuts)]
        made = cls(parts[::2], np.concatenate(kinds), prefix=prefix, suffix=suffix)
        found = made.join(np.array(single.ids, dtype=np.int32), np.array(backend.encode("a").ids, dtype=np.int32))
        same = np.array_equal(found.ids, ids) and np.array_equal(found.type_ids, types)
        return made if same else None

    def join(self, first: Ids, second: Ids) -> PairIds:
        """The pair of two texts, given as they are tokenized alone."""
        first, second = (ids[self._prefix : len(ids) - self._suffix] for ids in (first, second))
        parts = (self._before, first, self._between, second, self._behind)
        sizes = [len(part) for part in parts]

        def places() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
            query, document = sizes[0], sum(sizes[:3])
            return np.arange(query, query + sizes[1]), np.arange(document, document + sizes[3])

        return PairIds(ids=np.concatenate(parts), type_ids=np.repeat(self._types, sizes), places=places)


def of_encoding(encoding: Encoding) -> PairIds:
    """A pair as the library tokenizers has it."""

    def places() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        sides = np.array([-1 if side is None else side for side in encoding.sequence_ids], dtype=np.int8)
        return np.flatnonzero(sides == 0), np.flatnonzero(sides == 1)

    ids, types = np.array(encoding.ids, dtype=np.int32), np.array(encoding.type_ids, dtype=np.int8)
    return PairIds(ids=ids, type_ids=types, places=places)


def read_pairs(
    texts: Sequence[str],
    *,
    backend: Tokenizer,
    native: NativeTokenizer | None,
    template: PairTemplate | None,
    fold: Callable[[str], str],
) -> list[PairIds]:
    """The pairs of texts that follow each other; ``fold``: what ``backend`` needs before it."""
    joined: list[PairIds | None] = [None] * (len(texts) // 2)
    if native is not None and template is not None:
        found = native.split(texts)
        joined = [
            template.join(first, second) if first is not None and second is not None else None
            for first, second in zip(found[::2], found[1::2], strict=True)
        ]
    rest = [fold(text) for i, text in enumerate(texts) if joined[i // 2] is None]
    # Without a post-processor the fast variant leaves the token types of the second text out, too.
    encode = backend.encode_batch if backend.post_processor is None else backend.encode_batch_fast
    own = map(of_encoding, encode(list(zip(rest[::2], rest[1::2], strict=True))) if rest else ())
    return [next(own) if pair is None else pair for pair in joined]
