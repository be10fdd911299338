"""Conversations, rendered to texts by a model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millpond.engine.input.chat import render_chat
from millpond.errors import InvalidRequestError
from millpond.server.errors import RequestError
from millpond.server.models import ServedModel
from millpond.server.schemas.conversation import ChatFields, Message
from millpond.server.settings.config import ServerConfig

# What this server decides, or another field of the request does.
_RESERVED = frozenset(
    "add_generation_prompt chat_template continue_final_message conversation documents messages padding "
    "return_assistant_tokens_mask return_dict return_tensors sanitize_control_tokens tokenize tokenizer_kwargs tools "
    "truncation max_length".split()
)
_MARK = "\ue0f1\ue0f2"  # private use: in no template

Render = Callable[[list[dict[str, Any]]], str]


def render(
    conversations: Sequence[Sequence[Message]],
    fields: ChatFields,
    model: ServedModel,
    config: ServerConfig,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[str]:
    """The text of each conversation.

    Args:
        conversations: The conversations.
        fields: How they are to be rendered.
        model: Whose template is used.
        config: Whether a request's own template is trusted.
        tools: Descriptions of tools, for the template.

    Raises:
        RequestError: A template that is not trusted, a reserved variable, or flags that exclude each other.
        InvalidRequestError: No template, or a conversation that it refuses.
    """
    _check(fields, config)
    tokenizer = model.engine.tokenizer
    template = fields.chat_template or model.chat_template
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise InvalidRequestError(
            f"messages need a chat template, and {model.name} has none; pass texts as input, or start the server with "
            "--chat-template"
        )

    options = {
        "tools": tools,
        "chat_template": template,
        "add_generation_prompt": fields.add_generation_prompt,
        "continue_final_message": fields.continue_final_message,
        **(fields.chat_template_kwargs or {}),
    }

    def rendered(messages: list[dict[str, Any]], index: int = 0) -> str:
        return render_chat(tokenizer, messages, index=index, model=model.name, options=options)

    parts = _reads_parts(rendered)
    return [
        rendered([_plain(message, parts=parts) for message in conversation], i)
        for i, conversation in enumerate(conversations)
    ]


def check_trusted(chat_template: str | None, config: ServerConfig) -> None:
    """Refuse a template from a request, unless the server was started to accept one.

    Raises:
        RequestError: The template is not trusted.
    """
    if chat_template is not None and not config.trust_request_chat_template:
        raise RequestError(
            "Chat template is passed with request, but --trust-request-chat-template is not set. "
            "Refused request with untrusted chat template.",
            param="chat_template",
        )


def _check(fields: ChatFields, config: ServerConfig) -> None:
    check_trusted(fields.chat_template, config)
    if fields.add_generation_prompt and fields.continue_final_message:
        raise RequestError(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            param="continue_final_message",
        )
    taken = sorted(_RESERVED & (fields.chat_template_kwargs or {}).keys())
    if taken:
        raise RequestError(
            f"chat_template_kwargs holds {taken[0]}, which is no variable of a template; pass it beside, if at all",
            param="chat_template_kwargs",
        )


def _reads_parts(rendered: Render) -> bool:
    """Whether the template reads a message as a list of parts, and would say nothing about a text."""
    try:
        if _MARK in rendered([{"role": "user", "content": _MARK}]):
            return False
    except Exception:  # whatever the template raises: the parts may suit it
        pass
    try:
        return _MARK in rendered([{"role": "user", "content": [{"type": "text", "text": _MARK}]}])
    except Exception:  # it does not like the example: the caller's messages will tell
        return False


def _plain(message: Message, *, parts: bool) -> dict[str, Any]:
    """A message as templates know it."""
    given = message.model_dump(exclude_unset=True)
    content = message.content
    if content is None:
        return given
    if parts:
        listed = [content] if isinstance(content, str) else [part.text for part in content]
        return {**given, "content": [{"type": "text", "text": text} for text in listed]}
    return {**given, "content": content if isinstance(content, str) else "\n".join(part.text for part in content)}
