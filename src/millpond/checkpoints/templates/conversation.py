"""Chat templates: conversations rendered as transformers renders them, by Jinja alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millpond.checkpoints.resolve import read_json_object
from millpond.checkpoints.templates.sandbox import sandbox
from millpond.errors import InvalidRequestError, ModelLoadError

# Names of a message's reasoning; templates read different ones.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Put at the end of a message that is to be continued: what a template writes after it is dropped.
_END = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A checkpoint's templates, and the special tokens that they may name."""

    sources: Mapping[str, str]  # Jinja, by name
    variables: Mapping[str, str]  # special tokens by role

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],  # the conversation, as `{"role": ..., "content": ...}`
        *,
        index: int,  # index of the conversation in the caller's list, for errors
        model: str,  # the model that has the template, for errors
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation.

        ``options`` are variables of the template, and: ``chat_template``, another one or the name of one; ``tools``,
        a list of JSON schemas; ``continue_final_message``, to leave the last message open.
        """
        try:
            return self._render(_plain(messages), dict(options or {}))
        except Exception as error:  # Jinja's errors, and any error that the template raises
            raise InvalidRequestError(
                f"the conversation at index {index} does not fit the chat template of {model}: {error}"
            ) from error

    def _render(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        source = self._source(options.pop("chat_template", None), options.get("tools"))
        continued = options.pop("continue_final_message", False)
        messages = [_with_reasoning(message) for message in messages]
        ending = _mark_end(messages) if continued else ""
        variables = {"tools": None, "documents": None, "add_generation_prompt": False, **self.variables}
        text = str(sandbox().from_string(source).render(messages=messages, **(variables | _plain(options))))
        return _cut_at_end(text, ending) if continued else text

    def _source(self, given: str | None, tools: Any) -> str:
        if given is not None:
            return self.sources.get(given, given)
        if tools is not None and "tool_use" in self.sources:
            return self.sources["tool_use"]
        if "default" not in self.sources:
            raise ValueError(f"it has several, and none is the default; name one of {', '.join(sorted(self.sources))}")
        return self.sources["default"]


def read_conversation_template(folder: Path, specials: Mapping[str, str]) -> ChatTemplate | None:
    """The templates in ``folder``, from files of their own or tokenizer_config.json; ``None`` if it has none."""
    sources: dict[str, str] = {}
    path = folder / "chat_template.jinja"
    try:
        if path.is_file():
            sources["default"] = path.read_text(encoding="utf-8")
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            sources[path.stem] = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not sources:
        field = read_json_object(folder / "tokenizer_config.json", optional=True).get("chat_template")
        if isinstance(field, str):
            sources["default"] = field
        elif isinstance(field, list):
            named = (entry for entry in field if isinstance(entry, Mapping))
            sources = {str(entry.get("name")): str(entry.get("template")) for entry in named}
    return ChatTemplate(sources=sources, variables=specials) if sources else None


def _plain(value: Any) -> Any:
    """``value`` in plain types of JSON: any other object may have methods that a template must not call."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    plain = next((kind for kind in (str, int, float) if isinstance(value, kind)), None)
    return f"<{type(value).__name__}>" if plain is None else plain(value)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's text; returns the text."""
    content: Any = messages[-1].get("content") if messages else None
    parts = [part for part in content if "text" in part] if isinstance(content, list) else []
    if not isinstance(content, str) and not parts:
        raise ValueError("continue_final_message is set, and the last message has no text to continue")
    holder, key = (parts[-1], "text") if parts else (messages[-1], "content")
    text = str(holder[key])
    holder[key] = text + _END
    return text


def _cut_at_end(text: str, ending: str) -> str:
    """The rendered text up to the mark."""
    at = text.rfind(_END.strip())
    if at < 0 or ending.strip() not in text:
        raise ValueError("continue_final_message is set, and the template does not write the last message as it is")
    # A template that trims the message leaves the mark without its blank.
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()
