"""transformers' tokenizer class of a checkpoint: used for settings that ``tokenizer.json`` lacks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from millpond.checkpoints.resolve import quiet_transformers
from millpond.errors import ModelLoadError


def read_hf_tokenizer(folder: Path) -> Any:
    """The tokenizer of the class that transformers chooses, without saved padding and truncation."""
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
