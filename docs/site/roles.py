"""References of docstrings, such as ``:class:`Engine```, as links to the reference where it has the object."""

from __future__ import annotations

import html
import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|mod|func|meth|attr|data|exc|obj):`(?P<short>~?)(?P<name>[^`]+)`")


class Roles(griffe.Extension):
    """Replaces each reference by a link that is optional: a name of internal code stays text."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(lambda match: _link(match, obj), obj.docstring.value)


def _link(match: re.Match[str], obj: griffe.Object) -> str:
    name = match["name"]
    shown = name.rpartition(".")[2] if match["short"] else name
    try:
        target = name if name.startswith("millpond") else obj.resolve(name)
    except griffe.NameResolutionError:
        target = name
    return f'<autoref optional identifier="{html.escape(target)}"><code>{html.escape(shown)}</code></autoref>'
