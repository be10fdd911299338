"""A text made of several columns: joined by spaces, or by a template."""

import csv
import io
import json

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from langchain_core.documents import Document
from llama_index.core.schema import TextNode

from millpond.errors import InvalidRequestError
from millpond.ingest import Record, Rejected, read

ROWS = [
    {"id": "1", "title": " A mill ", "text": "by the pond", "lang": "en"},
    {"id": "2", "title": "", "text": "no title", "lang": "en"},
]
JOINED, TEMPLATE = ["title", "text"], "[{lang}] {title}: {text}"


def _csv(delimiter):
    file = io.StringIO()
    writer = csv.DictWriter(file, ROWS[0], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return file.getvalue()


def _columns():
    return {key: [row[key] for row in ROWS] for key in ROWS[0]}


def _parquet():
    file = io.BytesIO()
    pq.write_table(pa.table(_columns()), file)
    return file.getvalue()


def _others(row):
    return {key: row[key] for key in ("title", "lang")}


FILES = {
    "x.jsonl": lambda: "\n".join(map(json.dumps, ROWS)),
    "nested.jsonl": lambda: "\n".join(
        json.dumps({"id": row["id"], "text": row["text"], "metadata": _others(row)}) for row in ROWS
    ),
    "x.json": lambda: json.dumps(ROWS),
    "x.csv": lambda: _csv(","),
    "x.tsv": lambda: _csv("\t"),
    "x.parquet": _parquet,
}
OBJECTS = {
    "dicts": lambda: ROWS,
    "frame": lambda: pd.DataFrame(ROWS),
    "table": lambda: pa.table(_columns()),
    "records": lambda: [Record(row["id"], row["text"], _others(row)) for row in ROWS],
    "documents": lambda: [Document(id=row["id"], page_content=row["text"], metadata=_others(row)) for row in ROWS],
    "nodes": lambda: [TextNode(id_=row["id"], text=row["text"], metadata=_others(row)) for row in ROWS],
}


@pytest.mark.parametrize("kind", [*FILES, *OBJECTS])
def test_every_source_makes_the_same_texts_and_keeps_all_but_the_last_column_as_metadata(tmp_path, kind):
    source = OBJECTS[kind]() if kind in OBJECTS else tmp_path / kind
    if kind in FILES:
        data = FILES[kind]()
        source.write_bytes(data if isinstance(data, bytes) else data.encode())
    joined, alone = read(source, text_column=JOINED)
    assert joined == Record("1", "A mill by the pond", _others(ROWS[0]))
    assert alone == Record("2", "no title", _others(ROWS[1]))
    texts = [record.text for record in read(source, template=TEMPLATE, metadata_columns=["title"])]
    assert texts == ["[en]  A mill : by the pond", "[en] : no title"]
    assert next(read(source, template=TEMPLATE, metadata_columns=["title"])).metadata == {"title": " A mill "}


def test_a_text_is_made_of_what_a_record_has_and_the_log_names_what_it_lacks_once(caplog):
    rows = [
        {"id": "1", "text": "b"},
        {"id": "2", "title": 1984, "text": None},
        {"id": "3", "text": "c"},
        {"id": "4", "title": ["x"], "text": "b"},
        {"id": "5"},
    ]
    *made, listed, empty = read(rows, text_column=JOINED)
    assert [record.text for record in made] == ["b", "1984", "c"]
    assert (
        isinstance(listed, Rejected) and "'title' is of type list; a text is made of str and numbers" in listed.reason
    )
    assert isinstance(empty, Rejected) and "text is missing" in empty.reason
    assert [record.getMessage() for record in caplog.records if "'title'" in record.getMessage()] == [
        "records: a record lacks 'title'; its text is made of the others"
    ]


def test_a_template_writes_braces_and_columns_of_any_name():
    row = {"id": "1", "a b": "x", "c.d": 2}
    assert next(read([row], template="{{{a b}}} {c.d} {a b}")).text == "{x} 2 x"


def test_a_dead_letter_keeps_its_text_which_was_made_before(tmp_path):
    (tmp_path / "dead.jsonl").write_text(
        '{"millpond_dead_letter": 1, "id": "1", "text": "A mill by the pond", "metadata": {"title": "A mill"}}\n'
    )
    assert next(read(tmp_path / "dead.jsonl", text_column=JOINED)).text == "A mill by the pond"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"template": "no columns"}, r"template='no columns' does not name its columns alone; write columns in braces"),
        ({"template": "{}"}, "does not name its columns alone"),
        ({"template": "{text!r}"}, "does not name its columns alone"),
        ({"template": "{text:>9}"}, "does not name its columns alone"),
        ({"template": "{text"}, r"is not a template \(expected '}'"),
        ({"template": 1}, "template is of type int; pass a str"),
        ({"template": "{text}", "text_column": JOINED}, r"leave text_column=\['title', 'text'\] out"),
        ({"text_column": []}, "must name at least one column"),
        ({"text_column": ["text", "text"]}, "each once"),
        ({"text_column": ["text", 1]}, "holds 1; pass names of columns"),
        ({"text_column": ["id", "text"]}, "id_column and text_column are both 'id'"),
        ({"text_column": JOINED, "metadata_columns": ["text"]}, "metadata_columns names 'text'"),
        ({"text_column": ["titel", "text"]}, "has no column 'titel' for the text; its columns: 'id', 'title'"),
    ],
)
def test_columns_that_make_no_text_are_named_before_anything_is_read(tmp_path, columns, message):
    (tmp_path / "x.csv").write_text(_csv(","))
    with pytest.raises(InvalidRequestError, match=message):
        read(tmp_path / "x.csv", **columns)


def test_a_folder_has_no_columns_to_make_a_text_of(tmp_path):
    with pytest.raises(InvalidRequestError, match="text_column=title,text: the texts of the folder .* have no columns"):
        read(tmp_path, text_column=JOINED)
