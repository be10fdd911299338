"""Prompts and tokenization options as vLLM's callers write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from millpond.errors import InvalidRequestError
from millpond.inputs import Item, TokenIds
from millpond.tasks import Truncate

_OPTIONS = ("add_special_tokens", "max_length", "padding", "truncate_prompt_tokens", "truncation", "truncation_side")
_CUT = (True, "longest_first", "only_first", "only_second")
_UNCUT = (None, False, "do_not_truncate")


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """What ``tokenization_kwargs`` ask for.

    Attributes:
        truncate: ``error`` unless truncation was asked for, as in vLLM.
        limit: Most tokens; ``None`` and -1 are the model's maximum.
        side: The end of a text that is cut, once anything is.
        special_tokens: Whether a text gets its special tokens.
        refuses: Whether truncation was declined in so many words, which also a ColBERT's own lengths must heed.
    """

    truncate: Truncate = "error"
    limit: int | None = None
    side: Truncate = "end"
    special_tokens: bool = True
    refuses: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, truncate_prompt_tokens: int | None = None) -> Tokenization:
        """Read ``tokenization_kwargs``, and the argument that older methods had besides.

        Raises:
            InvalidRequestError: An option that is unknown, or of no meaning here.
        """
        options = {key: value for key, value in (options or {}).items() if value is not None}
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown:
            raise InvalidRequestError(
                f"tokenization_kwargs has {unknown[0]}, which is unknown; it may have {', '.join(_OPTIONS)}"
            )
        if options.get("padding") not in (None, False, "do_not_pad"):
            raise InvalidRequestError(f"padding={options['padding']!r}: millpond never pads; leave it out")
        right_or_left = options.get("truncation_side", "right")
        if right_or_left not in ("left", "right"):
            raise InvalidRequestError(f"truncation_side={right_or_left!r} is unknown; choose left or right")
        special_tokens = options.get("add_special_tokens", True)
        if not isinstance(special_tokens, bool):
            raise InvalidRequestError(f"add_special_tokens={special_tokens!r} must be True or False")
        side: Truncate = "start" if right_or_left == "left" else "end"
        limit = options.get("truncate_prompt_tokens", truncate_prompt_tokens)
        wanted = options.get("truncation")
        cut, limit = _cut(limit, wanted, options.get("max_length"))
        return cls(
            truncate=side if cut else "error",
            limit=limit,
            side=side,
            special_tokens=special_tokens,
            refuses=wanted is not None and not cut,
        )

    def cutting_to(self, limit: int) -> Tokenization:
        """These options with a request's own limit, which is a wish to truncate."""
        return replace(self, truncate=self.side, limit=limit, refuses=False)


def _cut(limit: int | None, wanted: Any, max_length: int | None) -> tuple[bool, int | None]:
    """Whether over-long texts are cut, and to how many tokens."""
    if wanted not in (*_CUT, *_UNCUT):
        raise InvalidRequestError(f"truncation={wanted!r} is unknown; choose True or False")
    if limit is not None:
        return True, limit
    if wanted in (False, "do_not_truncate"):
        return False, None
    return wanted is not None or max_length is not None, max_length  # as transformers: a length by itself truncates


def read_prompts(prompts: Any) -> list[Item]:
    """Prompts as items: a str, ``{"prompt": ...}``, ``{"prompt_token_ids": [...]}``, token ids, or a list of these.

    Raises:
        InvalidRequestError: None at all, or one of another kind.
    """
    alone = isinstance(prompts, str | bytes | Mapping) or _are_ids(prompts) or not isinstance(prompts, Iterable)
    listed = [prompts] if alone else list(prompts)
    if not listed:
        raise InvalidRequestError("You must pass at least one prompt; got an empty list")
    return [_read(prompt, i) for i, prompt in enumerate(listed)]


def _read(prompt: Any, i: int) -> Item:
    if isinstance(prompt, str):
        return prompt
    if _are_ids(prompt):
        return TokenIds(tuple(prompt))
    if isinstance(prompt, Mapping) and not prompt.keys() - {"prompt", "prompt_token_ids"}:
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if isinstance(ids, list | tuple):
            return TokenIds(tuple(ids))
        if isinstance(text, str) and ids is None:
            return text
    raise InvalidRequestError(
        f"the prompt at index {i} is {prompt!r:.80}; pass a str, "
        '{"prompt": str} or {"prompt_token_ids": [int, ...]}'
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(type(part) is int for part in value)


def read_texts(data: Any, name: str) -> list[str]:
    """One side of ``score``: a str, ``{"content": [text parts]}``, ``{"text": ...}``, or a list of these.

    ``{"prompt": ...}`` is vLLM's offline word for the third.

    Raises:
        InvalidRequestError: None at all, or one that is no text.
    """
    alone = isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable)
    listed = [data] if alone else list(data)
    if not listed:
        raise InvalidRequestError(f"At least one text is needed in {name}; got an empty list")
    return [_text(entry, name, i) for i, entry in enumerate(listed)]


def _text(entry: Any, name: str, i: int) -> str:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, Mapping):
        for key in ("prompt", "text"):
            if isinstance(entry.get(key), str):
                return str(entry[key])
        content = entry.get("content")
        if isinstance(content, str):
            return content
        if isinstance(content, list) and content and all(map(_is_text_part, content)):
            return "\n".join(part["text"] for part in content)
    raise InvalidRequestError(f"{name} has {entry!r:.80} at index {i}; millpond reads texts only")


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
