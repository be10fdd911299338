"""The tokenizer of static embeddings: tokenizer.json as it is, without special tokens, and model2vec's rules."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from millpond.checkpoints.layouts.static import NO_LENGTH, StaticTable
from millpond.checkpoints.tokenizers.read import TokenizerFile
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.engine.tokenize.tokenized import Tokenized
from millpond.errors import ModelLoadError, WeightMismatchError


def without_specials(tokenizer: TokenizerFile, *, rows: int) -> TextTokenizer:
    """The tokenizer of a table of ``rows`` weights: it adds no special tokens, and ``rows`` stands for no token."""
    backend = tokenizer.backend
    backend.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    limit = tokenizer.limit if tokenizer.limit is not None and tokenizer.limit < NO_LENGTH else NO_LENGTH
    return TextTokenizer(
        backend,
        lower=False,
        limit=limit,
        placeholder=rows,
        specials=tokenizer.specials,
        side="start" if tokenizer.cuts_start else "end",
    )


class StaticTokenizer(TextTokenizer):
    """Token ids without special tokens. A text without tokens has one that stands for none, whose vector is 0."""

    def __init__(self, backend: Tokenizer, table: StaticTable, *, rows: int) -> None:
        """``rows``: those of the table; the id after the last one stands for no token."""
        vocabulary = backend.get_vocab()
        highest = max(vocabulary.values(), default=-1)
        if highest >= rows:
            raise WeightMismatchError(
                f"{table.folder}: tokenizer.json has token {highest}, and the table {rows} rows; do the files belong "
                "together?"
            )
        backend.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
        unknown = _unknown(backend) if table.model2vec else None
        super().__init__(backend, lower=False, limit=table.length, placeholder=rows)
        self._nothing, self._unknown = rows, unknown
        self._characters = int(np.median([len(token) for token in vocabulary])) if table.model2vec else 0

    @classmethod
    def read(cls, table: StaticTable, *, rows: int) -> StaticTokenizer:
        """Read ``tokenizer.json`` of a table with so many rows."""
        path = table.folder / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(f"{table.folder} has no tokenizer.json, which a table of token vectors is read by")
        try:
            backend = Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ModelLoadError(f"{path} cannot be read: {error}; fetch it again") from error
        return cls(backend, table, rows=rows)

    def encode(
        self, texts: Sequence[str], *, prompt: str, limit: int, index_of: Callable[[int], int], **options: Any
    ) -> list[Tokenized]:
        """As :meth:`TextTokenizer.encode`; model2vec cuts characters before it, and drops unknown tokens after it."""
        if self._characters and options.get("truncate") == "end":
            most = max(0, limit * self._characters - len(prompt))
            texts = [text if len(text) <= most else text[:most] for text in texts]
        items = super().encode(texts, prompt=prompt, limit=limit, index_of=index_of, **options)
        if self._unknown is None:
            return items
        return [self._without_unknown(item) for item in items]

    def encode_one(self, text: str, **options: Any) -> Tokenized | None:
        """As :meth:`TextTokenizer.encode_one`."""
        return None if self._characters else super().encode_one(text, **options)

    def _without_unknown(self, item: Tokenized) -> Tokenized:
        kept = item.ids != self._unknown
        if kept.all():
            return item
        if not kept.any():
            return replace(item, ids=np.array([self._nothing], dtype=np.int32), alignment=_first(item))
        alignment = None if item.alignment is None else item.alignment.take(kept)
        return replace(item, ids=item.ids[kept], alignment=alignment)


def _first(item: Tokenized) -> Any:
    return None if item.alignment is None else item.alignment.take(np.arange(len(item.ids)) == 0)


def _unknown(backend: Tokenizer) -> int | None:
    """The id of the tokenizer's unknown token."""
    model: Any = backend.model
    if hasattr(model, "unk_token"):
        return None if model.unk_token is None else backend.token_to_id(model.unk_token)
    unknown = json.loads(backend.to_str())["model"].get("unk_id")
    return None if unknown is None else int(unknown)
