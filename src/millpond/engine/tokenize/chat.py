"""Chat templates: a conversation rendered to text, for rewards and for the server's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millpond.errors import InvalidRequestError


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],  # the conversation, as `{"role": ..., "content": ...}`
    *,
    index: int,  # index of the conversation in the caller's list, for errors
    model: str,  # the model that has the template, for errors
    options: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation by a chat template."""
    try:
        plain = [dict(message) for message in messages]
        return str(tokenizer.apply_chat_template(plain, tokenize=False, **(options or {})))
    except Exception as error:  # Jinja's errors, and any error that the template raises
        raise InvalidRequestError(
            f"the conversation at index {index} does not fit the chat template of {model}: {error}"
        ) from error
