"""Files, folders and standard input as streams of records."""

import io
import json
import logging
import os
import sys

import pytest

from millpond.errors import InvalidRequestError, SourceNotFoundError
from millpond.ingest import Record, Rejected, content_hash, read


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def ids(items):
    return [item.id for item in items if isinstance(item, Record)]


def rejected(items):
    return {item.where.rpartition(":")[2]: item.reason for item in items if isinstance(item, Rejected)}


# ---------------------------------------------------------------------------------------------------------- JSONL


def test_jsonl_gives_a_record_a_line(tmp_path):
    rows = [{"id": "a", "text": "first é", "metadata": {"n": [1, None]}}, {"text": "no id"}, {"id": 7, "text": ""}]
    path = write(tmp_path / "x.jsonl", "\n".join(json.dumps(row) for row in rows))
    assert list(read(path)) == [
        Record("a", "first é", {"n": [1, None]}),
        Record(content_hash("no id"), "no id"),
        Record("7", ""),
    ]


def test_jsonl_from_windows_reads_the_same(tmp_path):
    path = write(
        tmp_path / "x.JSONL", b'\xef\xbb\xbf{"id": "a", "text": "t"}\r\n\r\n  \r\n{"id": "b", "text": "t"}\r\n'
    )
    assert ids(read(path)) == ["a", "b"]


BAD_LINES = {
    b'{"id": "x", "text": "cut off': "not JSON",
    b'["x", "text"]': "a JSON list, not an object",
    b'"text"': "a JSON str, not an object",
    b'{"id": "x"}': "text is missing",
    b'{"id": "x", "text": null}': "text is missing",
    b'{"id": "x", "text": 5}': "text is of type int",
    b'{"id": true, "text": "t"}': "id is of type bool",
    b'{"id": 1.5, "text": "t"}': "id is of type float",
    b'{"id": "", "text": "t"}': "id is empty",
    b'{"id": "x", "text": "\\ud800"}': "lone surrogate",
    b'{"id": "x", "text": "caf\xe9"}': "not UTF-8 (byte 24)",
    b'{"id": "' + b"y" * 4097 + b'", "text": "t"}': "at most 4096",
    b'{"id": "x", "text": "t", "metadata": [1]}': "metadata is a list",
    b'{"id": "x", "text": "t", "metadata": {"n": NaN}}': "nan is not JSON",
    b'{"id": "x", "text": "t", "metadata": {"n": 9223372036854775808}}': "64 bits",
    b"[" * 100_000: "not JSON",
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_a_bad_line_is_rejected_by_number_and_the_rest_is_read(tmp_path, line, reason):
    path = write(tmp_path / "x.jsonl", b'{"id": "a", "text": "t"}\n\n' + line + b'\n{"id": "b", "text": "t"}\n')
    items = list(read(path))
    assert ids(items) == ["a", "b"]
    assert list(rejected(items)) == ["3"] and reason in rejected(items)["3"]
    assert items[1].where == f"{path}:3"


def test_keys_that_mean_nothing_are_named_once(tmp_path, caplog):
    path = write(tmp_path / "x.jsonl", '{"text": "t", "title": 1}\n{"text": "u", "title": 1, "_id": 2}\n')
    with caplog.at_level(logging.WARNING):
        assert len(list(read(path))) == 2
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "ignoring the keys 'title'",
        "ignoring the keys '_id'",
    ]


def test_other_names_for_id_and_text(tmp_path):
    path = write(tmp_path / "x.jsonl", '{"_id": "a", "body": "t"}\n{"_id": "b", "text": "wrong key"}\n')
    items = list(read(path, id_column="_id", text_column="body"))
    assert items[0] == Record("a", "t") and "text is missing" in items[1].reason


