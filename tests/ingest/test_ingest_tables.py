"""Tables as sources: Parquet and Arrow files, and tables, datasets and documents in memory."""

import json
import sys
import tracemalloc
import uuid
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal

import numpy as np
import pytest

from millpond.errors import InvalidRequestError, MissingExtraError
from millpond.ingest import Record, Rejected, content_hash, read

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def rejected(items):
    return {item.where: item.reason for item in items if isinstance(item, Rejected)}


def write_parquet(path, table):
    parquet.write_table(table, path, row_group_size=7)
    return path


def write_file(path, table, **options):
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_file(file, table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=5)
    return path


def write_compressed(path, table):
    return write_file(path, table, options=arrow.ipc.IpcWriteOptions(compression="zstd"))


def write_stream(path, table):
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return path


FILES = {"x.parquet": write_parquet, "x.arrow": write_file, "X.ARROW": write_stream, "x.feather": write_compressed}
ROWS = [{"id": f"r{i}", "text": f"text {i} é 😀", "n": i, "tags": ["a", None][: i % 3]} for i in range(50)]
RECORDS = [Record(f"r{i}", f"text {i} é 😀", {"n": i, "tags": ["a", None][: i % 3]}) for i in range(50)]


@pytest.mark.parametrize(("name", "rows"), list(zip(FILES, (1, 3, 2048, 7), strict=True)))
def test_every_kind_of_file_gives_the_same_records(tmp_path, monkeypatch, name, rows):
    monkeypatch.setattr("millpond.ingest.sources.arrow_cells.BATCH_ROWS", rows)
    path = FILES[name](tmp_path / name, arrow.Table.from_pylist(ROWS))
    assert list(read(path)) == RECORDS
    reader = read(path)
    next(reader)
    reader.close()  # a file left open would be a ResourceWarning, which is an error here
    empty = FILES[name](tmp_path / name, arrow.Table.from_pylist(ROWS).slice(0, 0))
    assert list(read(empty)) == []


def test_tables_and_readers_in_memory_give_the_same_records(tmp_path):
    table = arrow.Table.from_pylist(ROWS)
    dataset = pytest.importorskip("pyarrow.dataset")
    (tmp_path / "parts").mkdir()
    for part in range(5):
        parquet.write_table(table.slice(10 * part, 10), tmp_path / "parts" / f"{part}.parquet")
    sources = {
        "table": table,
        "batch": table.combine_chunks().to_batches()[0],
        "reader": table.to_reader(max_chunksize=7),
        "dataset": dataset.dataset(tmp_path / "parts"),
    }
    for name, source in sources.items():
        assert list(read(source)) == RECORDS, name


VALUES = {
    "half float": (arrow.array(np.array([0.5, 1], np.float16)), [0.5, 1.0]),
    "decimal": (arrow.array([Decimal("1.50"), Decimal("2")], arrow.decimal128(9, 2)), [1.5, 2.0]),
    "date": (arrow.array([date(2024, 5, 31), None]), ["2024-05-31", None]),
    "time": (arrow.array([time(9, 30), None]), ["09:30:00", None]),
    "timestamp": (arrow.array([datetime(2024, 5, 31, 12), None], arrow.timestamp("ms")), ["2024-05-31T12:00:00", None]),
    "timestamp ns": (arrow.array([10**18, None], arrow.timestamp("ns")), ["2001-09-09T01:46:40", None]),
    "timestamp tz": (
        arrow.array([datetime(2024, 5, 31, 12, tzinfo=UTC)] * 2, arrow.timestamp("us", tz="Europe/Berlin")),
        ["2024-05-31T14:00:00+02:00"] * 2,
    ),
    "duration": (arrow.array([timedelta(seconds=90), None]), [90.0, None]),
    "dictionary": (arrow.array(["a", "é"]).dictionary_encode(), ["a", "é"]),
    "string view": (arrow.array(["a", None], arrow.string_view()), ["a", None]),
    "uuid": (arrow.array([uuid.UUID(int=1).bytes, None], arrow.uuid()), [str(uuid.UUID(int=1)), None]),
    "struct": (arrow.array([{"a": 1, "b": [None, "x"]}, None]), [{"a": 1, "b": [None, "x"]}, None]),
    "map": (arrow.array([[("a", 1)], None], arrow.map_(arrow.string(), arrow.int64())), [{"a": 1}, None]),
    "fixed list": (arrow.array([[1, 2], None], arrow.list_(arrow.int32(), 2)), [[1, 2], None]),
    "null": (arrow.nulls(2), [None, None]),
    "run ends": (arrow.RunEndEncodedArray.from_arrays(arrow.array([2], arrow.int32()), arrow.array(["a"])), ["a", "a"]),
}


