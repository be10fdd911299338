"""The environment in which templates of checkpoints are rendered: they come from the hub, and are not trusted."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2.parser import Parser


def sandbox() -> Any:
    """Jinja as transformers configures it for chat templates, which are not trusted."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """``{% generation %}``, which marks an assistant's words for training and prints its body."""

        tags = {"generation"}  # noqa: RUF012  # as the base class declares it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class PlainNamespace(Namespace):
        """``namespace()`` without names that have a meaning in Python."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"the name {name!r} is not allowed in a namespace")
            super().__setitem__(name, value)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["namespace"] = PlainNamespace
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment
