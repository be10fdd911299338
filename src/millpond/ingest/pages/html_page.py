"""A page of HTML in one file: it loads nothing, runs no script, and follows the reader's dark or light colours."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path

from millpond.errors import InvalidRequestError


def check_page_path(path: str | os.PathLike[str]) -> None:
    """Refuse a path that no page can be written to, before the work that the page is about."""
    page = Path(path)
    folder = page.absolute().parent
    if page.is_dir():
        raise InvalidRequestError(f"{page} is a folder; name a file in it, such as {page / 'report.html'}")
    if not folder.is_dir():
        raise InvalidRequestError(f"{page}: there is no folder {folder}; make it first, or name a file elsewhere")
    if not os.access(folder, os.W_OK):
        raise InvalidRequestError(f"{page}: its folder cannot be written to; name a file elsewhere")
    if page.is_file() and not _is_page(page):
        raise InvalidRequestError(
            f"{page} exists and is not an HTML page, so it is not replaced; name another file, such as "
            f"{page.with_suffix('.html')}"
        )


def _is_page(path: Path) -> bool:
    """Whether a file is a page, or empty."""
    try:
        with path.open("rb") as file:
            return _DOCTYPE.startswith(file.read(len(_DOCTYPE)).lower())
    except OSError:  # it cannot be read
        return False


def write_page(path: str | os.PathLike[str], text: str) -> None:
    """Write a page at once: a reader, and a file of an earlier run, never sees a half of it."""
    page = Path(path).absolute()
    descriptor, name = tempfile.mkstemp(prefix=f".{page.name}.", dir=page.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "replace"))
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)  # mkstemp gives 0600
        Path(name).replace(page)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def page(*, title: str, subtitle: str, tiles: Mapping[str, str], sections: Sequence[str], note: str) -> str:
    """The whole page. Only ``sections`` are HTML; the others are escaped here."""
    shown = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in tiles.items())
    return _PAGE.format(
        title=escape(title), subtitle=escape(subtitle), tiles=shown, body="\n".join(sections), note=escape(note)
    )


def figure(
    title: str, svg: str | None, *, summary: str = "", keys: Mapping[str, str] | None = None, empty: str = ""
) -> str:
    """A chart with its heading, a sentence that says what it shows, and its key."""
    chips = "".join(f'<li style="--key: var(--{color})">{escape(name)}</li>' for name, color in (keys or {}).items())
    chips = f"<ul>{chips}</ul>" if chips and svg else ""
    text = f"<p>{escape(summary)}</p>" if summary and svg else ""
    drawn = svg or f"<p>{escape(empty)}</p>"
    return f"<figure><h2>{escape(title)}</h2>{text}{chips}{drawn}</figure>"


def side_by_side(*parts: str) -> str:
    """Charts, or narrow tables, side by side where there is room."""
    return f'<div class="columns">{"".join(parts)}</div>'


def table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    summary: str = "",
    marked: Sequence[bool] | None = None,
    numbers: bool = True,
) -> str:
    """A table; all columns but the first are numbers, aligned to the right, unless ``numbers`` is False."""
    kind = ' class="numbers"' if numbers else ""
    head = "<tr>" + "".join(f'<th scope="col">{escape(name)}</th>' for name in header) + "</tr>" if any(header) else ""
    lines = []
    for index, row in enumerate(rows):
        mark = ' class="marked"' if marked is not None and marked[index] else ""
        first, *others = row
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in others)
        lines.append(f'<tr{mark}><th scope="row">{escape(first)}</th>{cells}</tr>')
    text = f"<p>{escape(summary)}</p>" if summary else ""
    body = "\n".join(lines)
    return (
        f'<section><h2>{escape(title)}</h2>{text}<div class="scroll"><table{kind}><thead>{head}</thead>'
        f"<tbody>{body}</tbody></table></div></section>"
    )


def section(title: str, *paragraphs: str, code: str = "") -> str:
    """Text under a heading, and a command line."""
    texts = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs)
    command = f"<pre><code>{escape(code)}</code></pre>" if code else ""
    return f"<section><h2>{escape(title)}</h2>{texts}{command}</section>"


_DOCTYPE = b"<!doctype html"
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --page: #fff; --ink: #1c1e21; --soft: #5f6670; --line: #dfe2e6; --tint: #f4f6f8;
  --blue: #2563c9; --orange: #b9550b; --teal: #0b806a; --purple: #7443c4; --red: #c0302a; --gray: #8a919a; }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ --page: #16181b; --ink: #eceef0; --soft: #9aa2ab;
  --line: #33383e; --tint: #1f2226; --blue: #6ea8fe; --orange: #f09a54; --teal: #3fc8ad; --purple: #b795f5;
  --red: #ff7b72; --gray: #7d858e; }} }}
* {{ box-sizing: border-box; }}
body {{ background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; max-width: 84rem;
  margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.4rem; margin: 0; overflow-wrap: anywhere; }} h2 {{ font-size: 1rem; margin: 0 0 .25rem; }}
p {{ margin: 0 0 .5rem; color: var(--soft); font-size: .875rem; overflow-wrap: anywhere; max-width: 60rem; }}
dl {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .5rem; margin: 1.25rem 0 2rem; }}
dl div {{ background: var(--tint); border-radius: .5rem; padding: .6rem .8rem; }}
dt {{ color: var(--soft); font-size: .8125rem; }} dd {{ margin: 0; font-size: 1.3rem; font-weight: 600;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }}
.columns {{ display: flex; flex-wrap: wrap; gap: 2rem; }} .columns > * {{ flex: 1 1 min(100%, 24rem); }}
figure {{ margin: 0; min-width: 0; }}
svg {{ width: 100%; height: auto; display: block; overflow: visible; }}
svg text {{ font-family: system-ui, sans-serif !important; }}
ul {{ list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1rem; padding: 0; margin: 0 0 .25rem;
  font-size: .8125rem; }}
li::before {{ content: ""; display: inline-block; width: .7em; height: .7em; border-radius: .15em; margin-right: .4em;
  background: var(--key); }}
section {{ margin: 2.25rem 0 0; min-width: 0; }}
.columns section {{ margin: 0; }} :is(.columns, section) + .columns {{ margin-top: 2.25rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; vertical-align: top; padding: .3rem 1.5rem .3rem 0; border-top: 1px solid var(--line); }}
thead th {{ border: 0; color: var(--soft); font-weight: 400; white-space: nowrap; }}
tbody th {{ font-weight: 400; white-space: nowrap; }} td {{ overflow-wrap: anywhere; min-width: 4rem; }}
.numbers td, .numbers thead th:not(:first-child) {{ text-align: right; white-space: nowrap; }}
.numbers td:last-child {{ white-space: normal; overflow-wrap: normal; }}
@media print, (max-width: 70rem) {{ .numbers {{ font-size: .75rem; }} .numbers :is(th, td) {{ padding-right: .75rem; }}
  .numbers :is(td, th):last-child {{ padding-right: 0; }} .numbers td {{ min-width: 0; }}
  .numbers thead th {{ white-space: normal !important; vertical-align: bottom; }} }}
.marked th, .marked td {{ font-weight: 600; background: var(--tint); }}
pre {{ background: var(--tint); border-radius: .5rem; padding: .75rem 1rem; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: .8125rem; margin: .25rem 0; }}
footer {{ margin: 2.5rem 0 1rem; border-top: 1px solid var(--line); padding-top: .75rem; }}
@media print {{ body {{ margin: 0; max-width: none; font-size: 11pt; }} .columns > * {{ flex-basis: 16rem; }}
  figure, tr, pre {{ break-inside: avoid; }} h2 {{ break-after: avoid; }}
  dl div, pre, .marked * {{ print-color-adjust: exact; }} }}
</style>
</head>
<body>
<header><h1>{title}</h1><p>{subtitle}</p></header>
<dl>{tiles}</dl>
{body}
<footer><p>{note}</p></footer>
</body>
</html>
"""
