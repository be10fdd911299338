"""The drawn figures of docs/concepts.md, as SVG files in docs/images.

After a change: ``python docs/site/figures.py`` writes them again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "images"

# The browser's scheme decides; a figure has a ground of its own, so that it can be read on a page of either scheme.
_STYLE = """
  text { font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f; }
  .small { font-size: 11px; fill: #57606a; }
  .code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12px; }
  .ground { fill: #ffffff; }
  .line { stroke: #57606a; fill: none; stroke-width: 1.3; }
  .tip { fill: #57606a; }
  .a { fill: #2a9d8f; } .b { fill: #e9a23b; } .c { fill: #4f7cc4; } .d { fill: #c25b7a; }
  .on { fill: #ffffff; } .dark { fill: #24292f; }
  .pad { fill: none; stroke: #8c959f; stroke-dasharray: 3 3; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .small { fill: #9aa4af; } .ground { fill: #1b2129; } .pad { stroke: #6b7683; }
    .line { stroke: #9aa4af; } .tip { fill: #9aa4af; } .dark { fill: #10151b; }
  }
"""
_CLASSES = "abcd"

# all-MiniLM-L6-v2 in float32: cosines of the rows of ``token_embed``, by the roles of query and document, without
# those of special tokens. A test computes them again.
QUERY = "what makes dough rise ?"
DOCUMENT = "yeast gives off gas , and the dough rises ."
SIMILARITY = (
    (0.26, 0.49, 0.34, 0.22, 0.51, 0.61, 0.54, 0.36, 0.25, 0.60),
    (0.27, 0.61, 0.46, 0.21, 0.48, 0.63, 0.53, 0.31, 0.41, 0.60),
    (0.58, 0.21, 0.18, 0.37, 0.59, 0.44, 0.56, 0.93, 0.11, 0.51),
    (0.11, 0.33, 0.37, 0.19, 0.33, 0.37, 0.32, 0.17, 0.85, 0.31),
    (0.40, 0.41, 0.31, 0.30, 0.72, 0.68, 0.73, 0.60, 0.26, 0.76),
)


def packing() -> str:
    """Four texts as a padded batch, and as one packed row."""
    lengths = (7, 4, 19, 7)
    cell, left = 17, 24
    parts = [_text(left, 30, "Padded: a rectangle as wide as the longest text, half of it empty")]
    for row, length in enumerate(lengths):
        y = 44 + 22 * row
        parts += [_rect(left + cell * n, y, cell - 2, 16, _CLASSES[row]) for n in range(length)]
        parts += [_rect(left + cell * n, y, cell - 2, 16, "pad") for n in range(length, max(lengths))]
    tokens, cells = sum(lengths), len(lengths) * max(lengths)
    parts.append(_text(left + cell * max(lengths) + 14, 93, f"{cells} positions for {tokens} tokens", "small"))
    parts.append(_text(left, 176, "Packed: one row, the texts end to end; attention stays inside each text"))
    start = 0
    for row, length in enumerate(lengths):
        parts += [_rect(left + cell * n, 190, cell - 2, 16, _CLASSES[row]) for n in range(start, start + length)]
        x = left + cell * start - 1
        parts += [_path(f"M{x} 184V218"), _text(x, 233, str(start), "code", "middle")]
        start += length
    x = left + cell * start - 1
    parts += [_path(f"M{x} 184V218"), _text(x, 233, str(start), "code", "middle")]
    parts.append(_text(left, 260, f"cu_seqlens = {[sum(lengths[:n]) for n in range(len(lengths) + 1)]}", "code"))
    return _svg(690, 280, "Four texts as a padded batch of 76 positions, and as one packed row of 37 tokens", parts)


def matryoshka() -> str:
    """One vector, its cuts, and the two stages of a search."""
    parts = [
        _text(24, 30, "One vector of 384 numbers is computed; each width is its beginning, made unit length again")
    ]
    for y, width, name in ((46, 384, "c"), (76, 128, "a")):
        parts += [_rect(24, y, width, 20, name), _text(34, y + 14, f"d{width}", "on code")]
    parts.append(_text(420, 60, "ranks the candidates", "small"))
    parts.append(_text(164, 90, "finds candidates: a third of the bytes to read", "small"))
    parts += _flow(
        ("all rows", "d128, cosine", "a"), ("100 candidates", "d384, cosine", "c"), ("10 hits", "", "b"), y=122
    )
    return _svg(
        690, 190, "A vector of 384 numbers, cut to 128; the short one finds candidates, the long one ranks", parts
    )


def two_stages() -> str:
    """Retrieval and reranking."""
    parts = _flow(
        ("all passages", "one vector each: dense, coarse to fine, hybrid", "a"),
        ("100 candidates", "both texts read together, or MaxSim", "d"),
        ("5 passages", "for the answer", "b"),
        y=24,
    )
    return _svg(690, 104, "All passages, 100 candidates by one vector each, 5 passages by a reranker", parts)


def late_interaction() -> str:
    """The similarity of each token of a query with each of a document, and its largest one in each row."""
    query, document = QUERY.split(), DOCUMENT.split()
    wide, high, left, top = 50, 26, 84, 40
    parts = [_text(left + wide * (n + 0.5), 30, word, "", "middle") for n, word in enumerate(document)]
    total = 0.0
    for row, (word, values) in enumerate(zip(query, SIMILARITY, strict=True)):
        y = top + high * row
        parts.append(_text(left - 10, y + 17, word, "", "end"))
        for n, value in enumerate(values):
            shade = f'<rect x="{left + wide * n}" y="{y}" width="{wide - 2}" height="{high - 2}" class="a" '
            parts.append(shade + f'opacity="{value**2:.2f}"/>')
            best = value == max(values)
            if best:
                box = f'x="{left + wide * n + 1}" y="{y + 1}" width="{wide - 4}" height="{high - 4}"'
                parts.append(f'<rect {box} fill="none" stroke="#d9822b" stroke-width="2.5"/>')
            parts.append(
                _text(left + wide * (n + 0.5) - 1, y + 17, f"{value:.2f}", "code" if best else "small", "middle")
            )
        total += max(values)
        parts.append(_text(left + wide * len(document) + 16, y + 17, f"{max(values):.2f}", "code"))
    y = top + high * len(query)
    parts.append(_path(f"M{left + wide * len(document) + 10} {y + 2}h44"))
    parts.append(_text(left + wide * len(document) + 16, y + 20, f"{total:.2f}", "code"))
    parts.append(_text(left, y + 20, "MaxSim: the largest similarity of each row, added up", "small"))
    return _svg(
        690, y + 36, "Similarities of the tokens of a query and a document; the largest of each row are added", parts
    )


FIGURES = {
    "concept-packing.svg": packing,
    "concept-matryoshka.svg": matryoshka,
    "concept-late-interaction.svg": late_interaction,
    "concept-two-stages.svg": two_stages,
}


def _flow(*stages: tuple[str, str, str], y: int) -> list[str]:
    """Boxes from left to right, each with what leads to the next one written under the arrow."""
    parts, wide, gap = [], 118, 140
    if len(stages[0][1]) > 30:
        wide, gap = 112, 152
    for n, (name, step, color) in enumerate(stages):
        x = 24 + n * (wide + gap)
        parts += [
            _rect(x, y, wide, 36, color),
            _text(x + wide / 2, y + 23, name, "dark" if color == "b" else "on", "middle"),
        ]
        if n < len(stages) - 1:
            middle = y + 18
            parts.append(_path(f"M{x + wide + 8} {middle}H{x + wide + gap - 14}"))
            parts.append(f'<path class="tip" d="M{x + wide + gap - 8} {middle}l-9 -5v10z"/>')
            for line, words in enumerate(_wrapped(step, 24)):
                parts.append(_text(x + wide + gap / 2, middle + 18 + 14 * line, words, "small", "middle"))
    return parts


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _rect(x: float, y: float, width: float, height: float, name: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" class="{name}"/>'


def _path(d: str) -> str:
    return f'<path class="line" d="{d}"/>'


def _text(x: float, y: float, words: str, name: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{name}" text-anchor="{anchor}">{words}</text>'


def _svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    body = "\n".join(["", *parts, ""])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img">\n<title>{title}</title>\n<style>{_STYLE}</style>\n'
        f'<rect class="ground" width="{width}" height="{height}" rx="8"/>{body}</svg>\n'
    )


if __name__ == "__main__":
    for file, figure in FIGURES.items():
        (IMAGES / file).write_text(figure(), encoding="utf-8")
