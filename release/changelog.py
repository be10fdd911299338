"""Prints a release's section of CHANGELOG.md: ``python -m release.changelog v0.1.0``.

The tag must be the version of the nine packages, so a wrong tag stops a release here, before anything is built.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

from release.distributions import FOLDERS, ROOT

_UNRELEASED = re.compile(r"not on an index yet|no release on a package index yet", re.IGNORECASE)


def section(tag: str, changelog: str, versions: set[str]) -> str:
    """The section of a release, without its heading.

    Args:
        tag: The tag, as ``v0.1.0``.
        changelog: The text of CHANGELOG.md.
        versions: The versions in the seven ``pyproject.toml`` files.

    Raises:
        SystemExit: The tag is another version, or the changelog has no text for it.
    """
    if versions != {tag.removeprefix("v")} or not tag.startswith("v"):
        raise SystemExit(
            f"the tag {tag!r} is not v{', v'.join(sorted(versions))}: the tag, and all seven pyproject.toml files, "
            "must have the same version"
        )
    heading = re.search(rf"^## \[{re.escape(tag[1:])}\].*\n", changelog, re.MULTILINE)
    if heading is None:
        raise SystemExit(f"CHANGELOG.md has no section '## [{tag[1:]}]'; write one with the date of the release")
    text = re.split(r"^(?:## |\[[^\]]+\]: )", changelog[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0].strip()
    if not text:
        raise SystemExit(f"the section '## [{tag[1:]}]' of CHANGELOG.md is empty")
    return text


def stale_pages(root: Path) -> list[str]:
    """Pages that say that there is no release yet, and would say it on PyPI or on the site."""
    places = ("*.md", "docs/**/*.md", "integrations/*/README.md", "notebooks/*.md")
    pages = [page for place in places for page in root.glob(place)]
    texts = {
        page: " ".join(page.read_text(encoding="utf-8").split()) for page in pages if page.name != "CONTRIBUTING.md"
    }
    return sorted(page.relative_to(root).as_posix() for page, text in texts.items() if _UNRELEASED.search(text))


def versions() -> set[str]:
    """The versions in the seven ``pyproject.toml`` files."""
    texts = ((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8") for folder in FOLDERS)
    return {tomllib.loads(text)["project"]["version"] for text in texts}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tag", help="the tag of the release, as v0.1.0")
    parser.add_argument("--changelog", type=Path, default=ROOT / "CHANGELOG.md")
    arguments = parser.parse_args()
    notes = section(arguments.tag, arguments.changelog.read_text(encoding="utf-8"), versions())
    if stale := stale_pages(ROOT):
        raise SystemExit(f"{', '.join(stale)}: say that there is no release yet; write how to install this one")
    print(notes)


if __name__ == "__main__":
    main()
