"""Comparison: MaxSim of pairs whose matrices arrive in any order, and which of them stay in memory."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import write_checkpoint
from tests.tiny.heads import write_pylate

from millpond import AsyncEngine, Engine, Pair, PoolingParams
from millpond.engine.composite.comparison import Comparison
from millpond.engine.schedule.call import Call
from millpond.tasks import Role

WIDTH = 8
QUERY = "How deep is the mill pond?"

Matrices = dict[str, np.ndarray]


def matrices_of(texts: list[str]) -> Matrices:
    """A matrix for each text, of 1 to 9 rows that are not normalized."""
    generator = np.random.default_rng(0)
    return {
        text: generator.normal(size=(generator.integers(1, 10), WIDTH)).astype(np.float32)
        for text in dict.fromkeys(texts)
    }


def unit(matrix: np.ndarray) -> np.ndarray:
    return matrix / np.linalg.norm(matrix, axis=1, keepdims=True)


def kept(comparison: Comparison, role: Role) -> int:
    return len(comparison._kept[role])


def batches(pairs: list[Pair], size: int) -> list[tuple[Role, list[int], list[str]]]:
    """The distinct texts of both sides with their slots, in batches."""
    made: list[tuple[Role, list[int], list[str]]] = []
    sides: tuple[tuple[Role, list[str]], ...] = (
        ("query", [pair.query for pair in pairs]),
        ("document", [pair.document for pair in pairs]),
    )
    for role, texts in sides:
        distinct = list(dict.fromkeys(texts))
        for start in range(0, len(distinct), size):
            slots = list(range(start, min(start + size, len(distinct))))
            made.append((role, slots, [distinct[slot] for slot in slots]))
    return made


SHAPES = {
    "one query": [Pair("q", f"d{i}") for i in range(17)],
    "one document": [Pair(f"q{i}", "d") for i in range(9)],
    "n to n": [Pair(f"q{i}", f"d{i}") for i in range(13)],
    "every query with every document": [Pair(f"q{i}", f"d{j}") for i in range(4) for j in range(5)],
    "duplicates": [Pair("q", "d"), Pair("q", "e"), Pair("q", "d"), Pair("p", "d"), Pair("q", "d")],
    "a text on both sides": [Pair("a", "b"), Pair("b", "a"), Pair("a", "a")],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(("normalize", "mean"), [(True, False), (False, True)])
def test_matrices_may_arrive_in_any_order(shape: str, size: int, normalize: bool, mean: bool) -> None:
    pairs = SHAPES[shape]
    matrices = {role: matrices_of([pair[side] for pair in pairs]) for side, role in enumerate(("query", "document"))}
    change = unit if normalize else np.asarray
    expected = [
        (change(matrices["query"][q]) @ change(matrices["document"][d]).T).max(axis=1).sum()
        / (len(matrices["query"][q]) if mean else 1)
        for q, d in pairs
    ]
    order = batches(pairs, size)
    for seed in range(5):
        random.Random(seed).shuffle(order)
        comparison = Comparison(pairs, width=WIDTH, normalize=normalize, mean=mean)
        for role, slots, texts in order:
            comparison.take(role, slots, [matrices[role][text] for text in texts])
        np.testing.assert_allclose(comparison.scores(), expected, rtol=1e-5, atol=1e-5)
        assert kept(comparison, "query") == kept(comparison, "document") == 0
    assert np.ptp(expected) > 0.1  # an order that mixed pairs up would be noticed


def test_matrices_may_arrive_in_several_threads() -> None:
    pairs = [Pair(f"q{i % 20}", f"d{i}") for i in range(400)]
    matrices = {role: matrices_of([pair[side] for pair in pairs]) for side, role in enumerate(("query", "document"))}
    expected = [(unit(matrices["query"][q]) @ unit(matrices["document"][d]).T).max(axis=1).sum() for q, d in pairs]
    order = batches(pairs, 3)
    with ThreadPoolExecutor(8) as threads:
        for seed in range(3):
            random.Random(seed).shuffle(order)
            comparison = Comparison(pairs, width=WIDTH, normalize=True, mean=False)
            work = [
                threads.submit(comparison.take, role, slots, [matrices[role][text] for text in texts])
                for role, slots, texts in order
            ]
            for each in work:
                each.result()
            np.testing.assert_allclose(comparison.scores(), expected, rtol=1e-5)
            assert kept(comparison, "query") == kept(comparison, "document") == 0


def test_only_what_waits_for_its_partner_is_kept() -> None:
    pairs = [Pair("q", f"d{i}") for i in range(10)]
    matrices = matrices_of(["q", *(f"d{i}" for i in range(10))])
    comparison = Comparison(pairs, width=WIDTH, normalize=True, mean=False)
    comparison.take("document", [0, 1], [matrices["d0"], matrices["d1"]])
    assert kept(comparison, "document") == 2  # the query is still to come
    comparison.take("query", [0], [matrices["q"]])
    assert (kept(comparison, "query"), kept(comparison, "document")) == (1, 0)
    comparison.take("document", [2, 3, 4, 5, 6, 7, 8], [matrices[f"d{i}"] for i in range(2, 9)])
    assert (kept(comparison, "query"), kept(comparison, "document")) == (1, 0)
    comparison.take("document", [9], [matrices["d9"]])
    assert kept(comparison, "query") == 0


def test_a_kept_matrix_does_not_keep_its_batch_and_is_forgotten_when_the_call_is_over() -> None:
    batch = np.ones((100, WIDTH), dtype=np.float32)
    comparison = Comparison([Pair("q", "d")], width=WIDTH, normalize=False, mean=False)
    comparison.take("document", [0], [batch[:2]])
    (matrix,) = comparison._kept["document"].values()
    assert matrix.base is None
    assert batch.sum() == batch.size
    comparison.drop()
    assert kept(comparison, "document") == 0
    comparison.take("query", [0], [batch[:1]])  # a batch that was running
    assert kept(comparison, "query") == 0


# --- In an engine ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_checkpoint(tmp_path_factory.mktemp("comparison") / "bert", "bert")
    with Engine(folder, dtype="float32", device="cpu", max_batch_tokens=256) as engine:
        yield engine


class Delivered:
    """The matrices that calls received, as far as they are still in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._references: list[weakref.ref[Any]] = []
        self.most = self.count = 0
        lock = threading.Lock()
        deliver = Call.deliver

        def watched(call: Call, slots: Any, results: Any) -> None:
            deliver(call, slots, results)
            with lock:
                self._references = [reference for reference in self._references if reference() is not None]
                self._references += [weakref.ref(result) for result in results if result.ndim == 2]
                self.count += len(results)
                self.most = max(self.most, len(self._references))

        monkeypatch.setattr(Call, "deliver", watched)


