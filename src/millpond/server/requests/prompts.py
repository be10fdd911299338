"""Inputs: the prompts of a request, in any of their forms, as the items of a call."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from millpond.inputs import Item, TokenIds
from millpond.params import PoolingParams
from millpond.server.errors import RequestError
from millpond.server.models import ServedModel
from millpond.server.requests import chat
from millpond.server.requests.limits import check_count, check_length
from millpond.server.schemas.prompts import PromptRequest
from millpond.server.schemas.vectors import VectorRequest
from millpond.server.settings.config import ServerConfig
from millpond.tasks import Task
from millpond.vllm_dialect.model import Pending
from millpond.vllm_dialect.prompts import Tokenization


def count(body: PromptRequest, request: Request) -> int:
    """How many prompts there are.

    Args:
        body: The request's body.
        request: The request.

    Raises:
        RequestError: None at all, or more than the server takes.
    """
    conversations = body.conversations
    number = len(body.prompts if conversations is None else conversations)
    if number == 0:
        raise RequestError("You must pass at least one prompt; input is an empty list", param="input")
    check_count(number, request, field="input")
    return number


def submit(
    task: Task, body: PromptRequest, params: PoolingParams, model: ServedModel, config: ServerConfig
) -> Pending[Any]:
    """Queue the prompts of ``body``; takes as long as rendering and checking them does.

    Raises:
        RequestError: A form, or a field, that cannot be served.
        InvalidRequestError: A prompt or an option that cannot be served; nothing was queued.
        EngineOverloadedError: Too many texts are waiting.
    """
    items, how = read(body, model, config)
    if isinstance(body, VectorRequest) and body.has_purpose:
        _check_prompted(items, params, task, model)
    return model.pooling.submit(task, items, model.pooling.complete(task, params, how))


def read(body: PromptRequest, model: ServedModel, config: ServerConfig) -> tuple[list[Item], Tokenization]:
    """The items, and how they are to be tokenized.

    Raises:
        RequestError: A form, or a field, that cannot be served.
        InvalidRequestError: A prompt that cannot be read.
    """
    conversations = body.conversations
    how = body.tokenization(model.max_model_len, special_tokens=conversations is None)
    prompts = body.prompts if conversations is None else chat.render(conversations, body, model, config)
    if not how.special_tokens:  # all tokens are made before any is cut
        for prompt in prompts:
            if isinstance(prompt, str):
                check_length(prompt, model.max_model_len)
    items = [prompt if isinstance(prompt, str) else TokenIds(tuple(prompt)) for prompt in prompts]
    return model.pooling.bare(items, how), how


def _check_prompted(items: list[Item], params: PoolingParams, task: Task, model: ServedModel) -> None:
    """A prompt stands before a text, which token ids, messages and texts without special tokens are not any more.

    Raises:
        RequestError: The model has a prompt for what is asked, and an item cannot take it.
    """
    place = next((i for i, item in enumerate(items) if isinstance(item, TokenIds)), None)
    if place is None or task not in ("embed", "token_embed"):
        return
    asked = PoolingParams(role=params.role, prompt_name=params.prompt_name, adapter=params.adapter)
    token_ids = model.engine.token_ids
    if token_ids(task, "a", asked) != token_ids(task, "a", PoolingParams(prompt="")):
        raise RequestError(
            f"role, prompt_name and input_type ask for a prompt of the model, which the input at index {place} cannot "
            "take: token ids, messages and texts without special tokens run as they are; pass plain texts, or put the "
            "prompt there yourself",
            param="input",
        )
