"""Prompts and tokenization options as vLLM's callers write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millpond.engine.items import Item, TokenIds
from millpond.errors import InvalidRequestError
from millpond.tasks import Truncate

_OPTIONS = ("add_special_tokens", "max_length", "padding", "truncate_prompt_tokens", "truncation", "truncation_side")


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """What ``tokenization_kwargs`` ask for.

    Attributes:
        truncate: ``error`` unless truncation was asked for, as in vLLM.
        limit: Most tokens; ``None`` is the model's maximum.
        special_tokens: Whether a text gets its special tokens.
    """

    truncate: Truncate = "error"
    limit: int | None = None
    special_tokens: bool = True

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Tokenization:
        """Read ``tokenization_kwargs``.

        Raises:
            InvalidRequestError: An option that is unknown, or of no meaning here.
        """
        options = dict(options or {})
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown:
            raise InvalidRequestError(
                f"tokenization_kwargs has {unknown[0]}, which is unknown; it may have {', '.join(_OPTIONS)}"
            )
        if options.get("padding") not in (None, False, "do_not_pad"):
            raise InvalidRequestError(f"padding={options['padding']!r}: millpond never pads; leave it out")
        side = options.get("truncation_side") or "right"
        if side not in ("left", "right"):
            raise InvalidRequestError(f"truncation_side={side!r} is unknown; choose left or right")
        wanted = options.get("truncation")
        limit = options.get("truncate_prompt_tokens")
        cut = limit is not None
        if limit is None and wanted not in (False, "do_not_truncate"):
            limit = options.get("max_length")  # as transformers: a length by itself truncates
            cut = limit is not None or wanted not in (None,)
        truncate: Truncate = "error" if not cut else ("start" if side == "left" else "end")
        return cls(truncate=truncate, limit=limit, special_tokens=bool(options.get("add_special_tokens", True)))


def read_prompts(prompts: Any) -> list[Item]:
    """Prompts as items: a str, ``{"prompt": ...}``, ``{"prompt_token_ids": [...]}``, token ids, or a list of these.

    Raises:
        InvalidRequestError: None at all, or one of another kind.
    """
    alone = isinstance(prompts, str | Mapping) or _are_ids(prompts)
    listed = [prompts] if alone else list(prompts)
    if not listed:
        raise InvalidRequestError("You must pass at least one prompt; got an empty list")
    return [_read(prompt, i) for i, prompt in enumerate(listed)]


def _read(prompt: Any, i: int) -> Item:
    if isinstance(prompt, str):
        return prompt
    if _are_ids(prompt):
        return TokenIds(tuple(prompt))
    if isinstance(prompt, Mapping):
        if isinstance(prompt.get("prompt"), str):
            return str(prompt["prompt"])
        ids = prompt.get("prompt_token_ids")
        if ids is not None and not isinstance(ids, str):
            return TokenIds(tuple(ids))
    raise InvalidRequestError(
        f"the prompt at index {i} is {prompt!r:.80}; pass a str, "
        '{"prompt": str} or {"prompt_token_ids": [int, ...]}'
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(type(part) is int for part in value)


def read_texts(data: Any, name: str) -> list[str]:
    """One side of ``score``: a str, ``{"content": [text parts]}``, ``{"prompt": ...}``, or a list of these.

    Raises:
        InvalidRequestError: None at all, or one that is no text.
    """
    listed: Sequence[Any] = [data] if isinstance(data, str | Mapping) else list(data)
    if not listed:
        raise InvalidRequestError(f"At least one text is needed in {name}; got an empty list")
    return [_text(entry, name, i) for i, entry in enumerate(listed)]


def _text(entry: Any, name: str, i: int) -> str:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, Mapping):
        if isinstance(entry.get("prompt"), str):
            return str(entry["prompt"])
        content = entry.get("content")
        if isinstance(content, str):
            return content
        if isinstance(content, list) and all(
            isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        ):
            return "\n".join(part["text"] for part in content)
    raise InvalidRequestError(f"{name} has {entry!r:.80} at index {i}; millpond scores texts only")
