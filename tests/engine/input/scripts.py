"""Texts of all scripts, for tokenizers that must not differ on any."""

# Signs that look like others are the point.
# ruff: noqa: RUF001

from __future__ import annotations

import random
import sys

from tests.tiny.tokenizers import SENTENCES

# First and last code points of blocks; the last ones have what text rarely has.
BLOCKS = (
    *((0x20, 0x7E), (0x20, 0x7E), (0xA0, 0xFF), (0x100, 0x24F), (0x250, 0x36F), (0x370, 0x3FF), (0x400, 0x52F)),
    *((0x530, 0x58F), (0x590, 0x5FF), (0x600, 0x6FF), (0x750, 0x8FF), (0x900, 0x97F), (0x980, 0x9FF), (0xA00, 0xB7F)),
    *((0xB80, 0xCFF), (0xD00, 0xDFF), (0xE00, 0xE7F), (0xE80, 0xEFF), (0xF00, 0xFFF), (0x1000, 0x109F)),
    *((0x10A0, 0x10FF), (0x1100, 0x11FF), (0x1200, 0x137F), (0x13A0, 0x13FF), (0x1780, 0x17FF), (0x1800, 0x18AF)),
    *((0x1AB0, 0x1AFF), (0x1C80, 0x1CBF), (0x1DC0, 0x1DFF), (0x1E00, 0x1EFF), (0x1F00, 0x1FFF), (0x2000, 0x206F)),
    *((0x2070, 0x20FF), (0x2100, 0x218F), (0x2190, 0x2BFF), (0x2C00, 0x2DFF), (0x3000, 0x303F), (0x3040, 0x30FF)),
    *((0x3100, 0x33FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0x4E00, 0x9FFF), (0xA000, 0xABFF), (0xAC00, 0xD7FF)),
    *((0xE000, 0xF8FF), (0xF900, 0xFB4F), (0xFB50, 0xFDFF), (0xFE00, 0xFEFF), (0xFF00, 0xFFFF), (0x10000, 0x10FFF)),
    *((0x11000, 0x11FFF), (0x16000, 0x16FFF), (0x1D000, 0x1D7FF), (0x1E000, 0x1EFFF), (0x1F000, 0x1FAFF)),
    *((0x20000, 0x2FA1F), (0xE0000, 0xE01EF), (0xF0000, 0x10FFFF), (0, 0x10FFFF)),
)
_SIGNS = "'’.,!?-_/\\()[]<>@#$%&*+=~^`\"|:;…«»„“¿¡·—–।۔؟、。，！「」"
_SPACES = (
    *" " * 12,
    "  ",
    "   ",
    "\n",
    "\n\n",
    " \n ",
    "\r\n",
    "\t",
    "\t\t",
    "\xa0",
    "\u2003",
    "\u3000",
    "\x0b",
    "\x85",
)
# Letters that lower case, folding or composition treats in a way of their own.
_ODD = (
    *(
        "İ",
        "ı",
        "ſ",
        "ẞ",
        "ß",
        "ŉ",
        "ǰ",
        "ΐ",
        "Σ",
        "ς",
        "ΑΣ",
        "ﬁ",
        "ﬅ",
        "K",
        "Å",
        "Ω",
        "Ǆ",
        "ǅ",
        "ᾳ",
        "ᾼ",
        "Ⅷ",
        "ⓐ",
        "\u1100\u1161\u11a8",
        "각",
    ),
    *("각", "é", "ệ", "q̣̇", "q̣̇", "≮", "क़", "ড়", "โน้ำ", "ु़", "לֹ֗", "\u0345", "\u200d", "\u200b", "\ufeff", "\ufffd", "\0"),
    *("👩‍👩‍👧", "🏳️‍🌈", "🇩🇪", "1️⃣", "½", "²", "٣", "१२", "万", "㎏", "𝔘", "𐐀", "\U0001d15e", "\u302e", "\U00016ff0"),
)
_ENDINGS = ("'s", "'S", "'t", "'RE", "'ve", "'ll", "'LL", "'d", "'m", "'ſ", "'K", "'x", "''s", "'’s", "n't")


def texts(count: int, seed: int) -> list[str]:
    """So many texts, each of words of a few scripts with signs, numbers, spaces and odd letters between them."""
    chance = random.Random(seed)
    return [_text(chance) for _ in range(count)]


def every_character(pattern: str, *, per_text: int = 2000, thin: bool = False) -> list[str]:
    """Texts with each code point but surrogates, each as the pattern has it; ``thin``: few of those without a use."""
    codes = [code for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    if thin:  # planes that are not assigned, and the private ones
        codes = [code for code in codes if code < 0x32000 or 0xE0000 <= code < 0xE0200 or code % 97 == 0]
    groups = [codes[i : i + per_text] for i in range(0, len(codes), per_text)]
    return [" ".join(pattern.format(chr(code)) for code in group) for group in groups]


def _text(chance: random.Random) -> str:
    blocks = chance.sample(BLOCKS, chance.randint(1, 3))
    parts = []
    for _ in range(chance.randrange(1, 16)):
        parts.append(_word(chance, blocks))
        parts.append(chance.choice(_SPACES) if chance.random() < 0.8 else "")
    return "".join(parts)


def _word(chance: random.Random, blocks: list[tuple[int, int]]) -> str:
    kind = chance.random()
    if kind < 0.4:
        first, last = chance.choice(blocks)
        codes = [chance.randint(first, last) for _ in range(chance.randint(1, 9))]
        return "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
    if kind < 0.7:
        return chance.choice(chance.choice(SENTENCES).split()) + (chance.choice(_ENDINGS) if kind < 0.45 else "")
    if kind < 0.8:
        return "".join(chance.choice(_SIGNS) for _ in range(chance.randint(1, 4)))
    if kind < 0.88:
        return str(chance.randrange(10 ** chance.randint(1, 9)))
    if kind < 0.98:
        return "".join(chance.choice(_ODD) for _ in range(chance.randint(1, 4)))
    return chance.choice("aAé水한ก") * chance.choice((40, 99, 101, 200, 300))
