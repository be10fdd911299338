"""/tokenize and /detokenize: conversion between texts and token ids by a model's tokenizer."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from millpond.errors import InvalidRequestError
from millpond.server import openapi
from millpond.server.admission.body_budget import BodyBudget
from millpond.server.encoding import json_response
from millpond.server.errors import RequestError
from millpond.server.models import ServedModel
from millpond.server.requests import bodies, chat
from millpond.server.requests.limits import check_length
from millpond.server.schemas.conversation import as_batch
from millpond.server.schemas.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from millpond.server.settings.config import ServerConfig
from millpond.server.state import config_of, find_model, prepare_executor_of

router = APIRouter(tags=["vLLM"])

_MAX_TOKENS = 1 << 17  # decoding holds the GIL
_MAX_ID = (1 << 32) - 1  # larger ids overflow in tokenizers


@router.post("/tokenize", openapi_extra=openapi.operation(TokenizeRequest, answer=TokenizeResponse))
async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of a conversation rendered by the model's chat template; nothing is cut."""
    body = await bodies.read(request, TokenizeRequest, queued=False)
    model = find_model(request, body.model, tasks=(), api="Tokenize API")
    tokenizing = prepare_executor_of(request).submit(
        lambda: _tokenized(body, model, config_of(request)), body_bytes=BodyBudget.taken(request.scope)
    )
    return await json_response(await asyncio.wrap_future(tokenizing))


@router.post("/detokenize", openapi_extra=openapi.operation(DetokenizeRequest, answer=DetokenizeResponse))
async def detokenize(request: Request) -> Response:
    """The text of token ids, including the special tokens."""
    body = await bodies.read(request, DetokenizeRequest, queued=False)
    model = find_model(request, body.model, tasks=(), api="Detokenize API")
    return await json_response({"prompt": await asyncio.to_thread(_text, body.tokens, model)})


def _tokenized(body: TokenizeRequest, model: ServedModel, config: ServerConfig) -> dict[str, Any]:
    if body.messages is None:
        text, special_tokens = body.prompt or "", body.add_special_tokens is not False
    else:
        conversations = as_batch(body.messages)
        if len(conversations) > 1:
            raise InvalidRequestError(f"messages holds {len(conversations)} conversations; pass one")
        (text,) = chat.render(conversations, body, model, config, tools=body.tools)
        special_tokens = body.add_special_tokens is True
    check_length(text, model.max_model_len)
    (tokens,) = model.engine.tokenize([text], special_tokens=special_tokens)
    strings = model.engine.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": model.max_model_len, "tokens": tokens, "token_strs": strings}


def _text(tokens: list[int], model: ServedModel) -> str:
    tokenizer = model.engine.tokenizer
    vocabulary = tokenizer.backend_tokenizer
    limit = max(_MAX_TOKENS, model.max_model_len)
    if len(tokens) > limit:
        raise RequestError(
            f"{len(tokens)} tokens in one request; this server takes {limit}: send them in parts", param="tokens"
        )
    for i, token in enumerate(tokens):
        if token > _MAX_ID or vocabulary.id_to_token(token) is None:
            raise InvalidRequestError(
                f"the token id {token} at index {i} is out of vocabulary; {model.name} has "
                f"{vocabulary.get_vocab_size()} tokens"
            )
    return str(tokenizer.decode(tokens))
