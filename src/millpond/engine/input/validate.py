"""Validate: the inputs of a call, checked and converted to its items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from millpond.engine.input.model import LoadedModel
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.errors import InvalidRequestError
from millpond.values.inputs import Item, Pair, SpannedText, TokenIds


def check_items(inputs: Any, method: str, loaded: LoadedModel, *, first: int = 0) -> list[Item]:
    """The inputs of a call as a list of items."""
    if isinstance(inputs, str | bytes | Pair) or not isinstance(inputs, Iterable) or isinstance(inputs, dict):
        raise TypeError(f"{method} takes a list of texts, not a {type(inputs).__name__}; write {method}([text])")
    checked = list(inputs)
    if method != "score" and set(map(type, checked)) == {str} and all(map(str.isascii, checked)):
        return checked  # what most calls have, looked at without a loop in Python
    for i, item in enumerate(checked):
        if method == "classify" and isinstance(item, Pair) and loaded.encoder.pairs is not None:
            checked[i] = _check_item(item, first + i, method, loaded)
            continue
        if type(item) is not str:
            checked[i] = item = _check_item(item, first + i, method, loaded)
        elif not item.isascii():
            check_unicode(item, f"the text at index {first + i}")
        if (method == "score") is not isinstance(item, Pair) and not isinstance(item, TokenIds):
            kind = "a (query, document) pair" if method == "score" else "a text"
            raise InvalidRequestError(f"{method} takes {kind} at index {first + i}, not a {type(item).__name__}")
    return checked


def check_texts(inputs: Any, method: str, loaded: LoadedModel) -> list[str]:
    """The inputs of a method that takes texts only."""
    items = check_items(inputs, method, loaded)
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) < len(items):
        i, kind = next((i, type(item).__name__) for i, item in enumerate(items) if not isinstance(item, str))
        raise InvalidRequestError(f"{method} takes a text at index {i}, not a {kind}")
    return texts


def check_pairs(items: Sequence[Item], loaded: LoadedModel) -> list[Pair]:
    """The items of a score whose queries and documents are embedded separately."""
    pairs = [item for item in items if isinstance(item, Pair)]
    if len(pairs) < len(items):
        raise InvalidRequestError(
            f"score takes (query, document) pairs, not token ids: {loaded.spec.name} scores by "
            f"{loaded.spec.score_type}, which reads the two apart"
        )
    return pairs


def _check_item(item: Any, i: int, method: str, loaded: LoadedModel) -> Item:
    if isinstance(item, TokenIds):
        return _check_ids(item, i, loaded.vocabulary)
    if isinstance(item, SpannedText):
        check_unicode(item.text, f"the text at index {i}")
        return item
    if isinstance(item, tuple) and len(item) == 2:
        for part, side in zip(item, ("query", "document"), strict=True):
            if not isinstance(part, str):
                raise InvalidRequestError(
                    f"the {side} at index {i} is a {type(part).__name__}, not a str; convert it first"
                )
            check_unicode(part, f"the {side} at index {i}")
        return Pair(str(item[0]), str(item[1]))
    if not isinstance(item, str):
        kind = "a (query, document) tuple" if method == "score" else "a str"
        raise InvalidRequestError(f"the text at index {i} is a {type(item).__name__}, not {kind}; convert it first")
    check_unicode(item, f"the text at index {i}")
    return str(item)


def _check_ids(item: TokenIds, i: int, vocabulary: int) -> TokenIds:
    if not item.ids:
        raise InvalidRequestError(f"the prompt at index {i} has no token ids; pass at least one")
    for token in item.ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
            raise InvalidRequestError(
                f"the prompt at index {i} has the token id {token!r:.40}, which is out of vocabulary; this model's ids "
                f"run from 0 to {vocabulary - 1}"
            )
    return item


def check_unicode(text: str, what: str) -> None:
    """Refuse a text with a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{what} holds a lone surrogate (U+{ord(text[error.start]):04X} at {error.start}), which is not a "
            'character; replace it, for example with text.encode("utf-8", "replace").decode()'
        ) from error


def with_spans(texts: Any, spans: Any) -> list[SpannedText]:
    """Each text with its spans."""
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise TypeError(f"token_embed takes a list of texts, not a {type(texts).__name__}; write token_embed([text])")
    if not isinstance(spans, Iterable):
        raise InvalidRequestError(f"spans={spans!r} must be a list with the (start, end) pairs of each text")
    texts, spans = list(texts), list(spans)
    if len(texts) != len(spans):
        raise InvalidRequestError(f"{len(texts)} texts and {len(spans)} lists of spans; pass one list for each text")
    return [_with_spans(i, text, own) for i, (text, own) in enumerate(zip(texts, spans, strict=True))]


def _with_spans(i: int, text: Any, spans: Any) -> SpannedText:
    if not isinstance(text, str):
        raise InvalidRequestError(f"the text at index {i} is a {type(text).__name__}, not a str; convert it first")
    if not isinstance(spans, Iterable):
        raise InvalidRequestError(f"the spans of the text at index {i} are {spans!r}; pass a list of (start, end)")
    checked = []
    for span in spans:
        two_ints = isinstance(span, Sequence | np.ndarray) and len(span) == 2
        two_ints = two_ints and all(isinstance(edge, int | np.integer) and type(edge) is not bool for edge in span)
        if not two_ints or not 0 <= span[0] < span[1] <= len(text):
            raise InvalidRequestError(
                f"the text at index {i} has the span {span!r}; a span is (start, end) in characters, "
                f"0 <= start < end <= {len(text)}"
            )
        checked.append((int(span[0]), int(span[1])))
    return SpannedText(text, tuple(checked))


def rendered_conversations(inputs: Any, tokenizer: TextTokenizer) -> Any:
    """The inputs, with every conversation (a list of messages) rendered by the checkpoint's chat template."""
    if isinstance(inputs, str | bytes | dict) or not isinstance(inputs, Iterable):
        return inputs  # refused by check_items
    return [
        _conversation(item, i, tokenizer) if isinstance(item, list | tuple) else item for i, item in enumerate(inputs)
    ]


def _conversation(messages: Sequence[Any], i: int, tokenizer: TextTokenizer) -> TokenIds:
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        raise InvalidRequestError(
            f"the conversation at index {i} must be a list of messages, each a dict such as "
            '{"role": "user", "content": "..."}'
        )
    ids, tail = tokenizer.converse(messages, i)
    return TokenIds(tuple(ids), tail=tail)
