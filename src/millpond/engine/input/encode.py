"""InputEncoder: tokenizes items of every kind by the plan of their call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from millpond.engine.input.oversize import all_small, pre_truncate, split_by_size
from millpond.engine.input.plan import EncodesPairs, IndexOf, Plan
from millpond.engine.tokenize.large_texts import turn
from millpond.engine.tokenize.long_texts import is_oversize
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.engine.tokenize.tokenized import TokenAlignment, Tokenized, too_long
from millpond.errors import InputTooLongError, InvalidRequestError
from millpond.late_interaction.encoding.markers import ColbertEncoder, EncodedText
from millpond.values.inputs import Item, Pair, TokenIds, size_of, text_of


@dataclass(frozen=True, kw_only=True)
class InputEncoder:
    """How a checkpoint reads each kind of item."""

    texts: TextTokenizer  # its tokenizer
    pairs: EncodesPairs | None = None  # reads pairs; `None` if the checkpoint reads none
    # encodes queries and documents for late interaction; `None` if the checkpoint has none
    colbert: ColbertEncoder | None = None
    # rows of the embedding table, if the tokenizer has ids beyond the last; `None`: it has none
    rows: int | None = None

    def encode(self, items: Sequence[Item], plan: Plan, *, index_of: IndexOf) -> list[Tokenized]:
        """Tokenize each item."""
        encoded = self._encode(items, plan, index_of)
        if self.rows is not None:
            self._check_rows(encoded, self.rows, index_of)
        return encoded

    def _check_rows(self, encoded: Sequence[Tokenized], rows: int, index_of: IndexOf) -> None:
        for i, item in enumerate(encoded):
            highest = int(item.ids.max(initial=0))
            if highest >= rows:
                (name,) = self.texts.token_names([highest])
                raise InvalidRequestError(
                    f"the input at index {index_of(i)} has the token {name!r} with id {highest}, and the model has "
                    f"vectors for the ids 0 to {rows - 1}; leave the token out, or fetch the tokenizer and the weights "
                    "of one revision"
                )

    def _encode(self, items: Sequence[Item], plan: Plan, index_of: IndexOf) -> list[Tokenized]:
        if all_small(items):
            return self._encode_kinds(items, plan, index_of)
        return [
            item
            for indices in split_by_size(items)
            for item in self._encode_some([items[i] for i in indices], plan, partial(_nth, indices, index_of))
        ]

    def _encode_some(self, items: Sequence[Item], plan: Plan, index_of: IndexOf) -> list[Tokenized]:
        """Tokenize items that are few or short enough to be tokenized at once."""
        parts = {
            i: pre_truncate(item, self.texts, limit=plan.limit, truncate=plan.truncate)
            for i, item in enumerate(items)
            if _may_truncate(item, plan)
        }
        if not parts:
            return self._encode_kinds(items, plan, index_of)
        shortened = [i for i, part in parts.items() if size_of(part) < size_of(items[i])]
        try:
            return self._encode_kinds([parts.get(i, item) for i, item in enumerate(items)], plan, index_of)
        except InputTooLongError as error:
            if error.tokens is None or error.index not in [index_of(i) for i in shortened]:
                raise
            raise InputTooLongError(
                str(error).replace(" has ", " has at least ", 1),
                index=error.index,
                tokens=error.tokens,
                limit=error.limit,
                at_least=True,
            ) from None

    def _encode_kinds(self, items: Sequence[Item], plan: Plan, index_of: IndexOf) -> list[Tokenized]:
        """Tokenize items of any kind; items of one kind are tokenized together."""
        if set(map(type, items)) == {str}:
            return _mark_kept(self._texts(items, plan, index_of), plan)
        encoded: dict[int, Tokenized] = {}
        for kind, encode in ((TokenIds, self._ids), (Pair, self._pairs), (object, self._texts)):
            indices = [i for i, item in enumerate(items) if i not in encoded and isinstance(item, kind)]
            if indices:
                of_kind = encode([items[i] for i in indices], plan, partial(_nth, indices, index_of))
                encoded.update(zip(indices, of_kind, strict=True))
        return _mark_kept([encoded[i] for i in range(len(items))], plan)

    def _ids(self, items: Sequence[Item], plan: Plan, index_of: IndexOf) -> list[Tokenized]:
        return [_cut(item, plan, index_of(i)) for i, item in enumerate(items) if isinstance(item, TokenIds)]

    def _pairs(self, items: Sequence[Item], plan: Plan, index_of: IndexOf) -> list[Tokenized]:
        reader = plan.pairs or self.pairs
        assert reader is not None  # pairs are refused by every checkpoint without a reader
        return reader.encode(
            [item for item in items if isinstance(item, Pair)],
            instruction=plan.instruction,
            limit=plan.limit,
            truncate=plan.truncate,
            index_of=index_of,
        )

    def _texts(self, items: Sequence[Item], plan: Plan, index_of: IndexOf) -> list[Tokenized]:
        texts = list(map(text_of, items))
        align = plan.task == "token_classify" or any(not isinstance(item, str) for item in items)
        if plan.form == "colbert":
            return self._colbert_texts(texts, plan, index_of, align=align)
        return self.texts.encode(
            texts,
            prompt=plan.prompt,
            limit=plan.limit,
            truncate=plan.truncate,
            index_of=index_of,
            align=align,
            noun=plan.role or "text",
        )

    def _colbert_texts(self, texts: Sequence[str], plan: Plan, index_of: IndexOf, *, align: bool) -> list[Tokenized]:
        assert self.colbert is not None and plan.role is not None
        with turn(texts):
            encoded = self.colbert.encode(
                texts,
                role=plan.role,
                prompt=plan.prompt,
                limit=plan.limit,
                truncate=plan.truncate,
                index_of=index_of,
                align=align,
            )
        return [
            Tokenized(
                ids=text.ids,
                truncated=text.truncated,
                attended=text.attended,
                kept=text.kept,
                alignment=self._colbert_alignment(text, whole) if align else None,
            )
            for text, whole in zip(encoded, texts, strict=True)
        ]

    def _colbert_alignment(self, text: EncodedText, whole: str) -> TokenAlignment:
        """The alignment of the tokens that are scored; it has no words."""
        assert text.offsets is not None
        offsets, inside = self.texts.offsets_in_text(text.offsets, text.prompt, whole)
        alignment = TokenAlignment(
            offsets=offsets,
            special=~inside | (text.offsets[:, 0] == text.offsets[:, 1]),
            words=np.full(len(offsets), -1, dtype=np.int32),
        )
        return alignment if text.kept is None else alignment.take(text.kept)


def _nth(indices: Sequence[int], index_of: IndexOf, i: int) -> int:
    return index_of(indices[i])


def _cut(item: TokenIds, plan: Plan, index: int) -> Tokenized:
    """Token ids cut to the plan's limit; the item's tail stays."""
    ids = np.array(item.ids, dtype=np.int32)
    if len(ids) > plan.limit and plan.truncate == "error":
        raise too_long("prompt", index, len(ids), plan.limit)
    if plan.truncate == "end":
        end = len(ids) - item.tail
        kept = np.concatenate((ids[: min(end, plan.limit - item.tail)], ids[end:]))
    else:
        kept = ids[-plan.limit :]
    return Tokenized(ids=kept, truncated=len(kept) < len(ids))


def _mark_kept(items: list[Tokenized], plan: Plan) -> list[Tokenized]:
    """Mark the rows that a per-token result contains, by the plan's step tag and leading rows."""
    if plan.step_tag_id is None and not plan.first_kept:
        return items  # with the marks that they have, if any
    marked = []
    for item in items:
        kept = np.arange(len(item.ids)) >= plan.first_kept
        if plan.step_tag_id is not None:
            kept &= item.ids == plan.step_tag_id
        if item.kept is not None:
            kept &= item.kept
        alignment = None if item.alignment is None else item.alignment.take(kept)
        marked.append(replace(item, kept=kept, alignment=alignment))
    return marked


def _may_truncate(item: Item, plan: Plan) -> bool:
    """Whether ``item`` is oversize and a part of it can be tokenized instead.

    The end of a text may not, if there is a prompt before it or offsets are counted from its beginning.
    """
    ends = isinstance(item, str) and plan.form == "text" and not plan.prompt and plan.task != "token_classify"
    if plan.truncate == "start" and not ends:
        return False
    if isinstance(item, Pair):
        return is_oversize(item.query, plan.limit) or is_oversize(item.document, plan.limit)
    return is_oversize(text_of(item), plan.limit)
