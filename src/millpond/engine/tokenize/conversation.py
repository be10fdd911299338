"""A conversation to token ids, by the checkpoint's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from tokenizers import Tokenizer

from millpond.checkpoints.templates.conversation import ChatTemplate
from millpond.engine.tokenize.large_texts import turn
from millpond.errors import InvalidRequestError

Conversation = Sequence[Mapping[str, str]]


def read_conversation(
    backend: Tokenizer, chat: ChatTemplate, conversation: Conversation, index: int
) -> tuple[list[int], int]:
    """Token ids of a conversation, and how many of the last ones belong to the template."""
    ids = _ids(backend, chat, conversation, index)
    # The tokens at the end that stay when the last message is empty are the template's; a reward is read there.
    emptied = [*conversation[:-1], {**conversation[-1], "content": ""}] if conversation else []
    bare = _ids(backend, chat, emptied, index)
    pairs = zip(reversed(ids), reversed(bare), strict=False)
    return ids, min(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)), len(ids) - 1)


def _ids(backend: Tokenizer, chat: ChatTemplate, conversation: Conversation, index: int) -> list[int]:
    text = chat.render(conversation, index=index, model="the checkpoint")
    try:
        with turn([text]):
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
    except (TypeError, UnicodeError) as error:
        raise InvalidRequestError(
            f"the conversation at index {index} holds a lone surrogate, which is not a character; replace it"
        ) from error
    ids: list[int] = encoding.ids
    return ids
