"""The tokenizer in a checkpoint's folder: built here, or by transformers where that is installed and needed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from millpond.checkpoints.tokenizers.read import TokenizerFile, read_tokenizer
from millpond.checkpoints.tokenizers.settings import NotBuiltError
from millpond.errors import MissingExtraError, ModelLoadError

# Imported by its name.
_TRANSFORMERS = "millpond.backends.torch.loading.hf_tokenizer"
_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "*.tiktoken")


def tokenizer_file(folder: Path) -> TokenizerFile:
    """The tokenizer, built here or by transformers.

    Raises:
        ModelLoadError: There is none that can be read.
    """
    if not any(path.is_file() for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        # transformers would make up an empty tokenizer, to which every text is unknown tokens.
        raise ModelLoadError(f"{folder} has no tokenizer that can be read here; is the checkpoint complete?")
    try:
        return read_tokenizer(folder)
    except NotBuiltError as reason:
        if find_spec("transformers") is None:
            raise ModelLoadError(
                f'the tokenizer in {folder} needs transformers ({reason}): pip install "millpond[torch]"'
            ) from reason
    file: TokenizerFile = import_module(_TRANSFORMERS).read_as_file(folder)
    return file


def hf_tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer as transformers has it."""
    if find_spec("transformers") is None:
        raise MissingExtraError('transformers\' tokenizer needs transformers: pip install "millpond[torch]"')
    return import_module(_TRANSFORMERS).read_hf_tokenizer(folder)
