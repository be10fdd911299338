"""Writes src/millpond/native/tokenize/unicode_tables.h: what the installed ``tokenizers`` does with each code point.

    python tests/engine/input/unicode_tables.py > src/millpond/native/tokenize/unicode_tables.h

Its parts are of several Unicode versions, so they are asked, and not the standard. A number is written in digits of
five bits, the lowest first, of ``_DIGITS``; the second half of the digits says that another one follows.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

EVERY = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+-"
_HANGUL = range(0xAC00, 0xD7A4)  # decomposed by arithmetic
_OFF = {"clean_text": False, "handle_chinese_chars": False, "strip_accents": False, "lowercase": False}


def header() -> str:
    """The file."""
    lower, strip, clean = (_bert(option) for option in ("lowercase", "strip_accents", "clean_text"))
    marks = {character for character, found in strip.items() if not found}
    classes = _combining_classes()
    sets = {
        "kRemoved": ("BertNormalizer drops these", {c for c, found in clean.items() if not found}),
        "kMarks": ("and these if it strips accents", marks),
        "kMoving": ("canonical order may move these, and they stay", {c for c in EVERY if _moves(c)} - marks),
        "kPunctuation": ("BertPreTokenizer splits at these", _punctuation()),
        "kLetters": (r"\p{L} of Split", _matching(r"\p{L}")),
        "kNumbers": (r"\p{N}", _matching(r"\p{N}")),
        "kAccents": (r"\p{M}", _matching(r"\p{M}")),
        "kComposing": ("NFC may change a text with these", _composing(classes)),
    }
    mappings = {
        "kLower": ("to lower case, where that is one character", _single(lower)),
        "kStrip": ("without accents, where that is another character", _single(strip)),
        "kClasses": ("combining classes", {ord(c): number for c, number in classes.items()}),
    }
    lines = ["// Written by tests/engine/input/unicode_tables.py.", "", "#pragma once", "", "// clang-format off"]
    lines += [line for name, (what, held) in sets.items() for line in _array(name, what, _ranges(held))]
    lines += [line for name, (what, held) in mappings.items() for line in _array(name, what, _pairs(held))]
    lines += _array("kLonger", "strip accents from these: several characters", _sequences(strip))
    return "\n".join([*lines, "// clang-format on", ""])


def _bert(option: str) -> dict[str, str]:
    return _each(normalizers.BertNormalizer(**{**_OFF, option: True}))


def _each(normalizer: Any, before: str = "") -> dict[str, str]:
    """What becomes of each code point alone, in one call: no normalizer looks beyond a bar."""
    others = [c for c in EVERY if c != "|"]
    parts = normalizer.normalize_str("|".join(before + c for c in others)).split("|")
    return {**dict(zip(others, parts, strict=True)), "|": before + "|"}


def _matching(pattern: str) -> set[str]:
    """The code points that a pattern of one character matches."""
    words = pre_tokenizers.Split(Regex(pattern.replace("p{", "P{")), behavior="removed")
    return {c for word, _ in words.pre_tokenize_str("".join(EVERY)) for c in word}


def _punctuation() -> set[str]:
    pieces = pre_tokenizers.BertPreTokenizer().pre_tokenize_str("".join(c + c for c in EVERY))
    return {piece for piece, _ in pieces if len(piece) == 1}


def _moves(character: str) -> bool:
    return unicodedata.combining(character) > 0


def _combining_classes() -> dict[str, int]:
    """Classes that the standard and ``tokenizers`` agree on: marks of this class stay behind, or before, another."""
    high = _each(normalizers.NFD(), before="a\u0345")
    return {
        c: number for c in EVERY if (number := unicodedata.combining(c)) and (number == 240 or high[c] != f"a\u0345{c}")
    }


def _composing(classes: Mapping[str, int]) -> set[str]:
    changed = {c for c, found in _each(normalizers.NFC()).items() if found != c}
    seconds = {chr(code) for code in (*range(0x1161, 0x1176), *range(0x11A7, 0x11C3))}
    for c in EVERY:
        parts = unicodedata.decomposition(c).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            seconds.add(chr(int(parts[1], 16)))
    apart, behind = _each(normalizers.NFD()), _each(normalizers.NFD(), before="a\u0345")
    unsure = {c for c in EVERY if (behind[c] != "a\u0345" + apart[c] or _moves(c)) and c not in classes}
    return changed | seconds | unsure


def _single(found: Mapping[str, str]) -> dict[int, int]:
    """The mapping of those characters that become one other."""
    return {ord(c): ord(to) for c, to in found.items() if len(to) == 1 and to != c and ord(c) not in _HANGUL}


def _sequences(found: Mapping[str, str]) -> list[int]:
    longer = [(ord(c), to) for c, to in sorted(found.items()) if len(to) > 1 and ord(c) not in _HANGUL]
    return [number for code, to in longer for number in (code, len(to), *map(ord, to))]


def _ranges(held: Iterable[str]) -> list[int]:
    """The distance of each range from the end of the one before it, and its length."""
    numbers: list[int] = []
    end = 0
    for code in sorted(map(ord, held)):
        if numbers and code == end:
            numbers[-1] += 1
        else:
            numbers += [code - end, 1]
        end = code + 1
    return numbers


def _pairs(mapping: Mapping[int, int]) -> list[int]:
    """The distance of each code from the one before it, and how much the difference of its value has changed."""
    numbers: list[int] = []
    last, held = 0, 0
    for code, to in sorted(mapping.items()):
        change = to - code - held
        numbers += [code - last, 2 * change if change >= 0 else -2 * change - 1]
        last, held = code, to - code
    return numbers


def _array(name: str, what: str, numbers: Sequence[int]) -> list[str]:
    digits = "".join(map(_digits, numbers))
    lines = [f'    "{digits[i : i + 112]}"' for i in range(0, len(digits), 112)]
    lines[-1] += ";"
    return [f"constexpr char {name}[] =  // {what}", *lines]


def _digits(number: int) -> str:
    text = ""
    while number > 31:
        text += _DIGITS[32 + number % 32]
        number //= 32
    return text + _DIGITS[number]


if __name__ == "__main__":
    print(header(), end="")
