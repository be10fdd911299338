"""What every late-interaction index of the core does beside :class:`millpond.testing.IndexContract`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny.heads import DIM, write_stanford

from millpond import Engine
from millpond.errors import FingerprintMismatchError, InvalidRequestError
from millpond.late_interaction import AddReport, LateInteractionIndex
from millpond.testing import IndexContract as Shipped
from millpond.testing.matrices import (
    QUERY,
    TEXTS,
    FloatArray,
    assert_same_hits,
    documents_of,
    found,
    matrices,
    maxsim,
    names,
    ragged,
    units,
)

__all__ = [
    "QUERY",
    "TEXTS",
    "FloatArray",
    "IndexContract",
    "assert_same_hits",
    "found",
    "matrices",
    "maxsim",
    "names",
    "ragged",
    "units",
]


class IndexContract(Shipped):
    """Every test of an index, over a tiny ColBERT checkpoint."""

    # ---------------------------------------------------------------------------------------------------- fixtures

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("models")

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, folder: Path) -> Iterator[Engine]:
        with Engine(write_stanford(folder / "colbert"), dtype="float32", device="cpu") as engine:
            yield engine

    # -------------------------------------------------------------------------------------- documents and searching

    def test_of_equal_ids_in_a_call_the_last_counts(self, index: LateInteractionIndex) -> None:
        values = matrices(4)
        report = index.add_embeddings(["a", "b", "a", "a"], ragged(values), metadata=[{"n": n} for n in range(4)])
        assert report == AddReport(added=2, replaced=2)
        results = index.search_embeddings(ragged([values[3]]))
        self.check_hits(results, [values[3]], {"a": values[3], "b": values[1]}, 10)
        assert [(hit.id, hit.metadata) for hit in results[0]] == [("a", {"n": 3}), ("b", {"n": 1})]

    def test_every_document_can_be_deleted_and_added_again(self, index: LateInteractionIndex) -> None:
        documents = documents_of(names(5), matrices(5))
        for _ in range(2):
            index.add_embeddings(list(documents), ragged(list(documents.values())))
            assert index.delete(list(documents)) == 5
            assert len(index) == 0 and index.stats().tokens == 0 and index.ids() == []
            assert index.search_embeddings(ragged(matrices(1))) == [[]]

    def test_documents_are_listed_and_looked_up_by_id(self, index: LateInteractionIndex) -> None:
        assert index.ids() == [] and len(index) == 0
        index.add_embeddings(names(4), ragged(matrices(4)))
        assert "doc-2" in index and "doc-4" not in index
        assert 2 not in index and None not in index and "" not in index
        index.delete(["doc-2"])
        assert "doc-2" not in index and sorted(index.ids()) == ["doc-0", "doc-1", "doc-3"]

    # ------------------------------------------------------------------------------------------------- metadata

    def test_a_filter_sees_later_changes(self, index: LateInteractionIndex) -> None:
        query = ragged(matrices(1, seed=3))
        index.add_embeddings(["a", "b"], ragged(matrices(2)), metadata=[{"n": 1}, {"n": 2}])
        assert found(index.search_embeddings(query, filter={"n": 1})) == [["a"]]
        index.add_embeddings(["b", "c"], ragged(matrices(2, seed=1)), metadata=[{"n": 1}, {"n": 1}])
        assert sorted(found(index.search_embeddings(query, filter={"n": 1}))[0]) == ["a", "b", "c"]
        assert found(index.search_embeddings(query, filter={"n": 2})) == [[]]
        index.delete(["a"])
        assert sorted(found(index.search_embeddings(query, filter={"n": 1}))[0]) == ["b", "c"]

    def test_added_embeddings_are_copied(self, index: LateInteractionIndex) -> None:
        values = matrices(5)
        given = ragged([matrix.copy() for matrix in values])
        index.add_embeddings(names(5), given)
        given.flat[:] = 1
        self.check_hits(index.search_embeddings(ragged(values)), values, documents_of(names(5), values), 10)

    # ------------------------------------------------------------------------------------------------ sizes of rows

    def test_no_queries_have_no_results(self, index: LateInteractionIndex) -> None:
        assert index.search_embeddings(ragged([])) == []
        index.add_embeddings(["a"], ragged(matrices(1)))
        assert index.search_embeddings(ragged([])) == []

    def test_an_index_of_documents_without_rows_only(self, index: LateInteractionIndex) -> None:
        index.add_embeddings(["a"], ragged(matrices(1, tokens=[0])))
        assert len(index) == 1 and index.search_embeddings(ragged(matrices(1))) == [[]]
        assert index.ids() == ["a"]

    def test_a_query_without_rows_has_no_hits(self, index: LateInteractionIndex) -> None:
        documents = documents_of(names(4), matrices(4))
        index.add_embeddings(list(documents), ragged(list(documents.values())))
        queries = matrices(3, tokens=[0, 4, 0], seed=5)
        for exact in (False, True):
            results = index.search_embeddings(ragged(queries), k=3, exact=exact)
            self.check_hits(results, queries, documents, 3)
        assert results[0] == results[2] == []
        assert index.search_embeddings(ragged(matrices(2, tokens=0, width=99), 99)) == [[], []]

    def test_a_row_of_zeros_matches_nothing(self, index: LateInteractionIndex) -> None:
        values = [np.zeros((2, 32), dtype=np.float32), *matrices(2)]
        values[1][0] = 0
        index.add_embeddings(names(3), ragged(values))
        hits = {hit.id: hit.score for hit in index.search_embeddings(ragged([values[2]]))[0]}
        assert hits["doc-0"] == pytest.approx(0, abs=self.score_error)
        query = np.concatenate((np.zeros((1, 32), dtype=np.float32), values[2]))
        again = {hit.id: hit.score for hit in index.search_embeddings(ragged([query]))[0]}
        assert again["doc-2"] == pytest.approx(hits["doc-2"], abs=self.score_error)

    def test_one_token_and_8192_tokens(self, index: LateInteractionIndex) -> None:
        values = matrices(3, tokens=[1, 8192, 5])
        documents = documents_of(names(3), values)
        index.add_embeddings(names(3), ragged(values))
        assert index.stats().tokens == 8198
        queries = [values[0], values[1][-1:], values[1][[0, 5000, 8191]], *matrices(1, tokens=[300], seed=6)]
        for exact in (False, True):
            results = index.search_embeddings(ragged(queries), exact=exact)
            self.check_hits(results, queries, documents, 10)
        assert found(results)[0][0] == "doc-0" and found(results)[1][0] == found(results)[2][0] == "doc-1"

    def test_many_documents_in_one_call(self, index: LateInteractionIndex) -> None:
        documents = documents_of(names(1500), matrices(1500, width=16, tokens=2))
        index.add_embeddings(
            list(documents), ragged(list(documents.values()), 16), metadata=[{"n": n} for n in range(1500)]
        )
        assert len(index) == 1500 and index.stats().tokens == 3000
        queries = [documents["doc-0"], documents["doc-777"], documents["doc-1499"]]
        results = index.search_embeddings(ragged(queries, 16), k=3)
        assert [hits[0].metadata for hits in results] == [{"n": 0}, {"n": 777}, {"n": 1499}]
        assert len(set(index.ids())) == 1500

    # ------------------------------------------------------------------------------------------------------- texts

    def test_several_queries_at_once(self, texts: LateInteractionIndex) -> None:
        queries = [QUERY, *TEXTS, QUERY]
        together = texts.search(queries, k=2)
        alone = [texts.search([query], k=2)[0] for query in queries]
        assert found(together) == found(alone)
        assert texts.search([]) == []

    def test_one_text_of_one_token(self, path: Path, engine: Engine) -> None:
        with self.open(path, engine) as index:
            index.add(["a"], ["pond"])
            assert found(index.search(["pond"])) == [["a"]]
            index.add(["b"], ["."])  # its only word is on the skiplist
            assert sorted(found(index.search(["pond"]))[0]) == ["a", "b"]

    def test_duplicate_ids_among_texts(self, texts: LateInteractionIndex) -> None:
        report = texts.add(["doc-0", "x", "x"], ["first", "second", "third"])
        assert report == AddReport(added=1, replaced=2)
        (hit,) = texts.search(["third"], ids=["x"])[0]
        assert hit.text == "third"
        assert texts.add(["x", "x"], ["fourth", " "]) == AddReport(replaced=1, blank=1)
        assert "x" not in texts

    def test_a_hit_is_explained_by_the_matches_of_its_tokens(self, texts: LateInteractionIndex, engine: Engine) -> None:
        (hit,) = texts.search([QUERY], k=1)[0]
        matches = texts.explain(QUERY, hit.id)
        spans = engine.token_spans([QUERY], role="query")[0]
        assert [match.token for match in matches] == list(spans.tokens)
        error = self.score_error * len(matches)
        assert sum(match.score for match in matches) == pytest.approx(hit.score, abs=error)
        assert all(match.text == hit.text[match.start : match.end] for match in matches)
        assert any(match.text for match in matches)

    def test_a_match_in_a_cut_and_pooled_document_has_its_span(self, path: Path, engine: Engine) -> None:
        with self.open(path, engine, dimensions=12, pool_factor=2) as index:
            index.add(names(5), TEXTS)
            (hit,) = index.search([QUERY], k=1)[0]
            matches = index.explain(QUERY, hit.id)
            error = self.score_error * len(matches)
            assert sum(match.score for match in matches) == pytest.approx(hit.score, abs=error)
            assert all(match.text == hit.text[match.start : match.end] for match in matches)

    # -------------------------------------------------------------------------------------------------- opening again

    def test_an_empty_index_can_be_reopened(self, path: Path, engine: Engine) -> None:
        index = self.reopen(self.open(path, engine), path, engine)
        assert len(index) == 0 and index.search([QUERY]) == [[]]
        index.add(["a"], ["text"])
        index.delete(["a"])
        index = self.reopen(index, path, engine)
        assert len(index) == 0 and index.search([QUERY]) == [[]]
        index.close()

    def test_embeddings_are_there_after_reopening(self, path: Path) -> None:
        values = matrices(12, tokens=[n % 4 for n in range(12)])
        documents = documents_of(names(12), values)
        index = self.open(path, None)
        index.add_embeddings(names(12), ragged(values))
        queries = matrices(3, seed=8)
        before = index.search_embeddings(ragged(queries), k=12)
        index = self.reopen(index, path, None)
        after = index.search_embeddings(ragged(queries), k=12)
        self.check_hits(after, queries, documents, 12)
        assert_same_hits(after, before)
        assert len(index) == 12 and index.stats().dimensions == 32
        index.close()

    def test_an_index_opened_without_an_engine_takes_embeddings(
        self, path: Path, texts: LateInteractionIndex, engine: Engine
    ) -> None:
        query = engine.token_embed([QUERY], role="query", normalize=True).embeddings
        before = texts.search_embeddings(query)
        with self.reopen(texts, path, None) as index:
            assert_same_hits(index.search_embeddings(query), before)
            with pytest.raises(InvalidRequestError, match="no engine"):
                index.search([QUERY])

    def test_another_setting_of_the_model_is_refused(
        self, folder: Path, path: Path, texts: LateInteractionIndex, engine: Engine
    ) -> None:
        with (
            Engine(folder / "colbert", dtype="float32", device="cpu", max_length=20) as other,
            pytest.raises(FingerprintMismatchError, match="max_length"),
        ):
            self.reopen(texts, path, other)
        with self.open(path, engine) as index:
            assert len(index) == 5

    def test_an_engine_of_another_width_is_refused(self, path: Path, engine: Engine) -> None:
        index = self.open(path, None)
        index.add_embeddings(["a"], ragged(matrices(1, width=DIM + 8), DIM + 8))
        with pytest.raises(FingerprintMismatchError, match=f"{DIM + 8}.*{DIM}"):
            self.reopen(index, path, engine)

    # ----------------------------------------------------------------------------------------------- width and pooling

    def test_rows_are_cut_to_the_width(self, path: Path) -> None:
        # Rows that lie in 8 of 32 dimensions: the cut loses nothing.
        random = np.random.default_rng(3)
        basis = np.linalg.qr(random.standard_normal((32, 8)))[0]
        documents = {id: units(random.standard_normal((9, 8)) @ basis.T) for id in names(20)}
        queries = [units(random.standard_normal((4, 8)) @ basis.T) for _ in range(3)]
        index = self.open(path, None, dimensions=8)
        index.add_embeddings(list(documents)[:15], ragged(list(documents.values())[:15]))
        index.add_embeddings(list(documents)[15:], ragged(list(documents.values())[15:]))
        assert index.stats().dimensions == 8
        self.check_hits(index.search_embeddings(ragged(queries)), queries, documents, 10)
        before = index.search_embeddings(ragged(queries))
        with self.reopen(index, path, None) as index:
            assert_same_hits(index.search_embeddings(ragged(queries)), before)
            with pytest.raises(InvalidRequestError, match="8 wide.*32"):
                index.search_embeddings(ragged(matrices(1, width=8), 8))

    def test_another_width_and_pool_factor_are_refused(self, path: Path) -> None:
        index = self.open(path, None, dimensions=8, pool_factor=2)
        index.add_embeddings(["a"], ragged(matrices(1, tokens=20)))
        with pytest.raises(InvalidRequestError, match=r"dimensions=16.*8"):
            self.reopen(index, path, None, dimensions=16)
        with pytest.raises(InvalidRequestError, match=r"pool_factor=3.*2"):
            self.open(path, None, pool_factor=3)
        with self.open(path, None, dimensions=8) as index:
            assert len(index) == 1

    def test_documents_are_pooled_and_queries_are_not(self, path: Path) -> None:
        pairs = [np.repeat(matrix, 2, axis=0) for matrix in matrices(10, tokens=7)]  # every row twice
        for matrix in pairs:
            matrix[0] = matrix[1]
        documents = documents_of(names(10), pairs)
        queries = matrices(2, tokens=6, seed=9)
        index = self.open(path, None, pool_factor=2)
        index.add_embeddings(list(documents), ragged(pairs))
        assert index.stats().tokens < sum(map(len, pairs)) * 0.6
        results = index.search_embeddings(ragged(queries), k=10)
        # Pooling never raises the number of rows, and a query of 6 tokens scores up to 6.
        own = index.search_embeddings(ragged([pairs[4]]), k=1)[0][0]
        assert own.id == "doc-4" and own.score > 0.8 * len(pairs[4])
        with self.reopen(index, path, None) as index:
            assert_same_hits(index.search_embeddings(ragged(queries), k=10), results)
            tokens = index.stats().tokens
            index.add_embeddings(["more"], ragged([pairs[0]]))
            assert index.stats().tokens - tokens < len(pairs[0])  # the factor is the index's

    # ------------------------------------------------------------------------------------------------------ life cycle

    def test_the_context_manager_closes(self, path: Path) -> None:
        with self.open(path, None) as index:
            assert len(index) == 0
        with pytest.raises(InvalidRequestError, match="closed"):
            len(index)

    # ---------------------------------------------------------------------------------------------------------- threads

    def test_readers_see_whole_documents_while_one_writes(self, index: LateInteractionIndex) -> None:
        """Every version of a document has its own rows, and metadata that says which: they must fit together."""
        versions = [matrices(6, seed=seed) for seed in range(self.rounds)]
        stop = threading.Event()

        def write() -> None:
            try:
                for version, values in enumerate(versions):
                    metadata = [{"version": version, "doc": number} for number in range(6)]
                    index.add_embeddings(names(6), ragged(values), metadata=metadata)
                    if version % 5 == 4:
                        index.delete(["doc-5"])
                    if version % 7 == 6:
                        index.compact()
            finally:
                stop.set()

        def read(seed: int) -> int:
            searches = 0
            query = matrices(1, seed=1000 + seed)[0]
            while not (stop.is_set() and searches):
                hits = index.search_embeddings(ragged([query]), k=10)[0]
                assert len({hit.id for hit in hits}) == len(hits) <= 6
                for hit in hits:
                    rows = versions[hit.metadata["version"]][hit.metadata["doc"]]
                    assert hit.id == f"doc-{hit.metadata['doc']}"
                    assert hit.score == pytest.approx(maxsim(query, rows), abs=self.score_error * len(query))
                if self.atomic and hits:
                    assert len(hits) >= 5 and len({hit.metadata["version"] for hit in hits}) == 1
                some = index.search_embeddings(ragged([query]), k=10, filter={"doc": [0, 3]}, exact=True)[0]
                assert {hit.id for hit in some} <= {"doc-0", "doc-3"}
                assert len(index) <= 6
                searches += 1
            return searches

        with ThreadPoolExecutor(4) as threads:
            readers = [threads.submit(read, seed) for seed in range(3)]
            threads.submit(write).result()
            assert all(reader.result() for reader in readers)
        last = documents_of(names(6), versions[-1])
        expected = {id: last[id] for id in index.ids()}
        self.check_hits(index.search_embeddings(ragged(versions[-1]), k=10), versions[-1], expected, 10)

    def test_a_search_that_an_index_closes_under_ends(self, path: Path) -> None:
        index = self.open(path, None)
        index.add_embeddings(names(300), ragged(matrices(300)))
        queries = ragged(matrices(8, seed=1))
        started = threading.Barrier(3)

        def search() -> None:
            index.search_embeddings(queries)
            started.wait()
            while True:
                try:
                    results = index.search_embeddings(queries)
                except InvalidRequestError:
                    break
                assert [len(hits) for hits in results] == [10] * 8
            with pytest.raises(InvalidRequestError, match="closed"):
                index.search_embeddings(queries)

        with ThreadPoolExecutor(2) as threads:
            searches = [threads.submit(search) for _ in range(2)]
            started.wait()
            index.close()
            for each in searches:
                each.result()

    def test_candidates_may_be_as_few_as_k(self, index: LateInteractionIndex) -> None:
        documents = documents_of(names(20), matrices(20))
        index.add_embeddings(list(documents), ragged(list(documents.values())))
        queries = [documents["doc-5"], documents["doc-11"]]
        for candidates in (1, 5, 20, 1000):
            results = index.search_embeddings(ragged(queries), k=1, candidates=candidates)
            assert found(results) == [["doc-5"], ["doc-11"]]
        with pytest.raises(InvalidRequestError, match="candidates=3 must be an int from k=4"):
            index.search_embeddings(ragged(queries), k=4, candidates=3)

    def test_metadata_is_a_copy(self, index: LateInteractionIndex) -> None:
        metadata: dict[str, Any] = {"n": 1, "list": [1, 2], "object": {"inner": ["x"]}}
        index.add_embeddings(["a"], ragged(matrices(1)), metadata=[metadata])
        metadata["n"] = 2
        metadata["list"].append(3)
        stored = {"n": 1, "list": [1, 2], "object": {"inner": ["x"]}}
        hit = index.search_embeddings(ragged(matrices(1)))[0][0]
        assert hit.metadata == stored
        changed: Any = hit.metadata
        changed["n"] = 3
        changed["list"].append(4)
        changed["object"]["inner"].clear()
        again = index.search_embeddings(ragged(matrices(1)), filter={"n": 1})[0][0]
        assert again.metadata == stored

    def test_compaction_changes_no_result(self, index: LateInteractionIndex) -> None:
        documents = documents_of(names(30), matrices(30))
        index.add_embeddings(list(documents), ragged(list(documents.values())), metadata=[{"n": n} for n in range(30)])
        index.delete([id for number, id in enumerate(documents) if number % 3 == 0])
        queries = ragged(matrices(3, seed=2))
        before = index.search_embeddings(queries, k=30)
        index.compact()
        after = index.search_embeddings(queries, k=30)
        assert found(after) == found(before) and len(index) == 20
        assert [hit.metadata for hit in after[0]] == [hit.metadata for hit in before[0]]
        assert index.delete(["doc-1", "doc-0"]) == 1 and "doc-1" not in index
