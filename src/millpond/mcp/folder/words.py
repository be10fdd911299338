"""Words of texts and identifiers, for BM25: ``getUserName`` has get, user and name, too."""

from __future__ import annotations

import re

_IDENTIFIER = re.compile(r"\w+")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\dA-Za-z_]+")
# Words of a question that SQLite is asked for, longest first: more only cost time.
_MOST = 64


def words(text: str) -> list[str]:
    """The words in lower case, in order; of an identifier of several, itself and each of them."""
    found: list[str] = []
    for match in _IDENTIFIER.finditer(text):
        word = match[0]
        found.append(word.lower())
        if not (word.islower() and word.isalpha()):
            parts = _PART.findall(word)
            if len(parts) > 1:
                found += map(str.lower, parts)
    return found


def words_of_name(name: str) -> list[str]:
    """The words that a name is made of."""
    return [part.lower() for part in _PART.findall(name)]


def expression(question: str) -> str | None:
    """A question for SQLite's full-text search: any of its words; ``None`` if it has none."""
    distinct = sorted(dict.fromkeys(words(question)), key=len, reverse=True)[:_MOST]
    return " OR ".join(f'"{word}"' for word in distinct) or None
