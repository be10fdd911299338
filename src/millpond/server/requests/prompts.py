"""Prompts: the inputs of a request, in any of their forms, as the items of an engine call."""

from __future__ import annotations

from typing import Annotated, Any, Self

from fastapi import Request
from pydantic import Discriminator, Field, Tag, model_validator

from millpond.server.errors import RequestError
from millpond.server.requests import calls, chat
from millpond.server.requests.chat import ChatFields, Conversation, Message, as_batch
from millpond.server.requests.fields import PoolingRequest, check_count, check_length
from millpond.server.requests.result_size import reserve_result
from millpond.server.responses.encoding import JSON_BYTES
from millpond.server.served.models import ServedModel
from millpond.server.state import state_of
from millpond.tasks import Task
from millpond.values.inputs import Item, TokenIds
from millpond.values.params import PoolingParams
from millpond.vllm.model import Pending

TokenList = Annotated[list[int], Field(fail_fast=True)]


def _kind(value: Any) -> str:
    """The form of ``input``, by its first item, so that errors refer to that form only."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else None
    if isinstance(first, dict | Message):
        return "conversation"
    if isinstance(first, list):
        return "conversations" if first and isinstance(first[0], dict | Message) else "token_lists"
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
    def bytes_per_number(self) -> float:
        """Bytes of a number in the response."""
        return JSON_BYTES

    @property
    def selects_prompt(self) -> bool:
        """Whether the request selects a prompt of the model."""
        return False

    @property
    def conversations(self) -> list[list[Message]] | None:
        """The conversations, if the prompts are conversations."""
        if self.messages is not None:
            return as_batch(self.messages)
        return as_batch(self.input) if _kind(self.input).startswith("conversation") else None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The texts or token ids, if the prompts are not conversations."""
        items: Any = self.input
        return [items] if _kind(items) in ("text", "tokens") else items


def count(body: PromptRequest, request: Request) -> int:
    """The number of prompts."""
    conversations = body.conversations
    number = len(body.prompts if conversations is None else conversations)
    if number == 0:
        raise RequestError("You must pass at least one prompt; input is an empty list", param="input")
    check_count(request, number, field="input")
    return number


async def run(request: Request, model: ServedModel, task: Task, body: PromptRequest, params: PoolingParams) -> Any:
    """The output of ``task`` for the prompts of ``body``."""
    return await calls.run(
        request, lambda: submit(task, body, params, model, request), model=model, texts=count(body, request)
    )


def submit(
    task: Task, body: PromptRequest, params: PoolingParams, model: ServedModel, request: Request
) -> Pending[Any]:
    """Render, check and queue the prompts of ``body``; runs in a thread, since rendering takes time."""
    conversations = body.conversations
    tokenization = body.tokenization(model.max_model_len, special_tokens=conversations is None)
    prompts = (
        body.prompts if conversations is None else chat.render(conversations, body, model, state_of(request).config)
    )
    if not tokenization.special_tokens:  # the tokenizer tokenizes all of it before cutting
        for prompt in prompts:
            if isinstance(prompt, str):
                check_length(prompt, model.max_model_len)
    read = [prompt if isinstance(prompt, str) else TokenIds(tuple(prompt)) for prompt in prompts]
    items = model.pooling.without_special_tokens(read, tokenization)
    if body.selects_prompt:
        _check_prompt_applies(items, params, task, model)
    completed = model.pooling.complete(task, params, tokenization)
    reserve_result(request, model, task, items, completed, bytes_per_number=body.bytes_per_number)
    return model.pooling.submit(task, items, completed)


def _check_prompt_applies(items: list[Item], params: PoolingParams, task: Task, model: ServedModel) -> None:
    """Refuse items that a prompt cannot be put before: token ids, messages, and texts without special tokens."""
    index = next((i for i, item in enumerate(items) if isinstance(item, TokenIds)), None)
    if index is None or task not in ("embed", "token_embed"):
        return
    prompted = PoolingParams(role=params.role, prompt_name=params.prompt_name, adapter=params.adapter)
    token_ids = model.engine.token_ids
    if token_ids(task, "a", prompted) != token_ids(task, "a", PoolingParams(prompt="")):
        raise RequestError(
            f"role, prompt_name and input_type ask for a prompt of the model, which the input at index {index} cannot "
            "take: token ids, messages and texts without special tokens run as they are; pass plain texts, or put the "
            "prompt there yourself",
            param="input",
        )
