"""IndexContract: what every late-interaction index does, in memory, on disk and in a database.

Expected scores are MaxSim in float64 numpy, over the rows that were added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from millpond.errors import FingerprintMismatchError, InvalidRequestError
from millpond.late_interaction import AddReport, Hit, IndexStats, LateInteractionIndex, StoredDocument
from millpond.late_interaction.index.arguments import TokenEngine
from millpond.testing.engine import WordEngine
from millpond.testing.filters import EQUALS, FACETED, RANGES, REFUSED
from millpond.testing.matrices import (
    AWKWARD_IDS,
    QUERY,
    TEXTS,
    assert_same_hits,
    documents_of,
    found,
    matrices,
    maxsim,
    names,
    ragged,
)


class IndexContract:
    """The tests of a late-interaction index; a subclass implements :meth:`open`.

    :meth:`reopen` is to be overridden if closing does not store the index::

        class TestMyIndex(IndexContract):
            def open(self, path, engine, **options):
                return MyIndex(path, engine, **options)

    Attributes:
        score_error: Most that a score may differ from float64 MaxSim, for each token of the query.
        atomic: Whether a reader sees all documents of a call of ``add_embeddings`` or none.
        ties_in_order: Whether of equal scores the document added earlier comes first.
        rounds: Rounds of the tests with threads.
    """

    score_error = 0.01
    atomic = True
    ties_in_order = True
    rounds = 30

    def open(self, path: Path, engine: TokenEngine | None, **options: Any) -> LateInteractionIndex:
        """Create an index at ``path`` (a folder or name that does not exist), or open the one that is there.

        Args:
            path: The folder or name.
            engine: The engine; ``None`` if the test gives embeddings only.
            **options: Options of the index, as its class takes them.

        Returns:
            The index.
        """
        raise NotImplementedError

    def reopen(
        self, index: LateInteractionIndex, path: Path, engine: TokenEngine | None, **options: Any
    ) -> LateInteractionIndex:
        """Close an index that :meth:`open` gave, and open it again.

        Args:
            index: The index.
            path: As :meth:`open`.
            engine: As :meth:`open`.
            **options: As :meth:`open`.

        Returns:
            The index, opened again.
        """
        index.close()
        return self.open(path, engine, **options)

    @pytest.fixture(scope="session")
    @classmethod
    def engine(cls) -> TokenEngine:
        """The engine of the index."""
        return WordEngine(dimensions=32)

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """Where the index is."""
        return tmp_path / "index"

    @pytest.fixture
    def index(self, path: Path) -> Iterator[LateInteractionIndex]:
        """An empty index without an engine."""
        with self.open(path, None) as index:
            yield index

    @pytest.fixture
    def texts(self, path: Path, engine: TokenEngine) -> Iterator[LateInteractionIndex]:
        """An index of the five texts."""
        with self.open(path, engine) as index:
            index.add(names(5), TEXTS, [{"number": number} for number in range(5)])
            yield index

    def check_hits(
        self,
        results: Sequence[Sequence[Hit]],
        queries: Sequence[npt.NDArray[Any]],
        documents: Mapping[str, npt.NDArray[Any]],
        k: int,
    ) -> None:
        """The hits are the best of ``documents`` by float64 MaxSim, up to the error that the codec may make.

        Args:
            results: The hits of each query.
            queries: Token matrices ``[query tokens, d]``.
            documents: Token matrices ``[tokens, d]`` by id.
            k: How many hits were asked for.

        Raises:
            AssertionError: The hits are others.
        """
        assert len(results) == len(queries)
        rows = {id: matrix for id, matrix in documents.items() if len(matrix)}
        for hits, query in zip(results, queries, strict=True):
            error = self.score_error * max(len(query), 1)
            exact = {id: maxsim(query, matrix) for id, matrix in rows.items()}
            assert len(hits) == (min(k, len(rows)) if len(query) else 0)
            assert len({hit.id for hit in hits}) == len(hits)
            scores = [hit.score for hit in hits]
            assert scores == sorted(scores, reverse=True)
            best = sorted(exact.values(), reverse=True)
            for rank, hit in enumerate(hits):
                assert type(hit.id) is str and type(hit.score) is float and type(hit.exact) is bool
                assert hit.score == pytest.approx(exact[hit.id], abs=error)
                assert exact[hit.id] >= best[rank] - 2 * error

    @pytest.mark.parametrize("width", [1, 17, 32, 128])
    def test_the_best_documents_are_found(self, index: LateInteractionIndex, width: int) -> None:
        documents = documents_of(names(40), matrices(40, width=width, tokens=[1 + i % 9 for i in range(40)]))
        queries = [*matrices(3, width=width, tokens=[1, 5, 70], seed=1), documents["doc-7"], documents["doc-30"]]
        report = index.add_embeddings(list(documents), ragged(list(documents.values()), width))
        assert report == AddReport(added=40)
        for k in (1, 5, 40):
            self.check_hits(index.search_embeddings(ragged(queries, width), k=k), queries, documents, k)
        exact = index.search_embeddings(ragged(queries, width), k=10, exact=True)
        self.check_hits(exact, queries, documents, 10)
        if width > 1:  # of width 1 every similarity is 1 or -1
            assert exact[3][0].id == "doc-7" and exact[4][0].id == "doc-30"

    def test_a_hit_has_the_text_and_metadata_of_its_document(self, index: LateInteractionIndex) -> None:
        values = matrices(3)
        index.add_embeddings(names(3), ragged(values), texts=["one", "", "drei ⅓"], metadata=[{"n": 1}, None, {}])
        hits = {hit.id: hit for hit in index.search_embeddings(ragged(values[:1]))[0]}
        assert {id: (hit.text, hit.metadata) for id, hit in hits.items()} == {
            "doc-0": ("one", {"n": 1}),
            "doc-1": ("", {}),
            "doc-2": ("drei ⅓", {}),
        }

    def test_an_equal_id_replaces(self, index: LateInteractionIndex) -> None:
        old, new = documents_of(names(6), matrices(6)), documents_of(names(9)[3:], matrices(6, seed=1))
        index.add_embeddings(list(old), ragged(list(old.values())), metadata=[{"v": 1, "old": True}] * 6)
        report = index.add_embeddings(list(new), ragged(list(new.values())), metadata=[{"v": 2}] * 6)
        assert report == AddReport(added=3, replaced=3)
        assert len(index) == 9 and index.stats().documents == 9
        both = {**old, **new}
        queries = list(both.values())
        results = index.search_embeddings(ragged(queries), k=20)
        self.check_hits(results, queries, both, 20)
        assert {hit.id: hit.metadata["v"] for hit in results[0]} == {id: 2 if id in new else 1 for id in both}
        assert all("old" not in hit.metadata for hit in results[0] if hit.id in new)
        assert found(index.search_embeddings(ragged(queries[:1]), filter={"old": True})) == [
            [hit.id for hit in results[0] if hit.id not in new]
        ]

    def test_deleted_documents_are_not_found(self, index: LateInteractionIndex) -> None:
        documents = documents_of(names(10), matrices(10))
        index.add_embeddings(list(documents), ragged(list(documents.values())))
        assert index.delete(["doc-3", "doc-8", "unknown", "doc-3"]) == 2
        assert index.delete(["doc-3"]) == 0
        assert index.delete([]) == 0
        gone = {"doc-3": documents.pop("doc-3"), "doc-8": documents.pop("doc-8")}
        assert len(index) == 8 and index.stats().documents == 8
        queries = [*gone.values(), documents["doc-0"]]
        self.check_hits(index.search_embeddings(ragged(queries), k=10), queries, documents, 10)
        assert index.add_embeddings(list(gone), ragged(list(gone.values()))) == AddReport(added=2)
        self.check_hits(index.search_embeddings(ragged(queries), k=10), queries, {**documents, **gone}, 10)

    def test_ids_are_the_callers(self, path: Path) -> None:
        index = self.open(path, None)
        values = matrices(len(AWKWARD_IDS), width=64)
        documents = documents_of(AWKWARD_IDS, values)
        assert index.add_embeddings(AWKWARD_IDS, ragged(values, 64)) == AddReport(added=len(AWKWARD_IDS))
        with self.reopen(index, path, None) as index:
            assert sorted(index.ids()) == sorted(AWKWARD_IDS)
            results = index.search_embeddings(ragged(values, 64), k=1)
            assert found(results) == [[id] for id in AWKWARD_IDS]
            for id in AWKWARD_IDS:
                assert id in index
                assert found(index.search_embeddings(ragged([documents[id]], 64), ids=[id])) == [[id]]
                assert index.delete([id]) == 1
            assert len(index) == 0

    def test_a_filter_means_the_same_everywhere(self, index: LateInteractionIndex) -> None:
        documents = documents_of([str(number) for number in range(len(FACETED))], matrices(len(FACETED)))
        index.add_embeddings(list(documents), ragged(list(documents.values())), metadata=FACETED)
        queries = matrices(2, seed=3)
        for condition, expected in (*EQUALS, *RANGES):
            matching = {number: documents[number] for number in expected}
            for exact in (False, True):
                results = index.search_embeddings(ragged(queries), k=4, filter=condition, exact=exact)
                self.check_hits(results, queries, matching, 4)
        results = index.search_embeddings(ragged(queries), filter={"day": {"gt": "2024-01-31"}}, ids=["0", "3"])
        assert found(results) == [["3"], ["3"]]
        for refused, message in REFUSED:
            with pytest.raises(InvalidRequestError, match=message):
                index.delete(filter={"n": refused})
        for condition, count in (({"day": {"gt": "2024-01-31"}}, 3), ({"n": {"lt": 2}}, 1), ({"n": {"lt": 2}}, 0)):
            assert index.delete(filter=condition) == count
        assert sorted(index.ids()) == ["2", "5"]

    def test_a_search_among_ids(self, index: LateInteractionIndex) -> None:
        documents = documents_of(names(20), matrices(20))
        index.add_embeddings(
            list(documents), ragged(list(documents.values())), metadata=[{"n": n % 2} for n in range(20)]
        )
        some = {id: documents[id] for id in ("doc-3", "doc-17", "doc-4")}
        queries = matrices(2, seed=4)
        for exact in (False, True):
            results = index.search_embeddings(ragged(queries), ids=[*some, "unknown", "doc-3"], exact=exact)
            self.check_hits(results, queries, some, 10)
        results = index.search_embeddings(ragged(queries), ids=list(some), k=2)
        self.check_hits(results, queries, some, 2)
        results = index.search_embeddings(ragged(queries), ids=list(some), filter={"n": 0})
        assert found(results) == [["doc-4"], ["doc-4"]]
        assert index.search_embeddings(ragged(queries), ids=["unknown"]) == [[], []]
        assert index.search_embeddings(ragged(queries), ids=[]) == [[], []]
        index.delete(["doc-4"])
        assert "doc-4" not in found(index.search_embeddings(ragged(queries), ids=list(some)))[0]

    def test_of_equal_scores_the_earlier_document_comes_first(self, index: LateInteractionIndex) -> None:
        if not self.ties_in_order:
            pytest.skip("this index breaks ties in another way")
        same, other = matrices(2)
        for id in ("z", "m", "a"):
            index.add_embeddings([id], ragged([same]))
        index.add_embeddings(["other", "c", "b"], ragged([other, same, same]))
        for k in (2, 5):
            for exact in (False, True):
                hits = index.search_embeddings(ragged([same]), k=k, exact=exact)[0]
                assert [hit.id for hit in hits] == ["z", "m", "a", "c", "b"][:k]
                assert len({hit.score for hit in hits}) == 1
        index.delete(["m"])
        assert found(index.search_embeddings(ragged([same]), k=4)) == [["z", "a", "c", "b"]]
        index.compact()
        assert found(index.search_embeddings(ragged([same]), k=4)) == [["z", "a", "c", "b"]]

    def test_an_empty_index_finds_nothing(self, index: LateInteractionIndex) -> None:
        for width in (32, 128):
            assert index.search_embeddings(ragged(matrices(2, width=width), width)) == [[], []]
        assert index.search_embeddings(ragged(matrices(1)), filter={"a": 1}, ids=["x"], exact=True) == [[]]
        assert len(index) == 0 and index.ids() == [] and "a" not in index
        assert index.delete(["a"]) == 0 and index.delete(filter={"a": 1}) == 0
        stats = index.stats()
        assert isinstance(stats, IndexStats)
        assert (stats.documents, stats.tokens, stats.dimensions) == (0, 0, 0)
        assert index.check() == []
        index.compact()
        assert index.add_embeddings([], ragged([])) == AddReport()
        assert index.add_embeddings(["a"], ragged(matrices(1, width=48), 48)) == AddReport(added=1)

    def test_a_document_without_rows_is_stored_and_never_found(self, index: LateInteractionIndex) -> None:
        values = matrices(4, tokens=[3, 0, 5, 0])
        documents = documents_of(names(4), values)
        assert index.add_embeddings(names(4), ragged(values), metadata=[{"n": 1}] * 4) == AddReport(added=4)
        assert len(index) == 4 and "doc-1" in index and index.stats().tokens == 8
        for options in ({}, {"exact": True}, {"filter": {"n": 1}}, {"ids": names(4)}):
            results = index.search_embeddings(ragged(matrices(1)), **options)
            self.check_hits(results, matrices(1), documents, 10)
        assert index.search_embeddings(ragged(matrices(1)), ids=["doc-1", "doc-3"]) == [[]]
        assert index.delete(["doc-1"]) == 1 and len(index) == 3

    def test_texts_are_encoded_as_documents_and_queries(self, texts: LateInteractionIndex, engine: TokenEngine) -> None:
        rows = engine.token_embed(TEXTS, role="document", normalize=True).embeddings
        query = engine.token_embed([QUERY], role="query", normalize=True).embeddings
        results = texts.search([QUERY], k=3)
        self.check_hits(results, list(query), documents_of(names(5), list(rows)), 3)
        assert found(results) == found(texts.search_embeddings(query, k=3))
        assert results[0][0].text == TEXTS[int(results[0][0].id[-1])]
        assert results[0][0].metadata == {"number": int(results[0][0].id[-1])}
        as_document = engine.token_embed([QUERY], role="document", normalize=True).embeddings
        assert not np.array_equal(as_document.flat, query.flat)  # so a search that mistakes the role has other scores

    def test_blank_texts_are_left_out_and_delete(self, texts: LateInteractionIndex) -> None:
        report = texts.add(["doc-0", "new", "blank", "zero width"], ["", "A new text.", " \n\t", "\u200b"])
        assert report == AddReport(added=1, blank=3)
        assert sorted(texts.ids()) == ["doc-1", "doc-2", "doc-3", "doc-4", "new"]
        assert texts.add([], []) == AddReport()

    def test_over_long_texts_are_counted(self, texts: LateInteractionIndex, engine: TokenEngine) -> None:
        report = texts.add(["long", "short", "doc-1"], ["word " * 10 * engine.spec.max_length, "word", "word"])
        assert report == AddReport(added=2, replaced=1, truncated=1)
        assert texts.search(["word"], ids=["long"])[0][0].text == "word " * 10 * engine.spec.max_length

    def test_an_index_without_an_engine_encodes_no_texts(self, index: LateInteractionIndex) -> None:
        for call, message in (
            (lambda: index.add(["a"], ["text"]), r"no engine .* use add_embeddings"),
            (lambda: index.search(["text"]), r"no engine .* use search_embeddings"),
            (lambda: index.explain("text", "a"), "no engine to encode texts; pass an engine"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                call()

    def test_a_document_is_returned_by_its_id(self, texts: LateInteractionIndex) -> None:
        document = texts.get("doc-3")
        assert document == StoredDocument(id="doc-3", text=TEXTS[3], metadata={"number": 3})
        assert texts.get("unknown") is None
        changed: Any = document.metadata
        changed["number"] = 4
        again = texts.get("doc-3")
        assert again is not None and again.metadata == {"number": 3}

    def test_everything_is_there_after_reopening(self, path: Path, engine: TokenEngine) -> None:
        index = self.open(path, engine)
        metadata = [{"n": n, "tags": ["a", "é"], "x": {"y": [1.5, None, True]}} for n in range(5)]
        index.add(names(5), TEXTS, metadata)
        index.delete(["doc-2"])
        index.add(["doc-4"], ["Changed."], [{"n": 44}])
        before, stats, listed = index.search([QUERY, *TEXTS]), index.stats(), index.ids()
        index = self.reopen(index, path, engine)
        assert_same_hits(index.search([QUERY, *TEXTS]), before)
        again = index.stats()
        assert ((again.documents, again.tokens), index.ids()) == ((stats.documents, stats.tokens), listed)
        assert len(index) == 4 and "doc-2" not in index and index.check() == []
        assert found(index.search([QUERY], filter={"n": 44})) == [["doc-4"]]
        # and it can be changed and opened once more
        index.add(["doc-2", "doc-9"], ["Back again.", "And one more."])
        assert index.delete(["doc-0"]) == 1
        index = self.reopen(index, path, engine)
        assert sorted(index.ids()) == ["doc-1", "doc-2", "doc-3", "doc-4", "doc-9"]
        assert index.search(["Back again."], k=1)[0][0].text == "Back again."
        index.close()

    def test_another_model_is_refused(self, path: Path, texts: LateInteractionIndex, engine: TokenEngine) -> None:
        other = WordEngine("other words", dimensions=engine.spec.hidden_size)
        with pytest.raises(FingerprintMismatchError, match="was built by .* and this engine is other words"):
            self.reopen(texts, path, other)
        with self.open(path, engine) as index:
            assert len(index) == 5

    def test_stats_count_documents_and_tokens(self, index: LateInteractionIndex) -> None:
        index.add_embeddings(names(3), ragged(matrices(3, tokens=[1, 2, 3])))
        stats = index.stats()
        assert (stats.documents, stats.tokens, stats.dimensions) == (3, 6, 32)
        assert stats.bytes > 0 and stats.codec
        index.add_embeddings(["doc-0"], ragged(matrices(1, tokens=[10])))
        index.delete(["doc-1"])
        assert (index.stats().documents, index.stats().tokens) == (2, 13)
        assert index.check() == []

    def test_a_closed_index_says_so(self, path: Path, engine: TokenEngine) -> None:
        index = self.open(path, engine)
        index.add(["a"], ["text"])
        index.close()
        index.close()
        rows = ragged(matrices(1, width=engine.spec.hidden_size), engine.spec.hidden_size)
        for call in (
            lambda: index.add(["b"], ["text"]),
            lambda: index.add_embeddings(["b"], rows),
            lambda: index.delete(["a"]),
            lambda: index.delete(filter={"a": 1}),
            lambda: index.search([]),
            lambda: index.search_embeddings(rows),
            lambda: index.explain("text", "a"),
            lambda: index.ids(),
            lambda: index.get("a"),
            lambda: index.stats(),
            lambda: index.check(),
            lambda: len(index),
            lambda: "a" in index,
            lambda: index.__enter__(),
        ):
            with pytest.raises(InvalidRequestError, match="index .*is closed; open it again"):
                call()

    def test_several_writers_lose_nothing(self, index: LateInteractionIndex) -> None:
        def write(writer: int) -> None:
            for number in range(6):
                ids = [f"{writer}-{number}-{part}" for part in range(3)]
                index.add_embeddings([*ids, "shared"], ragged(matrices(4, seed=100 * writer + number)))
                assert index.delete(ids[:1]) == 1

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(write, range(4)))
        documents = {
            f"{writer}-{number}-{part}": matrices(4, seed=100 * writer + number)[part]
            for writer in range(4)
            for number in range(6)
            for part in (1, 2)
        }
        assert set(index.ids()) == {*documents, "shared"} and len(index) == 49
        queries = matrices(2, seed=5000)
        results = index.search_embeddings(ragged(queries), ids=list(documents))
        self.check_hits(results, queries, documents, 10)
        assert index.check() == []
