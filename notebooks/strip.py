"""Strip notebooks before a commit: no outputs, no execution counts, plain metadata.

``python notebooks/strip.py`` rewrites the notebooks of this folder, ``--check`` only names those that it would change.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def stripped(text: str) -> str:
    """A notebook's JSON as git has it. Cells keep their ids, and their tags if they have any.

    Raises:
        ValueError: The text is no notebook of format 4.5 or newer 4, whose cells have ids.
    """
    notebook = json.loads(text)
    if not isinstance(notebook, dict) or notebook.get("nbformat") != 4 or notebook.get("nbformat_minor", 0) < 5:
        raise ValueError("this is no notebook of format 4.5; open and save it in a current Jupyter")
    cells = [_stripped(cell) for cell in notebook["cells"]]
    plain = {"cells": cells, "metadata": _METADATA, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"


def _stripped(cell: dict[str, Any]) -> dict[str, Any]:
    tags = cell["metadata"].get("tags")
    source = cell["source"]
    kept: dict[str, Any] = {
        "cell_type": cell["cell_type"],
        "id": cell["id"],
        "metadata": {"tags": tags} if tags else {},
        "source": ("".join(source) if isinstance(source, list) else source).splitlines(keepends=True),
    }
    if cell["cell_type"] == "code":
        kept |= {"execution_count": None, "outputs": []}
    elif "attachments" in cell:
        kept["attachments"] = cell["attachments"]
    return dict(sorted(kept.items()))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Strip notebooks: no outputs, no execution counts, plain metadata.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of this folder")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if a notebook is not stripped"
    )
    options = parser.parse_args(arguments)
    changed = failed = False
    for path in options.notebooks or sorted(FOLDER.glob("*.ipynb")):
        try:
            text = path.read_text(encoding="utf-8")
            plain = stripped(text)
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            failed = True
            continue
        if plain != text:
            changed = True
            print(f"{path}: {'is not stripped' if options.check else 'stripped'}")
            if not options.check:
                path.write_text(plain, encoding="utf-8", newline="\n")
    return int(failed or (changed and options.check))


if __name__ == "__main__":
    sys.exit(main())
