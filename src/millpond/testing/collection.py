"""CollectionSinkContract: what a database's sink does beside storing rows: search, filters, opening again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from millpond.errors import FingerprintMismatchError, InvalidRequestError, SinkError
from millpond.ingest.copying.copy import copy
from millpond.ingest.record import Record
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.origin import trace
from millpond.ingest.sinks.run_note import RunNote
from millpond.ingest.sinks.stored_rows import stored_records, stored_rows
from millpond.testing.engine import WordEngine
from millpond.testing.filters import EQUALS, FACETED, RANGES, REFUSED
from millpond.testing.sink import ODD, SinkContract, fill, records, vectors

QUESTIONS = ["how to mend zip archives", "the price of arteries", "a song about violins"]
FORMED = [Record(name, f"the {name}", {"n": number}) for number, name in enumerate(("weir", "sluice", "race", "pond"))]


_WEIR = "\n\n".join(f"the weir of mill {n} holds weir water" for n in range(70))
_POND = "a pond is still water, and more of it than a river holds"


def _chunks(name: str, text: str, count: int) -> list[Record]:
    """A text cut into pieces that begin inside the one before, but for those that begin a line."""
    lines = text.split("\n\n") if "\n\n" in text else [text]
    pieces = []
    for line in lines:
        at, size = text.index(line), len(line) * len(lines) // count
        pieces += [
            (max(at, start - 3), min(at + len(line), start + size + 1)) for start in range(at, at + len(line), size)
        ]
    return [
        Record(name, text[start:end], {"page": 3, "chunk": n, "chunk_start": start, "chunk_end": end}, chunk=n)
        for n, (start, end) in enumerate(pieces)
    ]


def best(scores: Mapping[str, float], k: int) -> list[str]:
    """The ids of the ``k`` largest scores."""
    return sorted(scores, key=scores.__getitem__, reverse=True)[:k]


class CollectionSinkContract(SinkContract):
    """The tests of a :class:`~millpond.ingest.CollectionSink`.

    A subclass implements :meth:`make`::

        class TestMySink(CollectionSinkContract):
            lasting = True

            def make(self, folder, **options):
                return MySink(folder / "db", **{"collection": "docs", **options})

    Attributes:
        lasting: Whether a sink made again in the same folder finds what one wrote that was closed.
        layouts: The field layouts that the database has.
        score_error: Most that a score may differ from the cosine.
    """

    lasting: ClassVar[bool] = False
    layouts: ClassVar[Sequence[str]] = ("plain", "langchain", "llama_index")
    score_error: ClassVar[float] = 1e-5

    def make(self, folder: Path, **options: Any) -> Any:
        """An empty sink in a folder of the test's own.

        Args:
            folder: The folder.
            **options: ``collection``, ``dimensions`` and ``fields``.

        Returns:
            The sink.
        """
        raise NotImplementedError

    def again(self, sink: Any, folder: Path, **options: Any) -> Any:
        """Another sink of the same database, after the first is closed; one in memory shares its client.

        Args:
            sink: The first sink.
            folder: Its folder.
            **options: As :meth:`make`.

        Returns:
            The other sink.
        """
        if not self.lasting:
            client = sink.client
            return type(sink)(client, options.pop("collection", "docs"), **options)
        sink.close()
        return self.make(folder, **options)

    def of_layouts(
        self, folder: Path, engine: WordEngine, rows: Sequence[Record], **form: Any
    ) -> Iterator[tuple[str, Any]]:
        """A sink of each field layout, with these records.

        Args:
            folder: The folder of the sinks.
            engine: The engine that embeds the records.
            rows: The records.
            **form: Arguments of ``prepare``.

        Yields:
            The name of a layout, and its sink.
        """
        for layout in self.layouts:
            sink = self.make(folder, collection=layout, dimensions=self.widths, fields=layout)
            fill(sink, engine, rows, self.widths, **form)
            yield layout, sink
            sink.close()

    def cosines(self, engine: WordEngine, question: str, width: int, rows: Sequence[Record]) -> dict[str, float]:
        """``{record id: cosine}`` by numpy.

        Args:
            engine: The engine that embeds.
            question: The text of the question.
            width: The width of the vectors.
            rows: The records.

        Returns:
            The cosine of each record with the question.
        """
        documents = vectors(engine, [record.text for record in rows], width)
        scores = documents @ vectors(engine, [question], width)[0]
        return {record.id: float(score) for record, score in zip(rows, scores, strict=True)}

    def test_hits_are_the_records_and_scores_the_cosines(self, tmp_path: Path, engine: WordEngine) -> None:
        for _, sink in self.of_layouts(tmp_path, engine, records()):
            known = {record.id: record for record in records()}
            for question in QUESTIONS:
                expected = self.cosines(engine, question, self.widths[-1], records())
                hits = sink.search(engine, question, k=10, candidates=48)
                assert [hit.score for hit in hits] == pytest.approx(
                    [expected[id] for id in best(expected, 10)], abs=self.score_error
                )
                for hit in hits:
                    assert hit.score == pytest.approx(expected[hit.id], abs=self.score_error)
                    assert (hit.text, hit.metadata) == (known[hit.id].text, known[hit.id].metadata)

    def test_the_smallest_width_finds_candidates_and_the_largest_scores_them(
        self, tmp_path: Path, engine: WordEngine
    ) -> None:
        sink = self.make(tmp_path, dimensions=[16, 64, 384])
        fill(sink, engine, records(), (16, 64, 384))
        parted = 0
        for question in QUESTIONS:
            coarse, full = (self.cosines(engine, question, width, records()) for width in (16, 384))
            candidates = best(coarse, 6)
            hits = sink.search(engine, question, k=4, candidates=6, coarse_to_fine=True)
            assert [hit.id for hit in hits] == [id for id in best(full, 48) if id in candidates][:4]
            assert [hit.score for hit in hits] == pytest.approx([full[hit.id] for hit in hits], abs=self.score_error)
            straight = sink.search(engine, question, k=4, coarse_to_fine=False)
            assert [hit.id for hit in straight] == best(full, 4)
            chosen = sink.search(engine, question, k=4, candidates=6)
            assert [hit.id for hit in chosen] == [hit.id for hit in (straight if sink.exhaustive else hits)]
            parted += [hit.id for hit in hits] != [hit.id for hit in straight]
        assert parted  # sixteen dimensions miss some hits
        sink.close()

    def test_a_search_for_more_rows_than_exist_finds_all(self, sink: Any, engine: WordEngine) -> None:
        fill(sink, engine, records(), self.widths)
        hits = sink.search(engine, QUESTIONS[0], k=500)
        assert len({hit.id for hit in hits}) == len(hits) == 48
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)

    def test_an_empty_collection_finds_nothing(self, sink: Any, engine: WordEngine) -> None:
        sink.prepare(engine.spec)
        assert sink.count() == 0 and sink.search(engine, "anything") == []

    def test_a_missing_collection_is_an_error(self, sink: Any, engine: WordEngine) -> None:
        assert sink.count() == 0
        for use in (lambda: sink.search(engine, "anything"), lambda: sink.delete(["a"]), sink.open):
            with pytest.raises(InvalidRequestError, match="no collection 'docs'.*ingest into it first"):
                use()

    def test_a_missing_collection_is_named_beside_those_that_exist(self, tmp_path: Path, engine: WordEngine) -> None:
        sink = self.make(tmp_path, collection="docs", dimensions=self.widths)
        fill(sink, engine, records(3), self.widths)
        assert "docs" in sink.collections()
        found = sink.describe()
        assert (found.name, found.rows, found.kind) == ("docs", 3, "vectors")
        assert found.to_json()["dimensions"] == list(self.widths)
        other = self.again(sink, tmp_path, collection="dosc")
        with pytest.raises(InvalidRequestError, match=r"no collection 'dosc' at .*; it has 'docs'.*; correct the name"):
            other.describe()
        other.close()

    def test_invalid_searches_and_deletes_are_refused(self, sink: Any, engine: WordEngine) -> None:
        fill(sink, engine, records(2), self.widths)
        options: dict[str, Any]
        for options, message in (
            ({"k": 0}, "k=0"),
            ({"k": True}, "k=True"),
            ({"k": 5, "candidates": 4}, "candidates=4 must be an int from k=5"),
            ({"filter": {"n": None}}, "filter"),
            ({"filter": 5}, "filter is of type int"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                sink.search(engine, "anything", **options)
        with pytest.raises(InvalidRequestError, match="pass one str"):
            sink.search(engine, ["a", "b"])
        for options, message in (
            ({}, "either ids or filter"),
            ({"ids": ["a"], "filter": {"n": 1}}, "either ids or filter"),
            ({"ids": "measuring/sockets"}, "pass a list of ids"),
            ({"filter": {}}, "would delete every record"),
            ({"filter": 5}, "filter is of type int"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                sink.delete(**options)
        assert sink.count() == 2

    def test_a_filter_on_metadata_means_the_same_everywhere(self, tmp_path: Path, engine: WordEngine) -> None:
        rows = [Record(str(number), f"mill {number}", metadata) for number, metadata in enumerate(FACETED)]
        for layout, sink in self.of_layouts(tmp_path, engine, rows):
            for condition, expected in (*EQUALS, *RANGES):
                hits = sink.search(engine, "water", filter=condition, coarse_to_fine=layout != "langchain")
                assert "".join(sorted(hit.id for hit in hits)) == expected, (layout, condition)
            for refused, message in REFUSED:
                for use in (sink.delete, partial(sink.search, engine, "water")):
                    with pytest.raises(InvalidRequestError, match=message):
                        use(filter={"n": refused})
            # Of the rows that a database finds nearest, those outside an inexact range are not counted.
            for condition, count in (({"day": {"gt": "2024-01-31"}}, 3), ({"f": {"gt": 0.75, "lt": 20.75}}, 3)):
                for k in (1, 2, 3):
                    hits = sink.search(engine, "mill 5", k=k, candidates=k, filter=condition)
                    assert len(hits) == min(k, count), (layout, condition)
            for condition, left in (
                ({"day": {"gt": "2024-01-31", "lt": "2024-02-20"}}, "01245"),
                ({"f": {"gt": 1.75}, "day": {"gte": "1900-01-01"}}, "025"),
                ({"n": {"lte": 1}}, "25"),
            ):
                sink.delete(filter=condition)
                assert "".join(sorted(hit.id for hit in sink.search(engine, "water"))) == left, (layout, condition)

    def test_deleting_by_filter_deletes_what_a_search_with_it_finds(self, tmp_path: Path, engine: WordEngine) -> None:
        for _, sink in self.of_layouts(tmp_path, engine, records()):
            condition = {"verb": ["measuring", "a theory of"], "even": True}
            found = {hit.id for hit in sink.search(engine, QUESTIONS[0], k=48, filter=condition)}
            assert len(found) == 8
            sink.delete(filter=condition)
            sink.delete(filter={"verb": "nobody"})
            kept = {hit.id for hit in sink.search(engine, QUESTIONS[0], k=48)}
            assert kept == {record.id for record in records()} - found

    def test_unusual_records_come_back_unchanged(self, tmp_path: Path, engine: WordEngine) -> None:
        for _, sink in self.of_layouts(tmp_path, engine, ODD):
            hits = {hit.id: hit for hit in sink.search(engine, "anything", k=5)}
            assert {id: (hit.text, hit.metadata) for id, hit in hits.items()} == {
                record.id: (record.text, record.metadata) for record in ODD
            }
            stored = {record.id: record for record in stored_records(sink)}
            assert stored == {record.id: record for record in ODD}
            assert [row.text for page in stored_rows(sink, page=1) for row in page.values()] == [
                record.text for record in stored.values()
            ]

    def test_chunks_are_expanded_to_their_documents(self, tmp_path: Path, engine: WordEngine) -> None:
        rows = [*records(24), *_chunks("weir", _WEIR, 70), *_chunks("pond", _POND, 2)]
        for layout, sink in self.of_layouts(tmp_path, engine, rows, chunked=True, context="late"):
            (first, *others) = sink.search(engine, "weir weir weir", k=3, expand="parent")
            assert first.id == "weir" and first.text == _WEIR and len({hit.id for hit in others} | {"weir"}) == 3
            span = slice(first.metadata["chunk_start"], first.metadata["chunk_end"])
            chunks = sink.search(engine, "weir weir weir", k=3)
            assert {hit.id for hit in chunks} == {
                "weir"
            }  # which are more hits of one document than there are asked for
            assert first.score == pytest.approx(chunks[0].score, abs=self.score_error)
            assert _WEIR[span] == chunks[0].text and first.metadata["page"] == 3
            whole = sink.search(engine, "pond", k=200, expand="parent")
            assert len(whole) == len({hit.id for hit in whole}) == 26, layout
            assert {hit.id: hit.text for hit in whole}["pond"] == _POND
            assert sink.open().context == "late"
            with pytest.raises(InvalidRequestError, match="late chunks, pooled from whole documents"):
                sink.prepare(engine.spec, chunked=True)
            with pytest.raises(InvalidRequestError, match="expand='all' is unknown"):
                sink.search(engine, "pond", expand="all")

    def test_a_collection_opened_again_is_the_same(self, tmp_path: Path, engine: WordEngine) -> None:
        layout = self.layouts[-1]
        first = self.make(tmp_path, dimensions=self.widths, fields=layout)
        fill(first, engine, records(20), self.widths)
        before = first.search(engine, QUESTIONS[0])
        again = self.again(first, tmp_path)  # widths and field layout come from the manifest
        after = again.search(engine, QUESTIONS[0])
        assert [(hit.id, hit.text, hit.metadata) for hit in after] == [
            (hit.id, hit.text, hit.metadata) for hit in before
        ]
        assert [hit.score for hit in after] == pytest.approx([hit.score for hit in before], abs=1e-6)
        assert again.count() == 20
        again.delete([records()[0].id])
        more = self.again(again, tmp_path, dimensions=self.widths, fields=layout)
        fill(more, engine, records(), self.widths)
        assert more.count() == 48
        for sink in (first, again, more):
            sink.close()

    def test_a_sink_takes_the_form_of_a_collection_that_exists(self, tmp_path: Path, engine: WordEngine) -> None:
        for layout in self.layouts:
            first = self.make(tmp_path, collection=layout, dimensions=self.widths, fields=layout)
            fill(first, engine, FORMED[:2], self.widths)
            again = self.again(first, tmp_path, collection=layout)
            assert again.dimensions is None
            fill(again, engine, FORMED[2:], self.widths)
            assert again.manifest.dimensions == self.widths and again.manifest.fields == layout
            reader = self.again(again, tmp_path, collection=layout)
            hits = {hit.id: (hit.text, hit.metadata) for hit in reader.search(engine, "water", filter={"n": {"gt": 0}})}
            assert hits == {record.id: (record.text, record.metadata) for record in FORMED[1:]}, layout
            for sink in (first, again, reader):
                sink.close()

    def test_the_runs_are_kept(self, tmp_path: Path, engine: WordEngine) -> None:
        first = self.make(tmp_path, dimensions=self.widths)
        first.prepare(engine.spec)
        notes = [RunNote.now("ingest", "/docs"), RunNote.now("copy", "another collection", chunking="by words")]
        for name, note in zip(("one", "two"), notes, strict=True):
            try:
                first.note_run(name, note)
            except SinkError:
                pytest.skip("this sink keeps no run")
        again = self.again(first, tmp_path)
        assert again.open().runs == (replace(notes[0], run="one"), replace(notes[1], run="two"))
        assert again.last_run() == "two"
        for sink in (first, again):
            sink.close()

    def test_a_copy_holds_the_same_rows_and_finds_the_same(self, tmp_path: Path, engine: WordEngine) -> None:
        for layout, sink in self.of_layouts(tmp_path, engine, records(24)):
            other = self.make(tmp_path, collection=f"{layout}_copied")
            report = copy(sink, other, show_progress=False)
            assert report.good and report.written == other.count() == 24
            ids = [row_id for row_id, _ in sink.scan()]
            rows, copied = (each.read_rows(ids, widths=self.widths) for each in (sink, other))
            assert rows.keys() == copied.keys() == set(ids)
            for row_id, row in rows.items():
                own, theirs = ((r.record_id, r.content_hash, r.text, r.metadata) for r in (row, copied[row_id]))
                assert own == theirs
                for width, vector in row.vectors.items():
                    np.testing.assert_allclose(copied[row_id].vectors[width], vector, atol=self.tolerance)
            hits, wanted = (each.search(engine, QUESTIONS[0], k=5, candidates=24) for each in (other, sink))
            assert [(hit.id, hit.text) for hit in hits] == [(hit.id, hit.text) for hit in wanted]
            assert copy(sink, other, show_progress=False).unchanged == 24
            for record in records(3):
                (origin,) = trace(other, record.id)
                assert (origin.record_id, origin.text, origin.hash_fits) == (record.id, record.text, True)
            assert trace(other, "nobody") == []
            other.close()

    def test_two_collections_do_not_mix(self, tmp_path: Path, engine: WordEngine) -> None:
        first = self.make(tmp_path, collection="first", dimensions=[384])
        fill(first, engine, records(10), (384,))
        second = self.again(first, tmp_path, collection="second", dimensions=[64])
        fill(second, engine, [Record("only", "one text")], (64,))
        assert second.count() == 1 and [hit.id for hit in second.search(engine, "anything")] == ["only"]
        for sink in (first, second):
            sink.close()

    def test_other_widths_layouts_and_models_are_refused(self, tmp_path: Path, engine: WordEngine) -> None:
        sink = self.make(tmp_path, dimensions=self.widths)
        fill(sink, engine, records(3), self.widths)
        with pytest.raises(FingerprintMismatchError, match="vectors of two models do not compare"):
            sink.search(WordEngine("other words"), "anything")
        for widths in ([384], [32, 64]):
            sink = self.again(sink, tmp_path, dimensions=widths)
            with pytest.raises(InvalidRequestError, match=r"pass dimensions=\[64, 384\]"):
                sink.prepare(engine.spec)
        for layout in self.layouts[1:]:
            sink = self.again(sink, tmp_path, dimensions=self.widths, fields=layout)
            with pytest.raises(InvalidRequestError, match="pass fields='plain'"):
                sink.prepare(engine.spec)
        sink = self.again(sink, tmp_path, dimensions=[32])
        with pytest.raises(InvalidRequestError, match=r"not \[32\]"):
            sink.search(engine, "anything")
        sink = self.again(sink, tmp_path, dimensions=[384])
        expected = self.cosines(engine, QUESTIONS[0], 384, records(3))
        (hit,) = sink.search(engine, QUESTIONS[0], k=1)
        assert hit.score == pytest.approx(max(expected.values()), abs=self.score_error)
        sink.close()

    def test_a_closed_sink_says_so(self, sink: Any, engine: WordEngine) -> None:
        fill(sink, engine, records(3), self.widths)
        sink.close()
        with pytest.raises(SinkError, match="did not get a search: this sink is closed"):
            sink.search(engine, "anything")
        with pytest.raises(SinkError, match="did not get a delete of 2"):
            sink.delete(["a", "b"])

    def test_invalid_options_are_refused(self, tmp_path: Path) -> None:
        for options, message in (
            ({"dimensions": [0]}, "dimensions="),
            ({"dimensions": 128}, "dimensions=128"),
            ({"fields": "haystack"}, "fields='haystack'"),
            ({"collection": ""}, "collection=''"),
            ({"collection": "../docs"}, "is no name"),
            ({"collection": None}, "is no name"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                self.make(tmp_path, **options)

    def test_it_is_a_sink_of_a_collection(self, sink: Any, engine: WordEngine) -> None:
        assert isinstance(sink, CollectionSink) and sink.dimensions == self.widths and sink.collection == "docs"
        assert sink.target.endswith(" docs")
        with sink as same:
            assert same is sink
