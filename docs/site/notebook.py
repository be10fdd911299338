"""A notebook as a page: its Markdown as it is, its code in blocks; outputs are left out."""

from __future__ import annotations

import json
import re
from pathlib import Path


def page(path: Path) -> str:
    """The notebook in Markdown."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    blocks = []
    for cell in cells:
        text = "".join(cell["source"]).strip()
        if not text:
            continue
        if cell["cell_type"] == "markdown":
            blocks.append(text)
        elif cell["cell_type"] == "code":
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            blocks.append(f"{fence}python\n{text}\n{fence}")
    return "\n\n".join(blocks) + "\n"
