"""Result size: how many numbers a call will return, known before its work."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from fastapi import Request

from millpond.errors import InvalidRequestError
from millpond.server.requests.response_budget import response_budget_of
from millpond.server.responses.encoding import JSON_BYTES
from millpond.server.served.models import ServedModel
from millpond.tasks import Task
from millpond.values.inputs import Item, Pair, TokenIds, text_of
from millpond.values.params import PoolingParams

_FLOAT32_BYTES = 4
# Special tokens and a late-interaction model's query expansion, at most; a text has at most a token for each byte.
_MORE_TOKENS = 64
# A result of token rows that may be larger than this is counted token by token.
_COUNTED = 1 << 26
# A text of so many bytes for each token of the limit has more tokens than the limit.
_BYTES_PER_TOKEN = 64


def reserve_result(
    request: Request,
    model: ServedModel,
    task: Task,
    items: Sequence[Item],
    params: PoolingParams,
    *,
    bytes_per_number: float = JSON_BYTES,
    more: int = 0,
) -> None:
    """Reserve the room for the result of a call that writes its numbers with so many bytes each; 0 writes none.

    ``more`` bytes are for what is made of the numbers.

    Weights of sparse vectors are counted when they are known: nobody knows before how many are not zero.
    """
    spec = model.engine.spec
    matrices = task in ("token_embed", "token_classify", "reward")
    if task == "embed":
        width = params.dimensions or spec.default_dimensions or spec.dimensions
    elif task == "token_embed":
        width = spec.hidden_size
    else:
        width = len(params.returned_token_ids or spec.labels or (0,)) * len(params.labels or (0,))
    # Of token rows there are two copies: those of each text, and all of them together.
    memory = _FLOAT32_BYTES * (2 if matrices else 1) + bytes_per_number
    if task == "sparse_embed":
        return
    budget = response_budget_of(request)
    counted = min(_COUNTED, budget.largest) / (memory * width)
    rows = _token_rows(model, task, items, params, counted=counted) if matrices else len(items)
    ways = ["send fewer or shorter texts" if matrices else "send fewer texts"]
    if bytes_per_number == JSON_BYTES and task in ("embed", "token_embed"):
        ways.append("ask for base64 or binary numbers where the route has them (encoding_format)")
    budget.reserve(
        request.scope,
        size=int(rows * width * bytes_per_number),
        memory=int(rows * width * memory) + more,
        way_out=f"{', or '.join(ways)}; it is {rows} rows of {width} numbers",
    )


def reserve_comparison(request: Request, model: ServedModel, query: int, document: int) -> None:
    """Reserve the room for the token rows of a query and a document, and for the similarity of each to each."""
    numbers = 2 * (query + document) * model.engine.spec.hidden_size + query * document
    response_budget_of(request).reserve(
        request.scope, size=0, memory=_FLOAT32_BYTES * numbers, way_out="send a shorter query"
    )


def _token_rows(model: ServedModel, task: Task, items: Sequence[Item], params: PoolingParams, *, counted: float) -> int:
    """The rows of a call with one for each token, at most; exactly if there may be more than ``counted``."""
    limit = params.truncate_prompt_tokens
    longest = model.max_model_len if limit is None or limit < 0 else min(limit, model.max_model_len)
    bounds = [min(longest, _size(item) + _MORE_TOKENS) for item in items]
    if sum(bounds) <= counted:
        return sum(bounds)
    rows = 0
    for item, bound in zip(items, bounds, strict=True):
        if not isinstance(item, TokenIds) and _size(item) <= _BYTES_PER_TOKEN * longest:
            with contextlib.suppress(InvalidRequestError):  # the call itself will refuse the item, with its index
                bound = len(model.engine.token_ids(task, item, params))
        rows += bound
    return rows


def _size(item: Item) -> int:
    """Tokens of an item, at most."""
    if isinstance(item, TokenIds):
        return len(item.ids)
    if isinstance(item, Pair):
        return _size(item.query) + _size(item.document)
    text = text_of(item)
    return len(text) if text.isascii() else 4 * len(text)
