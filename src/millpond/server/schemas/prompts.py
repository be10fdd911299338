"""Requests over prompts: texts, token ids or conversations."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, model_validator

from millpond.server.schemas.conversation import ChatFields, Conversation, Message, as_batch, is_batch
from millpond.server.schemas.request import PoolingRequest

TokenList = Annotated[list[int], Field(fail_fast=True)]


def _kind(value: Any) -> str:
    """The form of ``input``, by its first item, so that errors refer to that form only."""
    first = value[0] if isinstance(value, list) and value else None
    if not isinstance(value, list):
        return "text"
    if isinstance(first, dict):
        return "conversation"
    if isinstance(first, list):
        return "conversations" if first and isinstance(first[0], dict) else "token_lists"
    return "texts" if first is None or isinstance(first, str) else "tokens"


Input = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(fail_fast=True), Tag("texts")]
    | Annotated[TokenList, Tag("tokens")]
    | Annotated[list[TokenList], Field(fail_fast=True), Tag("token_lists")]
    | Annotated[Conversation, Tag("conversation")]
    | Annotated[list[Conversation], Field(fail_fast=True), Tag("conversations")],
    Discriminator(_kind),
]


class PromptRequest(PoolingRequest, ChatFields):
    """A request over ``input`` or ``messages``."""

    input: Input | None = Field(None, description="A text, token ids, a conversation, or a list of one of these kinds.")

    @model_validator(mode="after")
    def _check_forms(self) -> Self:
        if self.input is None and self.messages is None:
            raise ValueError("input is missing; pass input (texts, token ids) or messages")
        if self.input is not None and self.messages is not None:
            raise ValueError("input and messages exclude each other; pass one")
        return self

    @property
    def conversations(self) -> list[list[Message]] | None:
        """The conversations, if the prompts are conversations."""
        if self.messages is not None:
            return as_batch(self.messages)
        return as_batch(self.input) if _holds_messages(self.input) else None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The texts or token ids, if the prompts are not conversations."""
        if isinstance(self.input, str):
            return [self.input]
        items: Any = self.input
        return [items] if items and isinstance(items[0], int) else items


def _holds_messages(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    if is_batch(value):
        first = first[0] if first else None
    return isinstance(first, Message)
