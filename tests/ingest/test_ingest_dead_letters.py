"""Dead letters as a source: what failed is read again, without its reason."""

import json

import pytest

from millpond.ingest import Record, Rejected, read
from millpond.ingest.sources.dead_letter import DEAD_LETTER_KEY, dump_record, dump_rejected


def letters(path, *lines):
    path.write_text("\n".join(lines), encoding="utf-8")
    return list(read(path))


def test_a_record_comes_back_as_it_was(tmp_path):
    records = [
        Record("a", "text é\n", {"n": [1, None], "reason": "its own", "where": "here"}),
        Record("a", "", {"chunk": 3, "chunk_start": 5, "chunk_end": 5}, chunk=3),
        Record("id", "text", {"millpond_dead_letter": "of its own", "id": 1, "text": 2, "metadata": {"x": 1}}),
    ]
    lines = [dump_record(record, where="x.jsonl:4", reason="no answer") for record in records]
    assert all(json.loads(line)["reason"] == "no answer" and "\n" not in line for line in lines)
    for name in ("dead.jsonl", "dead.ndjson"):
        assert letters(tmp_path / name, *lines) == records
    (tmp_path / "dead.json").write_text(f"[{','.join(lines)}]")
    assert list(read(tmp_path / "dead.json", id_column="_id", text_column="body")) == records


def test_a_repaired_line_is_read_with_the_names_of_the_source(tmp_path):
    rejected = Rejected(where="x.jsonl:2", reason="not JSON", content='{"_id": 7, "body": "now whole", "n": 1}')
    (tmp_path / "dead.jsonl").write_text(dump_rejected(rejected))
    assert list(read(tmp_path / "dead.jsonl", id_column="_id", text_column="body")) == [
        Record("7", "now whole", {"n": 1})
    ]


BROKEN = {
    "cut off": b'{"id": "x", "text": "cut',
    "a list": b'["x", "t"]',
    "not UTF-8": b'{"id": "x", "text": "caf\xe9"}',
    "a surrogate": b'{"id": "x", "text": "\\ud800"}',
    "no text": b'{"id": "x", "n": 1}',
    "a null text": b'{"id": "x", "text": null}',
    "bad metadata": b'{"id": "x", "text": "t", "n": NaN}',
    "a name like a letter": b'{"id": "x", "text": 5, "reason": "r", "where": "w"}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_line_that_holds_no_record_fails_again_with_its_place(tmp_path, name):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"id": "a", "text": "t"}\n' + BROKEN[name] + b"\n")
    _, first = read(path)
    assert isinstance(first, Rejected) and first.where == f"{path}:2"
    assert first.record_id == ("x" if name not in ("cut off", "a list", "not UTF-8") else None)
    (again,) = letters(tmp_path / "dead.jsonl", dump_rejected(first))
    assert (again.where, again.reason, again.content) == (first.where, first.reason, first.content)
    (third,) = letters(tmp_path / "dead2.jsonl", dump_rejected(again))
    assert third == again


def test_a_row_of_a_csv_and_an_object_without_json_fail_again(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('id,text,n\na,t,x\nb,"stray,1\nc,t,2\n')
    dead = [item for item in read(path, types={"n": "int"}) if isinstance(item, Rejected)]
    dead += list(read([{"text": b"bytes"}, object(), 5]))
    assert len(dead) == 5
    again = letters(tmp_path / "dead.jsonl", *map(dump_rejected, dead))
    assert [(item.where, item.reason, item.content) for item in again] == [
        (item.where, item.reason, item.content) for item in dead
    ]


@pytest.mark.parametrize(
    ("letter", "reason"),
    [
        ({DEAD_LETTER_KEY: 2, "id": "a", "text": "t"}, "millpond_dead_letter=2 is not known"),
        ({DEAD_LETTER_KEY: 1, "content": 5}, "holds no record"),
        ({DEAD_LETTER_KEY: 1, "id": "a", "text": None}, "text is missing"),
        ({DEAD_LETTER_KEY: 1, "id": "a", "text": "t", "metadata": [1]}, "metadata is a list"),
        ({DEAD_LETTER_KEY: 1, "id": "a", "text": "t", "chunk": -1}, "chunk=-1"),
        ({DEAD_LETTER_KEY: 1, "content": json.dumps({DEAD_LETTER_KEY: 1, "text": "t"}), "reason": "r"}, "r"),
    ],
    ids=range(6),
)
def test_a_damaged_letter_fails_alone(tmp_path, letter, reason):
    first, second = letters(tmp_path / "dead.jsonl", json.dumps(letter), '{"id": "b", "text": "t"}')
    assert isinstance(first, Rejected) and reason in first.reason
    assert first.where == f"{tmp_path / 'dead.jsonl'}:1"
    assert second == Record("b", "t")


def test_a_letter_without_an_id_has_the_hash_of_its_text(tmp_path):
    (record,) = letters(tmp_path / "dead.jsonl", json.dumps({DEAD_LETTER_KEY: 1, "text": "t", "metadata": None}))
    assert record == next(read([{"text": "t"}]))


def test_what_a_line_held_is_bounded(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"id": "x", "text": "' + "y" * (2 << 20))
    (item,) = read(path)
    assert len(item.content) == 1 << 20
    (again,) = letters(tmp_path / "dead.jsonl", dump_rejected(item))
    assert again.reason == item.reason


def test_a_rejected_line_can_always_be_written(tmp_path):
    rejected = Rejected(where="caf\udce9.txt", reason="\ud800", content="\udfff", record_id="\udc00")
    line = dump_rejected(rejected)
    assert json.loads(line.encode()) == {
        DEAD_LETTER_KEY: 1,
        "content": "\\udfff",
        "reason": "\\ud800",
        "where": "caf\\udce9.txt",
    }
