"""What docstrings have of reStructuredText, in Markdown: references as ``:class:`Engine``` and ``::`` before code."""

from __future__ import annotations

import html
import re
from typing import Any

import griffe

# Before an indented block.
_LITERAL = re.compile(r"(?P<text>\S?)[ ]?::(?=\n\n[ ]{4})")
_ROLE = re.compile(r":(?:class|mod|func|meth|attr|data|exc|obj):`(?P<short>~?)(?P<name>[^`]+)`")


class Roles(griffe.Extension):
    """Rewrites every docstring; a reference becomes a link that is optional, since internal code has no page."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            text = _LITERAL.sub(lambda match: match["text"] and match["text"] + ":", obj.docstring.value)
            obj.docstring.value = _ROLE.sub(lambda match: _link(match, obj), text)


def _link(match: re.Match[str], obj: griffe.Object) -> str:
    name = match["name"]
    shown = name.rpartition(".")[2] if match["short"] else name
    try:
        target = name if name.startswith("millpond") else obj.resolve(name)
    except griffe.NameResolutionError:
        target = name
    return f'<autoref optional identifier="{html.escape(target)}"><code>{html.escape(shown)}</code></autoref>'
