"""A notebook as a page: its Markdown as it is, its code in blocks, and its outputs if it was executed."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def page(path: Path, executed: Path | None = None) -> str:
    """The notebook in Markdown.

    Args:
        path: The notebook, without outputs.
        executed: The same notebook with outputs; it is left aside if it does not exist, or has other cells.
    """
    cells = _cells(path)
    if (
        executed is not None
        and executed.is_file()
        and list(map(_source, _cells(executed))) == list(map(_source, cells))
    ):
        cells = _cells(executed)
    return "\n\n".join(block for cell in cells for block in _blocks(cell)) + "\n"


def _cells(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return cells


def _source(cell: Mapping[str, Any]) -> str:
    return "".join(cell["source"]).strip()


def _blocks(cell: Mapping[str, Any]) -> Iterator[str]:
    text = _source(cell)
    if text and cell["cell_type"] == "markdown":
        yield text
    elif text and cell["cell_type"] == "code":
        yield _fenced(text, "python")
        for output in cell.get("outputs", ()):
            yield from _shown(output)


def _shown(output: Mapping[str, Any]) -> Iterator[str]:
    """An output, in the richest form that it has and a page can show."""
    if output["output_type"] == "stream":
        if output["name"] == "stdout":
            yield _fenced("".join(output["text"]).rstrip("\n"), "text")
        return
    data = {
        kind: "".join(content) for kind, content in output.get("data", {}).items() if isinstance(content, str | list)
    }
    if "image/png" in data:
        title = html.escape(data.get("text/plain", ""))
        yield f'<img alt="{title}" src="data:image/png;base64,{"".join(data["image/png"].split())}">'
    elif "text/html" in data:
        body = re.sub(r"\n\s*\n", "\n", data["text/html"])  # a blank line would end it
        yield f'<div class="output">\n{body}\n</div>'
    elif "text/plain" in data:
        yield _fenced(data["text/plain"], "text")


def _fenced(text: str, language: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
