"""Files, folders and standard input as streams of records."""

import gzip
import hashlib
import io
import json
import os
import re
import sys
import tracemalloc

import pytest

from millpond.errors import InvalidRequestError, MissingExtraError
from millpond.ingest import Record, Rejected, SkippedFiles, content_hash, read


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def ids(items):
    return [item.id for item in items if isinstance(item, Record)]


def rejected(items):
    return {item.where.rpartition(":")[2]: item.reason for item in items if isinstance(item, Rejected)}


def test_jsonl_gives_a_record_a_line(tmp_path):
    rows = [{"id": "a", "text": "first é", "metadata": {"n": [1, None]}}, {"text": "no id"}, {"id": 7, "text": ""}]
    path = write(tmp_path / "x.jsonl", "\n".join(json.dumps(row) for row in rows))
    assert list(read(path)) == [
        Record("a", "first é", {"n": [1, None]}),
        Record(content_hash("no id"), "no id"),
        Record("7", ""),
    ]


BAD_LINES = {
    b'{"id": "x", "text": "cut off': "not JSON",
    b'["x", "text"]': "a JSON list, not an object",
    b'{"id": "x"}': "text is missing",
    b'{"id": true, "text": "t"}': "id is of type bool",
    b'{"id": "", "text": "t"}': "id is empty",
    b'{"id": "x", "text": "\\ud800"}': "lone surrogate",
    b'{"id": "x", "text": "caf\xe9"}': "not UTF-8 (byte 24)",
    b'{"id": "' + b"y" * 4097 + b'", "text": "t"}': "at most 4096",
    b'{"id": "x", "text": "t", "metadata": [1]}': "metadata is a list",
    b'{"id": "x", "text": "t", "metadata": {"n": NaN}}': "nan is not JSON",
    b'{"id": "x", "text": "t", "metadata": {"n": 9223372036854775808}}': "64 bits",
    b"[" * 100_000: "not JSON",
}


def test_bad_lines_are_rejected_by_number_and_the_rest_is_read(tmp_path):
    lines = [line for bad in BAD_LINES for line in (b'{"text": "t"}', b"", bad)]
    path = write(tmp_path / "x.jsonl", b"\n".join(lines))
    items = list(read(path))
    assert len(ids(items)) == len(BAD_LINES)
    found = [item for item in items if isinstance(item, Rejected)]
    assert [item.where for item in found] == [f"{path}:{3 * (n + 1)}" for n in range(len(BAD_LINES))]
    assert all(reason in item.reason for item, reason in zip(found, BAD_LINES.values(), strict=True))


def test_other_keys_become_metadata(tmp_path, caplog):
    rows = [
        {"_id": "a", "title": "T", "text": "t"},
        {"_id": "b", "text": "t", "metadata": {"n": 1}, "title": {"de": "Ü"}},
        {"_id": "c", "text": "t", "metadata": None, "id": 5},
    ]
    path = write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows)))
    assert list(read(path, id_column="_id")) == [
        Record("a", "t", {"title": "T"}),
        Record("b", "t", {"n": 1, "title": {"de": "Ü"}}),
        Record("c", "t", {"id": 5}),
    ]
    assert not caplog.records


ROWS = [{"id": f"r{i}", "text": f"text {i} é 😀", "n": i, "metadata": {"deep": [i, {"x": None}]}} for i in range(50)]
RECORDS = [Record(f"r{i}", f"text {i} é 😀", {"n": i, "deep": [i, {"x": None}]}) for i in range(50)]
FORMS = {
    "x.jsonl": "\ufeff" + "\n  \r\n".join(map(json.dumps, ROWS)) + "\r\n",
    "x.ndjson": "\r\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS),
    "x.json": json.dumps(ROWS, ensure_ascii=False),
    "X.JSON": "\ufeff \r\n" + json.dumps(ROWS, indent=2) + "\n\n",
    "lines.json": "\n".join(map(json.dumps, ROWS)),
}


@pytest.mark.parametrize("name", [*FORMS, "x.jsonl.GZ", "x.json.gz"])
def test_every_form_of_json_gives_the_same_records(tmp_path, name):
    data = FORMS[name.removesuffix(".gz").removesuffix(".GZ")].encode()
    if name.lower().endswith(".gz"):  # two members, as of files that were compressed apart and concatenated
        data = gzip.compress(data[:500]) + gzip.compress(data[500:])
    reader = read(write(tmp_path / name, data))
    assert list(reader) == RECORDS
    assert reader.position.read() == reader.position.size == len(data)


