"""A fake Milvus for sinks and indexes: one collection in memory, behind the real gRPC service, with faults.

It knows the messages of Milvus 2.6 and the expressions that sinks and indexes send. It is no Milvus: that a server
accepts the same is not proven here.
"""

# ruff: noqa: N802 - gRPC calls a method by the name of its request

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import numpy as np
from pymilvus.grpc_gen import common_pb2, milvus_pb2, milvus_pb2_grpc, schema_pb2

OK = common_pb2.Status()
Fault = Callable[[str, Any], Any]
"""Called with the name of the method and the context before each answer; may sleep, abort, or return a Status."""


class FakeMilvus(milvus_pb2_grpc.MilvusServiceServicer):
    """One collection; a row is a dict of its columns."""

    def __init__(self) -> None:
        self.fault: Fault = lambda method, context: None
        self.calls: list[str] = []
        self.created: Any = None
        self.schema: Any = None
        self.indexes: dict[str, Any] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.searches: list[Any] = []
        self.queries: list[Any] = []
        self.upserts: list[Any] = []
        self.acknowledges: Callable[[int], int] = lambda count: count
        self.url = ""

    # ------------------------------------------------------------------------------------------------ requests

    def Connect(self, request: Any, context: Any) -> Any:
        status = self._status("Connect", context)
        info = common_pb2.ServerInfo(build_tags="v2.6.6", deploy_mode="STANDALONE")
        return milvus_pb2.ConnectResponse(status=status, identifier=1, server_info=info)

    def GetVersion(self, request: Any, context: Any) -> Any:
        return milvus_pb2.GetVersionResponse(status=self._status("GetVersion", context), version="v2.6.6")

    def CreateCollection(self, request: Any, context: Any) -> Any:
        status = self._status("CreateCollection", context)
        if _fine(status):
            self.created, self.schema = request, schema_pb2.CollectionSchema.FromString(request.schema)
        return status

    def DescribeCollection(self, request: Any, context: Any) -> Any:
        status = self._status("DescribeCollection", context)
        if _fine(status) and self.schema is None:
            status = common_pb2.Status(code=100, error_code=common_pb2.CollectionNotExists, reason="can't find it")
        if not _fine(status):
            return milvus_pb2.DescribeCollectionResponse(status=status)
        return milvus_pb2.DescribeCollectionResponse(
            status=OK,
            schema=self.schema,
            collectionID=7,
            collection_name="docs",
            properties=self.created.properties,
            consistency_level=self.created.consistency_level,
        )

    def AlterCollection(self, request: Any, context: Any) -> Any:
        status = self._status("AlterCollection", context)
        if _fine(status):
            changed = {each.key for each in request.properties}
            kept = [each for each in self.created.properties if each.key not in changed]
            del self.created.properties[:]
            self.created.properties.extend([*kept, *request.properties])
        return status

    def DescribeIndex(self, request: Any, context: Any) -> Any:
        status = self._status("DescribeIndex", context)
        if _fine(status) and not self.indexes:
            status = common_pb2.Status(code=700, error_code=common_pb2.IndexNotExist, reason="index not found")
        described = [
            milvus_pb2.IndexDescription(
                index_name=index.index_name,
                field_name=index.field_name,
                params=index.extra_params,
                state=common_pb2.Finished,
            )
            for index in self.indexes.values()
        ]
        return milvus_pb2.DescribeIndexResponse(status=status, index_descriptions=described)

    def CreateIndex(self, request: Any, context: Any) -> Any:
        status = self._status("CreateIndex", context)
        if _fine(status):
            self.indexes[request.field_name] = request
        return status

    def LoadCollection(self, request: Any, context: Any) -> Any:
        return self._status("LoadCollection", context)

    def GetLoadingProgress(self, request: Any, context: Any) -> Any:
        status = self._status("GetLoadingProgress", context)
        return milvus_pb2.GetLoadingProgressResponse(status=status, progress=100, refresh_progress=100)

    def GetLoadState(self, request: Any, context: Any) -> Any:
        return milvus_pb2.GetLoadStateResponse(status=OK, state=common_pb2.LoadStateLoaded)

    def Insert(self, request: Any, context: Any) -> Any:
        raise AssertionError("a server is never sent an insert, which may duplicate rows")

    def Upsert(self, request: Any, context: Any) -> Any:
        status = self._status("Upsert", context)
        if not _fine(status):
            return milvus_pb2.MutationResult(status=status)
        self.upserts.append(request)
        columns = {}
        for field in request.fields_data:
            columns["$meta" if field.is_dynamic else field.field_name] = _values(field)
        assert all(len(values) == request.num_rows for values in columns.values())
        for n in range(request.num_rows):
            row = {name: values[n] for name, values in columns.items()}
            row |= row.pop("$meta", {})
            self.rows[row[self._primary]] = row
        ids = schema_pb2.IDs(str_id=schema_pb2.StringArray(data=columns[self._primary]))
        return milvus_pb2.MutationResult(status=OK, IDs=ids, upsert_cnt=self.acknowledges(request.num_rows))

    def Delete(self, request: Any, context: Any) -> Any:
        status = self._status("Delete", context)
        if _fine(status):
            for row in self._matching(request.expr):
                del self.rows[row[self._primary]]
        return milvus_pb2.MutationResult(status=status)

    def Query(self, request: Any, context: Any) -> Any:
        status = self._status("Query", context)
        if not _fine(status):
            return milvus_pb2.QueryResults(status=status)
        if list(request.output_fields) == ["count(*)"]:
            count = schema_pb2.ScalarField(long_data=schema_pb2.LongArray(data=[len(self.rows)]))
            data = schema_pb2.FieldData(type=schema_pb2.Int64, field_name="count(*)", scalars=count)
            return milvus_pb2.QueryResults(status=OK, fields_data=[data], output_fields=["count(*)"])
        self.queries.append(request)
        rows = sorted(self._matching(request.expr), key=lambda row: str(row[self._primary]))
        options = {pair.key: pair.value for pair in request.query_params}
        limit = int(options.get("limit", 16_384))
        assert 0 < limit <= 16_384
        fields = list(dict.fromkeys([*request.output_fields, self._primary]))
        return milvus_pb2.QueryResults(
            status=OK,
            fields_data=self._columns(fields, rows[:limit]),
            output_fields=fields,
            primary_field_name=self._primary,
            session_ts=1,
        )

    def Search(self, request: Any, context: Any) -> Any:
        status = self._status("Search", context)
        self.searches.append(request)
        if not _fine(status):
            return milvus_pb2.SearchResults(status=status)
        return self._found(request, self._matching(request.dsl))

    def HybridSearch(self, request: Any, context: Any) -> Any:
        status = self._status("HybridSearch", context)
        self.searches.append(request)
        if not _fine(status):
            return milvus_pb2.SearchResults(status=status)
        return self._found(request, list(self.rows.values()))

    # ---------------------------------------------------------------------------------------------------------

    @property
    def _primary(self) -> str:
        return next(field.name for field in self.schema.fields if field.is_primary_key)

    def _status(self, method: str, context: Any) -> Any:
        self.calls.append(method)
        status = self.fault(method, context)
        return OK if status is None else status

    def _found(self, request: Any, rows: list[dict[str, Any]]) -> Any:
        rows = sorted(rows, key=lambda row: str(row[self._primary]))[:100]
        fields = list(request.output_fields)
        ids = schema_pb2.IDs(str_id=schema_pb2.StringArray(data=[row[self._primary] for row in rows]))
        results = schema_pb2.SearchResultData(
            num_queries=1,
            top_k=len(rows),
            fields_data=self._columns(fields, rows),
            scores=[1 - n / 1000 for n in range(len(rows))],
            ids=ids,
            topks=[len(rows)],
            output_fields=fields,
            primary_field_name=self._primary,
        )
        return milvus_pb2.SearchResults(status=OK, results=results, collection_name="docs")

    def _matching(self, expression: str) -> list[dict[str, Any]]:
        """The rows that an expression finds: primary keys, numbers of tokens, and the metadata's key n."""
        rest, rows = expression, list(self.rows.values())
        if "tokens > 0" in expression:
            rows = [row for row in rows if row["tokens"] > 0]
        if value := re.search(r'metadata\["n"\] == (\d+)', expression):
            rows = [row for row in rows if row["metadata"].get("n") == int(value[1])]
            rest = rest.replace(f'json_contains(metadata["n"], {value[1]})', "").replace(value[0], "")
        primary = self._primary
        for keys in re.findall(primary + r" in \[(.*?)\]", expression):
            among = set(json.loads(f"[{keys}]"))
            rows = [row for row in rows if row[primary] in among]
        if after := re.search(primary + r" > ['\"](.*?)['\"]", expression):
            rows = [row for row in rows if row[primary] > after[1]]
        known = primary + r" in \[.*?\]|" + primary + r" > (['\"]).*?\1|tokens >=? 0|and|or|[() ]"
        assert re.sub(known, "", rest) == "", expression
        return rows

    def _columns(self, names: Sequence[str], rows: list[dict[str, Any]]) -> list[Any]:
        fields = {field.name: field for field in (*self.schema.fields, *self.schema.struct_array_fields)}
        columns = [_column(fields[name], [row[name] for row in rows]) for name in names if name in fields]
        dynamic = [name for name in names if name not in fields]
        if dynamic:
            everything = "$meta" in dynamic
            values = [
                {key: value for key, value in row.items() if key not in fields and (everything or key in dynamic)}
                for row in rows
            ]
            data = schema_pb2.JSONArray(data=[json.dumps(value).encode() for value in values])
            columns.append(
                schema_pb2.FieldData(
                    type=schema_pb2.JSON,
                    field_name="$meta",
                    is_dynamic=True,
                    scalars=schema_pb2.ScalarField(json_data=data),
                )
            )
        return columns


