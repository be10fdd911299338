"""The picture of README: what ``millpond demo`` prints, drawn as a terminal.

    python docs/site/demo_picture.py [--questions 4] [--out docs/images/demo.svg] [--state FOLDER]

The demo is run anew in an empty folder, unless ``--state`` names that of an earlier run. ``...`` stands for questions
left out.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

_WIDTH = 100  # columns
_THEME = TerminalTheme(
    (24, 27, 33),
    (205, 210, 218),
    [(24, 27, 33), (232, 106, 88), (126, 190, 112), (222, 181, 98), (98, 160, 234), (190, 132, 220), (86, 182, 194)],
)
# rich's own frame without its fonts, which it would load from the network.
_FRAME = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img" \
aria-label="the output of make demo in a terminal">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; \
font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 16px; font-family: ui-sans-serif, "DejaVu Sans", Arial, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
_PHASE = re.compile(r"^([a-z][\w ]+?)(\s{2,}[\d.]+ s)(  .*)$")
_ANSWER = re.compile(r"^(  \d  )(\S+)(\s+[-\d.]+)(\s+#\d+)(.*)$")


def main() -> None:
    """Run the demo and draw what it prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=4, help="how many questions the picture shows")
    parser.add_argument("--out", type=Path, default=Path("docs/images/demo.svg"))
    parser.add_argument("--state", type=Path, help="folder of an earlier run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as empty:
        command = [sys.executable, "-m", "millpond", "demo", "--state", str(arguments.state or empty)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        printed = printed.replace(empty, "~/.cache/millpond/demo")  # the default
    lines = excerpt(printed, arguments.questions)
    arguments.out.write_text(draw(lines), encoding="utf-8")
    print(f"{arguments.out}: {len(lines)} lines")


def excerpt(printed: str, questions: int) -> list[str]:
    """The lines of the demo with the first ``questions`` questions, without the paragraphs that explain them."""
    paragraphs = [paragraph.strip("\n") for paragraph in printed.strip().split("\n\n")]
    asked = [f"{question}\n{answers}" for question, answers in pairwise(paragraphs) if question.endswith("?")]
    phases = [paragraph for paragraph in paragraphs if _PHASE.match(paragraph.partition("\n")[0])]
    shown = [*phases[:1], *asked[:questions], "..." if len(asked) > questions else "", *phases[1:]]
    return "\n\n".join(paragraph for paragraph in shown if paragraph).split("\n")


def draw(lines: list[str]) -> str:
    """An SVG of a terminal with ``lines``."""
    console = Console(record=True, width=_WIDTH, file=io.StringIO())
    console.print(Text("$ make demo\n", style="bold"))
    for line in lines:
        console.print(_styled(line), no_wrap=True, overflow="ellipsis")
    picture = console.export_svg(title="millpond", theme=_THEME, code_format=_FRAME, unique_id="demo")
    return "\n".join(line.rstrip() for line in picture.splitlines()) + "\n"


def _styled(line: str) -> Text:
    if line.endswith("?"):
        return Text(line, style="bold yellow")
    if line.startswith(("agreement ", "cache ")):
        name, space, rest = line.partition(" ")
        return Text.assemble((name, "cyan"), space, rest)
    if phase := _PHASE.match(line):
        return Text.assemble((phase[1], "cyan"), (phase[2], "bold"), phase[3])
    if answer := _ANSWER.match(line):
        return Text.assemble(answer[1], (answer[2], "bold green"), answer[3], (answer[4], "blue"), (answer[5], "dim"))
    return Text(line)


if __name__ == "__main__":
    main()
