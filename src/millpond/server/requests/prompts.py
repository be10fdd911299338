"""Prompts: the inputs of a request, in any of their forms, as the items of an engine call."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from millpond.inputs import Item, TokenIds
from millpond.params import PoolingParams
from millpond.server.errors import RequestError
from millpond.server.models import ServedModel
from millpond.server.requests import calls, chat
from millpond.server.requests.limits import check_count, check_length
from millpond.server.schemas.prompts import PromptRequest
from millpond.server.schemas.vectors import VectorRequest
from millpond.server.settings.config import ServerConfig
from millpond.server.state import config_of
from millpond.tasks import Task
from millpond.vllm.model import Pending
from millpond.vllm.prompts import Tokenization


def count(body: PromptRequest, request: Request) -> int:
    """The number of prompts.

    Args:
        body: The body of the request.
        request: The request.

    Raises:
        RequestError: No prompt, or more than the server accepts.
    """
    conversations = body.conversations
    number = len(body.prompts if conversations is None else conversations)
    if number == 0:
        raise RequestError("You must pass at least one prompt; input is an empty list", param="input")
    check_count(number, config_of(request).max_inputs, field="input")
    return number


async def run(request: Request, model: ServedModel, task: Task, body: PromptRequest, params: PoolingParams) -> Any:
    """The output of ``task`` for the prompts of ``body``; errors as :func:`count`, :func:`submit` and ``calls.run``."""
    config = config_of(request)
    return await calls.run(
        request, lambda: submit(task, body, params, model, config), model=model, texts=count(body, request)
    )


def submit(
    task: Task, body: PromptRequest, params: PoolingParams, model: ServedModel, config: ServerConfig
) -> Pending[Any]:
    """Render, check and queue the prompts of ``body``; runs in a thread, since rendering takes time.

    Raises:
        RequestError: A form or a field that is not supported.
        InvalidRequestError: An invalid prompt or option; nothing was queued.
        EngineOverloadedError: Too many texts are waiting.
    """
    items, tokenization = read(body, model, config)
    if isinstance(body, VectorRequest) and body.selects_prompt:
        _check_prompt_applies(items, params, task, model)
    return model.pooling.submit(task, items, model.pooling.complete(task, params, tokenization))


def read(body: PromptRequest, model: ServedModel, config: ServerConfig) -> tuple[list[Item], Tokenization]:
    """The items of the call, and tokenization they are tokenized.

    Raises:
        RequestError: A form or a field that is not supported.
        InvalidRequestError: A prompt that cannot be read.
    """
    conversations = body.conversations
    tokenization = body.tokenization(model.max_model_len, special_tokens=conversations is None)
    prompts = body.prompts if conversations is None else chat.render(conversations, body, model, config)
    if not tokenization.special_tokens:  # the tokenizer tokenizes all of it before cutting
        for prompt in prompts:
            if isinstance(prompt, str):
                check_length(prompt, model.max_model_len)
    items = [prompt if isinstance(prompt, str) else TokenIds(tuple(prompt)) for prompt in prompts]
    return model.pooling.without_special_tokens(items, tokenization), tokenization


def _check_prompt_applies(items: list[Item], params: PoolingParams, task: Task, model: ServedModel) -> None:
    """Refuse items that a prompt cannot be put before: token ids, messages, and texts without special tokens.

    Raises:
        RequestError: The model has a prompt for the request, and an item cannot take it.
    """
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
