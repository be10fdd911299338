"""Forms: every kind of item, made into tokens as its call plans it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from millpond.engine.input.oversize import bunches, is_giant, lessened
from millpond.engine.input.plan import EncodesPairs, Plan, Position
from millpond.engine.input.text_tokenizer import TextTokenizer, Tokenized
from millpond.errors import InputTooLongError
from millpond.inputs import Item, Pair, TokenIds, size_of, text_of

if TYPE_CHECKING:
    from millpond.late_interaction.encode import ColbertEncoder


@dataclass(frozen=True, kw_only=True)
class InputEncoder:
    """The ways in which a checkpoint reads.

    Attributes:
        texts: Its tokenizer.
        pairs: How it reads pairs; ``None`` where it does not.
        colbert: How it reads queries and documents for late interaction; ``None`` where it does not.
    """

    texts: TextTokenizer
    pairs: EncodesPairs | None = None
    colbert: ColbertEncoder | None = None

    def encode(self, items: Sequence[Item], plan: Plan, *, position: Position) -> list[Tokenized]:
        """Each item, ready to run.

        Raises:
            InputTooLongError: An item is too long, and may not be cut or cannot.
            InvalidRequestError: An item has no tokens at all.
        """
        return [
            item
            for places in bunches(items)
            for item in self._together([items[i] for i in places], plan, partial(_nth, places, position))
        ]

    def _together(self, items: Sequence[Item], plan: Plan, position: Position) -> list[Tokenized]:
        """Items that are few, or short, enough to be tokenized at once."""
        parts = {
            i: lessened(item, self.texts, limit=plan.limit, truncate=plan.truncate)
            for i, item in enumerate(items)
            if self._is_giant(item, plan)
        }
        if not parts:
            return self._each(items, plan, position)
        less = [i for i, part in parts.items() if size_of(part) < size_of(items[i])]
        try:
            return self._each([parts.get(i, item) for i, item in enumerate(items)], plan, position)
        except InputTooLongError as error:
            if error.tokens is None or error.index not in [position(i) for i in less]:
                raise
            raise InputTooLongError(
                str(error).replace(" has ", " has at least ", 1),
                index=error.index,
                tokens=error.tokens,
                limit=error.limit,
                at_least=True,
            ) from None

    def _is_giant(self, item: Item, plan: Plan) -> bool:
        """Whether a part of ``item`` may do; not its end, where there is a prompt or places are counted in front."""
        ends = isinstance(item, str) and plan.form == "text" and not plan.prompt and plan.task != "token_classify"
        if plan.truncate == "start" and not ends:
            return False
        if isinstance(item, Pair):
            return is_giant(item.query, plan.limit) or is_giant(item.document, plan.limit)
        return isinstance(item, str) and is_giant(item, plan.limit)

    def _each(self, items: Sequence[Item], plan: Plan, position: Position) -> list[Tokenized]:
        if all(type(item) is str for item in items):
            return _all_kept(self._texts(items, plan, position), plan)
        found: dict[int, Tokenized] = {}
        for kind, encode in ((TokenIds, self._ids), (Pair, self._pairs), (object, self._texts)):
            places = [i for i, item in enumerate(items) if i not in found and isinstance(item, kind)]
            if places:
                encoded = encode([items[i] for i in places], plan, partial(_nth, places, position))
                found.update(zip(places, encoded, strict=True))
        return _all_kept([found[i] for i in range(len(items))], plan)

    def _ids(self, items: Sequence[Item], plan: Plan, position: Position) -> list[Tokenized]:
        return [_cut(item, plan, position(i)) for i, item in enumerate(items) if isinstance(item, TokenIds)]

    def _pairs(self, items: Sequence[Item], plan: Plan, position: Position) -> list[Tokenized]:
        reader = plan.pairs or self.pairs
        assert reader is not None  # only cross-encoders are given pairs
        return reader.encode(
            [item for item in items if isinstance(item, Pair)],
            instruction=plan.instruction,
            limit=plan.limit,
            truncate=plan.truncate,
            position=position,
        )

    def _texts(self, items: Sequence[Item], plan: Plan, position: Position) -> list[Tokenized]:
        texts = [text_of(item) for item in items]
        if plan.form == "colbert":
            assert self.colbert is not None and plan.role is not None
            return [
                Tokenized(ids=e.ids, truncated=e.truncated, attended=e.attended, kept=e.kept)
                for e in self.colbert.encode(
                    texts,
                    role=plan.role,
                    prompt=plan.prompt,
                    limit=plan.limit,
                    truncate=plan.truncate,
                    position=position,
                )
            ]
        spanned = plan.task == "token_classify" or any(not isinstance(item, str) for item in items)
        return self.texts.encode(
            texts,
            prompt=plan.prompt,
            limit=plan.limit,
            truncate=plan.truncate,
            position=position,
            places=spanned,
            noun=plan.role or "text",
        )


def _nth(places: Sequence[int], position: Position, i: int) -> int:
    return position(places[i])


def _cut(item: TokenIds, plan: Plan, position: int) -> Tokenized:
    ids = np.array(item.ids, dtype=np.int32)
    if len(ids) > plan.limit and plan.truncate == "error":
        raise InputTooLongError(
            f"the prompt at index {position} has {len(ids)} token ids, more than max_length={plan.limit}; "
            'shorten it, or let it be cut with truncate="end"',
            index=position,
            tokens=len(ids),
            limit=plan.limit,
        )
    if plan.truncate == "end":
        end = len(ids) - item.tail
        kept = np.concatenate((ids[: min(end, plan.limit - item.tail)], ids[end:]))
    else:
        kept = ids[-plan.limit :]
    return Tokenized(ids=kept, truncated=len(kept) < len(ids))


def _all_kept(items: list[Tokenized], plan: Plan) -> list[Tokenized]:
    """Items with the rows marked that a per-token result has."""
    if plan.step_tag_id is None and not plan.first_kept:
        return items  # their own marks, if any, are all there are
    return [_kept(item, plan) for item in items]


def _kept(item: Tokenized, plan: Plan) -> Tokenized:
    """``item`` with the rows marked that a per-token result has."""
    masks: list[npt.NDArray[np.bool_]] = [] if item.kept is None else [item.kept]
    if plan.step_tag_id is not None:
        masks.append(item.ids == plan.step_tag_id)
    if plan.first_kept:
        masks.append(np.arange(len(item.ids)) >= plan.first_kept)
    if not masks:
        return item
    kept = np.logical_and.reduce(masks)
    return replace(item, kept=kept, places=None if item.places is None else item.places.take(kept))
