"""Milvus servers that start, that are old, and that name the key of a hit ``id``, against a fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from integrations.milvus.tests.fake_milvus import FakeMilvus, serving
from pymilvus.grpc_gen import common_pb2, milvus_pb2

from millpond import Engine, InvalidRequestError
from millpond.errors import SinkUnavailableError
from millpond.ingest import Record, WriteBatch, point_id
from millpond_milvus import MilvusIndex, MilvusSink

pytestmark = pytest.mark.contract


class OldMilvus(FakeMilvus):
    """A Milvus 2.3.5, which does not say what the key of a hit is called."""

    def GetVersion(self, request: Any, context: Any) -> Any:  # noqa: N802
        return milvus_pb2.GetVersionResponse(version="v2.3.5")

    def _found(self, request: Any, rows: list[dict[str, Any]]) -> Any:
        answer = super()._found(request, rows)
        answer.results.primary_field_name = ""
        return answer


class StartingMilvus(FakeMilvus):
    """Answers reads with a status until it is asked to load the collection, or has answered a few times."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__()
        self.left = 0
        self.status = common_pb2.Status(code=code, reason=reason, error_code=common_pb2.UnexpectedError)
        self.fault = self.start

    def start(self, method: str, context: Any) -> Any:
        if method == "LoadCollection":
            self.left = min(self.left, 1)
        if method in ("Search", "HybridSearch", "Query") and self.left:
            self.left -= 1
            return self.status
        return None


def filled(url: str, engine: Engine, **options: Any) -> MilvusSink:
    sink = MilvusSink(url, "docs", dimensions=[16], **options)
    sink.prepare(engine.spec)
    records = [Record(f"r{n}", "text", {"n": n}) for n in range(3)]
    vectors = {16: np.ones((3, 16), np.float32) / 4}
    sink.write(WriteBatch(records=records, ids=[point_id(record.id) for record in records], vectors=vectors))
    return sink


READS: dict[str, Callable[[MilvusSink, Engine], int]] = {
    "search": lambda sink, engine: len(sink.search(engine, "text")),
    "fetch": lambda sink, engine: len(sink.fetch([point_id(f"r{n}") for n in range(3)])),
    "scan": lambda sink, engine: len(list(sink.scan())),
    "count": lambda sink, engine: sink.count(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (101, "failed to search: collection not loaded[collection=7]"),
        (106, "collection on recovering"),
        (65535, "fail to query on QueryNode 3: channel not available[channel=by-dev-dml_0]"),
        (902, "node offline[node=3]"),
    ],
)
def test_what_reads_waits_until_the_collection_is_loaded(engine: Engine, read: str, code: int, reason: str) -> None:
    fake = StartingMilvus(code, reason)
    with serving(fake), filled(fake.url, engine, timeout=30) as sink:
        fake.left = 3
        assert READS[read](sink, engine) == 3
        assert not fake.left


def test_a_collection_that_is_never_loaded_is_unavailable(engine: Engine) -> None:
    fake = StartingMilvus(101, "collection not loaded[collection=7]")
    with serving(fake), filled(fake.url, engine, timeout=2) as sink:
        fake.fault = lambda method, context: fake.status if method == "Search" else None
        with pytest.raises(SinkUnavailableError, match="is not ready for a search: collection not loaded"):
            sink.search(engine, "text")


def test_a_filter_that_cannot_be_read_is_no_reason_to_wait(engine: Engine) -> None:
    fake = StartingMilvus(1100, 'failed to create query plan: cannot parse expression: state == "not ready"')
    with serving(fake), filled(fake.url, engine, timeout=30) as sink:
        fake.left = 3
        with pytest.raises(Exception, match="refused a search: failed to create query plan"):
            sink.search(engine, "text")
        assert fake.left == 2


def test_an_index_waits_until_its_collection_is_loaded(engine: Engine) -> None:
    fake = StartingMilvus(101, "collection not loaded[collection=7]")
    with serving(fake), MilvusIndex(fake.url, "docs", engine, timeout=30) as index:
        index.add(["a", "b"], ["one", "two words"])
        for read in (lambda: len(index.search(["one"])[0]), lambda: len(index), lambda: len(index.ids())):
            fake.left = 3
            assert read() == 2
            assert not fake.left


@pytest.fixture
def old() -> Iterator[OldMilvus]:
    servicer = OldMilvus()
    with serving(servicer):
        yield servicer


@pytest.mark.parametrize("fields", ["plain", "langchain", "llama_index"])
def test_a_hit_whose_key_is_named_id_is_read(old: OldMilvus, engine: Engine, fields: str) -> None:
    with filled(old.url, engine, fields=fields) as sink:
        assert {hit.id for hit in sink.search(engine, "text")} == {"r0", "r1", "r2"}


def test_several_widths_need_a_newer_server_and_nothing_is_created(old: OldMilvus, engine: Engine) -> None:
    with MilvusSink(old.url, "docs", dimensions=[16, 384]) as sink:
        with pytest.raises(InvalidRequestError, match=r"version 2.3.5, and dimensions=\[16, 384\] needs 2.4 .*\[384\]"):
            sink.prepare(engine.spec)
        assert old.created is None and old.calls.count("CreateCollection") == 0


def test_an_index_needs_a_newer_server(old: OldMilvus) -> None:
    with pytest.raises(InvalidRequestError, match="MilvusIndex needs 2.6.4"):
        MilvusIndex(old.url, "docs", None)
