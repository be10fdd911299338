"""ComposedText: the text of a record made of several columns, as a title before its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from string import Formatter
from typing import Any

from millpond.errors import InvalidRequestError
from millpond.support.blank import is_blank


@dataclass(frozen=True)
class ComposedText:
    """The values of some columns, put into a template or joined by spaces; what is missing or blank is left out.

    Attributes:
        names: The columns, each once; the last one is the text's own.
        pieces: Literals of the template, each with the column that follows it; empty: the values are joined.
    """

    names: tuple[str, ...]
    pieces: tuple[tuple[str, str | None], ...] = ()

    def __call__(self, values: Mapping[Any, Any]) -> str | None:
        """The text; ``None`` if every column is missing, and empty if none has a visible character."""
        found = {name: _part(name, values[name]) for name in self.names if values.get(name) is not None}
        parts = [found[name].strip() for name in self.names if not is_blank(found.get(name, ""))]
        if not parts:
            return "" if found else None
        if not self.pieces:
            return " ".join(parts)
        return "".join(literal + found.get(name or "", "") for literal, name in self.pieces).strip()


def compose(text: str | Sequence[str], template: str | None) -> ComposedText | None:
    """How the text is made; ``None``: it is the value of one column as it is."""
    if template is not None:
        if text != "text":
            raise InvalidRequestError(
                f"template={template!r} names the columns of the text itself; leave text_column={text!r} out"
            )
        return _parsed(template)
    if isinstance(text, str):
        return None
    names = tuple(text)
    for name in names:
        if not isinstance(name, str) or not name:
            raise InvalidRequestError(f"text_column={list(names)!r} holds {name!r}; pass names of columns")
    if not names or len(set(names)) != len(names):
        raise InvalidRequestError(f"text_column={list(names)!r} must name at least one column, and each once")
    return ComposedText(names) if len(names) > 1 else None


def _parsed(template: str) -> ComposedText:
    """The template's literals and columns; a name is taken as it is written, up to its closing brace."""
    advice = "write columns in braces, like '{title}: {text}', and {{ for a brace"
    if not isinstance(template, str):
        raise InvalidRequestError(f"template is of type {type(template).__name__}; pass a str: {advice}")
    try:
        parsed = [(literal, name, bool(form or sign)) for literal, name, form, sign in Formatter().parse(template)]
    except ValueError as error:
        raise InvalidRequestError(f"template={template!r} is not a template ({error}); {advice}") from None
    names = [name for _, name, _ in parsed if name is not None]
    if not names or not all(names) or any(formatted for *_, formatted in parsed):
        raise InvalidRequestError(f"template={template!r} does not name its columns alone; {advice}")
    # The last one written is the text's own.
    distinct = tuple(reversed(dict.fromkeys(reversed(names))))
    return ComposedText(distinct, tuple((literal, name) for literal, name, _ in parsed))


def _part(name: str, value: object) -> str:
    """A value in the text: a str as it is, a number as Python writes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, Real) and not isinstance(value, bool):
        return str(value)
    raise InvalidRequestError(f"{name!r} is of type {type(value).__name__}; a text is made of str and numbers")
