"""A journal with flipped bits is read, or is a JournalError that names it and says what to do."""

import random

import pytest

from millpond.cache.sqlitefile import SqliteFile
from millpond.errors import JournalError
from millpond.ingest.pipeline.journal import Journal, JournalEntry

pytestmark = pytest.mark.contract

IDS = [f"r{number}é" for number in range(60)]


def use(path):
    with Journal(path) as journal:
        entries = journal.collection("here model")
        found = entries.find(IDS)
        list(entries.pages())
        entries.ends(5)
        entries.rows()
        entries.add([JournalEntry("new", b"x" * 16, 1)])
        entries.invalidate(IDS[:1])
        entries.remove(IDS[1:2])
    return found


def test_a_flipped_bit_is_no_other_error(tmp_path, monkeypatch):
    monkeypatch.setattr(SqliteFile, "busy_timeout", 0.1)
    with Journal(tmp_path / "whole") as journal:
        journal.collection("here model").add(JournalEntry(each, bytes(range(16)), 1) for each in IDS)
    data, chance, messages = (tmp_path / "whole").read_bytes(), random.Random(0), []
    for number in range(300):
        bit = chance.randrange(8 * (100 if number % 3 == 0 else len(data)))
        path = tmp_path / f"flipped{number}"
        path.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ (1 << bit % 8)]) + data[bit // 8 + 1 :])
        try:
            found = use(path)
        except JournalError as error:
            messages.append((str(path), str(error)))
        else:
            assert all(isinstance(each.digest, bytes) for each in found.values())
    assert len(messages) > 10
    assert all(path in message and "choose another path" in message for path, message in messages)


def test_a_number_that_became_a_text_is_named(tmp_path):
    with Journal(tmp_path / "journal") as journal:
        entries = journal.collection("here model")
        entries.add([JournalEntry("a", b"x" * 16, 1)])
        with journal.writing() as connection:
            connection.execute("UPDATE records SET digest = 'text'")
        with pytest.raises(JournalError, match=r"journal is damaged; delete it, or choose another path"):
            entries.find(["a"])
