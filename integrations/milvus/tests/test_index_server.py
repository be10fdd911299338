"""MilvusIndex on a server: what it sends, and how it reads answers, against a fake that checks the requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from integrations.milvus.tests.fake_milvus import OK, FakeMilvus, refuse, serving
from pymilvus.grpc_gen import common_pb2, milvus_pb2, schema_pb2

from millpond import InvalidRequestError
from millpond.ingest import SinkError, point_id
from millpond.testing.matrices import matrices, maxsim, names, ragged
from millpond_milvus import MilvusIndex

pytestmark = pytest.mark.contract

STRING, LONG, JSON = schema_pb2.VarChar, schema_pb2.Int64, schema_pb2.JSON


class Fake(FakeMilvus):
    """It compares token rows by MaxSim."""

    def Search(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        options = {pair.key: pair.value for pair in request.search_params}
        self.searches.append((request.dsl, options, request.nq))
        assert options["anns_field"] == "rows[embedding]"
        (holder,) = common_pb2.PlaceholderGroup.FromString(request.placeholder_group).placeholders
        assert holder.type == common_pb2.EmbListFloatVector and len(holder.values) == request.nq
        fields = list(request.output_fields)
        found: list[tuple[float, dict[str, Any]]] = []
        sizes = []
        for value in holder.values:
            query = np.frombuffer(value, np.float32).reshape(-1, 32)
            rows = [row for row in self._matching(request.dsl) if len(row["rows"])]
            scored = sorted(((maxsim(query, row["rows"]), row) for row in rows), key=lambda pair: -pair[0])
            best = scored[: int(options["topk"])]
            found += best
            sizes.append(len(best))
        results = schema_pb2.SearchResultData(
            num_queries=request.nq,
            top_k=max(sizes),
            fields_data=self._columns(fields, [row for _, row in found]),
            scores=[score for score, _ in found],
            ids=schema_pb2.IDs(str_id=schema_pb2.StringArray(data=[row["pk"] for _, row in found])),
            topks=sizes,
            output_fields=fields,
            primary_field_name="pk",
        )
        return milvus_pb2.SearchResults(status=OK, results=results, collection_name="docs")


@pytest.fixture
def fake() -> Iterator[Fake]:
    servicer = Fake()
    with serving(servicer):
        yield servicer


def open_index(fake: Fake, **options: Any) -> MilvusIndex:
    return MilvusIndex(fake.url, "docs", None, timeout=10, **options)


def test_rows_are_an_array_of_structs_with_an_index_for_maxsim(fake: Fake) -> None:
    with open_index(fake) as index:
        index.add_embeddings(["a"], ragged(matrices(1)), texts=["text"], metadata=[{"n": 1}])
    (rows,) = fake.schema.struct_array_fields
    (vector,) = rows.fields
    parameters = {pair.key: pair.value for pair in vector.type_params}
    assert (rows.name, vector.name, vector.data_type) == ("rows", "embedding", schema_pb2.ArrayOfVector)
    assert (vector.element_type, parameters) == (schema_pb2.FloatVector, {"dim": "32", "max_capacity": "4096"})
    assert {field.name: field.data_type for field in fake.schema.fields} == {
        **dict.fromkeys(("pk", "id", "text", "content_hash"), STRING),
        "metadata": JSON,
        **dict.fromkeys(("tokens", "added"), LONG),
    }
    manifest = json.loads({pair.key: pair.value for pair in fake.created.properties}["millpond"])
    assert (manifest["kind"], manifest["codec"], manifest["prefetch"]) == ("late_interaction", "float32", "tokens")
    parameters = {pair.key: pair.value for pair in fake.indexes["rows[embedding]"].extra_params}
    assert (parameters["index_type"], parameters["metric_type"]) == ("HNSW", "MAX_SIM_IP")
    (row,) = fake.rows.values()
    assert (row["pk"], row["id"], row["text"], row["metadata"]) == (point_id("a"), "a", "text", {"n": 1})
    assert np.allclose(row["rows"], matrices(1)[0])


def test_a_search_is_one_request_for_embedding_lists(fake: Fake) -> None:
    values = matrices(30, tokens=[n % 6 for n in range(30)])
    queries = matrices(3, tokens=[1, 5, 40], seed=1)
    with open_index(fake) as index:
        index.add_embeddings(names(30), ragged(values), metadata=[{"n": n % 2} for n in range(30)])
        results = index.search_embeddings(ragged(queries), k=4)
        for query, hits in zip(queries, results, strict=True):
            best = sorted((maxsim(query, rows) for rows in values if len(rows)), reverse=True)[:4]
            assert [hit.score for hit in hits] == pytest.approx(best, abs=1e-4)
            assert all(hit.exact and hit.metadata == {"n": int(hit.id[4:]) % 2} for hit in hits)
        ((expression, options, count),) = fake.searches
        assert (expression, options["topk"], options["metric_type"], count) == ("", "200", "MAX_SIM_IP", 3)
        fake.searches.clear()
        index.search_embeddings(ragged(queries), k=4, candidates=5, filter={"n": 7}, ids=names(9))
        ((expression, options, _),) = fake.searches
        assert options["topk"] == "5" and 'metadata["n"] == 7' in expression
        assert all(point_id(id) in expression for id in names(9)) and point_id("doc-9") not in expression


def test_exact_searches_and_few_ids_are_scored_here(fake: Fake) -> None:
    values = matrices(30, tokens=[n % 6 for n in range(30)])
    queries = matrices(2, seed=1)
    with open_index(fake) as index:
        index.add_embeddings(names(30), ragged(values), metadata=[{"n": n % 3} for n in range(30)])
        for options in ({"exact": True}, {"ids": names(12)}, {"exact": True, "filter": {"n": 2}}):
            among = {id: rows for id, rows in zip(names(30), values, strict=True) if len(rows)}
            if "ids" in options:
                among = {id: among[id] for id in names(12) if id in among}
            if "filter" in options:
                among = {id: rows for id, rows in among.items() if int(id[4:]) % 3 == 2}
            for query, hits in zip(queries, index.search_embeddings(ragged(queries), k=3, **options), strict=True):
                scores = {id: maxsim(query, rows) for id, rows in among.items()}
                best = sorted(scores, key=lambda id: -scores[id])[:3]
                assert [hit.id for hit in hits] == best
                assert [hit.score for hit in hits] == pytest.approx([scores[id] for id in best], abs=1e-4)
        assert fake.searches == []


def test_more_hits_than_a_server_hands_out_are_refused(fake: Fake) -> None:
    with open_index(fake) as index:
        index.add_embeddings(["a"], ragged(matrices(1)))
        with pytest.raises(InvalidRequestError, match="k=16385 is more than Milvus hands out .16384.; pass exact=True"):
            index.search_embeddings(ragged(matrices(1)), k=16_385)
        assert len(index.search_embeddings(ragged(matrices(1)), k=16_385, exact=True)[0]) == 1
        index.search_embeddings(ragged(matrices(1)), k=1000)
        assert fake.searches[-1][1]["topk"] == "16384"  # and not 20 k


def test_documents_are_listed_replaced_and_deleted(fake: Fake) -> None:
    with open_index(fake) as index:
        report = index.add_embeddings(names(2500), ragged([np.ones((1, 32), np.float32)] * 2500))
        assert (report.added, len(index), index.stats().tokens) == (2500, 2500, 2500)
        report = index.add_embeddings(["doc-7", "new"], ragged(matrices(2)), metadata=[{"n": 5}, {"n": 5}])
        assert (report.added, report.replaced) == (1, 1)
        assert index.ids() == [*names(7), *names(2500)[8:], "doc-7", "new"]  # in pages of 1,000
        assert "new" in index and "newer" not in index and index.check() == []
        assert index.delete(["doc-0", "nobody"]) == 1 and index.delete(filter={"n": 5}) == 2
        assert len(index) == 2498
    with open_index(fake) as index:
        assert len(index.ids()) == 2498


def test_what_a_server_cannot_store_is_refused_before_anything_is_written(fake: Fake) -> None:
    one = np.ones((1, 32), np.float32)
    with open_index(fake) as index:
        for matrix, text, metadata, message in (
            (np.ones((4097, 32), np.float32), "", {}, "has 4097 token rows; Milvus stores at most 4096 of a document"),
            (one, "ü" * 32_768, {}, "has a text of 65536 bytes; Milvus stores at most 65535"),
            (one, "", {"n": "x" * 65_600}, "has metadata of 65609 bytes; Milvus stores at most 65536"),
        ):
            with pytest.raises(InvalidRequestError, match=f"document 'b' {message}"):
                index.add_embeddings(["a", "b"], ragged([one, matrix]), texts=["", text], metadata=[{}, metadata])
        assert len(index) == 0
        index.add_embeddings(["a"], ragged([np.ones((4096, 32), np.float32)]), texts=["x" * 65_535])
        assert len(index) == 1


def test_an_error_of_the_server_is_named(fake: Fake) -> None:
    with open_index(fake) as index:
        index.add_embeddings(["a"], ragged(matrices(1)))
        fake.fault = refuse(65535, "out of disk", "Upsert", "Query")
        for call, request in (
            (lambda: index.add_embeddings(["b"], ragged(matrices(1))), "a look for stored documents"),
            (lambda: index.delete(["a"]), "a delete of 1 rows"),
            (lambda: index.search_embeddings(ragged(matrices(1)), exact=True), "a search"),
        ):
            with pytest.raises(SinkError, match=rf"Milvus at http://127.0.0.1:\d+ refused {request}: .*out of disk"):
                call()
