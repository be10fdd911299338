"""MilvusIndex on a server: what it sends, and how it reads answers, against a fake that checks the requests.

The fake knows the messages of Milvus 2.6 for arrays of structs, the expressions that an index sends, and MaxSim. It is
no Milvus: that a server accepts the same is not proven here.
"""

# ruff: noqa: N802 - gRPC calls a method by the name of its request

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from pymilvus.grpc_gen import common_pb2, milvus_pb2, milvus_pb2_grpc, schema_pb2

from millpond import InvalidRequestError
from millpond.ingest import SinkError, point_id
from millpond.testing.matrices import matrices, maxsim, names, ragged
from millpond_milvus import MilvusIndex

pytestmark = pytest.mark.contract

OK = common_pb2.Status()
STRING, LONG, JSON = schema_pb2.VarChar, schema_pb2.Int64, schema_pb2.JSON


class Fake(milvus_pb2_grpc.MilvusServiceServicer):
    """One collection; a row is a dict, its ``rows`` a list of lists of float."""

    def __init__(self) -> None:
        self.created: Any = None
        self.schema: Any = None
        self.index: Any = None
        self.rows: dict[str, dict[str, Any]] = {}
        self.searches: list[tuple[str, dict[str, str], int]] = []  # expression, parameters, queries
        self.expressions: list[str] = []  # of queries
        self.failure = ""

    # ------------------------------------------------------------------------------------------------ requests

    def Connect(self, request: Any, context: Any) -> Any:
        return milvus_pb2.ConnectResponse(
            status=OK, identifier=1, server_info=common_pb2.ServerInfo(build_tags="v2.6.6", deploy_mode="STANDALONE")
        )

    def GetVersion(self, request: Any, context: Any) -> Any:
        return milvus_pb2.GetVersionResponse(status=OK, version="v2.6.6")

    def HasCollection(self, request: Any, context: Any) -> Any:
        return milvus_pb2.BoolResponse(status=OK, value=self.schema is not None)

    def CreateCollection(self, request: Any, context: Any) -> Any:
        self.created, self.schema = request, schema_pb2.CollectionSchema.FromString(request.schema)
        return OK

    def DescribeCollection(self, request: Any, context: Any) -> Any:
        if self.schema is None:
            status = common_pb2.Status(code=100, error_code=common_pb2.CollectionNotExists, reason="can't find it")
            return milvus_pb2.DescribeCollectionResponse(status=status)
        return milvus_pb2.DescribeCollectionResponse(
            status=OK,
            schema=self.schema,
            collectionID=7,
            collection_name="docs",
            properties=self.created.properties,
            consistency_level=self.created.consistency_level,
        )

    def DescribeIndex(self, request: Any, context: Any) -> Any:
        if self.index is None:
            status = common_pb2.Status(code=700, error_code=common_pb2.IndexNotExist, reason="index not found")
            return milvus_pb2.DescribeIndexResponse(status=status)
        description = milvus_pb2.IndexDescription(
            index_name=self.index.index_name,
            field_name=self.index.field_name,
            params=self.index.extra_params,
            state=common_pb2.Finished,
        )
        return milvus_pb2.DescribeIndexResponse(status=OK, index_descriptions=[description])

    def CreateIndex(self, request: Any, context: Any) -> Any:
        self.index = request
        return OK

    def LoadCollection(self, request: Any, context: Any) -> Any:
        return OK if self.index is not None else common_pb2.Status(code=700, reason="there is no vector index")

    def GetLoadingProgress(self, request: Any, context: Any) -> Any:
        return milvus_pb2.GetLoadingProgressResponse(status=OK, progress=100, refresh_progress=100)

    def GetLoadState(self, request: Any, context: Any) -> Any:
        return milvus_pb2.GetLoadStateResponse(status=OK, state=common_pb2.LoadStateLoaded)

    def Upsert(self, request: Any, context: Any) -> Any:
        if self.failure:
            return milvus_pb2.MutationResult(status=common_pb2.Status(code=65535, reason=self.failure))
        columns = {field.field_name: _values(field) for field in request.fields_data}
        assert sorted(columns) == sorted([*(field.name for field in self.schema.fields), "rows"])
        assert all(len(values) == request.num_rows for values in columns.values())
        for n in range(request.num_rows):
            row = {name: values[n] for name, values in columns.items()}
            assert len(row["rows"]) == row["tokens"] <= 4096
            self.rows[row["pk"]] = row
        ids = schema_pb2.IDs(str_id=schema_pb2.StringArray(data=columns["pk"]))
        return milvus_pb2.MutationResult(status=OK, IDs=ids, upsert_cnt=request.num_rows, succ_index=[])

    def Delete(self, request: Any, context: Any) -> Any:
        for row in self._matching(request.expr):
            del self.rows[row["pk"]]
        return milvus_pb2.MutationResult(status=OK)

    def Query(self, request: Any, context: Any) -> Any:
        if self.failure:
            return milvus_pb2.QueryResults(status=common_pb2.Status(code=65535, reason=self.failure))
        if list(request.output_fields) == ["count(*)"]:
            count = _field("count(*)", [len(self.rows)], self.schema)
            return milvus_pb2.QueryResults(status=OK, fields_data=[count], output_fields=["count(*)"])
        self.expressions.append(request.expr)
        rows = sorted(self._matching(request.expr), key=lambda row: str(row["pk"]))
        options = {pair.key: pair.value for pair in request.query_params}
        rows = rows[: int(options.get("limit", 16_384))]
        fields = list(dict.fromkeys([*request.output_fields, "pk"]))
        data = [_field(name, [row[name] for row in rows], self.schema) for name in fields]
        return milvus_pb2.QueryResults(
            status=OK, fields_data=data, output_fields=fields, primary_field_name="pk", session_ts=1
        )

    def Search(self, request: Any, context: Any) -> Any:
        options = {pair.key: pair.value for pair in request.search_params}
        self.searches.append((request.dsl, options, request.nq))
        assert options["anns_field"] == "rows[embedding]"
        group = common_pb2.PlaceholderGroup.FromString(request.placeholder_group)
        (holder,) = group.placeholders
        assert holder.type == common_pb2.EmbListFloatVector and len(holder.values) == request.nq
        fields = list(request.output_fields)
        found: list[dict[str, Any]] = []
        scores, sizes = [], []
        for value in holder.values:
            query = np.frombuffer(value, np.float32).reshape(-1, 32)
            rows = [row for row in self._matching(request.dsl) if row["rows"]]
            scored = sorted(((maxsim(query, np.array(row["rows"])), row) for row in rows), key=lambda pair: -pair[0])
            best = scored[: int(options["topk"])]
            found += [row for _, row in best]
            scores += [score for score, _ in best]
            sizes.append(len(best))
        results = schema_pb2.SearchResultData(
            num_queries=request.nq,
            top_k=max(sizes),
            fields_data=[_field(name, [row[name] for row in found], self.schema) for name in fields],
            scores=scores,
            ids=schema_pb2.IDs(str_id=schema_pb2.StringArray(data=[row["pk"] for row in found])),
            topks=sizes,
            output_fields=fields,
            primary_field_name="pk",
        )
        return milvus_pb2.SearchResults(status=OK, results=results, collection_name="docs")

    def _matching(self, expression: str) -> list[dict[str, Any]]:
        """The rows that an expression of an index finds: primary keys, numbers of tokens, one key of the metadata."""
        rest, rows = expression, list(self.rows.values())
        for keys in re.findall(r"pk in \[(.*?)\]", expression):
            among = set(json.loads(f"[{keys}]"))
            rows = [row for row in rows if row["pk"] in among]
        if after := re.search(r"pk > ['\"](.*?)['\"]", expression):
            rows = [row for row in rows if row["pk"] > after[1]]
        if "tokens > 0" in expression:
            rows = [row for row in rows if row["tokens"] > 0]
        if value := re.search(r'metadata\["n"\] == (\d+)', expression):
            rows = [row for row in rows if row["metadata"].get("n") == int(value[1])]
            rest = rest.replace(f'json_contains(metadata["n"], {value[1]})', "").replace(value[0], "")
        known = r"pk in \[.*?\]|pk > (['\"]).*?\1|tokens >=? 0|and|or|[() ]"
        assert re.sub(known, "", rest) == "", expression
        return rows


