"""Conversations: messages of text, and what a chat template is told besides."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from millpond.server.schemas.absent import absent_if_null


class TextPart(BaseModel):
    """A piece of a message; images and sound are not read here."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["text"] = "text"
    text: str


class Message(BaseModel):
    """What one side says; fields that only the model's template knows are handed to it."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str = Field(description="`user`, `assistant`, `system`, or what else the model's template knows.")
    content: str | list[TextPart] | None = Field(None, description="A text, or parts of one.")


Conversation = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


def is_batch(value: Any) -> bool:
    """Whether ``value``, of a request's JSON, is a list of conversations rather than one."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


Conversations = Annotated[
    Annotated[Conversation, Tag("conversation")]
    | Annotated[list[Conversation], Field(min_length=1, fail_fast=True), Tag("conversations")],
    Discriminator(lambda value: "conversations" if is_batch(value) else "conversation"),
]

Switch = Annotated[bool, absent_if_null(bool)]


class ChatFields(BaseModel):
    """The fields of a request that holds conversations."""

    messages: Conversations | None = Field(None, description="A conversation, or a list of them, instead of a text.")
    add_generation_prompt: Switch = Field(False, description="Let the template open the assistant's turn.")
    continue_final_message: Switch = Field(False, description="Leave the last message open.")
    chat_template: str | None = Field(None, description="Jinja, in the model's place; only where the server trusts it.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the template.")


def listed(conversations: Any) -> list[list[Message]]:
    """One conversation, or several, as several."""
    found: list[list[Message]] = conversations if is_batch(conversations) else [conversations]
    return found