def test_values_are_stored_as_json_has_them():
    table = arrow.table({"text": ["t", "u"], **{name: column for name, (column, _) in VALUES.items()}})
    records = list(read(table))
    for row, record in enumerate(records):
        assert record.metadata == {name: stored[row] for name, (_, stored) in VALUES.items()}


MAP = arrow.map_(arrow.string(), arrow.int64())
FAULTY = {
    "a null text": ({"id": ["a", "b"], "text": ["t", None]}, "text is missing"),
    "an empty id": ({"id": ["a", ""], "text": ["t", "u"]}, "id is empty"),
    "too large an int": ({"text": ["t", "u"], "x": arrow.array([1, 2**64 - 1], arrow.uint64())}, "64 bits"),
    "a key twice": ({"text": ["t", "u"], "x": arrow.array([[], [("a", 1), ("a", 2)]], MAP)}, "'x' cannot be read"),
    "a late time": ({"text": ["t", "u"], "x": arrow.array([0, 2**62], arrow.timestamp("us"))}, "'x' cannot be read"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_row_that_holds_no_record_fails_alone(name):
    columns, reason = FAULTY[name]
    first, second = read(arrow.table(columns))
    assert isinstance(first, Record)
    assert second.where == "row 1" and reason in second.reason


def test_a_nested_metadata_holds_the_metadata(caplog):
    table = arrow.table({"text": ["t"], "a": [1], "b": [2], "metadata": [{"b": 3, "c": {"d": 4}}]})
    assert next(read(table)).metadata == {"a": 1, "b": 3, "c": {"d": 4}}
    assert "the keys 'b' are both in metadata and beside it" in caplog.text
    assert next(read(table, metadata_columns=["a", "c"])).metadata == {"a": 1, "c": {"d": 4}}
    assert next(read(table, metadata_columns=["metadata"])).metadata == {"b": 3, "c": {"d": 4}}
    as_map = arrow.array([[("k", "v")]], arrow.map_(arrow.string(), arrow.string()))
    assert next(read(arrow.table({"text": ["t"], "metadata": as_map}))).metadata == {"k": "v"}
    plain = arrow.table({"text": ["t"], "metadata": ['{"k": 1}']})
    assert next(read(plain)).metadata == {"metadata": '{"k": 1}'}
    assert next(read(plain, text_column="metadata")) == Record(content_hash('{"k": 1}'), '{"k": 1}', {"text": "t"})


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"id": ["a"]}, {}, "no column 'text' for the text; its columns: 'id'"),
        ({"text": ["a"]}, {"id_column": "key"}, "no column 'key' for the id; its columns: 'text'"),
        ({"text": [1]}, {}, "column 'text' is of type int64, no text"),
        ({"text": ["t"], "id": [1.5]}, {}, "column 'id' is of type double; an id is a str, an integer or a UUID"),
        (
            {"text": ["t"], "x": [1]},
            {"metadata_columns": ["y"]},
            "no column 'y' for metadata; its columns: 'text', 'x'",
        ),
        ({"text": ["t"], "x": [b"b"], "n": [1]}, {}, "'x' holds bytes, .* metadata_columns=\\['n'\\]"),
        ({"text": ["t"], "x": [[{"a": b"b"}]]}, {}, "'x' holds bytes"),
        ({"text": ["t"]}, {"types": {"text": "int"}}, "types=text=int are for the columns of a CSV"),
    ],
    ids=range(8),
)
def test_columns_are_checked_before_anything_is_read(tmp_path, columns, options, message):
    table = arrow.table(columns)
    for source in (table, write_parquet(tmp_path / "x.parquet", table)):
        with pytest.raises(InvalidRequestError, match=message):
            read(source, **options)


