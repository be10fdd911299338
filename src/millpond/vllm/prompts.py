"""vLLM's prompts and tokenization options, translated to items and limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from millpond.errors import InvalidRequestError
from millpond.tasks import Truncate
from millpond.values.inputs import Item, TokenIds

_OPTIONS = ("add_special_tokens", "max_length", "padding", "truncate_prompt_tokens", "truncation", "truncation_side")
# transformers' values of ``truncation``.
_TRUNCATING = (True, "longest_first", "only_first", "only_second")
_NOT_TRUNCATING = (None, False, "do_not_truncate")


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """The ``tokenization_kwargs`` of a call, read."""

    truncate: Truncate = "error"  # error unless the caller asked for truncation, as in vLLM
    limit: int | None = None  # most tokens; None and -1 are the model's maximum
    side: Truncate = "auto"  # the end at which an over-long text is cut, if it is cut
    special_tokens: bool = True
    # Whether the caller switched truncation off explicitly; then a ColBERT does not cut to its own lengths either.
    refuses: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, truncate_prompt_tokens: int | None = None) -> Tokenization:
        """Read ``tokenization_kwargs`` and vLLM's older argument ``truncate_prompt_tokens``."""
        options = {key: value for key, value in (options or {}).items() if value is not None}
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown:
            raise InvalidRequestError(
                f"tokenization_kwargs has {unknown[0]}, which is unknown; it may have {', '.join(_OPTIONS)}"
            )
        if options.get("padding") not in (None, False, "do_not_pad"):
            raise InvalidRequestError(f"padding={options['padding']!r}: millpond never pads; leave it out")
        right_or_left = options.get("truncation_side")
        if right_or_left not in ("left", "right", None):
            raise InvalidRequestError(f"truncation_side={right_or_left!r} is unknown; choose left or right")
        special_tokens = options.get("add_special_tokens", True)
        if not isinstance(special_tokens, bool):
            raise InvalidRequestError(f"add_special_tokens={special_tokens!r} must be True or False")
        side: Truncate = "auto" if right_or_left is None else "start" if right_or_left == "left" else "end"
        limit = options.get("truncate_prompt_tokens", truncate_prompt_tokens)
        truncation = options.get("truncation")
        cuts, limit = _limit(limit, truncation, options.get("max_length"))
        return cls(
            truncate=side if cuts else "error",
            limit=limit,
            side=side,
            special_tokens=special_tokens,
            refuses=truncation is not None and not cuts,
        )

    def cutting_to(self, limit: int) -> Tokenization:
        """The same options with truncation to ``limit`` tokens."""
        return replace(self, truncate=self.side, limit=limit, refuses=False)


def _limit(limit: int | None, truncation: Any, max_length: int | None) -> tuple[bool, int | None]:
    """Whether over-long texts are cut, and to how many tokens."""
    if truncation not in (*_TRUNCATING, *_NOT_TRUNCATING):
        raise InvalidRequestError(f"truncation={truncation!r} is unknown; choose True or False")
    if limit is not None:
        return True, limit
    if truncation in (False, "do_not_truncate"):
        return False, None
    # As in transformers, a length without ``truncation`` truncates.
    return truncation is not None or max_length is not None, max_length


def read_prompts(prompts: Any) -> list[Item]:
    """Prompts as items: a str, ``{"prompt": ...}``, ``{"prompt_token_ids": [...]}``, token ids, or a list of these."""
    single = isinstance(prompts, str | bytes | Mapping) or _are_ids(prompts) or not isinstance(prompts, Iterable)
    listed = [prompts] if single else list(prompts)
    if not listed:
        raise InvalidRequestError("You must pass at least one prompt; got an empty list")
    return [_read_prompt(prompt, i) for i, prompt in enumerate(listed)]


def _read_prompt(prompt: Any, i: int) -> Item:
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

    ``{"prompt": ...}`` is the name of the third in vLLM's offline class.
    """
    single = isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable)
    listed = [data] if single else list(data)
    if not listed:
        raise InvalidRequestError(f"At least one text is needed in {name}; got an empty list")
    return [_read_text(entry, name, i) for i, entry in enumerate(listed)]


def _read_text(entry: Any, name: str, i: int) -> str:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, Mapping):
        for key in ("prompt", "text"):
            if isinstance(entry.get(key), str):
                return str(entry[key])
        content = entry.get("content")
        if isinstance(content, str):
            return content
        parts = content if isinstance(content, list) and all(isinstance(part, Mapping) for part in content) else []
        texts: list[Any] = [part.get("text") if part.get("type") == "text" else None for part in parts]
        if texts and all(isinstance(text, str) for text in texts):
            return "\n".join(texts)
    raise InvalidRequestError(f"{name} has {entry!r:.80} at index {i}; millpond reads texts only")
