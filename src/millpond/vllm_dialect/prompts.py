"""Prompts and tokenization options in vLLM's forms."""

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
    """Parsed ``tokenization_kwargs``.

    Attributes:
        truncate: ``error`` unless truncation was requested, as in vLLM.
        limit: Maximum number of tokens; ``None`` and -1: the model's maximum.
        side: End of a text that is cut, if it is cut.
        special_tokens: Special tokens are added to texts.
        refuses: Truncation was declined explicitly, which also disables truncation to a ColBERT's own lengths.
    """

    truncate: Truncate = "error"
    limit: int | None = None
    side: Truncate = "end"
    special_tokens: bool = True
    refuses: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, truncate_prompt_tokens: int | None = None) -> Tokenization:
        """Parse ``tokenization_kwargs`` and the separate argument of older methods.

        Raises:
            InvalidRequestError: An option is unknown or not supported.
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
        truncation = options.get("truncation")
        cut, limit = _cut(limit, truncation, options.get("max_length"))
        return cls(
            truncate=side if cut else "error",
            limit=limit,
            side=side,
            special_tokens=special_tokens,
            refuses=truncation is not None and not cut,
        )

    def cutting_to(self, limit: int) -> Tokenization:
        """These options with the limit of a request, which implies truncation."""
        return replace(self, truncate=self.side, limit=limit, refuses=False)


def _cut(limit: int | None, truncation: Any, max_length: int | None) -> tuple[bool, int | None]:
    """(Whether texts that are too long are cut, maximum number of tokens)."""
    if truncation not in (*_CUT, *_UNCUT):
        raise InvalidRequestError(f"truncation={truncation!r} is unknown; choose True or False")
    if limit is not None:
        return True, limit
    if truncation in (False, "do_not_truncate"):
        return False, None
    return (
        truncation is not None or max_length is not None,
        max_length,
    )  # as in transformers, max_length alone truncates


def read_prompts(prompts: Any) -> list[Item]:
    """Parse prompts: a str, ``{"prompt": ...}``, ``{"prompt_token_ids": [...]}``, token ids, or a list of these.

    Raises:
        InvalidRequestError: There are none, or one has another form.
    """
    single = isinstance(prompts, str | bytes | Mapping) or _are_ids(prompts) or not isinstance(prompts, Iterable)
    listed = [prompts] if single else list(prompts)
    if not listed:
        raise InvalidRequestError("You must pass at least one prompt; got an empty list")
    return [_read(prompt, index) for index, prompt in enumerate(listed)]


def _read(prompt: Any, index: int) -> Item:
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
        f"the prompt at index {index} is {prompt!r:.80}; pass a str, "
        '{"prompt": str} or {"prompt_token_ids": [int, ...]}'
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(type(part) is int for part in value)


def read_texts(data: Any, name: str) -> list[str]:
    """Parse one side of ``score``: a str, ``{"content": [text parts]}``, ``{"text": ...}``, or a list of these.

    ``{"prompt": ...}`` is the offline class's form of ``{"text": ...}``.

    Raises:
        InvalidRequestError: There are none, or one is not a text.
    """
    single = isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable)
    listed = [data] if single else list(data)
    if not listed:
        raise InvalidRequestError(f"At least one text is needed in {name}; got an empty list")
    return [_text(entry, name, index) for index, entry in enumerate(listed)]


def _text(entry: Any, name: str, index: int) -> str:
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
    raise InvalidRequestError(f"{name} has {entry!r:.80} at index {index}; millpond reads texts only")


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
