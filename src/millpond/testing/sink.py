"""SinkContract: what ``ingest`` expects of every sink."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from millpond.errors import FingerprintMismatchError, SinkError
from millpond.ingest.record import Record, content_hash, point_id
from millpond.ingest.sinks.batch import WriteBatch
from millpond.ingest.sinks.protocol import Deletes, NotesRun, Reads, ReadsContent, StoredRow
from millpond.testing.engine import WordEngine

SUBJECTS = ["a river", "zip archives", "sourdough", "sockets", "arteries", "binary search", "glaciers", "violins"]
VERBS = ["how to mend", "the history of", "an old song about", "measuring", "the price of", "a theory of"]
ODD = [
    Record("naïve/ä 😀/'\"\\", "e\u0301 — \u202e 漢字 \x01 'quoted' \"twice\" \\ \n\t end", {"kéy 😀": "välue"}),
    Record("deep", "x", {"a": {"b": [1, {"c": None}]}, "none": None, "big": 2**53 + 1, "t": [True, 1.5, "s"]}),
    Record("long", "word " * 13_000, {}),
    Record("y" * 4096, "the longest id", {}),
]


def records(count: int = 48) -> list[Record]:
    """At most 48 texts whose ranking differs between widths."""
    pairs = [(verb, subject) for verb in VERBS for subject in SUBJECTS]
    return [
        Record(f"{verb}/{subject}", f"{verb} {subject}", {"n": n, "verb": verb, "even": n % 2 == 0})
        for n, (verb, subject) in enumerate(pairs[:count])
    ]


def vectors(engine: WordEngine, texts: Sequence[str], width: int) -> npt.NDArray[np.float32]:
    """``[n, width]``, normalized."""
    return np.asarray(engine.embed(texts, dimensions=width, normalize=True).embeddings, dtype=np.float32)


def fill(sink: Any, engine: WordEngine, rows: Sequence[Record], widths: Sequence[int], **form: Any) -> None:
    """Prepare a sink, for rows of a form, and write records to it."""
    sink.prepare(engine.spec, **form)
    texts = [record.text for record in rows]
    sink.write(
        WriteBatch(
            records=list(rows),
            ids=[point_id(record.id, record.chunk) for record in rows],
            vectors={width: vectors(engine, texts, width).reshape(len(rows), width) for width in widths},
        )
    )


class SinkContract:
    """The tests of a sink; a subclass implements :meth:`make`.

    Attributes:
        widths: The widths that the tests store.
        tolerance: Most that a number of a stored vector may differ.
    """

    widths: ClassVar[tuple[int, ...]] = (64, 384)
    tolerance: ClassVar[float] = 1e-6

    def make(self, folder: Path, **options: Any) -> Any:
        """An empty sink in a folder of the test's own.

        Args:
            folder: The folder.
            **options: ``dimensions``, the widths to store.

        Returns:
            The sink.
        """
        raise NotImplementedError

    def stored(self, sink: Any) -> Mapping[str, StoredRow]:
        """Every row by its id; by default read back by ``scan`` and ``fetch``.

        Args:
            sink: The sink.

        Returns:
            For each row id, the row with its vectors ``[width]``.
        """
        rows: Mapping[str, StoredRow] = sink.fetch([row_id for row_id, _ in sink.scan()], widths=self.widths)
        return rows

    @pytest.fixture(scope="session")
    @classmethod
    def engine(cls) -> WordEngine:
        """The engine that makes the vectors."""
        return WordEngine()

    @pytest.fixture
    def sink(self, tmp_path: Path) -> Iterator[Any]:
        """A sink of :attr:`widths`."""
        sink = self.make(tmp_path, dimensions=self.widths)
        yield sink
        sink.close()

    def check_rows(self, sink: Any, engine: WordEngine, rows: Sequence[Record]) -> None:
        """The sink holds these records and no others.

        Args:
            sink: The sink.
            engine: The engine that made the vectors.
            rows: The records.

        Raises:
            AssertionError: It holds others.
        """
        stored = self.stored(sink)
        assert {row_id: row.record_id for row_id, row in stored.items()} == {
            point_id(record.id): record.id for record in rows
        }
        for record in rows:
            row = stored[point_id(record.id)]
            assert row.content_hash == content_hash(record.text)
            for width, vector in row.vectors.items():
                np.testing.assert_allclose(vector, vectors(engine, [record.text], width)[0], atol=self.tolerance)

    def test_what_is_written_is_stored(self, sink: Any, engine: WordEngine) -> None:
        fill(sink, engine, records(), self.widths)
        self.check_rows(sink, engine, records())
        sink.close()  # and once more after the test

    def test_writing_again_replaces(self, sink: Any, engine: WordEngine) -> None:
        changed = Record("measuring/sockets", "a picture of a cat", {"new": True})
        fill(sink, engine, records(), self.widths)
        fill(sink, engine, [*records(5), changed], self.widths)
        self.check_rows(sink, engine, [*(each for each in records() if each.id != changed.id), changed])

    def test_a_batch_may_be_empty(self, sink: Any, engine: WordEngine) -> None:
        fill(sink, engine, [], self.widths)
        assert self.stored(sink) == {}

    def test_more_rows_than_one_request_takes(self, sink: Any, engine: WordEngine) -> None:
        many = [Record(f"r{n}", f"text {n % 50}") for n in range(1100)]
        fill(sink, engine, many, self.widths)
        assert len(self.stored(sink)) == 1100

    def test_unusual_records_are_stored(self, sink: Any, engine: WordEngine) -> None:
        fill(sink, engine, ODD, self.widths)
        self.check_rows(sink, engine, ODD)

    def test_another_model_is_refused(self, sink: Any, engine: WordEngine) -> None:
        fill(sink, engine, records(3), self.widths)
        with pytest.raises(FingerprintMismatchError):
            sink.prepare(WordEngine("other words").spec)
        fill(sink, engine, records(5), self.widths)
        self.check_rows(sink, engine, records(5))

    def test_records_are_deleted_by_id(self, sink: Any, engine: WordEngine) -> None:
        if not isinstance(sink, Deletes):
            pytest.skip("this sink deletes nothing")
        fill(sink, engine, records(), self.widths)
        gone = [records()[n].id for n in (0, 17, 47)]
        sink.delete([*gone, "an id that was never ingested"])
        sink.delete([])
        self.check_rows(sink, engine, [record for record in records() if record.id not in gone])

    def test_rows_are_read_back(self, sink: Any, engine: WordEngine) -> None:
        if not isinstance(sink, Reads):
            pytest.skip("this sink reads nothing back")
        fill(sink, engine, records(), self.widths)
        assert sink.count() == 48
        assert sorted(sink.scan()) == sorted((point_id(record.id), record.id) for record in records())
        wanted = [point_id(record.id) for record in records(3)]
        found = sink.fetch([*wanted, point_id("unknown")], widths=self.widths[:1])
        assert set(found) == set(wanted)
        for record in records(3):
            row = found[point_id(record.id)]
            assert row.record_id == record.id and set(row.vectors) <= set(self.widths[:1])
        assert sink.fetch(wanted[:1])[wanted[0]].vectors == {}

    def test_texts_and_metadata_are_read_back(self, sink: Any, engine: WordEngine) -> None:
        if not isinstance(sink, ReadsContent):
            pytest.skip("this sink reads no texts back")
        rows = [*records(6), *ODD]
        fill(sink, engine, rows, self.widths)
        ids = [point_id(record.id) for record in rows]
        stored = sink.read_rows([*ids, point_id("unknown")], widths=self.widths[:1])
        assert set(stored) == set(ids)
        if all(row.text is None for row in stored.values()):
            pytest.skip("this sink reads no texts back")
        for record, row_id in zip(rows, ids, strict=True):
            assert stored[row_id].text == record.text and stored[row_id].metadata == record.metadata
            assert (stored[row_id].record_id, stored[row_id].content_hash) == (record.id, content_hash(record.text))

    def test_the_last_run_is_kept(self, sink: Any, engine: WordEngine) -> None:
        if not isinstance(sink, NotesRun):
            pytest.skip("this sink keeps no run")
        sink.prepare(engine.spec)
        assert sink.last_run() == ""
        try:
            sink.note_run("one")
        except SinkError:
            pytest.skip("this sink keeps no run")
        fill(sink, engine, records(3), self.widths)
        assert sink.last_run() == "one"
        sink.note_run("two")
        assert sink.last_run() == "two"
        self.check_rows(sink, engine, records(3))

    def test_rows_are_deleted_by_their_own_ids(self, sink: Any, engine: WordEngine) -> None:
        if not isinstance(sink, Reads):
            pytest.skip("this sink reads nothing back")
        many = [Record(f"r{n}", f"text {n % 50}") for n in range(1100)]
        fill(sink, engine, many, self.widths)
        sink.delete_rows([point_id(record.id) for record in many[:1050]])
        self.check_rows(sink, engine, many[1050:])
