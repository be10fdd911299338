"""Options shared by several commands, one by one; groups.py has those that go together."""

from __future__ import annotations

import json
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

import typer

from millpond.tasks import ScoreMethod

_DIMENSIONS = "Width of the vectors: the model's own, or a smaller one that it was trained for (Matryoshka)."
_WIDEST = "the width that the model returns"

Model = Annotated[str, typer.Option("--model", "-m", help="Hub id or local folder.", metavar="MODEL")]
StoredModel = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Hub id or local folder.", metavar="MODEL", show_default="the one that built it"
    ),
]
SparseModel = Annotated[
    str | None,
    typer.Option(
        "--sparse-model",
        help="Model of the sparse vectors.",
        metavar="MODEL",
        show_default="the one that built them, or the same",
    ),
]
Cache = Annotated[
    Path | None, typer.Option(help="Vector cache file to read and fill; created if missing.", metavar="PATH")
]
IdColumn = Annotated[str, typer.Option("--id", help="Key or column that holds the id.", metavar="COLUMN")]
TextColumns = Annotated[
    str,
    typer.Option(
        "--text",
        help="Key or column that holds the text; of several, as title,text, the values are joined by a space.",
        metavar="COLUMN,...",
    ),
]
Template = Annotated[
    str | None,
    typer.Option(
        help="Make the text of the keys or columns that this names: '{title}: {text}'.",
        metavar="TEXT",
    ),
]
TextSource = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A .jsonl, .json, .csv, .tsv, .parquet or .arrow file, a folder of files, any other file with "
        "one text per line (also as .gz or .zst), or - (stdin).",
    ),
]
RecordSource = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A .jsonl, .ndjson, .json, .csv or .tsv file (also as .gz or .zst), a .parquet, .arrow or .feather, a "
        "folder of text, Markdown, HTML, PDF, DOCX and code, or - (JSONL on stdin).",
    ),
]
Width = Annotated[int | None, typer.Option("--dimensions", help=_DIMENSIONS, metavar="N", show_default=_WIDEST)]
Widths = Annotated[str | None, typer.Option("--dimensions", help=_DIMENSIONS, metavar="N,N", show_default=_WIDEST)]
StoredWidths = Annotated[str | None, typer.Option("--dimensions", help=_DIMENSIONS, metavar="N,N", show_default="all")]
Fields = Annotated[
    str | None,
    typer.Option(
        "--fields",
        help="Layout of the stored records: plain, langchain or llama_index.",
        metavar="FORM",
        show_default="as the collection has it; of a new one plain, or that of the source of a copy",
    ),
]
DeadLetters = Annotated[
    Path | None,
    typer.Option(
        "--dead-letters",
        help="File for the records that are left out, which can be ingested itself.",
        metavar="PATH",
        show_default="the name of the journal, if there is one, with .dead.jsonl",
    ),
]
Queries = Annotated[
    str | None,
    typer.Option(
        "--queries",
        help="Read queries from a .jsonl, .json, .csv, .tsv, .parquet or .arrow file, any other file with one a line, "
        "or - (stdin).",
        metavar="SOURCE",
    ),
]
Query = Annotated[str, typer.Argument(help="What is asked.", metavar="QUERY")]
Method = Annotated[
    ScoreMethod,
    typer.Option(
        "--method",
        help="How a score is made: cosine of vectors; maxsim of token vectors; auto: a reranker's own score, or maxsim "
        "of an embedder.",
    ),
]
BudgetMs = Annotated[
    float | None,
    typer.Option(
        "--budget-ms",
        help="Most milliseconds in which a reranker scores a question's documents, the first ones first.",
        show_default="no limit",
    ),
]
Instruction = Annotated[
    str | None,
    typer.Option("--instruction", help="Instruction for the template of an LLM reranker.", metavar="TEXT"),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report",
        help="Write the result as an HTML page, too; charts need millpond[report].",
        metavar="FILE.html",
    ),
]
K = Annotated[int, typer.Option("--k", "-k", help="Most results of a query.", metavar="N", min=1)]
MaybeK = Annotated[
    int | None, typer.Option("--k", "-k", help="Most results of a query.", metavar="N", min=1, show_default="all")
]
FORMAT = "Form of what is printed."
SAMPLE = "Most records to embed; they are chosen at random."
ALL = "All of them: every layout in the table of advise, every row in an audit."
Types = Annotated[
    str | None,
    typer.Option(
        "--types",
        help="Types of a CSV's columns: year=int,price=float,flag=bool,day=date,at=datetime; the others are str.",
        metavar="COLUMN=TYPE,...",
    ),
]


def option(default: Any, words: str, metavar: str | None = None, *, flags: str = "", **more: Any) -> Any:
    """A field of a group: its default (``MISSING``: it is required), and what the help says of it."""
    return field(
        default=default, metadata={"option": typer.Option(*flags.split(), help=words, metavar=metavar, **more)}
    )


def read_object(text: str) -> dict[str, Any]:
    """Parse the value of an option that takes a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object")
    return value


def read_widths(text: str | None) -> list[int] | None:
    """Parse the value of :data:`Widths`; typer's own lists would need the option once per value."""
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of widths; write them as 128,768", param_hint="--dimensions"
        ) from None


def read_columns(text: str) -> str | list[str]:
    """Parse the value of :data:`TextColumns`: one column, or several."""
    names = [name.strip() for name in text.split(",")]
    return text if len(names) == 1 else names


def read_types(text: str | None) -> dict[str, str]:
    """Parse the value of :data:`Types`; the columns and types are checked when the file is opened."""
    types: dict[str, str] = {}
    for part in () if text is None else text.split(","):
        column, _, name = part.strip().rpartition("=")
        if not column or not name:
            raise typer.BadParameter(
                f"{part!r} names no column and type; write year=int,price=float", param_hint="--types"
            )
        if column in types:
            raise typer.BadParameter(f"{part!r} names the column again; write it once", param_hint="--types")
        types[column] = name
    return types
