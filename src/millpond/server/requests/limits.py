"""Limits: how many texts, and how long, one request may have."""

from __future__ import annotations

from millpond.server.errors import RequestError

# A longer text is not tokenized in full. The limit is the larger of these two; the second is per token of the model.
_MAX_CHARACTERS = 1 << 21
_MAX_CHARACTERS_PER_TOKEN = 64


def check_count(count: int, limit: int, *, field: str) -> None:
    """Refuse a request with more texts than the server accepts."""
    if count > limit:
        raise RequestError(
            f"{count} {field} in one request; this server takes {limit}: send them in parts", param=field
        )


def check_length(text: str, max_model_len: int) -> None:
    """Refuse a text whose full tokenization would take gigabytes."""
    limit = max(_MAX_CHARACTERS, _MAX_CHARACTERS_PER_TOKEN * max_model_len)
    if len(text) > limit:
        raise RequestError(
            f"a text has {len(text)} characters; {limit} are the most to be tokenized whole: send it in parts"
        )
