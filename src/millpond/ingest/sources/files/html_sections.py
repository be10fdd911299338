"""Sections of HTML, by its headings: what a reader of the page sees, without scripts and styles."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from millpond.ingest.sources.files.part import Part, SectionBuilder

_BLOCKS = frozenset(
    """
    address article aside blockquote body caption center dd details dialog dir div dl dt fieldset figcaption figure
    footer form h1 h2 h3 h4 h5 h6 header hr legend li main menu nav ol optgroup option p pre search section select
    summary table tbody tfoot thead tr ul
    """.split()
)
_CELLS = frozenset(("td", "th"))
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_UNSEEN = frozenset(
    "audio canvas datalist head iframe math noembed noframes noscript object script style svg template video".split()
)
_TEXT = "-text"
_SPACE = re.compile(r"\s+")
_BREAK = re.compile(r" ?\0 ?")  # a <br>, while spaces are counted: no text of a page has this character
# Where the encoding stands, if it does: a browser looks no further.
_LOOKED_AT = 1024
_CHARSET = re.compile(rb"""<meta[^>]*?charset\s*=\s*["']?\s*([A-Za-z0-9_:.\-]+)""", re.IGNORECASE)
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


def html_sections(data: bytes) -> Iterator[Part]:
    """The sections of a page."""
    parser = import_module("selectolax.lexbor").LexborHTMLParser(decode_html(data))
    builder = SectionBuilder()
    words: list[str] = []  # of the block that is open
    level = preformatted = 0

    def close() -> Iterator[Part]:
        nonlocal level
        text = "".join(words)
        text = text.strip("\n") if preformatted else _SPACE.sub(" ", text).strip()
        text = _BREAK.sub("\n", text)
        words.clear()
        if level:
            yield from builder.heading(level, " ".join(text.split()))
            level = 0
        else:
            builder.block(text)

    for node, entered in _walk(parser.body):
        tag = node.tag
        if tag == _TEXT:
            words += [node.text_content or ""] if entered else []
        elif tag in _CELLS:
            words += [" | "] if entered and "".join(words).strip() else []
        elif tag == "br":
            words += ["\0"] if entered else []
        elif tag in _BLOCKS:
            yield from close()
            if entered and tag in _HEADINGS:
                level = _HEADINGS[tag]
            elif tag == "pre":
                preformatted += 1 if entered else -1
    yield from close()
    yield from builder.end()


def decode_html(data: bytes) -> str:
    """The characters of a page: by its mark, by what it says of itself, else as UTF-8, else as Windows-1252."""
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return data.removeprefix(mark).decode(encoding, errors="replace")
    declared = _CHARSET.search(data[:_LOOKED_AT])
    names = [] if declared is None else [declared[1].decode()]
    for name in (*names, "utf-8"):
        try:
            # A page that can be read so far is not in UTF-16, and its Latin-1 is Windows-1252, as in every browser.
            found = {"iso8859-1": "cp1252", "ascii": "cp1252"}.get(codec := codecs.lookup(name).name, codec)
            return data.decode("utf-8" if found.startswith("utf-16") else found)
        except (LookupError, UnicodeDecodeError):
            continue
    return data.decode("cp1252", errors="replace")


def _walk(root: Any) -> Iterator[tuple[Any, bool]]:
    """The nodes that are seen, entered and left, without recursion: pages are nested to any depth."""
    node = root
    while node is not None:
        yield node, True
        child = None if node.tag in _UNSEEN or _is_hidden(node) else node.child
        if child is not None and node.tag != _TEXT:
            node = child
            continue
        while node is not None:
            yield node, False
            if node.mem_id == root.mem_id:  # == compares the HTML of both
                return
            if node.next is not None:
                node = node.next
                break
            node = node.parent


def _is_hidden(node: Any) -> bool:
    return node.tag != _TEXT and "hidden" in node.attributes