@contextmanager
def serving(fake: FakeMilvus, *, port: int = 0, credentials: Any = None) -> Iterator[Any]:
    """Serve a fake on loopback; its ``url`` is set."""
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", 64 << 20)])
    milvus_pb2_grpc.add_MilvusServiceServicer_to_server(fake, server)
    address = f"127.0.0.1:{port}"
    bound = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    fake.url = f"{'http' if credentials is None else 'https'}://127.0.0.1:{bound}"
    # The client keeps schemas by address for the whole process, and an earlier fake may have had this port.
    with suppress(ImportError):  # pymilvus 2.6 keeps them elsewhere
        from pymilvus.client.cache import GlobalCache

        GlobalCache._reset_for_testing()
    server.start()
    try:
        yield server
    finally:
        server.stop(None).wait()


def refuse(code: int, reason: str, *methods: str, **more: Any) -> Fault:
    """A fault: these methods answer with a status."""
    status = common_pb2.Status(code=code, reason=reason, **more)
    return lambda method, context: status if method in methods else None


def abort(code: grpc.StatusCode, details: str, *methods: str, **trailers: str) -> Fault:
    """A fault: these methods end with gRPC's own code."""

    def fault(method: str, context: Any) -> None:
        if method in methods:
            context.set_trailing_metadata(tuple((key.replace("_", "-"), value) for key, value in trailers.items()))
            context.abort(code, details)

    return fault