def test_an_element_of_an_array_that_is_not_an_object_fails_alone(tmp_path):
    path = write(tmp_path / "numbers.json", '[123456, "a,b", {"text": "t"}, null]')
    items = list(read(path))
    assert [item.where for item in items if isinstance(item, Rejected)] == [f"{path}[{i}]" for i in (0, 1, 3)]
    assert "a JSON int, not an object" in items[0].reason and ids(items) == [content_hash("t")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"text": "t"}, {"text": "u"', "is not JSON .*: mend it, or write one object a line into a .jsonl"),
        ('[{"text": "t"}] []', "is not JSON .Extra data"),
        ("[" * 100_000, "is not JSON"),
        (b'[{"text": "caf\xe9"}]', "is not UTF-8"),
    ],
)
def test_a_damaged_json_is_an_error_that_names_the_file(tmp_path, text, message):
    path = write(tmp_path / "x.json", text)
    with pytest.raises(InvalidRequestError, match=message.replace(": mend", "; mend")) as caught:
        list(read(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.csv.gz"])
def test_a_truncated_gz_is_an_error_after_the_records_before_it(tmp_path, name):
    rows = [{"id": str(i), "text": hashlib.sha256(b"%d" % i).hexdigest()} for i in range(5000)]
    text = {
        "x.jsonl.gz": "\n".join(map(json.dumps, rows)),
        "x.csv.gz": "id,text\n" + "\n".join(f"{row['id']},{row['text']}" for row in rows),
    }[name]
    whole = gzip.compress(text.encode())
    path = write(tmp_path / name, whole[: len(whole) * 3 // 4])
    items = []
    with pytest.raises(InvalidRequestError, match=re.escape(f"{str(path)!r} is damaged, or not a .gz file")):
        items.extend(read(path))
    assert len(items) > 1000 and all(isinstance(item, Record) for item in items)


def test_zst_without_its_package_names_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)  # an import of it fails
    with pytest.raises(MissingExtraError, match=r"pip install 'millpond\[zstd\]'"):
        read(write(tmp_path / "x.jsonl.zst", b"?"))


def test_zst_is_read(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    plain = FORMS["x.jsonl"].encode()
    compress = zstandard.ZstdCompressor().compress
    whole = compress(plain[:500]) + compress(plain[500:])
    assert list(read(write(tmp_path / "x.jsonl.zst", whole))) == RECORDS
    for damaged in (whole[:-20], b"no zst", whole + b"rest"):
        with pytest.raises(InvalidRequestError, match="is damaged, or not a .zst file"):
            list(read(write(tmp_path / "y.jsonl.zst", damaged)))


def test_a_dash_is_jsonl_on_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"id": "a", "text": "t"}\n{"text"\n')))
    items = list(read("-"))
    assert items[0] == Record("a", "t") and items[1].where == "stdin:2"


def test_csv_columns_become_metadata(tmp_path):
    path = write(tmp_path / "x.csv", 'id,text,lang,n\r\na,"one, ""two""\nthree",de,1\r\n\r\n,no id,,\r\n')
    assert list(read(path)) == [
        Record("a", 'one, "two"\nthree', {"lang": "de", "n": "1"}),
        Record(content_hash("no id"), "no id", {"lang": "", "n": ""}),
    ]


TYPED = "id,text,year,price,flag,day,at,note\n"
TYPES = {"year": "int", "price": "float", "flag": "bool", "day": "date", "at": "datetime", "note": "str"}


def test_csv_columns_have_the_types_that_are_named(tmp_path):
    rows = "a,t,2024,9.5,True,2024-05-31,2024-05-31T12:00:00+02:00,007\n"
    rows += "b,t,,, ,,,\nc,t, -7 ,1e3,no,20240531,2024-05-31,x\n"
    values = [
        (2024, 9.5, True, "2024-05-31", "2024-05-31T12:00:00+02:00", "007"),
        (None, None, None, None, None, ""),
        (-7, 1000.0, False, "2024-05-31", "2024-05-31T00:00:00", "x"),
    ]
    records = list(read(write(tmp_path / "x.csv", TYPED + rows), types=TYPES))
    assert [record.metadata for record in records] == [dict(zip(TYPES, row, strict=True)) for row in values]


@pytest.mark.parametrize(
    ("column", "cell", "accepted"),
    [
        ("year", "1_000", "a whole number"),
        ("year", "٣", "a whole number"),
        ("year", "9" * 5000, "a whole number|64 bits"),
        ("year", "9" * 19, "64 bits"),
        ("price", "nan", "a number like"),
        ("price", "1e999", "a number like"),
        ("flag", "2", "true, false"),
        ("day", "2024-02-30", "a date like"),
        ("at", "noon", "a time like"),
    ],
)
def test_a_cell_of_another_type_fails_its_row_alone(tmp_path, column, cell, accepted):
    row = dict.fromkeys(TYPES, "") | {column: f'"{cell}"'}
    data = TYPED + f"a,t,,,,,,\nb,t,{','.join(row.values())}\nc,t,,,,,,\n"
    items = list(read(write(tmp_path / "x.csv", data), types=TYPES))
    assert ids(items) == ["a", "c"]
    reason = rejected(items)["3"]
    assert column in reason and cell[:10] in reason
    assert re.search(accepted, reason)
    assert len(reason) < 300


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ({"when": "date"}, r"types=when=date: .* has the columns 'id', 'text', 'year'"),
        ({"year": "integer"}, "types=year=integer is unknown; choose str, int, float, bool, date, datetime"),
        ({"text": "int"}, "the column is the id or the text"),
        ({"id": "int"}, "the column is the id or the text"),
    ],
)
def test_types_are_checked_before_anything_is_read(tmp_path, types, message):
    with pytest.raises(InvalidRequestError, match=message):
        read(write(tmp_path / "x.csv", TYPED), types=types)
    with pytest.raises(InvalidRequestError, match="are for the columns of a CSV"):
        read(write(tmp_path / "x.jsonl", ""), types=types)


def test_tabs_separate_the_cells_of_a_tsv_whose_columns_have_other_names(tmp_path):
    path = write(tmp_path / "x.tsv", '\ufeffkey\tbody\tn\na\tone, two\t1\n\t"three\nlines"\t2\n')
    assert list(read(path, id_column="key", text_column="body", types={"n": "int"})) == [
        Record("a", "one, two", {"n": 1}),
        Record(content_hash("three\nlines"), "three\nlines", {"n": 2}),
    ]


def test_columns_of_metadata_are_chosen_and_checked(tmp_path):
    path = write(tmp_path / "x.csv", "id,text,a,b,c\n1,t,A,2,C\n")
    assert list(read(path, metadata_columns=["b", "a"], types={"b": "int"})) == [Record("1", "t", {"a": "A", "b": 2})]
    assert list(read(path, metadata_columns=[])) == [Record("1", "t")]
    for options, error, message in (
        ({"metadata_columns": ["a", "x", "y"]}, InvalidRequestError, "no column 'x', 'y' for metadata; its columns"),
        ({"metadata_columns": ["a"], "types": {"c": "int"}}, InvalidRequestError, "is not one of metadata_columns"),
        ({"metadata_columns": ["text"]}, InvalidRequestError, "names 'text', which is the id or the text"),
        ({"metadata_columns": "a,b"}, TypeError, "metadata_columns='a,b' is a str"),
        ({"metadata_columns": [5]}, TypeError, "metadata_columns holds 5"),
    ):
        with pytest.raises(error, match=message):
            read(path, **options)
    lines = write(tmp_path / "x.jsonl", json.dumps({"text": "t", "a": 1, "b": 2, "metadata": {"c": 3, "d": 4}}))
    assert next(read(lines, metadata_columns=["a", "d", "other"])).metadata == {"a": 1, "d": 4}
    assert next(read(lines, metadata_columns=["metadata"])).metadata == {"c": 3, "d": 4}
    with pytest.raises(InvalidRequestError, match="metadata_columns=a: the texts of the folder"):
        read(tmp_path, metadata_columns=["a"])


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


OTHER = "it is no text, Markdown, HTML, PDF, DOCX or code"


def whole(path, text):
    return Record(path, text, {"path": path, "first_line": 1, "last_line": 1})


def unread(folder, path, reason):
    return Rejected(where=str(folder / path), reason=reason, record_id=path, parts=True)


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
    os.mkfifo(tmp_path / "pipe.txt")  # opening a pipe for reading blocks until there is a writer
    (tmp_path / "folder.md").mkdir()
    reader = read(tmp_path)
    assert list(reader) == [
        whole("a.txt", "first"),
        unread(tmp_path, "broken.txt", "not UTF-8 (byte 3)"),
        unread(tmp_path, "pipe.txt", "is not a regular file"),
        whole("b/A.TXT", ""),
        Record(
            "b/deep/é.md#title",
            "# title",
            {"path": "b/deep/é.md", "heading": "title", "first_line": 1, "last_line": 1},
        ),
    ]
    assert reader.skipped == SkippedFiles(count=1, names=("image.png",), reasons={OTHER: 1})


def test_links_that_leave_a_folder_are_not_followed(tmp_path, caplog):
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside / "sub", inside / ".data", outside):
        folder.mkdir(parents=True)
    for name in ("out/secret.txt", "in/a.txt", "in/sub/notes", "in/.data/config.md"):
        write(tmp_path / name, name)
    for name, target in {
        "b.txt": "../out/secret.txt",
        "sub/d.md": "../../out/secret.txt",
        "again.txt": "a.txt",
        "named.txt": "sub/notes",
        "config.md": ".data/config.md",
        "twice.txt": "b.txt",
        "gone.txt": "nowhere",
        "loop.txt": "loop.txt",
        "folder.txt": "sub",
        "away": outside,
        "round": ".",
    }.items():
        (inside / name).symlink_to(target)
    reader = read(inside)
    items = list(reader)
    assert [(item.id, item.text) for item in items if isinstance(item, Record)] == [
        ("a.txt", "in/a.txt"),
        ("config.md", "in/.data/config.md"),
        ("named.txt", "in/sub/notes"),
    ]
    assert [item.where for item in items if isinstance(item, Rejected)] == [
        str(inside / name) for name in ("gone.txt", "loop.txt")
    ]
    assert reader.skipped.count == 8 and reader.skipped.reasons == {
        "a link to a file that is read itself": 1,
        "a link that leaves the folder": 4,
        "a link to a folder": 2,
        OTHER: 1,
    }
    assert f"{inside}: not read, because a link that leaves the folder: 4 (away, b.txt, twice.txt, sub/d.md)" in (
        caplog.text
    )


def test_a_name_that_is_no_utf8_fails_alone_and_can_be_printed(tmp_path):
    try:
        write(tmp_path / os.fsdecode(b"caf\xe9.txt"), "t")
        write(tmp_path / os.fsdecode(b"caf\xe9.bin"), "t")
    except OSError:
        pytest.skip("the file system takes only UTF-8")
    write(tmp_path / "d.txt", "t")
    reader = read(tmp_path)
    first, second = reader
    assert first.where == f"{tmp_path}/caf\\xe9.txt" and "lone surrogate" in first.reason
    assert second == whole("d.txt", "t")
    assert reader.skipped.names == ("caf\\xe9.bin",)


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv.gz"])
def test_a_large_file_is_read_in_constant_memory(tmp_path, name):
    """Twice as many rows take no more memory."""
    peaks = []
    for rows in (2_000, 8_000):
        lines = {
            "x.jsonl": (f'{{"id": "{i}", "text": "text number {i}", "n": {i}}}\n' for i in range(rows)),
            "x.csv": ("id,text,n\n" * (i == 0) + f'{i},"text ""number"" {i}",{i}\n' for i in range(rows)),
        }[name.removesuffix(".gz")]
        data = "".join(lines).encode()
        path = write(tmp_path / name, gzip.compress(data) if name.endswith(".gz") else data)
        del data
        tracemalloc.start()
        assert sum(isinstance(item, Record) for item in read(path)) == rows
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] < 2 << 20


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.parquet.gz", "compressed inside"),
        ("x.pdf", "not a kind of source"),
        ("x", "without a suffix"),
        ("x.txt.gz", ".txt is not a kind of source"),
    ],
)
def test_other_files_are_refused_at_once(tmp_path, name, message):
    with pytest.raises(InvalidRequestError, match=message):
        read(write(tmp_path / name, ""))


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
        whole("a/x.txt", "t"),
        Rejected(where=str(tmp_path / "b"), reason="cannot be listed (Permission denied)"),
        Rejected(where=str(tmp_path / "c"), reason="cannot be listed (Permission denied)"),
    ]
