"""No record takes more memory than a bounded part: one that is too long is rejected with its place, in every form."""

import gzip
import io
import json

import pytest
import zstandard

from millpond.cli.arguments.input_texts import read_texts
from millpond.errors import InvalidRequestError
from millpond.ingest import Record, Rejected, read
from millpond.ingest.advice.judgements import read_judgements
from millpond.ingest.pipeline.dead_letter_file import DeadLetterFile
from millpond.ingest.sources.json_array import ArrayReader, LeftOut
from millpond.ingest.sources.json_file import dump_record
from millpond.ingest.sources.lines import MAX_RECORD_BYTES

LONG = b"a" * (MAX_RECORD_BYTES + 1)
FORMS = {
    "lines.jsonl": (b'{"id": "x", "text": "t"}\n{"id": "long", "text": "%s"}\n{"id": "y", "text": "t"}\n', ":2"),
    "last.jsonl": (b'{"id": "x", "text": "t"}\n{"id": "y", "text": "t"}\n{"text": "%s"}', ":3"),
    "deep.jsonl": (b'{"id": "x", "text": "t"}\n[[[[%s\n{"id": "y", "text": "t"}\n', ":2"),
    "array.json": (b'[{"id": "x", "text": "t"}, {"k": "]\\"}", "text": "%s"}, {"id": "y", "text": "t"}]', "[1]"),
    "lines.json": (b'{"id": "x", "text": "t"}\n{"id": "long", "text": "%s"}\n{"id": "y", "text": "t"}\n', ":2"),
    "field.csv": (b"id,text\nx,t\nlong,%s\ny,t\n", ":3"),
    "quoted.csv": (b'id,text\nx,t\nlong,"%s"\ny,t\n', ":3"),
    "field.tsv": (b"id\ttext\nx\tt\nlong\t%s\ny\tt\n", ":3"),
}


def pack(name, data):
    return gzip.compress(data, 1) if name.endswith(".gz") else zstandard.compress(data) if "zst" in name else data


@pytest.mark.parametrize("name", [*FORMS, "lines.jsonl.gz", "array.json.zst", "field.csv.gz"])
def test_a_record_that_is_too_long_is_rejected_and_the_others_are_read(tmp_path, name):
    data, where = FORMS[name.removesuffix(".gz").removesuffix(".zst")]
    (tmp_path / name).write_bytes(pack(name, data % LONG))
    items = list(read(tmp_path / name))
    assert [item.id for item in items if isinstance(item, Record)] == ["x", "y"]
    (rejected,) = [item for item in items if isinstance(item, Rejected)]
    assert rejected.where == f"{tmp_path / name}{where}" and rejected.content is None
    assert "is longer than 16 MiB" in rejected.reason or "has 16,777," in rejected.reason


def test_one_object_that_is_too_long_is_rejected(tmp_path):
    (tmp_path / "x.json").write_bytes(b'{\n  "id": "x",\n  "text": "%s"\n}' % LONG)
    (rejected,) = read(tmp_path / "x.json")
    assert rejected.where.endswith("x.json[0]") and "16 MiB" in rejected.reason


def test_a_file_of_a_folder_that_is_too_long_is_rejected(tmp_path):
    (tmp_path / "long.txt").write_bytes(LONG)
    (tmp_path / "x.md").write_text("t")
    long, good = read(tmp_path)
    assert (long.where, good.id) == (str(tmp_path / "long.txt"), "x.md") and "16,777,217 bytes" in long.reason


def test_a_cell_of_a_table_that_is_too_long_is_rejected_and_dictionaries_are_read_in_parts(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = {"id": ["x", "long", "y"], "text": ["t", LONG.decode(), "t"]}
    parquet.write_table(arrow.table(rows), tmp_path / "x.parquet")
    words = arrow.DictionaryArray.from_arrays([0, 1, 0], ["t", LONG.decode()])
    for source in (tmp_path / "x.parquet", arrow.table(rows), arrow.table({"id": rows["id"], "text": words})):
        first, rejected, last = read(source)
        assert (first.id, last.id) == ("x", "y")
        assert rejected.where.endswith(("[1]", "row 1")) and "cell of column 'text' has 16,777,217" in rejected.reason


def test_a_line_of_texts_that_is_too_long_is_rejected(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"one\n%s\nthree" % LONG)
    one, rejected, three = read_texts(str(tmp_path / "x.txt"), id_column="id", text_column="text")
    assert (one.id, three.id) == ("1", "3") and rejected.where.endswith("x.txt:2")


def test_judgements_name_the_line_that_is_too_long(tmp_path):
    (tmp_path / "qrels.tsv").write_bytes(b"q\td\t1\n" + LONG)
    with pytest.raises(InvalidRequestError, match=r"qrels.tsv:2: the line has 16,777,217 bytes"):
        read_judgements(tmp_path / "qrels.tsv")


def test_a_dead_letter_is_never_longer_than_what_is_read(tmp_path):
    letter = dump_record(Record("x", LONG.decode()), where="here", reason="refused")
    assert json.loads(letter) == {"millpond_dead_letter": 1, "where": "here", "reason": "refused"}
    (tmp_path / "foreign").write_bytes(LONG)
    with pytest.raises(InvalidRequestError, match="line 1 of this file is not a dead letter"):
        DeadLetterFile(tmp_path / "foreign")


ARRAYS = [
    [],
    [1, -2.5e-3, 12345678901, None, True],
    ["a]b\\", '"', "é😀,"],
    [{"a": [{}, []]}, {"b": "}"}],
    [[["x"], {}]],
]


@pytest.mark.parametrize("block", [1, 2, 5, 1000])
@pytest.mark.parametrize("values", ARRAYS)
def test_an_array_is_read_in_blocks_of_any_size(monkeypatch, values, block):
    module = "millpond.ingest.sources.json_array"
    monkeypatch.setattr(f"{module}._READ_BYTES", block)
    texts = [json.dumps(value, ensure_ascii=False) for value in values]
    data = ("[" + " ,\n".join(texts) + " ] ").encode()
    assert list(ArrayReader(io.BytesIO(data))) == values
    with pytest.raises(ValueError, match="ends early|behind the array|missing"):
        list(ArrayReader(io.BytesIO(data.rstrip()[:-1] if len(values) % 2 else data + b"]")))
    monkeypatch.setattr(f"{module}.MAX_RECORD_BYTES", 6)
    kept = [value if len(text) <= 6 else None for value, text in zip(values, texts, strict=True)]
    assert [None if isinstance(value, LeftOut) else value for value in ArrayReader(io.BytesIO(data))] == kept
