"""Chat: conversations rendered to texts by a model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from millpond.checkpoints.templates.conversation import ChatTemplate
from millpond.errors import InvalidRequestError
from millpond.server.errors import RequestError
from millpond.server.requests.fields import absent_if_null
from millpond.server.served.models import ServedModel
from millpond.server.settings.config import ServerConfig


class TextPart(BaseModel):
    """A part of a message; images and audio are not supported."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["text"] = "text"
    text: str


class Message(BaseModel):
    """One message; additional fields are passed to the model's template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str = Field(description="`user`, `assistant`, `system`, or another role of the model's template.")
    content: str | list[TextPart] | None = Field(None, description="A text, or a list of text parts.")


Conversation = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


def is_batch(value: Any) -> bool:
    """Whether ``value``, from a request's JSON, is a list of conversations rather than one."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


Conversations = Annotated[
    Annotated[Conversation, Tag("conversation")]
    | Annotated[list[Conversation], Field(min_length=1, fail_fast=True), Tag("conversations")],
    Discriminator(lambda value: "conversations" if is_batch(value) else "conversation"),
]

Switch = Annotated[bool, absent_if_null(bool)]


class ChatFields(BaseModel):
    """The fields of a request with conversations."""

    messages: Conversations | None = Field(
        None, description="A conversation, or a list of conversations, instead of texts."
    )
    add_generation_prompt: Switch = Field(False, description="Let the template start the assistant's turn.")
    continue_final_message: Switch = Field(False, description="Do not end the last message.")
    chat_template: str | None = Field(
        None, description="Jinja template that replaces the model's own, if the server accepts one."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Additional variables for the template.")


def as_batch(conversations: Any) -> list[list[Message]]:
    """One conversation or several, as a list of conversations."""
    batch: list[list[Message]] = conversations if is_batch(conversations) else [conversations]
    return batch


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
    """The rendered text of each conversation."""
    _check(fields, config)
    own = model.engine.text_tokenizer.chat
    template = fields.chat_template or model.chat_template
    if template is None and own is None:
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

    chat = own or ChatTemplate(sources={}, variables=model.engine.text_tokenizer.specials)

    def apply_template(messages: list[dict[str, Any]], index: int = 0) -> str:
        return chat.render(messages, index=index, model=model.name, options=options)

    parts = _needs_parts(apply_template)
    return [
        apply_template([_plain(message, parts=parts) for message in conversation], i)
        for i, conversation in enumerate(conversations)
    ]


def check_trusted(chat_template: str | None, config: ServerConfig) -> None:
    """Refuse a template from a request, unless the server was started to accept one."""
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
