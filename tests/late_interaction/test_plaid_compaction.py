"""PlaidIndex: when segments are merged, when centroids are trained, and that neither changes what is found."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.late_interaction.plaid_data import filled, matrices, names, ragged

from millpond.late_interaction import MemoryIndex, PlaidIndex
from millpond.late_interaction.codecs.rows import CODECS, Codec
from millpond.late_interaction.plaid import compaction, writer
from millpond.late_interaction.plaid import index as index_module
from millpond.late_interaction.plaid.compaction import due_segments
from millpond.late_interaction.plaid.storage.manifest import FileEntry, Manifest, SegmentEntry


def manifest(sizes: Sequence[int], *, dead: dict[int, float] | None = None) -> Manifest:
    """Segments of these many tokens, a hundred documents each, of which some share is deleted."""
    file = FileEntry(name="segment", bytes=1, sha256="")
    return Manifest(
        payload="4",
        segments=tuple(
            SegmentEntry(
                file=file,
                documents=100,
                tokens=tokens,
                coded=True,
                deleted_documents=round(100 * (dead or {}).get(index, 0)),
                deleted_tokens=round(tokens * (dead or {}).get(index, 0)),
            )
            for index, tokens in enumerate(sizes)
        ),
    )


@pytest.mark.parametrize(
    ("sizes", "due"),
    [
        pytest.param([], None, id="none"),
        pytest.param([100] * 7, None, id="seven"),
        pytest.param([100] * 8, range(8), id="eight"),
        pytest.param([1_000_000, *[100] * 8], range(1, 9), id="eight-after-a-large-one"),
        pytest.param([*[100] * 8, 1_000_000], range(8), id="eight-before-a-large-one"),
        pytest.param([20_000] * 7 + [100] * 8, range(7, 15), id="the-smallest-size-first"),
        pytest.param([20_000] * 7 + [100] * 7, None, id="smaller-ones-do-not-count"),
        pytest.param([20_000] * 7 + [100] * 3 + [20_000] + [100], range(12), id="smaller-ones-between-and-after"),
        pytest.param([200_000] * 8, None, id="too-large-for-an-add"),
        pytest.param([130_000] * 8, range(8), id="as-large-as-an-add-rewrites"),
        pytest.param([0] * 8, range(8), id="without-tokens"),
    ],
)
def test_eight_segments_of_a_size_are_due(sizes: list[int], due: range | None) -> None:
    assert due_segments(manifest(sizes)) == due


@pytest.mark.parametrize(
    ("sizes", "dead", "due"),
    [
        pytest.param([1000, 1000], {1: 0.2}, None, id="a-fifth"),
        pytest.param([1000, 1000], {1: 0.21}, range(1, 2), id="more-than-a-fifth"),
        pytest.param([2_000_000], {0: 0.3}, None, id="too-large-for-an-add"),
        pytest.param([2_000_000], {0: 0.5}, range(1), id="small-once-rewritten"),
    ],
)
def test_a_segment_with_a_fifth_of_its_documents_deleted_is_due(
    sizes: list[int], dead: dict[int, float], due: range | None
) -> None:
    assert due_segments(manifest(sizes, dead=dead)) == due


@pytest.mark.parametrize(
    ("codec", "trained"),
    [
        ("4", True),
        *(
            pytest.param(codec, trained, marks=pytest.mark.slow)
            for codec, trained in [("int8", False), ("int8", True), ("4", False), ("2", True)]
        ),
    ],
)
def test_small_adds_are_merged_and_nothing_changes(
    tmp_path: Path, codec: str, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "TRAIN_TOKENS", 300 if trained else 1 << 40)
    monkeypatch.setattr(compaction, "_SMALLEST_TIER", 64)
    monkeypatch.setattr(compaction, "is_codable", lambda manifest, tokens: manifest.codec is not None)
    documents, queries = matrices(90), ragged(matrices(3, seed=4))
    index = PlaidIndex(tmp_path, None, codec)  # type: ignore[arg-type]
    index.add_embeddings(names(90)[:30], ragged(documents[:30]))
    most = 0
    for number in range(30, 70):
        index.add_embeddings([f"d{number}"], ragged([documents[number]]), texts=[f"text {number}"])
        if number % 7 == 0:
            index.delete([f"d{number - 20}"])
        most = max(most, index.stats().details["segments"])
    assert 7 <= most <= 20 and (index.stats().details["centroids"] > 0) == trained
    before = index.search_embeddings(queries, k=90, exact=True)
    assert len(before[0]) == len(index) == 65
    index.compact()
    assert index.stats().details["segments"] == 1 and index.stats().details["deleted_documents"] == 0
    assert index.search_embeddings(queries, k=90, exact=True) == before
    assert index.check() == []
    generation = index._refresh().manifest.generation
    index.compact()
    assert index._refresh().manifest.generation == generation  # nothing to do


def test_many_deleted_documents_are_rewritten_by_the_next_add(tmp_path: Path) -> None:
    index = filled(tmp_path, 100)
    index.delete(names(100)[:20])
    index.add_embeddings(["more"], ragged(matrices(1)))
    assert index.stats().details["deleted_documents"] == 20
    index.delete(["d20"])
    assert index.stats().details["deleted_documents"] == 21
    index.add_embeddings(["again"], ragged(matrices(1)))
    assert index.stats().details["deleted_documents"] == 0
    assert len(index) == 81 and index.ids() == [*names(100)[21:], "more", "again"]


def test_centroids_are_trained_when_an_add_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "TRAIN_TOKENS", 1_000)
    index = PlaidIndex(tmp_path, None)
    documents = matrices(300)
    ends = np.cumsum([len(document) for document in documents])
    below = int(np.searchsorted(ends, 1_000))  # documents with 999 rows at most
    index.add_embeddings(names(below), ragged(documents[:below]))
    assert index.stats().tokens < 1_000 and index.stats().details["centroids"] == 0
    index.add_embeddings(["next"], ragged([documents[below]]))
    stats = index.stats()
    assert stats.tokens >= 1_000 and stats.details["centroids"] == 128 and stats.details["segments"] == 1
    # Later rows get further centroids beside those that there are.
    trained = index._refresh().trained
    index.add_embeddings(names(300, "e"), ragged(documents))
    grown = index._refresh().trained
    assert trained is not None and grown is not None and len(grown.centroids) > 128
    assert np.array_equal(grown.centroids.rows[:128], trained.centroids.rows)
    assert index.stats().details["trained_tokens"] == stats.tokens


@pytest.mark.parametrize("codec", ["int8", "4"])
def test_only_rows_in_int8_are_trained_anew(tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "TRAIN_TOKENS", 500)
    index = PlaidIndex(tmp_path, None, codec)  # type: ignore[arg-type]
    documents = matrices(500)
    index.add_embeddings(names(40), ragged(documents[:40]))
    first = index.stats().details["centroids"]
    index.add_embeddings(names(500), ragged(documents))
    assert index.stats().details["centroids"] > first > 0
    trained = index.stats().details["trained_tokens"]
    queries = ragged(matrices(3, seed=4))
    before = index.search_embeddings(queries, k=20, exact=True)
    index.compact()
    assert (index.stats().details["trained_tokens"] > trained) == (codec == "int8")
    assert index.search_embeddings(queries, k=20, exact=True) == before
    assert [hits[0].id for hits in index.search_embeddings(queries, k=20)] == [hits[0].id for hits in before]


def test_a_large_add_commits_several_times_and_trains_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_COMMIT_TOKENS", 6_000)
    monkeypatch.setattr(compaction, "TRAIN_TOKENS", 10_000)
    trained: list[int] = []
    train = writer.train

    def counted(transaction: object, snapshot: object) -> Manifest:
        trained.append(len(snapshot.segments))  # type: ignore[attr-defined]
        return train(transaction, snapshot)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "train", counted)
    index = PlaidIndex(tmp_path, None)
    documents = matrices(2_000)
    report = index.add_embeddings(names(2_000), ragged(documents))
    assert (report.added, report.replaced) == (2_000, 0)
    assert trained == [4]  # pieces of 512 documents have about 8,000 rows
    assert index.ids() == names(2_000) and index.stats().details["segments"] == 1
    hits = index.search_embeddings(ragged(documents[::500]), k=1)
    assert [some[0].id for some in hits] == [f"d{number}" for number in range(0, 2_000, 500)]


def test_an_add_that_fails_keeps_the_documents_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = PlaidIndex(tmp_path, None)
    prepare = index._encoding.documents
    calls = 0

    def failing(embeddings: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return prepare(embeddings)  # type: ignore[arg-type]

    monkeypatch.setattr(index._encoding, "documents", failing)
    with pytest.raises(KeyboardInterrupt):
        index.add_embeddings(names(2_000), ragged(matrices(2_000)))
    assert index.ids() == names(1_024)
    monkeypatch.undo()
    report = index.add_embeddings(names(2_000), ragged(matrices(2_000)))
    assert (report.added, report.replaced) == (976, 1_024)


def test_a_compaction_that_fails_after_an_add_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compaction, "TRAIN_TOKENS", 500)

    def full(*args: object, **options: object) -> Manifest:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(writer, "train", full)
        index = filled(tmp_path, 200)
    assert len(index) == 200 and index.stats().details["centroids"] == 0
    assert "was not compacted" in caplog.text and "No space left" in caplog.text
    index.add_embeddings(["next"], ragged(matrices(1)))
    assert index.stats().details["centroids"] > 0


def test_deleted_documents_leave_the_disk_by_compaction(tmp_path: Path) -> None:
    index = filled(tmp_path, 300)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    index.delete(filter={"third": [1, 2]})
    index.compact()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 0.45 * size
    assert len(os.listdir(tmp_path)) == 4  # CURRENT, LOCK, a manifest and a segment
    assert index.ids() == [f"d{number}" for number in range(0, 300, 3)]


def test_rows_of_deleted_documents_train_no_centroids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "TRAIN_TOKENS", 1 << 40)
    index = PlaidIndex(tmp_path, None)
    documents = [np.eye(24, dtype=np.float32)[[number % 2, 2 + number % 2]] for number in range(400)]
    index.add_embeddings(names(400), ragged(documents))
    index.delete([f"d{number}" for number in range(1, 400, 2)])
    monkeypatch.setattr(compaction, "TRAIN_TOKENS", 100)
    index.compact()
    codec = index._refresh().trained
    assert codec is not None
    used = np.abs(codec.centroids.values).max(axis=0) > 0.5
    assert used.tolist() == [True, False, True, False] + [False] * 20


def test_an_index_without_documents_trains_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "TRAIN_TOKENS", 500)
    index = filled(tmp_path, 100)
    assert index.delete(names(100)) == 100
    assert index.stats().details["centroids"] == 0 and not list(tmp_path.glob("codec-*"))
    index.add_embeddings(names(9), ragged(matrices(9)))
    assert all(hit.exact for hit in index.search_embeddings(ragged(matrices(1)))[0])
    index.add_embeddings(names(200), ragged(matrices(200)))
    assert index.stats().details["centroids"] > 0 and len(index) == 200


def test_both_kinds_of_index_store_rows_as_the_table_of_codecs_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new row of the table is packed, scored, written, trained on and compacted as itself: float16, for once."""
    halves = Codec(name="int8", dtype=np.dtype(np.float16))
    monkeypatch.setitem(CODECS, "int8", halves)
    monkeypatch.setattr(compaction, "TRAIN_TOKENS", 500)
    documents, queries = matrices(300), ragged(matrices(3, seed=4))
    expected, memory = MemoryIndex(None, "float32"), MemoryIndex(None, "int8")
    plaid = PlaidIndex(tmp_path / "plaid", None, "int8")
    for index in (expected, memory, plaid):
        index.add_embeddings(names(20), ragged(documents[:20]))  # before centroids are trained
        index.add_embeddings(names(300), ragged(documents))
    memory.save(tmp_path / "memory")
    plaid.compact()
    scores = [{hit.id: hit.score for hit in hits} for hits in expected.search_embeddings(queries, k=300)]
    for index in (memory, MemoryIndex.open(tmp_path / "memory", None), plaid, PlaidIndex(tmp_path / "plaid", None)):
        for hits, wanted in zip(index.search_embeddings(queries, k=300), scores, strict=True):
            assert [hit.score for hit in hits] == pytest.approx([wanted[hit.id] for hit in hits], abs=2e-3)
            assert len(hits) == 300 and all(hit.exact for hit in hits)
    assert plaid.stats().details["centroids"] > 0
    assert plaid._refresh().segments[0].file.columns.rows.dtype == np.float16  # type: ignore[union-attr]