@pytest.mark.parametrize("name", FILES)
def test_damage_is_an_error_that_names_the_file(tmp_path, name):
    for data in (b"", b"nonsense" * 100):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InvalidRequestError, match="is damaged, or not a") as caught:
            read(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


def test_damage_further_on_is_an_error_after_the_records_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr("millpond.ingest.sources.arrow_cells.BATCH_ROWS", 100)
    table = arrow.table({"id": [str(i) for i in range(1000)], "text": [f"{i} text" for i in range(1000)]})
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=100, compression="snappy")
    data = bytearray((tmp_path / "x.parquet").read_bytes())
    offset = parquet.ParquetFile(tmp_path / "x.parquet").metadata.row_group(5).column(1).data_page_offset
    data[offset : offset + 200] = b"\xff" * 200
    (tmp_path / "x.parquet").write_bytes(data)
    reader = read(tmp_path / "x.parquet")
    assert [next(reader).id for _ in range(500)] == [str(i) for i in range(500)]
    with pytest.raises(InvalidRequestError, match=r"x.parquet' is damaged"):
        next(reader)


def test_pyarrow_is_named_if_it_is_missing(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "x.parquet", arrow.table({"text": ["t"]}))
    table = arrow.table({"text": ["t"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # an import of it fails
    for source in (path, table):
        with pytest.raises(MissingExtraError, match=r"pip install 'millpond\[parquet\]'"):
            read(source)


@pytest.mark.contract
def test_long_texts_are_read_a_few_at_a_time(tmp_path):
    table = arrow.table({"text": [str(i) * (1 << 18) for i in range(10, 100)]})  # forty-five megabytes
    # Pages of a megabyte: a reader cannot have less than a page.
    parquet.write_table(table, tmp_path / "x.parquet", write_batch_size=1, use_dictionary=False)
    write_stream(tmp_path / "x.arrow", table)
    sources = {"table": table, "parquet": tmp_path / "x.parquet", "arrow": tmp_path / "x.arrow"}
    for name, source in sources.items():
        tracemalloc.start()
        before = peak = arrow.total_allocated_bytes()
        for number, record in enumerate(read(source)):
            assert record.text.startswith(str(10 + number) * 2)
            peak = max(peak, arrow.total_allocated_bytes())
        assert number == 89
        assert tracemalloc.get_traced_memory()[1] < 36 << 20, name
        assert peak - before < 44 << 20, name
        tracemalloc.stop()


def test_a_frame_of_pandas_is_a_table():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "id": ["a", "b"],
            "text": ["t", "u"],
            "n": pandas.array([1, None], dtype="Int64"),
            "f": [0.5, float("nan")],
            "day": [pandas.Timestamp("2024-05-31 12:00"), pandas.NaT],
            "mixed": [{"x": [1]}, "s"],
            "kind": pandas.Categorical(["k", None]),
        },
        index=[7, 7],
    )
    assert list(read(frame)) == [
        Record("a", "t", {"n": 1, "f": 0.5, "day": "2024-05-31T12:00:00", "mixed": {"x": [1]}, "kind": "k"}),
        Record("b", "u", {"n": None, "f": None, "day": None, "mixed": "s", "kind": None}),
    ]
    assert next(read(frame, metadata_columns=["f"])) == Record("a", "t", {"f": 0.5})
    assert list(read(frame.iloc[:0])) == []
    assert rejected(read(frame.assign(text=["t", None]))) == {"row 1": "text is missing; it must be a str"}
    for wrong, message in (
        (frame.rename(columns={"text": "body"}), "no column 'text'"),
        (frame.rename(columns={"n": 5}), "columns that are no str"),
        (frame.rename(columns={"n": "f"}), "names a column twice"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            read(wrong)
    with pytest.raises(InvalidRequestError, match="no column 'q' for metadata"):
        read(frame, metadata_columns=["q"])


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    return pytest.importorskip("datasets")


def test_a_dataset_of_hugging_face_is_a_table(datasets):
    dataset = datasets.Dataset.from_list([{**row, "tags": row["tags"] or ["z"]} for row in ROWS])
    expected = [Record(r.id, r.text, {**r.metadata, "tags": r.metadata["tags"] or ["z"]}) for r in RECORDS]
    upper = [Record(record.id, record.text.upper(), record.metadata) for record in expected]
    assert list(read(dataset)) == expected
    assert list(read(dataset.select(range(3, 9)))) == expected[3:9]
    assert list(read(dataset.with_format("numpy"))) == expected
    assert list(read(dataset.to_iterable_dataset())) == expected
    assert list(read(dataset.with_transform(_upper))) == upper
    assert list(read(dataset.to_iterable_dataset().map(_upper, batched=True))) == upper
    assert list(read(dataset, metadata_columns=["n"]))[1] == Record("r1", ROWS[1]["text"], {"n": 1})
    hidden = dataset.with_format("python", columns=["id", "text"])
    assert next(read(hidden)) == Record("r0", ROWS[0]["text"])
    for source in (dataset, dataset.to_iterable_dataset()):
        with pytest.raises(InvalidRequestError, match="has no column 'body' for the text; its columns: 'id', 'text'"):
            read(source, text_column="body")


def _upper(batch):
    return {**batch, "text": [text.upper() for text in batch["text"]]}


def test_examples_of_a_generator_fail_alone(datasets):
    source = datasets.IterableDataset.from_generator(_examples)
    first, second, third = read(source, text_column="body")
    assert (first.metadata, third.metadata) == ({"n": 1}, {"n": "one"})
    assert second.where == "item 1"


def _examples():
    yield from ({"body": "a", "n": 1}, {"body": None, "n": 2}, {"body": "c", "n": "one"})


def test_the_splits_of_a_dataset_are_named(datasets):
    dataset = datasets.Dataset.from_dict({"text": ["t"]})
    splits = datasets.DatasetDict(train=dataset, test=dataset)
    with pytest.raises(TypeError, match=r"a DatasetDict with the splits train, test; pass one.*records\['train'\]"):
        read(splits)
    with pytest.raises(TypeError, match="IterableDatasetDict with the splits a"):
        read(datasets.IterableDatasetDict(a=dataset.to_iterable_dataset()))
    assert list(read(splits["train"])) == [Record(content_hash("t"), "t")]


def test_documents_of_langchain_are_records():
    documents = pytest.importorskip("langchain_core.documents")
    items = [
        documents.Document(page_content="text é", metadata={"page": 1, "day": date(2024, 5, 31)}),
        documents.Document(page_content="text", id="a"),
        documents.Document(page_content="text", metadata={"x": b"bytes"}),
    ]
    first, second, third = read(items)
    assert first == Record(content_hash("text é"), "text é", {"page": 1, "day": "2024-05-31"})
    assert second == Record("a", "text")
    assert third.where == "item 2" and "bytes" in third.reason
    assert next(read(items[:1], metadata_columns=["page"])).metadata == {"page": 1}
    with pytest.raises(TypeError, match="records is one Document; pass a list"):
        read(items[0])


@pytest.mark.contract
def test_nodes_and_documents_of_llama_index_are_records():
    schema = pytest.importorskip("llama_index.core.schema")
    node = schema.TextNode(id_="n", text="a node", metadata={"file": "x.md"})
    items = [
        schema.Document(id_="d", text="a document", metadata={"page": 1}),
        node,
        schema.NodeWithScore(node=node, score=0.5),
    ]
    assert list(read(items)) == [
        Record("d", "a document", {"page": 1}),  # without the metadata that get_content() puts before it
        Record("n", "a node", {"file": "x.md"}),
        Record("n", "a node", {"file": "x.md"}),
    ]
    with pytest.raises(TypeError, match="records is one TextNode; pass a list"):
        read(node)


class Node:
    """An older node: ``id_`` alone, and no metadata yet."""

    id_ = "n"
    metadata = None

    def get_content(self, metadata_mode="all"):
        return f"text in mode {metadata_mode}"


class Document:
    page_content = 5


class Broken:
    node_id = "x"

    def get_content(self, metadata_mode="all"):
        raise OSError("gone")


def test_documents_are_known_by_their_attributes():
    first, second, third, fourth = read([Node(), Document(), Broken(), {"id": "a", "text": "t"}])
    assert first == Record("n", "text in mode none")
    assert "text is of type int" in second.reason
    assert third == Rejected(where="item 2", reason="OSError: gone")
    assert fourth == Record("a", "t")


def test_dicts_of_an_iterable_have_their_columns(tmp_path):
    rows = [{"_id": 1, "body": "t", "a": 1, "b": 2}, {"_id": 2, "a": date(2024, 1, 1)}, {"_id": 3, "a": 1}]
    first, second, third = read(iter(rows), id_column="_id", text_column="body", metadata_columns=["b"])
    assert first == Record("1", "t", {"b": 2})
    assert (second.content, second.record_id) == (None, "2")  # a date is no JSON
    assert json.loads(third.content) == rows[2] and third.where == "item 2"
