"""Conversations: messages of text, and the options of the chat template."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from millpond.server.schemas.absent import absent_if_null


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
