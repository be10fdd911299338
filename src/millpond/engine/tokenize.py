"""Texts to token ids: batched, thread-safe, the interpreter lock released while the tokenizer works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer
from tokenizers.normalizers import Lowercase

from millpond.errors import InputTooLongError, InvalidRequestError, ModelLoadError
from millpond.tasks import Truncate

# A tokenizer without a limit of its own says so with an astronomical number.
_NO_LIMIT = 1_000_000
# As sentence-transformers folds case, letter by letter: str.lower() knows the final sigma.
_LOWER = Lowercase()
_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "*.tiktoken")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenized:
    """One text, ready to run.

    Attributes:
        ids: int32 ``[tokens]``, special tokens and prompt included.
        truncated: Whether the text was cut.
    """

    ids: npt.NDArray[np.int32]
    truncated: bool


class TextTokenizer:
    """A checkpoint's tokenizer with truncation of its own: special tokens and prompts are never cut."""

    def __init__(self, backend: Tokenizer, *, lower: bool, limit: int | None, stand_in: int | None = None) -> None:
        # Files often carry the padding and truncation of somebody's training run.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._lower = lower
        self._stand_in = stand_in
        self.limit = limit
        probe = backend.encode("a").special_tokens_mask
        self._prefix = next((i for i, special in enumerate(probe) if not special), len(probe))
        self._suffix = next((i for i, special in enumerate(reversed(probe)) if not special), 0)

    @classmethod
    def load(cls, folder: Path, *, lower: bool) -> TextTokenizer:
        """Read the tokenizer of a checkpoint, as transformers would.

        Raises:
            ModelLoadError: There is none, or it is no fast one.
        """
        from transformers import AutoTokenizer

        if not any(path.is_file() for pattern in _VOCABULARIES for path in folder.glob(pattern)):
            # transformers would make an empty tokenizer up, and every text would be unknown tokens.
            raise ModelLoadError(f"{folder} has no tokenizer that can be read here; is the checkpoint complete?")
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            backend = tokenizer.backend_tokenizer
        except (OSError, ValueError, KeyError, AttributeError, TypeError, ImportError) as error:
            raise ModelLoadError(f"{folder} has no tokenizer that can be read here: {error}") from error
        limit = tokenizer.model_max_length
        stand_ins = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
        return cls(
            backend,
            lower=lower,
            limit=None if limit is None or limit > _NO_LIMIT else int(limit),
            stand_in=next((int(token) for token in stand_ins if token is not None), None),
        )

    def prompt_length(self, prompt: str) -> int:
        """Tokens at the front that belong to ``prompt``, leading special ones too, as sentence-transformers counts."""
        return len(self._encode([prompt])[0].ids) - self._suffix if prompt else 0

    def encode(
        self, texts: Sequence[str], *, prompt: str, limit: int, truncate: Truncate, position: Callable[[int], int]
    ) -> list[Tokenized]:
        """Tokenize ``prompt + text`` for each text, to at most ``limit`` tokens.

        Args:
            texts: The texts.
            prompt: Put before each.
            limit: Most tokens of each result.
            truncate: Which end of the text is cut.
            position: A text's index in the caller's list, for errors.

        Raises:
            InputTooLongError: A text is too long and ``truncate="error"``, or prompt and special tokens fill the limit.
        """
        encodings = self._encode([prompt + text for text in texts] if prompt else texts)
        tokenized = []
        for i, encoding in enumerate(encodings):
            ids = np.array(encoding.ids, dtype=np.int32)
            if len(ids) == 0:
                ids = self._nothing(position(i))
            cut = len(ids) > limit
            if cut:
                if truncate == "error":
                    raise InputTooLongError(
                        f"the text at index {position(i)} has {len(ids)} tokens, more than max_length={limit}; "
                        'shorten it, or let it be cut with truncate="end"'
                    )
                ids = self._cut(ids, prompt + texts[i], prompt, limit, truncate)
            tokenized.append(Tokenized(ids=ids, truncated=cut))
        return tokenized

    def _encode(self, texts: Sequence[str]) -> list[Encoding]:
        if self._lower:
            texts = [_LOWER.normalize_str(text) for text in texts]
        if len(texts) == 1:
            return [self._backend.encode(texts[0])]
        return self._backend.encode_batch_fast(list(texts))

    def _nothing(self, position: int) -> npt.NDArray[np.int32]:
        """The ids of a text that has none (the empty one, with a tokenizer that adds no special tokens)."""
        if self._stand_in is None:
            raise InvalidRequestError(
                f"the text at index {position} has no tokens, and this tokenizer has no special token to stand in; "
                "leave empty texts out"
            )
        return np.array([self._stand_in], dtype=np.int32)

    def _cut(
        self, ids: npt.NDArray[np.int32], text: str, prompt: str, limit: int, truncate: Truncate
    ) -> npt.NDArray[np.int32]:
        """The longest allowed form of an over-long text: front (special tokens, prompt) + part of the text + suffix."""
        front = self._prefix + (self._prompt_tokens(text, prompt) if prompt else 0)
        end = len(ids) - self._suffix
        room = limit - front - self._suffix
        if room < 1:
            raise InputTooLongError(
                f"prompt and special tokens take {front + self._suffix} of max_length={limit} tokens, which leaves "
                "none for the text; shorten the prompt or raise max_length"
            )
        kept = ids[front : front + room] if truncate == "end" else ids[end - room : end]
        return np.concatenate((ids[:front], kept, ids[end:]))

    def _prompt_tokens(self, text: str, prompt: str) -> int:
        """Tokens, special ones aside, that begin inside the prompt."""
        if self._lower:
            text, prompt = _LOWER.normalize_str(text), _LOWER.normalize_str(prompt)
        offsets = self._backend.encode(text, add_special_tokens=False).offsets
        return next((i for i, (start, _) in enumerate(offsets) if start >= len(prompt)), len(offsets))
