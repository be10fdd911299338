"""Limits: how much one request may ask for."""

from __future__ import annotations

from fastapi import Request

from millpond.server.errors import RequestError
from millpond.server.state import config_of

# A text whose tokens are all wanted may have this many characters, or this many for each token that the model reads.
_LONGEST = 1 << 21
_LONGEST_PER_TOKEN = 64


def check_count(count: int, request: Request, *, field: str) -> None:
    """Refuse a request that has more texts than the server takes at once.

    Args:
        count: How many there are.
        request: Whose they are.
        field: What the request calls them.

    Raises:
        RequestError: More than ``max_inputs``.
    """
    most = config_of(request).max_inputs
    if count > most:
        raise RequestError(f"{count} {field} in one request; this server takes {most}: send them in parts", param=field)


def check_length(text: str, max_model_len: int) -> None:
    """Refuse a text that would have to be tokenized to its end, which takes a tokenizer gigabytes.

    Args:
        text: It may be much longer than any model reads.
        max_model_len: What the model reads.

    Raises:
        RequestError: It has too many characters all the same.
    """
    most = max(_LONGEST, _LONGEST_PER_TOKEN * max_model_len)
    if len(text) > most:
        raise RequestError(
            f"a text has {len(text)} characters; {most} are the most to be tokenized whole: send it in parts"
        )
