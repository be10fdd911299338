"""MemoryIndex: the contract of every index, and what only an index in memory has."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.late_interaction.index_contract import (
    IndexContract,
    documents_of,
    found,
    matrices,
    maxsim,
    names,
    ragged,
    units,
)

from millpond import Engine
from millpond.errors import InvalidRequestError, MissingExtraError
from millpond.late_interaction import AddReport, LateInteractionIndex, MemoryIndex, Ragged
from millpond.late_interaction.codecs import kmeans
from millpond.late_interaction.memory import blocks, scoring, store
from millpond.late_interaction.memory import index as memory_index


class TestMemoryIndex(IndexContract):
    """In int8, stored by ``save``."""

    def open(self, path: Path, engine: Engine | None, **options: Any) -> LateInteractionIndex:
        return MemoryIndex.open(path, engine, **options) if path.exists() else MemoryIndex(engine, **options)

    def reopen(
        self, index: LateInteractionIndex, path: Path, engine: Engine | None, **options: Any
    ) -> LateInteractionIndex:
        assert isinstance(index, MemoryIndex)
        index.save(path)
        index.close()
        return MemoryIndex.open(path, engine, **options)


@pytest.mark.torch
@pytest.mark.contract
class TestMemoryIndexByTorch(TestMemoryIndex):
    """In float32, stored and compared by torch as on a GPU; and in blocks of a few rows, as large indexes have them."""

    score_error = 1e-4

    @pytest.fixture(autouse=True)
    def torch_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = pytest.importorskip("millpond.late_interaction.cuda", reason="needs torch", exc_type=ImportError)
        monkeypatch.setattr(memory_index, "_memory_of", lambda device: cuda.DeviceMemory(cuda.device_of(device)))
        monkeypatch.setattr(blocks, "FULL_BLOCK", 16 * 128)
        monkeypatch.setattr(blocks, "_FIRST_ROWS", 8)

    def open(self, path: Path, engine: Engine | None, **options: Any) -> LateInteractionIndex:
        return super().open(path, engine, **({} if path.exists() else {"codec": "float32"}), **options)


# --- codecs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "bytes_of_a_row", "error"), [("int8", 130, 5e-3), ("bfloat16", 256, 5e-3), ("float32", 512, 1e-5)]
)
def test_a_codec_stores_rows_in_its_size(codec: Any, bytes_of_a_row: int, error: float, tmp_path: Path) -> None:
    documents = documents_of(names(50), matrices(50, width=128))
    index = MemoryIndex(None, codec)
    index.add_embeddings(list(documents), ragged(list(documents.values()), 128))
    stats = index.stats()
    assert stats.codec == codec
    assert stats.bytes == bytes_of_a_row * 300 + 8 * 51
    query = matrices(1, width=128, seed=4)[0]
    index.save(tmp_path / "index")
    opened = MemoryIndex.open(tmp_path / "index", None)
    for each in (index, opened):
        for hit in each.search_embeddings(ragged([query], 128), k=50)[0]:
            assert hit.exact and hit.score == pytest.approx(maxsim(query, documents[hit.id]), abs=error * len(query))
    assert opened.stats() == stats
    # a codec that is mistaken for another one has another error
    worst = max(
        abs(hit.score - maxsim(query, documents[hit.id]))
        for hit in index.search_embeddings(ragged([query], 128), k=50)[0]
    )
    assert (worst > 1e-4) == (codec != "float32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "int4"}, "codec='int4' is unknown; choose 'int8', 'bfloat16', 'float32'"),
        ({"threads": 0}, "threads=0 must be an int from 1"),
    ],
    ids=str,
)
def test_wrong_options_of_an_index_in_memory_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        MemoryIndex(None, **options)


@pytest.mark.torch
def test_a_device_that_torch_does_not_have_is_refused() -> None:
    pytest.importorskip("torch")
    for device in ("no such", 3.5):
        with pytest.raises(InvalidRequestError, match=f"device={device!r} cannot be used"):
            MemoryIndex(None, device=device)  # type: ignore[arg-type]
    assert MemoryIndex(None, device="cpu:0").stats().details["device"] == "cpu"


def test_without_torch_a_device_is_refused_and_the_cpu_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "millpond.late_interaction.cuda", raising=False)
    with pytest.raises(MissingExtraError, match=r"device='cuda' needs torch; use device='cpu', or .*millpond\[torch\]"):
        MemoryIndex(None, device="cuda")
    MemoryIndex(None).add_embeddings(["a"], ragged(matrices(1)))


def test_threads_change_no_result() -> None:
    values = matrices(300, tokens=30)
    queries = ragged(matrices(3, seed=1))
    results = []
    for threads in (None, 1, 3):
        index = MemoryIndex(None, threads=threads)
        index.add_embeddings(names(300), ragged(values))
        results.append(index.search_embeddings(queries))
    assert results[0] == results[1] == results[2]


# --- candidates by codes ----------------------------------------------------------------------------------------------


def topics(count: int, *, seed: int = 0, tokens: int = 8, width: int = 32) -> list[npt.NDArray[np.float32]]:
    """Documents whose tokens lie near those of one of 40 topics, as words of a text lie near each other."""
    centers = np.random.default_rng(99).standard_normal((40, tokens, width))
    random = np.random.default_rng(seed)
    return [units(centers[number % 40] + 0.35 * random.standard_normal((tokens, width))) for number in range(count)]


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Codes from 200 documents on, which keep 30 candidates; the list has the candidates of each scan."""
    monkeypatch.setattr(store, "_CODED_DOCUMENTS", 200)
    monkeypatch.setattr(scoring, "_CANDIDATES", 30)
    monkeypatch.setattr(scoring, "_CANDIDATES_PER_HIT", 3)
    kept: list[int] = []
    candidates_of = scoring.candidates_of

    def counted(*args: Any, **options: Any) -> Any:
        chosen = candidates_of(*args, **options)
        kept.append(sum(map(len, chosen)))
        return chosen

    monkeypatch.setattr(scoring, "candidates_of", counted)
    return kept


