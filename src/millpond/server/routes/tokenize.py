"""/tokenize and /detokenize: between texts and token ids, by a model's own tokenizer."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from millpond.errors import InvalidRequestError
from millpond.server.encoding import json_answer
from millpond.server.errors import RequestError
from millpond.server.models import ServedModel
from millpond.server.requests import bodies, chat
from millpond.server.requests.limits import check_length
from millpond.server.schemas.conversation import listed
from millpond.server.schemas.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from millpond.server.settings.config import ServerConfig
from millpond.server.state import config_of, meant, models_of

router = APIRouter(tags=["vLLM"])

_MOST_AT_ONCE = 1 << 17  # ids; the tokenizer lets nobody else run while it puts a text together
_MOST = (1 << 32) - 1  # what tokenizers takes for an id


@router.post("/tokenize", openapi_extra=bodies.documented(TokenizeRequest, answer=TokenizeResponse))
async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of a conversation as the model's chat template renders it; nothing is cut."""
    body = await bodies.read(request, TokenizeRequest, queued=False)
    model = meant(request, models_of(request).find(body.model, tasks=(), api="Tokenize API"))
    return await json_answer(await asyncio.to_thread(_tokenized, body, model, config_of(request)))


@router.post("/detokenize", openapi_extra=bodies.documented(DetokenizeRequest, answer=DetokenizeResponse))
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens written out."""
    body = await bodies.read(request, DetokenizeRequest, queued=False)
    model = meant(request, models_of(request).find(body.model, tasks=(), api="Detokenize API"))
    return await json_answer({"prompt": await asyncio.to_thread(_text, body.tokens, model)})


def _tokenized(body: TokenizeRequest, model: ServedModel, config: ServerConfig) -> dict[str, Any]:
    if body.messages is None:
        text, special_tokens = body.prompt or "", body.add_special_tokens is not False
    else:
        conversations = listed(body.messages)
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
    most = max(_MOST_AT_ONCE, model.max_model_len)
    if len(tokens) > most:
        raise RequestError(
            f"{len(tokens)} tokens in one request; this server takes {most}: send them in parts", param="tokens"
        )
    for i, token in enumerate(tokens):
        if token > _MOST or vocabulary.id_to_token(token) is None:
            raise InvalidRequestError(
                f"the token id {token} at index {i} is out of vocabulary; {model.name} has "
                f"{vocabulary.get_vocab_size()} tokens"
            )
    return str(tokenizer.decode(tokens))
