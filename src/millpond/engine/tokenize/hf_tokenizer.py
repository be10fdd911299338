"""transformers' tokenizer of a checkpoint: for settings that ``tokenizer.json`` lacks, and for chat templates."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millpond.checkpoints.resolve import quiet_transformers
from millpond.errors import InvalidRequestError, ModelLoadError
from millpond.support.fork import loading

# transformers imports its parts on first use, and a second thread that asks meanwhile gets an ImportError.
_turn = threading.Lock()


def read_hf_tokenizer(folder: Path) -> Any:
    """The tokenizer of the class that transformers chooses, without saved padding and truncation."""
    with loading(), _turn:
        return _read(folder)


def _read(folder: Path) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    try:
        with quiet_transformers(), warnings.catch_warnings():
            # transformers reads a config.json of unknown model_type as a bare one, and warns of old fields in it.
            warnings.simplefilter("ignore", FutureWarning)
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        backend = tokenizer.backend_tokenizer
    except StrictDataclassError as error:  # transformers reads config.json on the way to the tokenizer's class
        raise ModelLoadError(f"{folder}: config.json does not fit its model's class: {error}") from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError, ImportError) as error:
        raise ModelLoadError(f"{folder} has no tokenizer that can be read here: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    return tokenizer


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],  # the conversation, as `{"role": ..., "content": ...}`
    *,
    index: int,  # index of the conversation in the caller's list, for errors
    model: str,  # the model that has the template, for errors
    options: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation by a chat template."""
    try:
        plain = [dict(message) for message in messages]
        return str(tokenizer.apply_chat_template(plain, tokenize=False, **(options or {})))
    except Exception as error:  # Jinja's errors, and any error that the template raises
        raise InvalidRequestError(
            f"the conversation at index {index} does not fit the chat template of {model}: {error}"
        ) from error