def filled(count: int, **options: Any) -> tuple[MemoryIndex, dict[str, npt.NDArray[np.float32]]]:
    documents = documents_of(names(count), topics(count))
    index = MemoryIndex(None, **options)
    index.add_embeddings(
        list(documents), ragged(list(documents.values())), metadata=[{"n": n % 4} for n in range(count)]
    )
    return index, documents


def recall(index: MemoryIndex, queries: list[npt.NDArray[np.float32]], **options: Any) -> float:
    """The share of the exact ten best that are found."""
    approximate = found(index.search_embeddings(ragged(queries), **options))
    exact = found(index.search_embeddings(ragged(queries), exact=True, **options))
    return float(np.mean([len({*a} & {*b}) / len(b) for a, b in zip(approximate, exact, strict=True)]))


def test_few_documents_are_all_compared(scans: list[int]) -> None:
    index, _ = filled(199)
    assert index.stats().details["centroids"] == 0
    index.search_embeddings(ragged(topics(3, seed=1)))
    assert scans == []


def test_codes_pick_the_candidates_of_many_documents(scans: list[int]) -> None:
    index, documents = filled(400)
    assert index.stats().details["centroids"] > 1
    queries = topics(20, seed=1)
    results = index.search_embeddings(ragged(queries))
    assert scans == [30] * 20
    assert recall(index, queries) > 0.95
    for hits, query in zip(results, queries, strict=True):
        for hit in hits:
            assert hit.exact and hit.score == pytest.approx(maxsim(query, documents[hit.id]), abs=0.08)
    scans.clear()
    index.search_embeddings(ragged(queries[:2]), k=20)
    index.search_embeddings(ragged(queries[:2]), k=2, candidates=77)
    assert scans == [60, 60, 77, 77]


def test_an_exact_search_and_one_among_few_documents_scan_no_codes(scans: list[int]) -> None:
    index, _ = filled(400)
    queries = ragged(topics(2, seed=1))
    index.search_embeddings(queries, exact=True)
    index.search_embeddings(queries, ids=names(30))
    index.search_embeddings(queries, candidates=400)
    assert scans == []
    assert index.search_embeddings(ragged([np.empty((0, 32), dtype=np.float32)])) == [[]] and scans == []


def test_candidates_are_live_and_match_the_filter(scans: list[int]) -> None:
    index, _ = filled(400)
    index.delete([f"doc-{n}" for n in range(0, 400, 40)])  # all of one topic
    queries = topics(40, seed=1)
    results = index.search_embeddings(ragged(queries), filter={"n": [0, 1]})
    assert scans == [30] * 40
    for hits in results:
        assert len(hits) == 10
        assert all(hit.metadata["n"] in (0, 1) and int(hit.id[4:]) % 40 for hit in hits)
    assert recall(index, queries[1:], filter={"n": [0, 1]}, candidates=60) > 0.9
    among = names(400)[50:150]
    assert {hit.id for hits in index.search_embeddings(ragged(queries), ids=among) for hit in hits} <= {*among}


def test_later_documents_are_found_by_their_codes(scans: list[int]) -> None:
    index, documents = filled(400)
    later = documents_of([f"later-{n}" for n in range(80)], topics(80, seed=7))
    index.add_embeddings(list(later)[:40], ragged(list(later.values())[:40]))
    index.add_embeddings(["doc-3", *list(later)[40:]], ragged([documents["doc-9"], *list(later.values())[40:]]))
    for id, matrix in later.items():
        assert index.search_embeddings(ragged([matrix]), k=1)[0][0].id == id
    assert {hit.id for hit in index.search_embeddings(ragged([documents["doc-9"]]), k=2)[0]} == {"doc-9", "doc-3"}
    assert len(scans) == 81


