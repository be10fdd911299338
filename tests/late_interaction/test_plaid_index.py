"""PlaidIndex: what it finds, in every codec, before and after centroids are trained."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.late_interaction.plaid_data import WIDTH, filled, matrices, maxsim, names, ragged

from millpond.errors import InvalidRequestError, SourceNotFoundError
from millpond.late_interaction import PlaidIndex

CODECS = ["int8", "4", "2"]
# Largest difference of a score from that of the rows, a query token.
TOLERANCE = {"int8": 0.01, "4": 0.05, "2": 0.2}


@pytest.fixture
def trains_early(train_from: Callable[[int], None]) -> None:
    train_from(2_000)


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_an_index_is_empty_until_documents_are_added(tmp_path: Path) -> None:
    index = PlaidIndex(tmp_path / "new" / "index", None)
    assert len(index) == 0
    assert index.search_embeddings(ragged(matrices(2))) == [[], []]
    assert index.stats().documents == 0
    assert "d0" not in index
    assert index.delete(["d0"]) == 0
    index.compact()
    assert index.check() == []
    assert len(PlaidIndex(tmp_path / "new" / "index", None)) == 0


def test_scores_before_training_are_those_of_int8_rows(tmp_path: Path, codec: str) -> None:
    index = filled(tmp_path, 60, codec=codec)
    documents, queries = matrices(60), matrices(3, seed=7)
    for query, hits in zip(queries, index.search_embeddings(ragged(queries), k=60), strict=True):
        expected = {f"d{number}": maxsim(query, document) for number, document in enumerate(documents)}
        assert [hit.id for hit in hits] == [hit.id for hit in sorted(hits, key=lambda hit: -hit.score)]
        assert {hit.id for hit in hits} == set(expected)
        assert all(hit.exact for hit in hits)
        assert [hit.score for hit in hits] == pytest.approx([expected[hit.id] for hit in hits], abs=0.01 * len(query))


@pytest.mark.usefixtures("trains_early")
def test_scores_after_training_are_those_of_the_payload(tmp_path: Path, codec: str) -> None:
    index = filled(tmp_path, 300, codec=codec)
    assert index.stats().details["centroids"] > 0
    documents, queries = matrices(300), matrices(3, seed=7)
    for exact in (False, True):
        for query, hits in zip(queries, index.search_embeddings(ragged(queries), k=300, exact=exact), strict=True):
            assert len(hits) == 300
            assert {hit.exact for hit in hits} == {codec == "int8"}
            expected = [maxsim(query, documents[int(hit.id[1:])]) for hit in hits]
            assert [hit.score for hit in hits] == pytest.approx(expected, abs=TOLERANCE[codec] * len(query))


@pytest.mark.usefixtures("trains_early")
def test_the_scan_of_codes_keeps_the_best_documents(tmp_path: Path, codec: str) -> None:
    index = filled(tmp_path, 400, codec=codec)
    # One token alone may have several documents that are about as near.
    chosen = [number for number, matrix in enumerate(matrices(400)) if len(matrix) >= 5][:20]
    queries = [matrices(400)[number] + 0.05 for number in chosen]
    kept = index.search_embeddings(ragged(queries), k=5, candidates=40)
    everything = index.search_embeddings(ragged(queries), k=5, exact=True)
    shared = sum(len({hit.id for hit in a} & {hit.id for hit in b}) for a, b in zip(kept, everything, strict=True))
    assert [hits[0].id for hits in kept] == [f"d{number}" for number in chosen]
    assert shared >= 0.9 * 5 * len(queries)


@pytest.mark.usefixtures("trains_early")
def test_no_more_than_the_candidates_are_scored(tmp_path: Path, codec: str) -> None:
    index = filled(tmp_path, 200, codec=codec)
    query = ragged(matrices(1, seed=3))
    assert len(index.search_embeddings(query, k=7, candidates=7)[0]) == 7
    assert len(index.search_embeddings(query, k=150)[0]) == 150


@pytest.mark.usefixtures("trains_early")
def test_a_reopened_index_gives_the_same_answers(tmp_path: Path, codec: str) -> None:
    index = filled(tmp_path, 250, codec=codec)
    index.add_embeddings(["late"], ragged(matrices(1, seed=5)))
    index.delete(["d3"])
    queries = ragged(matrices(4, seed=8))
    reopened = PlaidIndex(tmp_path, None)
    assert reopened.search_embeddings(queries, k=9) == index.search_embeddings(queries, k=9)
    assert reopened.stats() == index.stats()
    assert reopened.codec == codec
    assert "late" in reopened and "d3" not in reopened


@pytest.mark.parametrize("trained", [False, True], ids=["int8-rows", "codes"])
def test_a_replaced_document_is_found_by_its_new_rows_only(
    tmp_path: Path, codec: str, trained: bool, train_from: Callable[[int], None]
) -> None:
    train_from(2_000 if trained else 1 << 40)
    index = filled(tmp_path, 250, codec=codec)
    old, new = matrices(250)[4], matrices(1, seed=77)[0]
    report = index.add_embeddings(["d4", "fresh"], ragged([new, new]), texts=["again", "fresh"])
    assert (report.added, report.replaced) == (1, 1)
    assert len(index) == 251
    best = index.search_embeddings(ragged([new]), k=2)[0]
    assert {hit.id for hit in best} == {"d4", "fresh"}
    assert best[0].score == best[1].score
    assert {hit.text for hit in best} == {"again", "fresh"}
    found = {hit.id: hit.score for hit in index.search_embeddings(ragged([old]), k=251, exact=True)[0]}
    assert found["d4"] == pytest.approx(maxsim(old, new), abs=TOLERANCE[codec] * len(old))


@pytest.mark.usefixtures("trains_early")
def test_deleted_documents_are_not_found(tmp_path: Path, codec: str) -> None:
    index = filled(tmp_path, 250, codec=codec)
    segment = next(tmp_path.glob("segment-*")).stat()
    assert index.delete(["d1", "d2", "unknown", "d1"]) == 2
    assert index.delete(["d1"]) == 0
    assert len(index) == 248 and "d1" not in index
    assert next(tmp_path.glob("segment-*")).stat().st_mtime_ns == segment.st_mtime_ns
    hits = index.search_embeddings(ragged([matrices(250)[1]]), k=250)[0]
    assert len(hits) == 248 and not {"d1", "d2"} & {hit.id for hit in hits}
    assert index.delete(filter={"third": [0, 1]}) == len({n for n in range(250) if n % 3 != 2} - {1})
    assert {hit.metadata["third"] for hit in index.search_embeddings(ragged([matrices(250)[1]]), k=250)[0]} == {2}
    assert index.delete(filter={"third": 2}) == len({n for n in range(250) if n % 3 == 2} - {2})
    assert len(index) == 0 and index.stats().details["segments"] == 0
    assert index.add_embeddings(["d1"], ragged(matrices(1))).added == 1


@pytest.mark.usefixtures("trains_early")
def test_filters_and_ids_restrict_a_search(tmp_path: Path, codec: str) -> None:
    index = filled(tmp_path, 250, codec=codec)
    index.add_embeddings(["x"], ragged(matrices(1, seed=5)), metadata=[{"third": 1, "tags": "t1"}])
    query = ragged(matrices(1, seed=6))
    for exact in (False, True):
        hits = index.search_embeddings(query, k=300, filter={"third": 1, "tags": "t1"}, exact=exact)[0]
        assert {hit.id for hit in hits} == {f"d{n}" for n in range(250) if n % 3 == 1 and n % 5 == 1} | {"x"}
        chosen = ["x", "d7", "d9", "nobody", "d7"]
        assert {h.id for h in index.search_embeddings(query, k=5, ids=chosen, exact=exact)[0]} == {"x", "d7", "d9"}
        assert {h.id for h in index.search_embeddings(query, ids=chosen, filter={"third": 1})[0]} == {"x", "d7"}
    assert index.search_embeddings(query, ids=[]) == [[]]
    assert index.search_embeddings(query, filter={"nothing": 1}) == [[]]
    few = index.search_embeddings(query, k=3, candidates=3, filter={"third": 2})[0]
    assert len(few) == 3 and {hit.metadata["third"] for hit in few} == {2}


@pytest.mark.usefixtures("trains_early")
def test_documents_without_rows_are_kept_and_never_found(tmp_path: Path, codec: str) -> None:
    index = filled(tmp_path, 250, codec=codec)
    empty = np.empty((0, WIDTH), dtype=np.float32)
    index.add_embeddings(["none", "one"], ragged([empty, matrices(1, seed=4)[0][:1]]), texts=["no rows", "a row"])
    assert len(index) == 252 and "none" in index
    for exact in (False, True):
        hits = index.search_embeddings(ragged([matrices(1)[0], empty]), k=300, exact=exact)
        assert "none" not in {hit.id for hit in hits[0]} and len(hits[0]) == 251
        assert hits[1] == []
    index.compact()
    assert "none" in index and len(index) == 252


@pytest.mark.usefixtures("trains_early")
def test_centroids_are_trained_beside_documents_without_rows_that_came_first(tmp_path: Path, codec: str) -> None:
    index = PlaidIndex(tmp_path, None, codec)  # type: ignore[arg-type]
    index.add_embeddings(["none"], ragged([np.empty((0, WIDTH), dtype=np.float32)]))
    documents = matrices(300)
    assert index.add_embeddings(names(300), ragged(documents)).added == 300
    assert index.stats().details["centroids"] > 0
    assert index.ids() == ["none", *names(300)]
    assert index.search_embeddings(ragged([documents[7]]), k=1)[0][0].id == "d7"


def test_of_equal_scores_the_document_added_earlier_comes_first(tmp_path: Path, codec: str) -> None:
    index = filled(tmp_path, 250, codec=codec)
    same = matrices(1, seed=42)[0]
    for batch in range(3):
        index.add_embeddings(names(4, f"same{batch}-"), ragged([same] * 4))
    expected = [f"same{batch}-{number}" for batch in range(3) for number in range(4)]
    assert [hit.id for hit in index.search_embeddings(ragged([same]), k=12)[0]] == expected
    index.compact()
    assert [hit.id for hit in index.search_embeddings(ragged([same]), k=12)[0]] == expected
    assert [hit.id for hit in index.search_embeddings(ragged([same]), k=5, candidates=5)[0]] == expected[:5]


def test_texts_metadata_and_ids_come_back_as_they_were(tmp_path: Path) -> None:
    index = PlaidIndex(tmp_path, None)
    ids = ["a", "ä/\u2603 \U0001f600", "\x00", "x" * 5000, "a\n"]
    texts = ["", "naïve \U0001f600", "line\nline\x00", "y" * 70_000, "z"]
    metadata = [None, {"ключ": ["é", 1, None, {"deep": True}]}, {"f": 0.1}, {}, {"n": -(1 << 62)}]
    index.add_embeddings(ids, ragged(matrices(5)), texts=texts, metadata=metadata)
    for opened in (index, PlaidIndex(tmp_path, None)):
        hits = {hit.id: hit for hit in opened.search_embeddings(ragged(matrices(1)), k=5)[0]}
        assert [hits[id].text for id in ids] == texts
        assert [hits[id].metadata for id in ids] == [value or {} for value in metadata]


@pytest.mark.parametrize("width", [1, 3, 17, 128])
@pytest.mark.usefixtures("trains_early")
def test_rows_may_have_any_width(tmp_path: Path, codec: str, width: int) -> None:
    documents = matrices(220, width=width)
    index = PlaidIndex(tmp_path, None, codec)  # type: ignore[arg-type]
    index.add_embeddings(names(220), ragged(documents, width))
    query = matrices(1, seed=1, width=width)[0]
    hits = index.search_embeddings(ragged([query], width), k=3, exact=True)[0]
    expected = [maxsim(query, documents[int(hit.id[1:])]) for hit in hits]
    assert [hit.score for hit in hits] == pytest.approx(expected, abs=TOLERANCE[codec] * len(query))


def test_rows_of_another_width_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    index = filled(tmp_path, 5)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(InvalidRequestError, match=rf"16 wide.*{WIDTH}"):
        index.add_embeddings(["other"], ragged(matrices(1, width=16), 16))
    with pytest.raises(InvalidRequestError, match=rf"16 wide.*{WIDTH}"):
        index.search_embeddings(ragged(matrices(1, width=16), 16))
    assert sorted(os.listdir(tmp_path)) == before and len(index) == 5


@pytest.mark.parametrize(
    ("name", "value"), [("codec", "2"), ("codec", "float32"), ("dimensions", 8), ("pool_factor", 2)]
)
def test_another_option_than_the_index_has_is_refused(tmp_path: Path, name: str, value: object) -> None:
    filled(tmp_path, 5, codec="int8")
    with pytest.raises(InvalidRequestError, match=name):
        PlaidIndex(tmp_path, None, **{name: value})  # type: ignore[arg-type]
    assert PlaidIndex(tmp_path, None).codec == "int8"


def test_a_path_that_is_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(InvalidRequestError, match="is a file"):
        PlaidIndex(file, None)
    with pytest.raises(InvalidRequestError, match="lies in one"):
        PlaidIndex(file / "index", None)
    assert file.read_text() == "mine"
    with pytest.raises(InvalidRequestError, match=r"not an index.*'file'"):
        PlaidIndex(tmp_path, None)
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(SourceNotFoundError, match="build it first"):
        PlaidIndex.open(tmp_path / "missing")
    assert os.listdir(tmp_path) == ["file"]


def test_ids_of_equal_hashes_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constant = SimpleNamespace(digest=lambda: bytes(8))
    monkeypatch.setattr("millpond.late_interaction.plaid.storage.columns.blake2b", lambda *_, **__: constant)
    index = filled(tmp_path, 9)
    assert index.delete(["d2", "other"]) == 1
    index.add_embeddings(["d3", "new"], ragged(matrices(2)), texts=["changed", ""])
    assert ["d2" in index, "d3" in index, "new" in index, "other" in index] == [False, True, True, False]
    assert [index.get(f"d{number}").text for number in (1, 3, 8)] == ["text 1", "changed", "text 8"]  # type: ignore[union-attr]


@pytest.mark.usefixtures("trains_early")
def test_groups_of_centroids_are_stored_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "millpond.late_interaction.kernels.centroids"
    monkeypatch.setattr(f"{module}._SMALLEST_GROUPED", 64)
    index = filled(tmp_path, 250)
    monkeypatch.setattr(f"{module}._group", None)  # would have to be called
    for opened in (index, PlaidIndex(tmp_path, None)):
        opened.add_embeddings(["more"], ragged(matrices(1, seed=5)))
        assert opened.search_embeddings(ragged(matrices(1, seed=5)), k=1)[0][0].id == "more"
