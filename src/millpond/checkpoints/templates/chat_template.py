"""A checkpoint's chat template, from whichever file holds it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millpond.checkpoints.resolve import read_json_object
from millpond.checkpoints.templates.score_template import ScoreTemplate
from millpond.errors import ModelLoadError

# Special tokens by role; the keys of tokenizer_config.json are ``bos_token`` and so on.
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def read_chat_template(
    folder: Path,
    *,
    variant: str = "default",
    instruction: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> ScoreTemplate | None:
    """The chat template of the checkpoint in ``folder``, with its special tokens; ``None`` if it has none."""
    config = read_json_object(folder / "tokenizer_config.json", optional=True)
    source = _from_file(folder, variant) or _from_field(config.get("chat_template"), variant)
    if source is None:
        return None
    return ScoreTemplate(
        source=source,
        name=f"{folder.name}'s chat template",
        special_tokens=False,
        instruction=instruction,
        variables={**_special_tokens(config), **(variables or {})},
    )


def _from_file(folder: Path, variant: str) -> str | None:
    default = variant == "default"
    path = folder / ("chat_template.jinja" if default else f"additional_chat_templates/{variant}.jinja")
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return _from_field(read_json_object(folder / "chat_template.json", optional=True).get("chat_template"), variant)


def _from_field(value: object, variant: str) -> str | None:
    """A template from the value of ``chat_template``: one source, or a list of named ones."""
    if isinstance(value, str):
        return value if variant == "default" else None
    if isinstance(value, list):
        named = {str(entry.get("name")): entry.get("template") for entry in value if isinstance(entry, Mapping)}
        source = named.get(variant)
        return source if isinstance(source, str) else None
    return None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for role in _ROLES:
        token = config.get(f"{role}_token")
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            tokens[f"{role}_token"] = token
    return tokens