def test_centroids_are_trained_anew_when_the_documents_are_four_times_as_many(scans: list[int]) -> None:
    index, documents = filled(300)
    first = index.stats().details["centroids"]
    more = documents_of([f"more-{n}" for n in range(1000)], topics(1000, seed=3))
    ids, values = list(more), list(more.values())
    index.add_embeddings(ids[:800], ragged(values[:800]))
    assert index.stats().details["centroids"] == first
    index.add_embeddings(ids[800:], ragged(values[800:]))
    assert index.stats().details["centroids"] == 2 * first
    assert recall(index, topics(20, seed=1), candidates=100) > 0.9
    assert index.search_embeddings(ragged([more["more-999"], documents["doc-0"]]), k=1)[0][0].id == "more-999"


def test_codes_survive_save_and_compaction(scans: list[int], tmp_path: Path) -> None:
    index, _ = filled(400)
    index.delete([f"doc-{n}" for n in range(0, 400, 7)])
    queries = ragged(topics(10, seed=1))
    before = index.search_embeddings(queries)
    index.save(tmp_path / "index")
    opened = MemoryIndex.open(tmp_path / "index", None)
    assert opened.search_embeddings(queries) == before
    assert opened.stats().details["centroids"] == index.stats().details["centroids"]
    for each in (index, opened):
        each.compact()
        assert each.search_embeddings(queries) == before
        assert each.add_embeddings(["new"], ragged(topics(1, seed=5))) == AddReport(added=1)
        assert each.search_embeddings(ragged(topics(1, seed=5)), k=1)[0][0].id == "new"
    assert scans == [30] * 42


