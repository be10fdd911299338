"""``millpond explain``: where each token of a query finds its best match in a text, as a heat map."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from millpond.cli.arguments import options
from millpond.cli.arguments.groups import EngineOptions, grouped
from millpond.cli.arguments.input_texts import check_piped
from millpond.cli.arguments.opened_index import reopened_index, stored_index, token_engine
from millpond.cli.arguments.options import option
from millpond.cli.arguments.written import writing
from millpond.errors import InvalidRequestError
from millpond.ingest.pages.html_page import check_page_path, write_page
from millpond.support.blank import is_blank

if TYPE_CHECKING:
    from millpond.late_interaction import TokenMatch

_BOM = "\ufeff"


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """The text, if it is not that of a file."""

    text: str | None = option(None, "The text to find the tokens of QUERY in.", "TEXT")
    index: Path | None = option(None, "Folder of an index, whose document --id is the text.", "INDEX")
    id: str | None = option(None, "Id of a document of --index.", "ID")

    def check(self, file: str | None, model: str | None) -> None:
        """Refuse anything but one source of the text, before anything is read."""
        if [file, self.text, self.index].count(None) != 2:
            raise typer.BadParameter("pass one text: FILE, --text TEXT, or --index INDEX --id ID", param_hint="FILE")
        if (self.index is None) is not (self.id is None):
            raise typer.BadParameter("--index and --id name a document together", param_hint="--id")
        if self.index is None and model is None:
            raise typer.BadParameter("name the model that compares the texts", param_hint="--model")
        check_piped(file, "FILE")


@grouped
def explain(
    query: options.Query,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="A file with one text (also as .gz or .zst), or - (stdin); instead of --text or --index.",
        ),
    ] = None,
    *,
    source: TextSource,
    model: options.StoredModel = None,
    report: options.Report = None,
    format: Annotated[
        Literal["heatmap", "table", "jsonl"] | None,
        typer.Option(help=options.FORMAT, show_default="heatmap on a terminal, table in a pipe"),
    ] = None,
    engine_options: EngineOptions,
) -> None:
    """Show which parts of a text the tokens of QUERY match, and how well.

    The text is a document of an index, or any text. Start and end are characters of the text; the scores of all tokens
    add up to MaxSim. A heatmap is the text by heat; a table has token, score, start, end and matched text between tabs.
    """
    if is_blank(query):
        raise typer.BadParameter("it is blank; write what to look for in the text", param_hint="QUERY")
    source.check(file, model)
    if report is not None:
        check_page_path(report)
    if source.index is not None and source.id is not None:
        found, matches = _of_index(query, source.index, source.id, model, engine_options)
    else:
        found = source.text if source.text is not None else _read(str(file))
        if is_blank(found):
            raise InvalidRequestError("the text is blank; there is nothing in it to match")
        with token_engine(str(model), engine_options) as engine:
            from millpond.late_interaction import MemoryIndex

            with MemoryIndex(engine, codec="float32") as index:
                index.add(["text"], [found])
                matches = index.explain(query, "text")
    if report is not None:
        from millpond.cli.output import heat_map

        title = source.id or (Path(file).name if file and file != "-" else "Matches")
        with writing(report):
            write_page(report, heat_map.page(matches, found, query=query, title=title))
    _print(matches, found, query, format)


def _of_index(
    query: str, index: Path, id: str, model: str | None, engine_options: EngineOptions
) -> tuple[str, list[TokenMatch]]:
    """The text of the document, and the matches in it."""
    with stored_index(index) as stored:
        document = stored.get(id)
    if document is None:  # before the model is loaded
        raise InvalidRequestError(
            f"the index at {str(index)!r} has no document of id {id!r}; millpond index search prints ids"
        )
    with reopened_index(index, model, engine_options) as opened:
        return document.text, opened.explain(query, id)


def _read(file: str) -> str:
    """The text of a file, without a byte order mark and the line breaks at its end."""
    from millpond.ingest.sources.compression import open_source
    from millpond.ingest.sources.lines import MAX_RECORD_BYTES, too_long

    with nullcontext(sys.stdin.buffer) if file == "-" else open_source(Path(file)) as source:
        data = source.read(MAX_RECORD_BYTES + 1)
    if len(data) > MAX_RECORD_BYTES:
        raise InvalidRequestError(too_long("text"))
    try:
        return data.decode().removeprefix(_BOM).rstrip("\r\n")
    except UnicodeDecodeError as error:
        name = "standard input" if file == "-" else repr(file)
        raise InvalidRequestError(f"{name} is not UTF-8 (byte {error.start}); convert it first") from None


def _print(matches: Sequence[TokenMatch], text: str, query: str, form: str | None) -> None:
    from millpond.cli.output.results_table import one_line

    if form == "heatmap" or (form is None and sys.stdout.isatty()):
        from millpond.cli.output.heat_map import print_heat_map

        print_heat_map(matches, text, query=query)
        return
    for match in matches:
        if form == "jsonl":
            print(json.dumps(asdict(match), ensure_ascii=False))
        else:
            token, matched = one_line(match.token), one_line(match.text)
            print(token, f"{match.score:.6g}", match.start, match.end, matched, sep="\t")
