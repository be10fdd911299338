"""The check of a built site: links and images lead to a file and an anchor of it; nothing is loaded from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes by which a browser loads something at once; of <link>, only with these relations.
_LOADED = {("img", "src"), ("script", "src"), ("iframe", "src"), ("source", "src"), ("link", "href"), ("use", "href")}
_LOADING_RELATIONS = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "modulepreload"}
_CSS_URL = re.compile(r"""(?:@import\s+|url\(\s*)["']?((?:https?:)?//[^"')\s]+)""")


class _Document(HTMLParser):
    """The anchors, links and loaded files of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_style = tag == "style"
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        for name in ("href", "src"):
            if name not in values:
                continue
            relations = set(values.get("rel", "").split())
            if (tag, name) in _LOADED and (tag != "link" or relations & _LOADING_RELATIONS):
                self.loaded.append(values[name])
            if tag != "link" or relations & _LOADING_RELATIONS:
                self.links.append(values[name])

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.loaded += _CSS_URL.findall(data)
            self.links += _CSS_URL.findall(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False


def problems(site: Path) -> Iterator[str]:
    """A message for each broken link, and for each file that a page would load from another server."""
    documents = {path: _read(path) for path in site.rglob("*.html") if path.name != "404.html"}
    for path, document in sorted(documents.items()):
        place = path.relative_to(site).as_posix()
        for link in dict.fromkeys(document.links):
            parts = urlsplit(link)
            if parts.scheme in ("data", "mailto"):
                continue
            if parts.scheme or parts.netloc:
                if link in document.loaded:
                    yield f"{place} loads {link} from another server"
                continue
            file = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file():
                yield f"{place} links to {link}, which is no file of the site"
            elif parts.fragment.startswith("__"):  # of the theme's own script
                continue
            elif parts.fragment and file in documents and unquote(parts.fragment) not in documents[file].anchors:
                yield f"{place} links to {link}, and {file.relative_to(site.resolve())} has no such anchor"
    for path in sorted(site.rglob("*.css")):
        for address in _CSS_URL.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site).as_posix()} loads {address} from another server"


def _read(path: Path) -> _Document:
    document = _Document()
    document.feed(path.read_text(encoding="utf-8"))
    return document
