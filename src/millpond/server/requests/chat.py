"""Chat: conversations rendered to texts by a model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millpond.engine.input.chat import render_chat
from millpond.errors import InvalidRequestError
from millpond.server.errors import RequestError
from millpond.server.models import ServedModel
from millpond.server.schemas.conversation import ChatFields, Message
from millpond.server.settings.config import ServerConfig

# Set by this server or by another field of the request.
_RESERVED = frozenset(
    "add_generation_prompt chat_template continue_final_message conversation documents messages padding "
    "return_assistant_tokens_mask return_dict return_tensors sanitize_control_tokens tokenize tokenizer_kwargs tools "
    "truncation max_length".split()
)
_PROBE = "\ue0f1\ue0f2"  # private-use characters, which no template contains

Render = Callable[[list[dict[str, Any]]], str]


def render(
    conversations: Sequence[Sequence[Message]],
    fields: ChatFields,
    model: ServedModel,
    config: ServerConfig,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[str]:
    """The rendered text of each conversation.

    Args:
        conversations: The messages of each conversation.
        fields: The rendering options of the request.
        model: The model whose template is used.
        config: Whether a request's own template is trusted.
        tools: Descriptions of tools, for the template.

    Raises:
        RequestError: An untrusted template, a reserved variable, or flags that exclude each other.
        InvalidRequestError: No template, or a conversation that the template refuses.
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

    def apply_template(messages: list[dict[str, Any]], index: int = 0) -> str:
        return render_chat(tokenizer, messages, index=index, model=model.name, options=options)

    parts = _needs_parts(apply_template)
    return [
        apply_template([_plain(message, parts=parts) for message in conversation], i)
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
    reserved = sorted(_RESERVED & (fields.chat_template_kwargs or {}).keys())
    if reserved:
        raise RequestError(
            f"chat_template_kwargs holds {reserved[0]}, which is no variable of a template; pass it beside, if at all",
            param="chat_template_kwargs",
        )


def _needs_parts(apply_template: Render) -> bool:
    """Whether the template reads content as a list of parts, and would ignore a plain text."""
    try:
        if _PROBE in apply_template([{"role": "user", "content": _PROBE}]):
            return False
    except Exception:  # the template may accept parts
        pass
    try:
        return _PROBE in apply_template([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
    except Exception:  # the template refuses the probe; the caller's messages will show why
        return False


def _plain(message: Message, *, parts: bool) -> dict[str, Any]:
    """A message in the form that templates read."""
    fields = message.model_dump(exclude_unset=True)
    content = message.content
    if content is None:
        return fields
    if parts:
        texts = [content] if isinstance(content, str) else [part.text for part in content]
        return {**fields, "content": [{"type": "text", "text": text} for text in texts]}
    return {**fields, "content": content if isinstance(content, str) else "\n".join(part.text for part in content)}