def test_readers_and_writers_go_on_while_centroids_are_trained(
    scans: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    training, go_on = threading.Event(), threading.Event()
    train = kmeans.train

    def held(*args: Any, **options: Any) -> Any:
        training.set()
        assert go_on.wait(60)
        return train(*args, **options)

    monkeypatch.setattr("millpond.late_interaction.memory.store.kmeans.train", held)
    index = MemoryIndex(None)
    documents = documents_of(names(400), topics(400))
    adding = threading.Thread(
        target=lambda: index.add_embeddings(list(documents), ragged(list(documents.values()))), daemon=True
    )
    adding.start()
    assert training.wait(60)
    later = topics(30, seed=7)
    assert index.search_embeddings(ragged([documents["doc-5"]]), k=1)[0][0].id == "doc-5" and scans == []
    index.add_embeddings([f"later-{n}" for n in range(30)], ragged(later))  # a second training does not begin
    index.delete(["doc-0"])
    index.compact()
    index.add_embeddings(["doc-1"], ragged([documents["doc-0"]]))
    go_on.set()
    adding.join(60)
    assert not adding.is_alive() and index.stats().details["centroids"] > 1
    for number, matrix in enumerate(later):
        assert index.search_embeddings(ragged([matrix]), k=1)[0][0].id == f"later-{number}"
    assert index.search_embeddings(ragged([documents["doc-0"]]), k=1)[0][0].id == "doc-1"
    assert recall(index, topics(20, seed=1)) > 0.9


# --- blocks and snapshots ---------------------------------------------------------------------------------------------


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 rows of 32 int8 columns, compacted from 10 deleted documents on."""
    monkeypatch.setattr(blocks, "FULL_BLOCK", 64 * 32)
    monkeypatch.setattr(store, "FULL_BLOCK", 64 * 32)
    monkeypatch.setattr(blocks, "_FIRST_ROWS", 16)
    monkeypatch.setattr(store, "_DEAD_DOCUMENTS", 10)
    monkeypatch.setattr(store, "_DEAD_ROWS", 60)
    monkeypatch.setattr(blocks, "_STEP", 24)


@pytest.mark.usefixtures("small_blocks")
def test_results_do_not_depend_on_blocks() -> None:
    documents = documents_of(names(60), matrices(60, tokens=[1 + n * n % 90 for n in range(60)]))
    index = MemoryIndex(None)
    for start in range(0, 60, 7):
        ids = names(60)[start : start + 7]
        index.add_embeddings(ids, ragged([documents[id] for id in ids]))
    assert index.stats().details["blocks"] > 10 and index.ids() == names(60)
    queries = matrices(5, seed=3)
    results = index.search_embeddings(ragged(queries), k=60)
    for hits, query in zip(results, queries, strict=True):
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        for hit in hits:
            assert hit.score == pytest.approx(maxsim(query, documents[hit.id]), abs=0.05)
    index.compact()
    assert index.search_embeddings(ragged(queries), k=60) == results


@pytest.mark.usefixtures("small_blocks")
def test_deleted_rows_are_given_back_at_a_fifth() -> None:
    documents = documents_of(names(100), matrices(100))
    index = MemoryIndex(None)
    index.add_embeddings(list(documents), ragged(list(documents.values())))
    full = index.stats().bytes
    index.delete(names(20))
    assert index.stats().details["deleted"] == 20 and index.stats().bytes == full
    index.delete(["doc-20"])
    assert index.stats().details["deleted"] == 0 and index.stats().bytes < 0.82 * full
    assert index.ids() == names(100)[21:]
    for number in (21, 50, 99):
        assert index.search_embeddings(ragged([documents[f"doc-{number}"]]), k=1)[0][0].id == f"doc-{number}"
    for _ in range(5):  # replacing documents again and again takes no more memory
        index.add_embeddings(names(100)[21:], ragged([documents[id] for id in names(100)[21:]]))
        assert index.stats().bytes < 1.3 * full and len(index) == 79
    assert index.delete(names(100)) == 79
    assert index.stats().bytes == 0 and index.stats().details["blocks"] == 0


@pytest.mark.usefixtures("small_blocks")
def test_a_search_has_the_documents_of_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = documents_of(names(40), matrices(40))
    index = MemoryIndex(None)
    index.add_embeddings(list(documents), ragged(list(documents.values())), metadata=[{"n": n} for n in range(40)])
    query = ragged(matrices(1, seed=1))
    before = index.search_embeddings(query, k=40)
    score = scoring._Selection.scores
    changed: list[int] = []

    def changing(*args: Any, **options: Any) -> Any:
        if not changed:
            changed.append(1)
            index.delete(names(30))
            index.compact()
            index.add_embeddings(["doc-35", "new"], ragged(matrices(2, seed=2)), metadata=[{"n": -1}, {"n": -1}])
        return score(*args, **options)

    monkeypatch.setattr(scoring._Selection, "scores", changing)
    assert index.search_embeddings(query, k=40) == before
    assert changed and len(index) == 11
    assert len(index.search_embeddings(query, k=40)[0]) == 11


@pytest.mark.usefixtures("small_blocks")
def test_documents_of_an_add_that_fails_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = documents_of(names(40), matrices(40))
    index = MemoryIndex(None)
    index.add_embeddings(names(5), ragged([documents[id] for id in names(5)]))
    append, calls = blocks.Block.append, []

    def failing(*args: Any) -> Any:
        calls.append(1)
        view = append(*args)
        if len(calls) == 2:
            raise MemoryError("no memory")
        return view

    monkeypatch.setattr(blocks.Block, "append", failing)
    with pytest.raises(MemoryError):
        index.add_embeddings(names(40)[2:], ragged([documents[id] for id in names(40)[2:]]))
    assert index.ids() == names(5)
    assert index.search_embeddings(ragged([documents["doc-3"]]), k=1)[0][0].id == "doc-3"
    other = matrices(1, seed=8)[0]
    index.add_embeddings(["other"], ragged([other]), texts=["its text"], metadata=[{"n": 1}])
    hit = index.search_embeddings(ragged([other]), k=1)[0][0]
    assert (hit.id, hit.text, hit.metadata) == ("other", "its text", {"n": 1})
    index.delete(["other"])
    assert index.add_embeddings(names(40)[2:], ragged([documents[id] for id in names(40)[2:]])) == AddReport(
        added=35, replaced=3
    )
    for id, matrix in documents.items():
        assert index.search_embeddings(ragged([matrix]), k=1)[0][0].id == id


def test_documents_without_rows_train_no_centroids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_CODED_DOCUMENTS", 10)
    index = MemoryIndex(None)
    assert index.add_embeddings(names(12), ragged([np.empty((0, 32), dtype=np.float32)] * 12)).added == 12
    assert (len(index), index.stats().details["centroids"]) == (12, 0)
    [other] = matrices(1)
    index.add_embeddings(["other"], ragged([other]))
    assert [hit.id for hit in index.search_embeddings(ragged([other]))[0]] == ["other"]


def test_of_two_threads_that_add_the_first_rows_one_decides_their_width(monkeypatch: pytest.MonkeyPatch) -> None:
    index = MemoryIndex(None)
    decide = index._encoding.decide

    def late(first: Ragged) -> Any:
        monkeypatch.undo()
        index.add_embeddings(["narrow"], ragged(matrices(1, width=12), 12))  # what another thread may do here
        return decide(first)

    monkeypatch.setattr(index._encoding, "decide", late)
    with pytest.raises(InvalidRequestError, match=r"32 wide, and the rows of this index 12"):
        index.add_embeddings(["wide"], ragged(matrices(1)))
    assert index.ids() == ["narrow"]
    assert [hit.id for hit in index.search_embeddings(ragged(matrices(1, width=12), 12))[0]] == ["narrow"]