def test_a_dash_is_jsonl_on_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"id": "a", "text": "t"}\n{"text"\n')))
    items = list(read("-"))
    assert items[0] == Record("a", "t") and items[1].where == "stdin:2"


# ------------------------------------------------------------------------------------------------------------ CSV


def test_csv_columns_become_metadata(tmp_path):
    path = write(tmp_path / "x.csv", 'id,text,lang,n\r\na,"one, ""two""\nthree",de,1\r\n\r\n,no id,,\r\n')
    assert list(read(path)) == [
        Record("a", 'one, "two"\nthree', {"lang": "de", "n": "1"}),
        Record(content_hash("no id"), "no id", {"lang": "", "n": ""}),
    ]


def test_csv_columns_by_name(tmp_path):
    path = write(tmp_path / "x.csv", "\ufeffkey,body\na,t\n")
    assert list(read(path, id_column="key", text_column="body")) == [Record("a", "t")]


def test_csv_without_an_id_column_takes_content_hashes(tmp_path):
    assert ids(read(write(tmp_path / "x.csv", "text\nt\n"))) == [content_hash("t")]


def test_csv_cells_may_be_longer_than_the_modules_own_limit(tmp_path):
    (record,) = read(write(tmp_path / "x.csv", "text\n" + "x" * 200_000 + "\n"))
    assert len(record.text) == 200_000


def test_csv_bad_rows_are_rejected_by_line(tmp_path):
    data = b'id,text\na,t\nb\nc,t,u\nd,caf\xe9\ne,"x"y\nf,"two\nlines"\n' + b"g" * 5000 + b',t\nh,t\ni,"never closed\n'
    items = list(read(write(tmp_path / "x.csv", data)))
    assert ids(items) == ["a", "f", "h"]
    reasons = rejected(items)
    assert list(reasons) == ["3", "4", "5", "6", "9", "11"]
    assert "1 cells, the header 2" in reasons["3"] and "3 cells" in reasons["4"]
    assert reasons["5"] == "not UTF-8; convert the file"
    assert "not CSV" in reasons["6"] and "at most 4096" in reasons["9"] and "not CSV" in reasons["11"]


@pytest.mark.parametrize(
    ("header", "columns", "message"),
    [
        ("", {}, "no column 'text'.*its columns: none"),
        ("id,body\n", {}, "no column 'text'.*'id', 'body'"),
        ("id,text\n", {"id_column": "key"}, "no column 'key' for the id"),
        ("id,text,text\n", {}, "names a column twice"),
        ("id,text\n", {"id_column": "text"}, "both 'text'"),
    ],
)
def test_csv_headers_are_checked_before_anything_is_read(tmp_path, header, columns, message):
    with pytest.raises(InvalidRequestError, match=message):
        read(write(tmp_path / "x.csv", header), **columns)


def test_a_csv_that_begins_with_no_header(tmp_path):
    with pytest.raises(InvalidRequestError, match="does not begin with a CSV header"):
        read(write(tmp_path / "x.csv", '"id"text\n'))


# --------------------------------------------------------------------------------------------------------- folders


def test_a_folder_gives_its_texts_in_order(tmp_path):
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    write(tmp_path / "b" / "deep" / "é.md", "\ufeff# title")
    write(tmp_path / "b" / "A.TXT", "")
    write(tmp_path / "a.txt", "first")
    write(tmp_path / "broken.txt", b"caf\xe9")
    write(tmp_path / "image.png", b"\x89PNG")
    write(tmp_path / ".hidden.txt", "no")
    write(tmp_path / ".git" / "notes.txt", "no")
    items = list(read(tmp_path))
    assert [item for item in items if isinstance(item, Record)] == [
        Record("a.txt", "first"),
        Record("b/A.TXT", ""),
        Record("b/deep/é.md", "# title"),
    ]
    assert [item for item in items if isinstance(item, Rejected)] == [
        Rejected(where=str(tmp_path / "broken.txt"), reason="not UTF-8 (byte 3)")
    ]


def test_a_folder_without_texts_says_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert list(read(tmp_path)) == []
    assert "holds no .txt or .md file" in caplog.text


def test_a_file_that_cannot_be_read_is_left_out(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone")
    write(tmp_path / "b.txt", "t")
    items = list(read(tmp_path))
    assert items == [
        Rejected(where=str(tmp_path / "a.txt"), reason="cannot be read (No such file or directory)"),
        Record("b.txt", "t"),
    ]


def test_a_path_too_long_for_an_id_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("millpond.ingest.record.MAX_ID_BYTES", 10)
    write(tmp_path / "a-longer-name.txt", "t")
    (item,) = read(tmp_path)
    assert "at most 10 are stored" in item.reason


# ------------------------------------------------------------------------------------------------------------ paths


def test_a_missing_path_is_an_error_at_once(tmp_path):
    with pytest.raises(SourceNotFoundError, match="no file or folder"):
        read(tmp_path / "x.jsonl")
    assert issubclass(SourceNotFoundError, FileNotFoundError) and issubclass(SourceNotFoundError, ValueError)


@pytest.mark.parametrize(
    ("name", "message"),
    [("x.parquet", "not available in this version"), ("x.json", "not a kind of source"), ("x", "without a suffix")],
)
def test_other_files_are_refused_at_once(tmp_path, name, message):
    with pytest.raises(InvalidRequestError, match=message):
        read(write(tmp_path / name, ""))


def test_no_file_stays_open_when_the_reader_stops_early(tmp_path):
    path = write(tmp_path / "x.jsonl", '{"text": "t"}\n' * 10)
    reader = read(path)
    next(reader)
    reader.close()  # a file left open would be a ResourceWarning, which is an error here


def test_a_pipe_or_folder_named_like_a_text_is_left_out(tmp_path):
    os.mkfifo(tmp_path / "a.txt")  # opening a pipe for reading blocks until there is a writer
    (tmp_path / "b.md").mkdir()
    write(tmp_path / "c.txt", "t")
    assert list(read(tmp_path)) == [
        Rejected(where=str(tmp_path / "a.txt"), reason="is no regular file"),
        Record("c.txt", "t"),
    ]


def test_a_folder_that_cannot_be_listed_is_left_out_by_name(tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "x.txt", "t")
    scan = os.scandir

    def refuse(path):  # permissions do not restrict root, and root may run the tests
        if str(path).endswith(("b", "c")):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert list(read(tmp_path)) == [
        Record("a/x.txt", "t"),
        Rejected(where=str(tmp_path / "b"), reason="cannot be listed (Permission denied)"),
        Rejected(where=str(tmp_path / "c"), reason="cannot be listed (Permission denied)"),
    ]


def test_a_home_folder_is_where_it_is_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "x.jsonl", '{"id": "a", "text": "t"}')
    assert ids(read("~/x.jsonl")) == ["a"]
    with pytest.raises(SourceNotFoundError, match="no file or folder"):
        read("~nobody-of-that-name/x.jsonl")
