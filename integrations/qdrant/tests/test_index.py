"""QdrantIndex: the contract of every index, in memory and in a folder, and what only an index in Qdrant has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

from millpond import Engine, FingerprintMismatchError, InvalidRequestError
from millpond.ingest import Record, SinkError, content_hash, ingest, point_id
from millpond.late_interaction import LateInteractionIndex, Ragged
from millpond.testing import IndexContract
from millpond.testing.matrices import matrices, names, ragged
from millpond_qdrant import QdrantIndex, QdrantSink


class TestFolder(IndexContract):
    """In a folder, with candidates by MUVERA."""

    score_error = 1e-3  # a test adds float16
    atomic = False
    rounds = 8

    def open(self, path: Path, engine: Engine | None, **options: Any) -> LateInteractionIndex:
        return QdrantIndex(path, "docs", engine, **options)


class TestMemory(IndexContract):
    """In a client that outlives the index, with candidates by mean vectors."""

    score_error = 1e-3  # a test adds float16
    atomic = False
    rounds = 8

    @pytest.fixture(autouse=True)
    def clients(self) -> Iterator[None]:
        self.opened: dict[Path, QdrantClient] = {}
        yield
        for client in self.opened.values():
            client.close()

    def open(self, path: Path, engine: Engine | None, **options: Any) -> LateInteractionIndex:
        client = self.opened.get(path) or QdrantClient(":memory:", force_disable_check_same_thread=True)
        self.opened[path] = client
        return QdrantIndex(client, "docs", engine, prefetch="dense", **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def client() -> Iterator[QdrantClient]:
    client = QdrantClient(":memory:", force_disable_check_same_thread=True)
    yield client
    client.close()


def test_a_document_is_a_point_of_the_plain_payload(client: QdrantClient) -> None:
    index = QdrantIndex(client, "docs", None)
    index.add_embeddings(["a/1", "ü"], ragged(matrices(2)), texts=["one", ""], metadata=[{"n": 1}, None])
    points = {str(point.id): point for point in client.scroll("docs", with_vectors=True)[0]}
    assert sorted(points) == sorted([point_id("a/1"), point_id("ü")])
    payload = points[point_id("a/1")].payload or {}
    added = payload.pop("added")
    assert payload == {
        "id": "a/1",
        "text": "one",
        "metadata": {"n": 1},
        "content_hash": content_hash("one"),
        "tokens": 6,
    }
    assert (points[point_id("ü")].payload or {})["added"] == added + 1
    vectors: Any = points[point_id("a/1")].vector
    assert np.shape(vectors["tokens"]) == (6, 32) and np.shape(vectors["muvera"]) == (2560,)


def test_token_rows_have_no_graph_and_candidates_are_int8(client: QdrantClient) -> None:
    for prefetch, width in (("muvera", 2560), ("dense", 32), (None, None)):
        QdrantIndex(client, f"c-{prefetch}", None, prefetch=prefetch).add_embeddings(["a"], ragged(matrices(1)))
        vectors: Any = client.get_collection(f"c-{prefetch}").config.params.vectors
        tokens = vectors.pop("tokens")
        assert (tokens.size, tokens.distance, tokens.on_disk, tokens.hnsw_config.m) == (32, "Dot", True, 0)
        assert (tokens.multivector_config.comparator, tokens.datatype) == ("max_sim", "float16")
        assert {name: (vector.size, vector.distance) for name, vector in vectors.items()} == (
            {} if prefetch is None else {prefetch: (width, "Dot")}
        )
        for vector in vectors.values():
            assert vector.quantization_config.scalar.type == "int8" and vector.quantization_config.scalar.always_ram


def test_the_manifest_says_how_rows_were_made(path: Path) -> None:
    with QdrantIndex(path, "docs", None, dimensions=8, pool_factor=2) as index:
        index.add_embeddings(["a"], ragged(matrices(1, tokens=40)))
        manifest: Any = index._connection.read_manifest()
    matrix = manifest.pop("projection")
    assert len(matrix) == 4 * -(-32 * 8 * 4 // 3)  # base64 of float32
    assert manifest == {
        "schema": 1,
        "kind": "late_interaction",
        "model": None,
        "native": 32,
        "width": 8,
        "pool_factor": 2,
        "codec": "float16",
        "prefetch": "muvera",
        "muvera": {"width": 8, "repetitions": 20, "bits": 3, "projected": 16, "dimensions": None, "seed": 0},
    }


@pytest.mark.parametrize("options", [{"prefetch": "dense"}, {"prefetch": None}, {"codec": "float32"}], ids=str)
def test_other_options_than_the_collections_are_refused(client: QdrantClient, options: dict[str, Any]) -> None:
    QdrantIndex(client, "docs", None).add_embeddings(["a"], ragged(matrices(1)))
    (name,) = options
    with pytest.raises(InvalidRequestError, match=f"'docs' was made with {name}=.*; pass {name}="):
        QdrantIndex(client, "docs", None, **options)


def test_a_collection_of_something_else_is_refused(client: QdrantClient) -> None:
    client.create_collection("foreign", {"x": models.VectorParams(size=2, distance=models.Distance.DOT)})
    client.create_collection("sink", {}, metadata={"millpond": {"schema": 1, "dimensions": [4], "payload": "plain"}})
    client.create_collection("later", {}, metadata={"millpond": {"schema": 2, "kind": "late_interaction"}})
    client.create_collection("broken", {}, metadata={"millpond": {"schema": 1, "kind": "late_interaction"}})
    for name, message in (
        ("foreign", "'foreign' was not made by millpond"),
        ("sink", "'sink' holds one vector for each text, as a sink writes them"),
        ("later", "'later' carries a manifest that this version of millpond cannot read .another schema"),
        ("broken", "'broken' carries a manifest that this version"),
    ):
        with pytest.raises(FingerprintMismatchError, match=message):
            QdrantIndex(client, name, None)


def test_a_sink_refuses_the_collection_of_an_index(client: QdrantClient, engine: Engine) -> None:
    QdrantIndex(client, "docs", None).add_embeddings(["a"], ragged(matrices(1)))
    with pytest.raises(FingerprintMismatchError, match="'docs' carries a manifest"):
        ingest([Record("a", "text")], engine=engine, sink=QdrantSink(client, "docs"), show_progress=False)


def test_an_index_in_use_reads_what_another_object_created(client: QdrantClient) -> None:
    first, second = (QdrantIndex(client, "docs", None, dimensions=8) for _ in range(2))
    values = matrices(12, tokens=10)
    first.add_embeddings(names(12), ragged(values))
    assert len(second) == 12 and second.stats() == first.stats()
    assert second.search_embeddings(ragged(values)) == first.search_embeddings(ragged(values))
    second.add_embeddings(["more"], ragged(values[:1]))
    # The same tokens twice: which is first depends on the last bit of a product.
    assert {hit.id for hit in first.search_embeddings(ragged(values[:1]), k=2)[0]} == {"doc-0", "more"}


@pytest.mark.parametrize("options", [{"dimensions": 8}, {"pool_factor": 2}], ids=str)
def test_documents_are_not_added_to_a_collection_that_another_object_made_differently_meanwhile(
    client: QdrantClient, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    mine = {"dimensions": 8} if "dimensions" in options else {}
    first, second = QdrantIndex(client, "docs", None, **options), QdrantIndex(client, "docs", None, **mine)
    prepare = second._encoding.documents

    def slow(embeddings: Ragged) -> Ragged:
        prepared = prepare(embeddings)
        first.add_embeddings(["a"], ragged(matrices(1, tokens=40, seed=5)))
        return prepared

    monkeypatch.setattr(second._encoding, "documents", slow)
    values = ragged(matrices(1, tokens=40))
    with pytest.raises(SinkError, match="'docs' was created by another process at the same time; add the documents"):
        second.add_embeddings(["b"], values)
    assert first.ids() == ["a"]
    monkeypatch.undo()
    second.add_embeddings(["b"], values)
    assert first.ids() == ["a", "b"]
    assert second.search_embeddings(values)[0] == first.search_embeddings(values)[0]


def test_a_document_above_the_limit_of_a_multivector_is_refused_before_anything_is_written(
    client: QdrantClient,
) -> None:
    index = QdrantIndex(client, "docs", None, prefetch="dense")
    rows = np.zeros((8193, 128), np.float32)
    rows[:, 0] = 1
    message = (
        r"'doc-1' has 8193 token rows of 128 columns, 1048704 floats; Qdrant stores at most 1048576 of a document, "
        r"8192 rows; split the text"
    )
    with pytest.raises(InvalidRequestError, match=message):
        index.add_embeddings(names(3), ragged([rows[:2], rows, rows[:1]], 128))
    assert len(index) == 0
    assert index.add_embeddings(names(3), ragged([rows[:2], rows[:8192], rows[:1]], 128)).added == 3
    assert index.stats().tokens == 8195


def test_a_document_that_no_request_can_carry_is_refused(client: QdrantClient) -> None:
    index = QdrantIndex(client, "docs", None, prefetch=None)
    with pytest.raises(
        InvalidRequestError, match=r"document 'b' takes 325\d+ bytes in a request, and Qdrant at most 32505"
    ):
        index.add_embeddings(["a", "b"], ragged(matrices(2)), texts=["", "x" * 32_504_000])
    assert len(index) == 0


def test_more_ids_than_a_request_takes_are_asked_in_parts(
    client: QdrantClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpond.ingest.sinks.late_interaction._MAX_IDS", 7)
    index = QdrantIndex(client, "docs", None)
    values = matrices(30)
    index.add_embeddings(names(30), ragged(values))
    among = names(30)[5:25]
    expected = [hit for hit in index.search_embeddings(ragged(values[:3]), k=30, exact=True)[2] if hit.id in among]
    assert index.search_embeddings(ragged(values[:3]), k=4, ids=among)[2] == expected[:4]


def test_many_equal_scores_at_the_end_are_cut_in_order(client: QdrantClient) -> None:
    index = QdrantIndex(client, "docs", None, prefetch=None)
    (same,) = matrices(1)
    for start in range(40, 0, -10):  # later documents first
        index.add_embeddings(names(start)[start - 10 :], ragged([same] * 10))
    hits = index.search_embeddings(ragged([same]), k=12)[0]
    assert [hit.id for hit in hits] == [*names(40)[30:], *names(30)[20:22]]


def test_check_names_what_is_wrong(client: QdrantClient) -> None:
    index = QdrantIndex(client, "docs", None)
    index.add_embeddings(names(3), ragged(matrices(3, tokens=[4, 0, 5])))
    assert index.check() == []
    client.delete_vectors("docs", ["muvera"], [point_id("doc-2")])
    client.upsert("docs", [models.PointStruct(id=7, vector={}, payload={"id": "doc-0"})])
    lacking, foreign = index.check()
    assert "1 points lack the vector 'muvera'" in lacking
    assert "the point 7 was not written by an index (its payload's id is 'doc-0')" in foreign


def test_check_compares_the_vectors_with_the_manifest(client: QdrantClient) -> None:
    QdrantIndex(client, "docs", None).add_embeddings(["a"], ragged(matrices(1)))
    manifest = (client.get_collection("docs").config.metadata or {})["millpond"]
    vectors = {"tokens": models.VectorParams(size=32, distance=models.Distance.COSINE)}
    client.create_collection("copy", vectors, metadata={"millpond": manifest})
    problems = QdrantIndex(client, "copy", None).check()
    assert [problem.split("its vector ")[1].split(" is not")[0] for problem in problems] == ["'tokens'", "'muvera'"]
