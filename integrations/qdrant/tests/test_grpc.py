"""Over gRPC: what is sent, and the class of every failure. The server is grpc's own, with answers of this file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from qdrant_client import grpc as proto
from qdrant_client.conversions.conversion import RestToGrpc

from millpond import Engine
from millpond.errors import SinkError, SinkRejectedError, SinkTooLargeError, SinkUnavailableError
from millpond.ingest import CollectionManifest, Record, WriteBatch, point_id
from millpond_qdrant import QdrantSink

pytestmark = pytest.mark.contract


class Fake:
    """The part of Qdrant's gRPC API that a write needs."""

    def __init__(self, manifest: CollectionManifest, exists: bool = True) -> None:
        self.manifest = manifest
        self.exists = exists
        self.created: list[Any] = []
        self.upserts: list[Any] = []
        self.indexes: list[Any] = []
        self.fault: Callable[[Any], None] = lambda context: None
        self.status = proto.UpdateStatus.Completed
        options = [("grpc.max_receive_message_length", 32 << 20)]
        self.server = grpc.server(ThreadPoolExecutor(4), options=options)
        fake = self

        class Collections(proto.CollectionsServicer):
            def CollectionExists(self, request: Any, context: Any) -> Any:  # noqa: N802
                return proto.CollectionExistsResponse(result=proto.CollectionExists(exists=fake.exists))

            def Get(self, request: Any, context: Any) -> Any:  # noqa: N802
                return proto.GetCollectionInfoResponse(result=fake.info())

            def Create(self, request: Any, context: Any) -> Any:  # noqa: N802
                fake.created.append(request)
                fake.exists = True
                return proto.CollectionOperationResponse(result=True)

        class Points(proto.PointsServicer):
            def Upsert(self, request: Any, context: Any) -> Any:  # noqa: N802
                fake.upserts.append(request)
                fake.fault(context)
                result = proto.UpdateResult(operation_id=0, status=fake.status)
                return proto.PointsOperationResponse(result=result)

            def CreateFieldIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
                fake.indexes.append(request)
                result = proto.UpdateResult(operation_id=0, status=proto.UpdateStatus.Completed)
                return proto.PointsOperationResponse(result=result)

        proto.add_CollectionsServicer_to_server(Collections(), self.server)
        proto.add_PointsServicer_to_server(Points(), self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def info(self) -> Any:
        vectors = (
            self.created[0].vectors_config
            if self.created
            else proto.VectorsConfig(
                params_map=proto.VectorParamsMap(
                    map={
                        f"d{width}": proto.VectorParams(size=width, distance=proto.Distance.Cosine)
                        for width in self.manifest.dimensions
                    }
                )
            )
        )
        return proto.CollectionInfo(
            status=proto.CollectionStatus.Green,
            optimizer_status=proto.OptimizerStatus(ok=True),
            segments_count=1,
            config=proto.CollectionConfig(
                params=proto.CollectionParams(vectors_config=vectors, shard_number=1, on_disk_payload=True),
                hnsw_config=proto.HnswConfigDiff(m=16, ef_construct=100, full_scan_threshold=10000),
                optimizer_config=proto.OptimizersConfigDiff(
                    deleted_threshold=0.2, vacuum_min_vector_number=1, default_segment_number=0, flush_interval_sec=5
                ),
                wal_config=proto.WalConfigDiff(wal_capacity_mb=32, wal_segments_ahead=0),
                metadata=RestToGrpc.convert_payload({"millpond": self.manifest.to_dict()}),
            ),
        )


@pytest.fixture
def server(engine: Engine) -> Iterator[Fake]:
    fake = Fake(CollectionManifest.of(engine.spec, dimensions=(8, 64), fields="plain"))
    yield fake
    fake.server.stop(None)


def batch(rows: int = 3, text: str = "text") -> WriteBatch:
    records = [Record(f"r{row}", text, {"n": row}) for row in range(rows)]
    vectors = {width: np.eye(rows, width, dtype=np.float32) for width in (8, 64)}
    return WriteBatch(records=records, ids=[point_id(record.id) for record in records], vectors=vectors)


def opened(server: Fake, **options: Any) -> QdrantSink:
    url = "http://127.0.0.1:1"  # where no HTTP is: everything goes over gRPC
    return QdrantSink(url, "docs", dimensions=[8, 64], prefer_grpc=True, grpc_port=server.port, **options)


def failure(engine: Engine, server: Fake, *, timeout: float = 5, rows: WriteBatch | None = None) -> SinkError:
    with opened(server, timeout=timeout) as sink:
        sink.prepare(engine.spec)
        started = time.monotonic()
        with pytest.raises(SinkError) as caught:
            sink.write(rows or batch())
        assert time.monotonic() - started < 10
    assert "an upsert of " in str(caught.value) and caught.value.__cause__ is not None
    return caught.value


def test_a_collection_is_created_and_written_over_grpc(engine: Engine, server: Fake) -> None:
    server.exists = False
    options = {"datatype": "float16", "index_quantization": "binary", "indexes": {"n": "integer"}}
    with opened(server, **options) as sink:
        sink.prepare(engine.spec)
        sink.write(batch())
    (created,), (upsert,), (index,) = server.created, server.upserts, server.indexes
    params = created.vectors_config.params_map.map
    assert {name: (of.size, of.distance, of.datatype) for name, of in params.items()} == {
        f"d{width}": (width, proto.Distance.Cosine, proto.Datatype.Float16) for width in (8, 64)
    }
    assert all(of.quantization_config.HasField("binary") for of in params.values())
    assert "millpond" in created.metadata and index.field_name == "metadata.n"
    assert upsert.wait and [point.id.uuid for point in upsert.points] == [point_id(f"r{row}") for row in range(3)]
    assert {point.payload["text"].string_value for point in upsert.points} == {"text"}


CODE = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (CODE.UNAVAILABLE, "shutting down", SinkUnavailableError),
        (CODE.DEADLINE_EXCEEDED, "too slow", SinkUnavailableError),
        (CODE.RESOURCE_EXHAUSTED, "rate limit", SinkUnavailableError),
        (CODE.INTERNAL, "Service internal error: No space left on device", SinkUnavailableError),
        (CODE.RESOURCE_EXHAUSTED, "Sent message larger than max (34000000 vs. 33554432)", SinkTooLargeError),
        (
            CODE.OUT_OF_RANGE,
            "Error, decoded message length too large: found 34000000 bytes, the limit is: 33554432 bytes",
            SinkTooLargeError,
        ),
        (CODE.INVALID_ARGUMENT, "Wrong input: Vector dimension error", SinkRejectedError),
        (CODE.UNAUTHENTICATED, "Invalid API key", SinkError),
        (CODE.UNKNOWN, "a bug", SinkError),
    ],
    ids=lambda value: value.name if isinstance(value, CODE) else getattr(value, "__name__", ""),
)
def test_a_code_is_retried_split_isolated_or_final(
    engine: Engine, server: Fake, code: Any, details: str, kind: type[SinkError]
) -> None:
    server.fault = lambda context: context.abort(code, details)
    error = failure(engine, server)
    assert type(error) is kind and code.name in str(error) and details[:200] in str(error)
    assert len(server.upserts) == 1  # neither the channel nor the client tries again


def test_what_the_server_asks_to_wait_is_handed_on(engine: Engine, server: Fake) -> None:
    def fault(context: Any) -> None:
        context.set_trailing_metadata((("retry-after", "7"),))
        context.abort(CODE.RESOURCE_EXHAUSTED, "rate limit")

    server.fault = fault
    error = failure(engine, server)
    assert type(error) is SinkUnavailableError and error.retry_after == 7


def test_a_server_that_hangs_has_a_deadline(engine: Engine, server: Fake) -> None:
    server.fault = lambda context: time.sleep(3)
    error = failure(engine, server, timeout=1)
    assert type(error) is SinkUnavailableError and "within 1 s" in str(error)


def test_a_message_larger_than_the_servers_limit_is_too_large(engine: Engine, server: Fake) -> None:
    rows = batch(rows=1, text="x" * (33 << 20))
    error = failure(engine, server, timeout=60, rows=rows)
    assert type(error) is SinkTooLargeError and "larger than max" in str(error)
    assert server.upserts == []
