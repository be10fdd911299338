"""Late chunks in collections: vectors of whole documents, what they mix with, and the documents of found chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.composite.test_late_chunks import by_hand
from tests.ingest.memory_sink import MemorySink
from tests.tiny import MAX_TOKENS, SENTENCES, Dense, Layout, Normalize, Pooling

from millpond import Engine, VectorCache
from millpond.errors import InvalidRequestError
from millpond.ingest import Chunker, Chunking, Record, copy, ingest, point_id
from millpond.ingest.sinks.parents import best_of_each, joined
from millpond.ingest.sinks.search import Hit

pytest.importorskip("semantic_text_splitter")

PROMPT = "keep this: "
LATE = Chunking(max_tokens=24, overlap=4, context="late")
PLAIN = Chunking(max_tokens=24, overlap=4)
RECORDS = [
    Record("long", " ".join(SENTENCES * 2), {"n": 1}),
    Record("fits", "How deep is it? The old mill knows, and so does the miller of the pond."),
    Record("one", "A short text."),
]


@pytest.fixture
def folder(checkpoint_of: Callable[..., Path]) -> Path:
    layout = Layout(modules=(Pooling(), Normalize()), prompts={"query": "find: ", "document": PROMPT})
    return checkpoint_of("bert", sentence_transformers=layout)


@pytest.fixture
def engine(folder: Path, engine_of: Callable[..., Engine]) -> Engine:
    return engine_of(folder)


@pytest.fixture
def sink() -> Iterator[MemorySink]:
    with MemorySink("", "docs") as sink:
        yield sink


def fill(sink: Any, engine: Engine, records: Any = RECORDS, chunking: Any = LATE, **options: Any) -> Any:
    return ingest(records, engine=engine, sink=sink, chunking=chunking, show_progress=False, **options)


def vectors(sink: MemorySink) -> dict[str, np.ndarray]:
    ids = [row_id for row_id, _ in sink.scan()]
    return {row_id: row.vectors[48] for row_id, row in sink.fetch(ids, widths=[48]).items()}


@pytest.mark.torch
def test_the_rows_are_means_of_states_of_their_documents(sink: MemorySink, engine: Engine, folder: Path) -> None:
    report = fill(sink, engine, verify=True)
    assert report.verification.good and report.verification.sampled == report.written == sink.count() > 20
    assert (report.embedded, report.failed, report.truncated) == (3, 0, 0)
    stored = vectors(sink)
    chunker = Chunker.for_engine(engine, LATE)
    for record in RECORDS:
        pieces = chunker.split(record)
        keys = ("chunk_start", "chunk_end")
        spans = [tuple(piece.metadata[key] for key in keys) for piece in pieces] if len(pieces) > 1 else []
        expected = by_hand(folder, record.text, spans or [(0, len(record.text))], PROMPT, MAX_TOKENS)
        found = np.stack([stored[point_id(piece.id, piece.chunk)] for piece in pieces])
        np.testing.assert_allclose(found, expected, atol=1e-5)
        alone = engine.embed([piece.text for piece in pieces], role="document").embeddings
        assert np.abs(found - alone).max() > 1e-2


def test_a_changed_end_changes_the_chunks_before_it(sink: MemorySink, engine: Engine, tmp_path: Path) -> None:
    fill(sink, engine, journal=tmp_path / "journal")
    before = vectors(sink)
    assert fill(sink, engine, journal=tmp_path / "journal").unchanged == 3
    record = Record("fits", RECORDS[1].text.replace("pond", "weir"))
    assert fill(sink, engine, [record], journal=tmp_path / "journal").embedded == 1
    changed = {row_id for row_id, vector in vectors(sink).items() if np.abs(vector - before[row_id]).max() > 1e-4}
    first, *_ = pieces = Chunker.for_engine(engine, LATE).split(record)
    assert "weir" not in first.text and len(pieces) > 1
    assert changed == {point_id("fits", piece.chunk) for piece in pieces}


def test_no_cache_has_vectors_of_late_chunks(folder: Path, sink: MemorySink, tmp_path: Path) -> None:
    with VectorCache(tmp_path / "v.db") as cache, Engine(folder, cache=cache, dtype="float32", device="cpu") as engine:
        plain = MemorySink("", "plain")
        fill(plain, engine, chunking=PLAIN)
        held = len(cache)
        assert fill(sink, engine).cached == 0 and len(cache) == held
        assert fill(sink, engine, resume=False).cached == 0
        late, alone = vectors(sink), vectors(plain)
        assert late.keys() == alone.keys() and all(np.abs(late[each] - alone[each]).max() > 1e-3 for each in late)
        again = MemorySink("", "again")
        assert fill(again, engine, chunking=PLAIN).cached == 3
        np.testing.assert_array_equal(list(vectors(again).values()), list(alone.values()))


def test_late_and_other_chunks_do_not_mix(sink: MemorySink, engine: Engine) -> None:
    fill(sink, engine)
    assert sink.open().context == "late"
    with pytest.raises(InvalidRequestError, match="holds late chunks, pooled from whole documents, and this run"):
        fill(sink, engine, chunking=PLAIN)
    plain = MemorySink("", "plain")
    fill(plain, engine, chunking=PLAIN)
    with pytest.raises(InvalidRequestError, match="rows that are embedded by themselves, and this run writes late"):
        fill(plain, engine)
    with pytest.raises(InvalidRequestError, match="holds rows that are embedded by themselves, and the source late"):
        copy(sink, plain)
    copied = MemorySink("", "copied")
    copy(sink, copied)
    assert copied.open().context == "late"


def test_a_stored_chunk_has_no_document(sink: MemorySink, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    piece = Chunker.for_engine(engine, LATE).split(RECORDS[0])[0]
    report = fill(sink, engine, [Record("part", piece.text, piece.metadata), RECORDS[2]])
    assert (report.failed, report.written) == (1, 1)
    assert "late chunks are made of whole documents; ingest the document" in caplog.text


def test_a_text_without_tokens_fails_alone(sink: MemorySink, engine: Engine) -> None:
    report = fill(sink, engine, [Record("nothing", "\ufffd\x01"), *RECORDS])
    assert report.failed == 1 and report.embedded == 3


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ((Pooling(modes=("cls",)),), "its pooling is cls, which reads no span of a text; leave context out, or choose"),
        ((Pooling(modes=("mean", "max")),), r"its pooling is mean\+max"),
        ((Pooling(), Dense(out_features=48)), "layers follow its pooling"),
    ],
)
def test_other_poolings_are_refused_before_anything_is_read(
    sink: MemorySink, engine_of: Callable[..., Engine], checkpoint_of: Callable[..., Path], modules: Any, message: str
) -> None:
    other = engine_of(checkpoint_of("bert", sentence_transformers=Layout(modules=modules)))
    with pytest.raises(InvalidRequestError, match=message):
        fill(sink, other, records=(1 / 0 for _ in [0]))
    fill(MemorySink("", "plain"), other, chunking=PLAIN)


def test_wrong_options_are_refused(sink: MemorySink, engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="context='early' is unknown; choose late"):
        Chunking(max_tokens=9, context="early")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="context='late' needs max_tokens"):
        Chunking(context="late")
    with pytest.raises(InvalidRequestError, match=r"max_tokens=50 is more than three quarters .* at most \d+"):
        fill(sink, engine, chunking=Chunking(max_tokens=50, context="late"))
    with pytest.raises(InvalidRequestError, match="keep_blank=True embeds blank texts, which have no token"):
        fill(sink, engine, keep_blank=True)
    assert Chunker.for_engine(engine, LATE).settings == Chunker.for_engine(engine, PLAIN).settings + ", late"


def test_what_embeds_stored_texts_by_themselves_refuses_late_chunks(sink: MemorySink, engine: Engine) -> None:
    from millpond.audit.audit import audit
    from millpond.audit.candidates import Models
    from millpond.migrate.change import Change

    fill(sink, engine)
    with pytest.raises(InvalidRequestError, match="holds late chunks, .* by millpond ingest --verify"):
        audit(sink, Models([engine.spec.name]))
    manifest = sink.open()
    with pytest.raises(InvalidRequestError, match="holds late chunks, .* name it with --source and --chunk"):
        Change(spec=engine.spec, options={"datatype": "float16"}).check(manifest)
    with pytest.raises(InvalidRequestError, match="migration embeds row by row, and late chunks"):
        Change(spec=engine.spec, chunking=LATE, records=lambda: RECORDS).check(manifest)
    plain = Change(spec=engine.spec, chunking=PLAIN, records=lambda: RECORDS)
    plain.check(manifest)
    assert plain.manifest(manifest).context is None


# --- Documents of chunks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunking", [LATE, PLAIN], ids=["late", "plain"])
def test_a_search_returns_whole_documents(sink: MemorySink, engine: Engine, chunking: Chunking) -> None:
    fill(sink, engine, chunking=chunking)
    query = SENTENCES[5]
    children, found = sink.search(engine, query, k=sink.count()), sink.search(engine, query, k=3, expand="parent")
    best = {hit.id: hit for hit in reversed(children)}
    assert [hit.id for hit in found] == list(dict.fromkeys(hit.id for hit in children)) and len(found) == 3
    for hit in found:
        child = best[hit.id]
        assert (hit.score, hit.metadata) == (child.score, child.metadata)
        assert hit.text == next(record.text for record in RECORDS if record.id == hit.id)
        span = slice(hit.metadata.get("chunk_start"), hit.metadata.get("chunk_end"))
        assert hit.text[span] == child.text and (hit.id == "one" or len(child.text) < len(hit.text))
    assert [hit.id for hit in sink.search(engine, query, k=1, expand="parent")] == [found[0].id]
    only = sink.search(engine, query, k=3, expand="parent", filter={"n": 1})
    assert [hit.id for hit in only] == ["long"]


def test_more_chunks_are_fetched_until_there_are_enough_documents() -> None:
    hits = [Hit(id=name, score=1 / n, text="", metadata={}) for n, name in enumerate("aaaaaaabbbbbbbbcde", start=1)]
    asked: list[int] = []

    def search(count: int) -> list[Hit]:
        asked.append(count)
        return hits[:count]

    assert [hit.id for hit in best_of_each(search, 3, 1000)] == ["a", "b", "c"] and asked == [3, 12, 48]
    assert best_of_each(search, 3, 1000)[1] is hits[7]
    assert [hit.id for hit in best_of_each(search, 9, 1000)] == list("abcde")  # there are no more
    assert [hit.id for hit in best_of_each(search, 3, 12)] == ["a", "b"]  # nor does the database hand out more


def test_pieces_are_joined_by_their_characters() -> None:
    text = "  One two.\n\nThree four five six.  Seven"
    spans = [(2, 10), (12, 22), (17, 32), (20, 24), (34, 39)]
    assert (
        joined((start, text[start:end]) for start, end in reversed(spans))
        == "\n\nOne two.\n\nThree four five six.\n\nSeven"
    )
    assert joined([(0, "a"), (2, "b"), (6, "c")]) == "a b\n\n c"
    assert joined([]) == ""
