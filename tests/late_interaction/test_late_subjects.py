"""Subjects that come after the training of centroids are found as those before it, whatever the order of adds."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.late_interaction.plaid_data import names, ragged

from millpond.late_interaction import LateInteractionIndex, MemoryIndex, PlaidIndex
from millpond.late_interaction.memory import store
from millpond.late_interaction.plaid import compaction, growth

pytestmark = pytest.mark.contract

WIDTH, EARLY, LATE = 64, 1_600, 1_200
Matrices = list[npt.NDArray[np.float32]]
Add = Callable[[range, int], None]


def fields() -> tuple[Matrices, Matrices]:
    """Documents of two fields, each around a direction of its own, and queries of each: rows of a document, moved."""
    random = np.random.default_rng(0)

    def unit(*shape: int) -> npt.NDArray[np.float64]:
        rows = random.normal(size=(*shape, WIDTH))
        return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True))

    documents: Matrices = []
    queries: Matrices = []
    for count, subjects in ((EARLY, 80), (LATE, 60)):
        field, centers = 3 * unit(1), unit(subjects)
        some = [
            (field + centers[number % subjects] + 0.5 * unit() + 0.7 * unit(rows)).astype(np.float32)
            for number, rows in enumerate(random.integers(12, 24, size=count))
        ]
        some = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in some]
        documents += some
        for number in random.choice(count, 40, replace=False):
            rows = some[number][random.choice(len(some[number]), 10, replace=False)]
            queries.append((rows + 0.2 * unit(10)).astype(np.float32))
    return documents, queries


def late_at_once(add: Add, index: PlaidIndex) -> None:
    add(range(EARLY), EARLY)
    add(range(EARLY, EARLY + LATE), LATE)


def late_by_small_adds(add: Add, index: PlaidIndex) -> None:
    add(range(EARLY), EARLY)
    add(range(EARLY, EARLY + LATE), 48)


def a_tiny_first_add(add: Add, index: PlaidIndex) -> None:
    add(range(10), 10)
    add(range(10, EARLY), EARLY)
    add(range(EARLY, EARLY + LATE), 400)


def deleted_and_added_again(add: Add, index: PlaidIndex) -> None:
    add(range(EARLY), EARLY)
    index.delete(names(400))
    add(range(EARLY, EARLY + LATE), 300)
    add(range(400), 100)
    index.compact()


ORDERS = [late_at_once, late_by_small_adds, a_tiny_first_add, deleted_and_added_again]


def best_ten(documents: Matrices, queries: Matrices) -> list[set[str]]:
    flat, starts = np.concatenate(documents), np.cumsum([0, *map(len, documents)])[:-1]
    scores = [np.maximum.reduceat(flat @ query.T, starts, axis=0).sum(axis=1) for query in queries]
    return [{f"d{number}" for number in np.argsort(-some)[:10]} for some in scores]


def recall(index: LateInteractionIndex, queries: Matrices, truth: Sequence[set[str]]) -> float:
    found = index.search_embeddings(ragged(queries, WIDTH), k=10, candidates=200)
    return float(np.mean([len({hit.id for hit in hits} & best) / 10 for hits, best in zip(found, truth, strict=True)]))


@pytest.mark.parametrize("codec", ["int8", "4", "2"])
def test_recall_does_not_depend_on_the_order_of_adds(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "TRAIN_TOKENS", 1 << 14)
    documents, queries = fields()
    ids = names(len(documents))
    truth = best_ten(documents, queries)

    def filled(order: Callable[[Add, PlaidIndex], None] | None, folder: Path) -> PlaidIndex:
        index = PlaidIndex(folder, None, codec)  # type: ignore[arg-type]

        def add(some: range, step: int) -> None:
            for start in range(some.start, some.stop, step):
                part = slice(start, min(start + step, some.stop))
                index.add_embeddings(ids[part], ragged(documents[part], WIDTH))

        if order is None:
            add(range(len(ids)), len(ids))
        else:
            order(add, index)
        return index

    once = filled(None, tmp_path / "once")
    expected = [recall(once, some, best) for some, best in ((queries[:40], truth[:40]), (queries[40:], truth[40:]))]
    for order in ORDERS:
        index = filled(order, tmp_path / order.__name__)
        early, late = recall(index, queries[:40], truth[:40]), recall(index, queries[40:], truth[40:])
        assert (early + late) / 2 >= sum(expected) / 2 - 0.02, (order.__name__, expected, early, late)
        assert late >= expected[1] - 0.04, (order.__name__, expected, late)
        assert index.stats().details["drift"] < 0.2 and index.check() == []


def test_an_index_that_forgot_late_subjects_says_so_and_int8_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an index that was written before centroids were added: late rows have codes of the early centroids."""
    monkeypatch.setattr(compaction, "TRAIN_TOKENS", 1 << 14)
    documents, _ = fields()
    ids = names(len(documents))
    index = PlaidIndex(tmp_path, None, "int8")
    index.add_embeddings(ids[:EARLY], ragged(documents[:EARLY], WIDTH))
    with monkeypatch.context() as patch:
        patch.setattr(growth, "grown", lambda trained, sample, rows, total: trained)
        index.add_embeddings(ids[EARLY:], ragged(documents[EARLY:], WIDTH))
    assert index.stats().details["drift"] > 0.3
    (sentence,) = index.check()
    assert "% of the rows" in sentence and "compact()" in sentence
    index.compact()
    assert index.stats().details["drift"] < 0.05 and index.check() == []


def test_more_centroids_than_codes_can_name_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compaction, "TRAIN_TOKENS", 1 << 14)
    documents, _ = fields()
    ids = names(len(documents))
    index = PlaidIndex(tmp_path, None, "2")
    index.add_embeddings(ids[:EARLY], ragged(documents[:EARLY], WIDTH))
    centroids = index.stats().details["centroids"]
    monkeypatch.setattr(growth, "MAX_CENTROIDS", centroids)
    index.add_embeddings(ids[EARLY:], ragged(documents[EARLY:], WIDTH))
    assert index.stats().details["centroids"] == centroids
    assert "far from all centroids" in caplog.text and index.stats().details["drift"] > 0.1


@pytest.mark.parametrize("step", [LATE, 60])
def test_a_memory_index_finds_late_subjects(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_CODED_DOCUMENTS", EARLY)
    documents, queries = fields()
    ids, truth = names(len(documents)), best_ten(documents, queries)
    once, index = MemoryIndex(None), MemoryIndex(None)
    once.add_embeddings(ids, ragged(documents, WIDTH))
    index.add_embeddings(ids[:EARLY], ragged(documents[:EARLY], WIDTH))
    assert index.stats().details["centroids"] > 0
    for start in range(EARLY, EARLY + LATE, step):
        part = slice(start, start + step)
        index.add_embeddings(ids[part], ragged(documents[part], WIDTH))
    assert recall(index, queries[40:], truth[40:]) >= recall(once, queries[40:], truth[40:]) - 0.02
    assert index.stats().details["drift"] < 0.05
