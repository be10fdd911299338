"""Blank texts: those without a visible character, which have a vector but no meaning."""

from __future__ import annotations

import unicodedata

# White space, control and format characters. Not all of C: private and new characters may be visible.
_CATEGORIES = frozenset(("Cc", "Cf", "Zs", "Zl", "Zp"))
# Invisible characters that Unicode counts as letters, marks or symbols: joiners, fillers, variation selectors.
_INVISIBLE = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"
    + "".join(map(chr, [*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)]))
)


def is_blank(text: str) -> bool:
    """Whether a text has no visible character: it is empty, or holds only white space, control and zero-width ones."""
    if "!" <= text[:1] <= "~":  # visible ASCII, as most texts begin
        return False
    # The beginning decides for nearly every text; for the others each character is looked at once.
    return not any(map(_is_visible, text[:64])) and not any(map(_is_visible, set(text)))


def _is_visible(character: str) -> bool:
    return unicodedata.category(character) not in _CATEGORIES and character not in _INVISIBLE
