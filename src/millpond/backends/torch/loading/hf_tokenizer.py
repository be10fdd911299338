"""transformers' tokenizer of a checkpoint: for classes and settings that are not built without it, and for users."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millpond.checkpoints.tokenizers.read import TokenizerFile
from millpond.errors import ModelLoadError
from millpond.support.fork import loading

# transformers imports its parts on first use, and a second thread that asks meanwhile gets an ImportError.
_turn = threading.Lock()


def read_hf_tokenizer(folder: Path) -> Any:
    """The tokenizer of the class that transformers chooses, without saved padding and truncation."""
    with loading(), _turn:
        return _read(folder)


def read_as_file(folder: Path) -> TokenizerFile:
    """The same as what is read without transformers."""
    tokenizer = read_hf_tokenizer(folder)
    return TokenizerFile(
        backend=tokenizer.backend_tokenizer,
        limit=tokenizer.model_max_length,
        specials={role: str(token) for role, token in tokenizer.special_tokens_map.items()},
        typed="token_type_ids" in tokenizer.model_input_names,
        cuts_start=tokenizer.truncation_side == "left",
        cleans_up=bool(tokenizer.clean_up_tokenization_spaces),
    )


def _read(folder: Path) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    try:
        with quiet_transformers(), warnings.catch_warnings():
            # transformers reads a config.json of unknown model_type as a bare one, and warns of old fields in it.
            warnings.simplefilter("ignore", FutureWarning)
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        backend = getattr(tokenizer, "backend_tokenizer", None)
    except StrictDataclassError as error:  # transformers reads config.json on the way to the tokenizer's class
        raise ModelLoadError(f"{folder}: config.json does not fit its model's class: {error}") from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError, ImportError) as error:
        raise ModelLoadError(f"{folder} has no tokenizer that can be read here: {error}") from error
    if backend is None:
        raise ModelLoadError(
            f"{folder}: its tokenizer, transformers' {type(tokenizer).__name__}, splits texts in Python, which "
            "millpond does not run; write tokenizer.json, where a converter for it is at hand"
        )
    backend.no_padding()
    backend.no_truncation()
    return tokenizer


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch off transformers' load report and progress bar; the report is checked where the model is loaded."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
