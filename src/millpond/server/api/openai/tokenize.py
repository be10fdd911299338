"""/tokenize and /detokenize: conversion between texts and token ids by a model's tokenizer."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from millpond.errors import InvalidRequestError
from millpond.server.api import openapi
from millpond.server.errors import RequestError
from millpond.server.requests import bodies, calls, chat
from millpond.server.requests.chat import ChatFields, Switch, as_batch
from millpond.server.requests.fields import INT64, check_length, one_of
from millpond.server.requests.response_budget import response_budget_of
from millpond.server.responses.encoding import json_response
from millpond.server.served.models import ServedModel
from millpond.server.state import find_model, state_of


class TokenizeRequest(ChatFields):
    """A text or a conversation to tokenize."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = Field(None, description="By default true for a prompt, false for messages.")
    return_token_strs: Switch = Field(False, description="Also return the tokens as strings of the vocabulary.")
    add_generation_prompt: Switch = Field(True, description="Let the template start the assistant's turn.")
    tools: list[dict[str, Any]] | None = Field(None, description="Passed to the template.")

    _check_forms = one_of("prompt", "messages")


class TokenizeResponse(BaseModel):
    """Token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(BaseModel):
    """Token ids to convert to a text."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=INT64)]], Field(fail_fast=True)]


class DetokenizeResponse(BaseModel):
    """The text."""

    prompt: str


router = APIRouter(tags=["vLLM"])

_MAX_TOKENS = 1 << 17  # decoding holds the GIL
_TOKEN_BYTES = 44  # of a token id: as a Python object, and in the response
_STRING_BYTES = 80  # of a token's string
_MAX_ID = (1 << 32) - 1  # larger ids overflow in tokenizers


@router.post("/tokenize", openapi_extra=openapi.operation(TokenizeRequest, answer=TokenizeResponse))
async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of a conversation rendered by the model's chat template; nothing is cut."""
    body = await bodies.read(request, TokenizeRequest, queued=False)
    model = find_model(request, body.model, tasks=(), api="Tokenize API")
    return await json_response(await calls.prepared(request, lambda: _tokenized(body, model, request)))


@router.post("/detokenize", openapi_extra=openapi.operation(DetokenizeRequest, answer=DetokenizeResponse))
async def detokenize(request: Request) -> Response:
    """The text of token ids, including the special tokens."""
    body = await bodies.read(request, DetokenizeRequest, queued=False)
    model = find_model(request, body.model, tasks=(), api="Detokenize API")
    return await json_response({"prompt": await asyncio.to_thread(_text, body.tokens, model)})


def _tokenized(body: TokenizeRequest, model: ServedModel, request: Request) -> dict[str, Any]:
    if body.messages is None:
        text, special_tokens = body.prompt or "", body.add_special_tokens is not False
    else:
        conversations = as_batch(body.messages)
        if len(conversations) > 1:
            raise InvalidRequestError(f"messages holds {len(conversations)} conversations; pass one")
        (text,) = chat.render(conversations, body, model, state_of(request).config, tools=body.tools)
        special_tokens = body.add_special_tokens is True
    check_length(text, model.max_model_len)
    most = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))  # a token for each byte
    each = _TOKEN_BYTES + (_STRING_BYTES if body.return_token_strs else 0)
    budget = response_budget_of(request)
    size = min(budget.largest, most * each // 4)  # of the response; ids and strings take more as Python objects
    budget.reserve(request.scope, size=size, memory=most * each, way_out="send the text in parts", param="prompt")
    (tokens,) = model.engine.tokenize([text], special_tokens=special_tokens)
    strings = model.engine.text_tokenizer.token_names(tokens) if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": model.max_model_len, "tokens": tokens, "token_strs": strings}


def _text(tokens: list[int], model: ServedModel) -> str:
    tokenizer = model.engine.text_tokenizer
    limit = max(_MAX_TOKENS, model.max_model_len)
    if len(tokens) > limit:
        raise RequestError(
            f"{len(tokens)} tokens in one request; this server takes {limit}: send them in parts", param="tokens"
        )
    for i, token in enumerate(tokens):
        if token > _MAX_ID or not tokenizer.has_token(token):
            raise InvalidRequestError(
                f"the token id {token} at index {i} is out of vocabulary; {model.name} has "
                f"{tokenizer.vocabulary_size} tokens"
            )
    return tokenizer.decode(tokens)
