"""A checkpoint's own chat template, from whichever file it lies in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millpond.checkpoints.resolve import read_json_object
from millpond.checkpoints.score_template import ScoreTemplate
from millpond.errors import ModelLoadError

# What transformers calls special tokens, by the keys of tokenizer_config.json.
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def read_chat_template(
    folder: Path,
    *,
    variant: str = "default",
    instruction: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> ScoreTemplate | None:
    """The chat template of the checkpoint in ``folder``, with its special tokens; ``None`` if it has none.

    Args:
        folder: Where tokenizer_config.json lies.
        variant: Name of the template, where there are several.
        instruction: The template's default instruction.
        variables: Further variables of the template.

    Raises:
        ModelLoadError: A file cannot be read.
    """
    config = read_json_object(folder / "tokenizer_config.json", optional=True)
    source = _own_file(folder, variant) or _listed(config.get("chat_template"), variant)
    if source is None:
        return None
    return ScoreTemplate(
        source=source,
        name=f"{folder.name}'s chat template",
        special_tokens=False,
        instruction=instruction,
        variables={**_special_tokens(config), **(variables or {})},
    )


def _own_file(folder: Path, variant: str) -> str | None:
    default = variant == "default"
    path = folder / ("chat_template.jinja" if default else f"additional_chat_templates/{variant}.jinja")
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return _listed(read_json_object(folder / "chat_template.json", optional=True).get("chat_template"), variant)


def _listed(written: object, variant: str) -> str | None:
    """A template out of the field's value: one source, or a list of named ones."""
    if isinstance(written, str):
        return written if variant == "default" else None
    if isinstance(written, list):
        named = {str(entry.get("name")): entry.get("template") for entry in written if isinstance(entry, Mapping)}
        source = named.get(variant)
        return source if isinstance(source, str) else None
    return None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for role in _ROLES:
        token = config.get(f"{role}_token")
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            found[f"{role}_token"] = token
    return found
