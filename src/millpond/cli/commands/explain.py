"""``millpond explain``: where each token of a query finds its best match in a text, as a heat map."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from millpond.blank import is_blank
from millpond.cli.arguments import options
from millpond.cli.commands.index import SameModel, engine_settings, reopened_index, stored_index, token_engine
from millpond.errors import InvalidRequestError

if TYPE_CHECKING:
    from millpond.late_interaction.scoring.explanation import TokenMatch

_BOM = "\ufeff"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def explain(
    query: Annotated[str, typer.Argument(help="The question.")],
    file: Annotated[
        str | None,
        typer.Argument(help="A file with one text (also as .gz or .zst), or - (stdin); instead of --text or --index."),
    ] = None,
    *,
    text: Annotated[str | None, typer.Option(help="The text to find the tokens of QUERY in.", metavar="TEXT")] = None,
    index: Annotated[
        Path | None, typer.Option(help="Folder of an index, whose document --id is the text.", metavar="INDEX")
    ] = None,
    id: Annotated[str | None, typer.Option(help="Id of a document of --index.", metavar="ID")] = None,
    model: SameModel = None,
    html: Annotated[Path | None, typer.Option(help="Write the heat map to this file, too.", metavar="FILE")] = None,
    output: Annotated[
        Literal["heatmap", "table", "jsonl"] | None,
        typer.Option(
            help="heatmap: the text by heat; table: tab-separated token, score, start, end and matched text; jsonl: "
            "the same as JSON (default: heatmap on a terminal, table in a pipe)."
        ),
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_length: options.MaxLength = None,
    revision: options.Revision = None,
    hf_overrides: options.HfOverrides = None,
) -> None:
    """Show which parts of a text the tokens of QUERY match, and how well.

    The text is a document of an index, or any text. Start and end are characters of the text; the scores of all tokens
    add up to MaxSim.
    """
    if is_blank(query):
        raise typer.BadParameter("it is blank; write what to look for in the text", param_hint="QUERY")
    _check_source(file=file, text=text, index=index, id=id, model=model)
    settings = engine_settings(device, dtype, max_length, revision, hf_overrides)
    with ExitStack() as stack:
        page = None if html is None else stack.enter_context(_opened_page(html))
        if index is not None and id is not None:
            found, matches = _of_index(query, index, id, model, settings)
        else:
            found = text if text is not None else _read(str(file))
            if is_blank(found):
                raise InvalidRequestError("the text is blank; there is nothing in it to match")
            matches = _of_text(query, found, str(model), settings)
        if page is not None:
            _write_page(
                page, matches, found, query, title=id or (Path(file).name if file and file != "-" else "Matches")
            )
    _print(matches, found, query, output)


def _check_source(*, file: str | None, text: str | None, index: Path | None, id: str | None, model: str | None) -> None:
    """Refuse anything but one source of the text, before anything is read."""
    named = {"FILE": file, "--text": text, "--index": index}
    given = [name for name, value in named.items() if value is not None]
    if id is not None and index is None:
        raise typer.BadParameter("it is the id of a document of --index; name that, too", param_hint="--id")
    if len(given) != 1:
        wrong = f"{' and '.join(given)} are {len(given)} texts" if given else "no text is named"
        raise typer.BadParameter(f"{wrong}; pass FILE, --text TEXT, or --index INDEX --id ID", param_hint="FILE")
    if index is not None and id is None:
        raise typer.BadParameter("name one of its documents with --id", param_hint="--index")
    if index is None and model is None:
        raise typer.BadParameter("name the model that compares the texts", param_hint="--model")
    if file == "-" and sys.stdin.isatty():
        raise typer.BadParameter("name a file, or pipe a text in", param_hint="FILE")


def _of_index(
    query: str, index: Path, id: str, model: str | None, settings: dict[str, Any]
) -> tuple[str, list[TokenMatch]]:
    """The text of the document, and the matches in it."""
    with stored_index(index) as stored:
        document = stored.get(id)
    if document is None:  # before the model is loaded
        raise InvalidRequestError(
            f"the index at {str(index)!r} has no document of id {id!r}; millpond index search prints ids"
        )
    with reopened_index(index, model, settings) as opened:
        return document.text, opened.explain(query, id)


def _of_text(query: str, text: str, model: str, settings: dict[str, Any]) -> list[TokenMatch]:
    with token_engine(model, settings) as engine:
        from millpond.late_interaction.scoring import explanation

        query_rows = engine.token_embed([query], role="query", normalize=True).embeddings.flat
        document_rows = engine.token_embed([text], role="document", normalize=True).embeddings.flat
        (query_spans,) = engine.token_spans([query], role="query")
        (document_spans,) = engine.token_spans([text], role="document")
        return explanation.explain(query_spans, query_rows, document_spans, document_rows, text)


def _read(file: str) -> str:
    """The text of a file, without a byte order mark and the line breaks at its end."""
    from millpond.ingest.sources.compression import open_source

    if file == "-":
        data = sys.stdin.buffer.read()
    else:
        with open_source(Path(file)) as source:
            data = source.read()
    try:
        return data.decode().removeprefix(_BOM).rstrip("\r\n")
    except UnicodeDecodeError as error:
        name = "standard input" if file == "-" else repr(file)
        raise InvalidRequestError(f"{name} is not UTF-8 (byte {error.start}); convert it first") from None


@contextmanager
def _opened_page(path: Path) -> Iterator[TextIO]:
    """The file of the page, unchanged so far; a new one is deleted if there is no page to write."""
    existed = path.exists()
    try:
        file = path.open("a", encoding="utf-8", newline="\n")
    except OSError as error:
        raise typer.BadParameter(f"{str(path)!r} cannot be written ({error.strerror})", param_hint="--html") from None
    with file:
        try:
            yield file
        except BaseException:
            if not existed:
                path.unlink(missing_ok=True)
            raise


def _write_page(file: TextIO, matches: Sequence[TokenMatch], text: str, query: str, *, title: str) -> None:
    from millpond.late_interaction.scoring import explanation

    page = explanation.html(matches, text, query=query, title=title)
    try:
        if Path(file.name).is_file():  # and no device
            file.truncate(0)
        file.write(page)
        file.flush()
    except OSError as error:
        raise typer.BadParameter(f"{file.name!r} cannot be written ({error.strerror})", param_hint="--html") from None


def _print(matches: Sequence[TokenMatch], text: str, query: str, output: str | None) -> None:
    from millpond.late_interaction.scoring import explanation

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not encode every text
    if output == "heatmap" or (output is None and sys.stdout.isatty()):
        print(explanation.terminal(matches, text, query=query), end="")
        return
    for match in matches:
        if output == "jsonl":
            print(json.dumps(asdict(match), ensure_ascii=False))
        else:
            print(_line(match.token), f"{match.score:.6g}", match.start, match.end, _line(match.text), sep="\t")


def _line(text: str) -> str:
    """The text on one line, without tabs and other control characters."""
    return _CONTROL.sub("\ufffd", " ".join(text.split()))