def hang(stop: threading.Event, *methods: str, seconds: float = 60) -> Fault:
    """A fault: these methods answer late."""

    def fault(method: str, context: Any) -> None:
        if method in methods:
            stop.wait(seconds)

    return fault


def _fine(status: Any) -> bool:
    return bool(status.code == 0 and status.error_code == 0)


def _values(field: Any) -> list[Any]:
    """The column of a request, one value for each row."""
    if field.type == schema_pb2.ArrayOfStruct:
        (vectors,) = field.struct_arrays.fields
        array = vectors.vectors.vector_array
        assert array.element_type in (schema_pb2.FloatVector, 0)  # pymilvus 2.6 leaves it out
        return [np.array(row.float_vector.data, np.float32).reshape(-1, array.dim) for row in array.data]
    if field.HasField("scalars"):
        kind = field.scalars.WhichOneof("data")
        values = list(getattr(field.scalars, kind).data)
        return [json.loads(value) for value in values] if kind == "json_data" else values
    if field.type == schema_pb2.SparseFloatVector:
        return [_sparse(content) for content in field.vectors.sparse_float_vector.contents]
    if field.type == schema_pb2.FloatVector:
        return list(np.array(field.vectors.float_vector.data, np.float32).reshape(-1, field.vectors.dim))
    name = {
        schema_pb2.Float16Vector: "float16_vector",
        schema_pb2.BFloat16Vector: "bfloat16_vector",
        schema_pb2.Int8Vector: "int8_vector",
    }[field.type]
    content = getattr(field.vectors, name)
    size = field.vectors.dim * (1 if name == "int8_vector" else 2)
    return [content[start : start + size] for start in range(0, len(content), size)]


def _sparse(content: bytes) -> dict[int, float]:
    pairs = np.frombuffer(content, dtype=[("token", "<u4"), ("weight", "<f4")])
    return {int(pair["token"]): float(pair["weight"]) for pair in pairs}


def _column(field: Any, values: list[Any]) -> Any:
    """The column of an answer."""
    if isinstance(field, schema_pb2.StructArrayFieldSchema):
        return _struct_column(field.name, values)
    if field.data_type in (schema_pb2.VarChar, schema_pb2.JSON, schema_pb2.Int64):
        if field.data_type == schema_pb2.JSON:
            scalars = schema_pb2.ScalarField(
                json_data=schema_pb2.JSONArray(data=[json.dumps(value).encode() for value in values])
            )
        elif field.data_type == schema_pb2.Int64:
            scalars = schema_pb2.ScalarField(long_data=schema_pb2.LongArray(data=values))
        else:
            scalars = schema_pb2.ScalarField(string_data=schema_pb2.StringArray(data=values))
        return schema_pb2.FieldData(type=field.data_type, field_name=field.name, scalars=scalars)
    dim = int(next(pair.value for pair in field.type_params if pair.key == "dim"))
    if field.data_type == schema_pb2.FloatVector:
        data = schema_pb2.FloatArray(data=np.concatenate(values).tolist() if values else [])
        vectors = schema_pb2.VectorField(dim=dim, float_vector=data)
    else:
        name = {
            schema_pb2.Float16Vector: "float16_vector",
            schema_pb2.BFloat16Vector: "bfloat16_vector",
            schema_pb2.Int8Vector: "int8_vector",
        }[field.data_type]
        vectors = schema_pb2.VectorField(dim=dim, **{name: b"".join(values)})
    return schema_pb2.FieldData(type=field.data_type, field_name=field.name, vectors=vectors)


def _struct_column(name: str, values: list[Any]) -> Any:
    """Token rows: arrays of structs of one vector, of 32 columns."""
    data = [
        schema_pb2.VectorField(dim=32, float_vector=schema_pb2.FloatArray(data=np.ravel(value).tolist()))
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