DOCUMENTS = [f"the {i}th wheel turns in the water of the pond, {i * i} times" for i in range(400)]


@pytest.mark.parametrize("method", ["maxsim", "auto"])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_the_documents_of_a_rerank_are_never_in_memory_together(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, method: Any, asynchronous: bool
) -> None:
    delivered = Delivered(monkeypatch)
    if asynchronous:
        ranked = await AsyncEngine(engine).rerank(QUERY, DOCUMENTS, method=method)
    else:
        ranked = engine.rerank(QUERY, DOCUMENTS, method=method)
    assert len(ranked) == len(DOCUMENTS)
    assert delivered.count == 1 + len(DOCUMENTS)
    assert delivered.most < 100  # a few batches of 256 tokens
    engine.token_embed(DOCUMENTS)  # negative control: here the matrices are the result
    assert delivered.most >= len(DOCUMENTS) - 100


@pytest.mark.parametrize("mean", [False, True])
def test_queries_and_documents_n_to_n_score_as_one_by_one(tmp_path: Path, mean: bool) -> None:
    path = write_pylate(tmp_path / "model", similarity_fn_name="MeanMaxSim" if mean else "MaxSim")
    queries = [f"how deep is pond number {i % 70}?" for i in range(300)]
    documents = [DOCUMENTS[i % 110] for i in range(300)]
    with Engine(path, dtype="float32", device="cpu", max_batch_tokens=256) as colbert:
        scores = colbert.score(queries, documents).scores
        left = colbert.token_embed(queries, role="query").embeddings
        right = colbert.token_embed(documents, role="document").embeddings
    expected = [(q @ d.T).max(axis=1).sum() / (len(q) if mean else 1) for q, d in zip(left, right, strict=True)]
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_a_cancelled_rerank_keeps_no_matrix(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Comparison] = []
    begin = Comparison.__init__

    def noted(comparison: Comparison, *args: Any, **options: Any) -> None:
        begin(comparison, *args, **options)
        made.append(comparison)

    monkeypatch.setattr(Comparison, "__init__", noted)
    pairs = [Pair(QUERY, document) for document in DOCUMENTS]
    future = engine.submit("score", pairs, PoolingParams(), method="maxsim")
    future.cancel()
    assert len(engine.rerank(QUERY, DOCUMENTS[:3])) == 3
    assert all(kept(comparison, role) == 0 for comparison in made for role in ("query", "document"))
    assert engine.submit("score", pairs, PoolingParams(), method="maxsim").result(timeout=60).scores.shape == (400,)
