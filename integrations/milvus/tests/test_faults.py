"""What a sink says of a Milvus that does not answer as it should, in which class of error, and in what time."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pymilvus
import pytest
from integrations.milvus.tests.fake_milvus import FakeMilvus, Fault, abort, hang, refuse, serving
from pymilvus.grpc_gen import common_pb2

from millpond import Engine, InvalidRequestError
from millpond.errors import SinkError, SinkRejectedError, SinkTooLargeError, SinkUnavailableError
from millpond.ingest import Record, WriteBatch, point_id
from millpond_milvus import MilvusSink

pytestmark = pytest.mark.contract

# Generous: the machine may be busy.
PATIENCE = 30
NEW = (
    pymilvus.__version__ >= "3"
)  # pymilvus 2 repeats an unavailable request for all of the time, and knows no "retriable"
EXHAUSTED, DEAD = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE


def batch(count: int = 3) -> WriteBatch:
    records = [Record(f"r{n}", "text", {"n": n}) for n in range(count)]
    vectors = {16: np.ones((count, 16), np.float32) / 4}
    return WriteBatch(records=records, ids=[point_id(record.id) for record in records], vectors=vectors)


def test_a_port_where_nothing_listens_is_named() -> None:
    with pytest.raises(
        SinkUnavailableError, match="nothing listens at http://127.0.0.1:1, so Milvus did not answer the connection"
    ):
        MilvusSink("http://127.0.0.1:1", "docs", timeout=1)


def test_another_grpc_server_is_no_milvus() -> None:
    server = grpc.server(__import__("concurrent.futures").futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with pytest.raises(SinkError, match="what answers there is no Milvus") as caught:
        MilvusSink(f"http://127.0.0.1:{port}", "docs", timeout=5)
    assert type(caught.value) is SinkError
    server.stop(None).wait()


@pytest.fixture
def fake() -> Iterator[FakeMilvus]:
    servicer = FakeMilvus()
    with serving(servicer):
        yield servicer


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (
            abort(grpc.StatusCode.UNAUTHENTICATED, "auth check failure", "Connect"),
            SinkError,
            "refused the connection: the token is missing, wrong, .*auth check failure.*set MILVUS_TOKEN",
        ),
        (
            refuse(800, "database not found[database=nowhere]", "DescribeCollection"),
            SinkError,
            "database not found.database=nowhere.; the path of the URL names the database",
        ),
        (refuse(1401, "privilege not permitted", "CreateCollection"), SinkError, "set MILVUS_TOKEN"),
        (
            abort(DEAD, "node is starting", "GetVersion"),
            SinkUnavailableError,
            "the version.*node is starting" if NEW else "did not answer the version",
        ),
        (refuse(1, "service not ready", "DescribeCollection"), SinkUnavailableError, "too busy.*service not ready"),
    ],
    ids=["token", "database", "privilege", "unavailable", "not-ready"],
)
def test_a_server_that_refuses_to_be_opened_says_why(
    fake: FakeMilvus, engine: Engine, fault: Fault, kind: type[SinkError], message: str
) -> None:
    fake.fault = fault
    start = time.monotonic()
    with (
        pytest.raises(SinkError, match=message) as caught,
        MilvusSink(fake.url, "docs", dimensions=[16], timeout=2) as sink,
    ):
        sink.prepare(engine.spec)
    assert type(caught.value) is kind and time.monotonic() - start < PATIENCE


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (
            refuse(8, "rate limit exceeded[rate=1]", "Upsert"),
            SinkUnavailableError,
            "is too busy for an upsert of 3 rows",
        ),
        (
            refuse(65535, "quota", "Upsert", error_code=common_pb2.RateLimit),
            SinkUnavailableError,
            "is too busy for an upsert of 3 rows: quota",
        ),
        (
            refuse(99, "moved", "Upsert", retriable=True),
            SinkUnavailableError if NEW else SinkError,
            "for an upsert of 3 rows: moved" if NEW else "refused an upsert of 3 rows: moved",
        ),
        (abort(EXHAUSTED, "too many requests", "Upsert"), SinkUnavailableError, "is too busy .*too many requests"),
        (
            abort(EXHAUSTED, "grpc: received message larger than max (70 vs. 64)", "Upsert"),
            SinkTooLargeError,
            "refused an upsert of 3 rows: it is too large",
        ),
        (refuse(1102, "parameter too large", "Upsert"), SinkTooLargeError, "parameter too large"),
        (refuse(1100, "the length of text exceeds max length", "Upsert"), SinkRejectedError, "max length"),
        (refuse(9, "disk quota exceeded", "Upsert"), SinkError, "refused an upsert of 3 rows: disk quota"),
        (abort(grpc.StatusCode.DEADLINE_EXCEEDED, "late", "Upsert"), SinkUnavailableError, "did not answer an upsert"),
        (abort(grpc.StatusCode.UNIMPLEMENTED, "what?", "Upsert"), SinkError, "did not answer an upsert of 3 rows"),
    ],
    ids="rate-8 rate-legacy retriable exhausted larger 1102 1100 quota deadline unimplemented".split(),
)
def test_a_write_that_is_refused_has_the_class_that_a_run_acts_on(
    fake: FakeMilvus, engine: Engine, fault: Fault, kind: type[SinkError], message: str
) -> None:
    with MilvusSink(fake.url, "docs", dimensions=[16], timeout=2) as sink:
        sink.prepare(engine.spec)
        fake.fault = fault
        start = time.monotonic()
        with pytest.raises(SinkError, match=message) as caught:
            sink.write(batch())
        assert type(caught.value) is kind and time.monotonic() - start < PATIENCE
        fake.fault = lambda method, context: None
        sink.write(batch())  # and the sink goes on
        assert sink.count() == 3


def test_the_rate_limit_is_not_retried_inside_the_client(fake: FakeMilvus, engine: Engine) -> None:
    with MilvusSink(fake.url, "docs", dimensions=[16], timeout=20) as sink:
        sink.prepare(engine.spec)
        fake.fault = refuse(8, "rate limit exceeded", "Upsert")
        fake.calls.clear()
        with pytest.raises(SinkUnavailableError):
            sink.write(batch())
        assert fake.calls.count("Upsert") == 1


@pytest.mark.parametrize(("key", "seconds"), [("retry_after", 7.0), ("grpc_retry_pushback_ms", 0.007)])
def test_the_wait_that_a_proxy_asks_for_is_handed_on(
    fake: FakeMilvus, engine: Engine, key: str, seconds: float
) -> None:
    with MilvusSink(fake.url, "docs", dimensions=[16], timeout=2) as sink:
        sink.prepare(engine.spec)
        fake.fault = abort(EXHAUSTED, "slow down", "Upsert", **{key: "7"})
        with pytest.raises(SinkUnavailableError) as caught:
            sink.write(batch())
        assert caught.value.retry_after == seconds


@pytest.mark.parametrize("lie", [0, 2, 4])
def test_fewer_rows_acknowledged_than_sent_is_an_error(fake: FakeMilvus, engine: Engine, lie: int) -> None:
    with MilvusSink(fake.url, "docs", dimensions=[16], timeout=20) as sink:
        sink.prepare(engine.spec)
        fake.acknowledges = lambda count: lie
        with pytest.raises(SinkError, match=f"acknowledged {lie} of 3 rows of an upsert"):
            sink.write(batch())


@pytest.mark.parametrize(
    ("slow", "use"),
    [
        (["Connect"], lambda sink, engine: None),
        (["DescribeCollection"], lambda sink, engine: sink.prepare(engine.spec)),
        (["CreateCollection"], lambda sink, engine: sink.prepare(engine.spec)),
        (["DescribeIndex", "CreateIndex"], lambda sink, engine: sink.prepare(engine.spec)),
        (["LoadCollection", "GetLoadingProgress"], lambda sink, engine: sink.prepare(engine.spec)),
    ],
    ids=["connect", "describe", "create", "index", "load"],
)
def test_a_call_that_hangs_ends_with_the_timeout(
    fake: FakeMilvus, engine: Engine, slow: list[str], use: Callable[[MilvusSink, Engine], object]
) -> None:
    stop = threading.Event()
    fake.fault = hang(stop, *slow)
    start = time.monotonic()
    try:
        with (
            pytest.raises(SinkUnavailableError, match="within 1 s"),
            MilvusSink(fake.url, "docs", dimensions=[16], timeout=1) as sink,
        ):
            use(sink, engine)
        assert time.monotonic() - start < PATIENCE
    finally:
        stop.set()


def test_an_unavailable_server_is_asked_twice_and_then_named(fake: FakeMilvus, engine: Engine) -> None:
    with MilvusSink(fake.url, "docs", dimensions=[16], timeout=20 if NEW else 2) as sink:
        sink.prepare(engine.spec)
        fake.fault = abort(DEAD, "no healthy upstream", "Upsert")
        fake.calls.clear()
        wanted = ": no healthy upstream" if NEW else ""
        with pytest.raises(SinkUnavailableError, match=f"did not answer an upsert of 3 rows{wanted}"):
            sink.write(batch())
        attempts = fake.calls.count("Upsert")
        assert attempts == 2 if NEW else attempts > 2  # and not for 20 seconds


def test_a_server_that_dies_in_a_run_is_found_again(engine: Engine) -> None:
    fake = FakeMilvus()
    with serving(fake) as server:
        url = fake.url
        sink = MilvusSink(url, "docs", dimensions=[16], timeout=5)
        sink.prepare(engine.spec)
        sink.write(batch())
        server.stop(None).wait()
        start = time.monotonic()
        with pytest.raises(
            SinkUnavailableError, match="nothing listens at .*, so Milvus did not answer a look at the coll"
        ):
            sink.write(batch(5))
        assert time.monotonic() - start < PATIENCE
    with serving(fake, port=int(url.rpartition(":")[2])):
        give_up = time.monotonic() + PATIENCE
        while True:
            try:
                sink.write(batch(5))
                break
            except SinkUnavailableError:  # gRPC waits a second between its attempts to connect
                assert time.monotonic() < give_up
                time.sleep(0.2)
        assert sink.count() == 5
        sink.close()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "60", True, None])
def test_a_timeout_that_is_none_is_refused(timeout: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be a number of seconds above 0"):
        MilvusSink("http://127.0.0.1:1", "docs", timeout=timeout)


def test_an_expected_error_leaves_no_traceback_on_standard_error(fake: FakeMilvus, engine: Engine) -> None:
    """pymilvus logs to a handler of its own."""
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pymilvus").addHandler(handler)
    try:
        with MilvusSink(fake.url, "docs", dimensions=[16], timeout=2) as sink:
            sink.prepare(engine.spec)
            fake.fault = refuse(9, "quota", "Upsert", "Delete")
            with pytest.raises(SinkError):
                sink.write(batch())
            assert seen == []
            with pytest.raises(pymilvus.MilvusException):
                sink.client.delete("docs", filter='pk in ["a"]')  # by somebody else
            assert len(seen) == 1
    finally:
        logging.getLogger("pymilvus").removeHandler(handler)


def test_a_file_that_another_process_uses_is_locked_until_it_ends(tmp_path: Path) -> None:
    uri = str(tmp_path / "x.db")
    program = (
        "import sys; from millpond_milvus import MilvusSink; MilvusSink(sys.argv[1], 'docs'); print(1, flush=True); "
        "sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, uri], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None and other.stdin is not None
    with other:
        assert other.stdout.readline() == "1\n"
        with pytest.raises(SinkError, match=r"x.db' cannot be opened: another process uses it"):
            MilvusSink(uri, "docs")
        other.stdin.close()
    MilvusSink(uri, "docs").close()


def test_a_folder_that_may_not_be_written_is_named() -> None:
    if not os.path.isdir("/sys/kernel"):
        pytest.skip("no folder that even root may not write to")
    with pytest.raises(SinkError, match=r"'/sys/kernel/x.db' cannot be opened, and Milvus Lite writes even to read: "):
        MilvusSink("/sys/kernel/x.db", "docs")