def _values(field: Any) -> Sequence[Any]:
    """The column of a request, one value for each row."""
    if field.field_name == "rows":
        (vectors,) = field.struct_arrays.fields
        array = vectors.vectors.vector_array
        assert vectors.field_name == "embedding" and array.dim == 32
        assert array.element_type in (schema_pb2.FloatVector, 0)  # pymilvus 2.6 leaves it out
        return [np.array(row.float_vector.data, np.float32).reshape(-1, 32).tolist() for row in array.data]
    kind = field.scalars.WhichOneof("data")
    values = list(getattr(field.scalars, kind).data)
    return [json.loads(value) for value in values] if kind == "json_data" else values


def _field(name: str, values: Sequence[Any], schema: Any) -> Any:
    """The column of an answer."""
    if name == "rows":
        data = [
            schema_pb2.VectorField(
                dim=32, float_vector=schema_pb2.FloatArray(data=[number for row in value for number in row])
            )
            for value in values
        ]
        array = schema_pb2.VectorArray(dim=32, data=data, element_type=schema_pb2.FloatVector)
        vectors = schema_pb2.FieldData(
            type=schema_pb2.ArrayOfVector,
            field_name="embedding",
            vectors=schema_pb2.VectorField(dim=32, vector_array=array),
        )
        structs = schema_pb2.StructArrayField(fields=[vectors])
        return schema_pb2.FieldData(type=schema_pb2.ArrayOfStruct, field_name=name, struct_arrays=structs)
    kinds = {field.name: field.data_type for field in schema.fields}
    kind = kinds.get(name, LONG)
    if kind == STRING:
        scalars = schema_pb2.ScalarField(string_data=schema_pb2.StringArray(data=values))
    elif kind == JSON:
        encoded = [json.dumps(value).encode() for value in values]
        scalars = schema_pb2.ScalarField(json_data=schema_pb2.JSONArray(data=encoded))
    else:
        scalars = schema_pb2.ScalarField(long_data=schema_pb2.LongArray(data=values))
    return schema_pb2.FieldData(type=kind, field_name=name, scalars=scalars)


@pytest.fixture
def fake() -> Iterator[Fake]:
    servicer = Fake()
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", 64 << 20)])
    milvus_pb2_grpc.add_MilvusServiceServicer_to_server(servicer, server)
    servicer.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"  # type: ignore[attr-defined]
    server.start()
    yield servicer
    server.stop(None).wait()


def open_index(fake: Fake, **options: Any) -> MilvusIndex:
    return MilvusIndex(fake.url, "docs", None, timeout=10, **options)  # type: ignore[attr-defined]


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
    parameters = {pair.key: pair.value for pair in fake.index.extra_params}
    assert fake.index.field_name == "rows[embedding]"
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
        fake.failure = "out of disk"
        for call, request in (
            (lambda: index.add_embeddings(["b"], ragged(matrices(1))), "a look for stored documents"),
            (lambda: index.delete(["a"]), "a delete of 1 rows"),
            (lambda: index.search_embeddings(ragged(matrices(1)), exact=True), "a search"),
        ):
            with pytest.raises(SinkError, match=rf"Milvus at http://127.0.0.1:\d+ refused {request}: .*out of disk"):
                call()
