"""Links: from files of the repository to pages of the site, or to the repository itself."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path

# Links in code are text.
_CODE = re.compile(r"(^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)[ \t]*$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<before>\]\(|^\[[^\]]+\]:[ \t]+)(?P<target>[^)\s]+)", re.MULTILINE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:|//|#", re.IGNORECASE)
# Stands for the address of the repository until the page is HTML.
_REPOSITORY = "repository:"
_TO_REPOSITORY = re.compile(rf'<a [^>]*?href="{_REPOSITORY}(?P<path>[^"]*)"[^>]*>(?P<text>.*?)</a>', re.DOTALL)


def rewrite(
    markdown: str, *, source: str, page: str, pages: Mapping[str, str], root: Path, warn: Callable[[str], object]
) -> str:
    """A page's Markdown, with links to pages as seen from its own address.

    Args:
        markdown: The text of the page.
        source: Its path in the repository.
        page: Its address, as a path below the site.
        pages: The address of every page and image, by its path in the repository.
        root: The repository.
        warn: Called with a message for a link to a file that does not exist.
    """

    def replaced(match: re.Match[str]) -> str:
        target = match["target"]
        if _SCHEME.match(target):
            return match[0]
        name, hash_sign, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
        uri = pages.get(path) or pages.get(f"{path}/README.md")
        if uri is not None:
            return f"{match['before']}{posixpath.relpath(uri, posixpath.dirname(page) or '.')}{hash_sign}{anchor}"
        if path.split("/")[0] == ".." or not (root / path).exists():
            warn(f"{source} links to {target}, which is no file of the repository")
            return match[0]
        return f"{match['before']}{_REPOSITORY}{path}{hash_sign}{anchor}"

    parts = []
    end = 0
    for code in _CODE.finditer(markdown):
        parts += [_LINK.sub(replaced, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, _LINK.sub(replaced, markdown[end:])])


def to_repository(html: str, repository: str | None, *, root: Path) -> str:
    """A page's HTML, with links to files of the repository; without its address, these links are plain text."""

    def replaced(match: re.Match[str]) -> str:
        if not repository:
            return match["text"]
        name = match["path"].partition("#")[0]
        kind = "tree" if (root / name).is_dir() else "blob"
        return f'<a href="{repository.rstrip("/")}/{kind}/main/{match["path"]}">{match["text"]}</a>'

    return _TO_REPOSITORY.sub(replaced, html)
