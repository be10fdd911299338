"""Several sinks on one folder, from threads of a process and from two processes."""

from __future__ import annotations

import gc
import multiprocessing
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import portalocker
import pytest
from qdrant_client import QdrantClient

from millpond import Engine
from millpond.ingest import Record, SinkError, ingest
from millpond_qdrant import QdrantSink

# qdrant-client leaves the lock file that it failed to lock to the garbage collector.
pytestmark = [pytest.mark.contract, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]


def at_once(*tasks: Callable[[], object]) -> None:
    """Run tasks in threads that start together, and raise the first error of any."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(tasks))

    def run(task: Callable[[], object]) -> None:
        start.wait()
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def some(name: str, n: int = 20) -> list[Record]:
    return [Record(f"{name}-{i}", f"text {i}", {"of": name}) for i in range(n)]


def filled(engine: Engine, sink: QdrantSink, name: str) -> None:
    for _ in range(2):  # again, in small batches
        for start in (0, 10):
            ingest(some(name)[start : start + 10], engine=engine, sink=sink, show_progress=False)


@pytest.mark.parametrize("kind", ["memory", "folder", "one sink"])
def test_runs_from_threads_share_a_client(engine: Engine, tmp_path: Path, kind: str) -> None:
    client = QdrantClient(path=str(tmp_path)) if kind == "folder" else QdrantClient(":memory:")
    one = QdrantSink(client, "docs", dimensions=[32, 384])
    sinks = [one if kind == "one sink" else QdrantSink(client, "docs", dimensions=[32, 384]) for _ in range(4)]

    def search() -> None:
        for _ in range(5):
            assert len({hit.id for hit in one.search(engine, "text 3", k=500)}) <= 80

    ingest(some("0", 1), engine=engine, sink=one, show_progress=False)
    at_once(*(lambda n=n: filled(engine, sinks[n], str(n)) for n in range(4)), search)  # type: ignore[misc]
    assert one.count() == 80 and len(one.search(engine, "text 3", k=500)) == 80
    client.close()


def test_the_last_sink_to_be_closed_closes_the_folder(engine: Engine, records: list[Record], tmp_path: Path) -> None:
    place = tmp_path / "db"
    one, two = QdrantSink(place, "docs", dimensions=[64]), QdrantSink(str(place) + "/../db/", "other", dimensions=[64])
    assert one.client is two.client
    ingest(records, engine=engine, sink=one, show_progress=False)
    one.close()
    one.close()
    with pytest.raises(
        SinkError, match=r"did not get a look for the collection: this sink is closed; open another one"
    ):
        one.count()
    ingest(records, engine=engine, sink=two, show_progress=False)
    with pytest.raises(RuntimeError, match="already accessed"):
        QdrantClient(path=str(place))
    two.close()
    QdrantClient(path=str(place)).close()


def test_a_sink_that_is_dropped_leaves_the_folder(tmp_path: Path) -> None:
    one, two = QdrantSink(tmp_path, "docs"), QdrantSink(tmp_path, "docs")
    del one
    two.close()
    QdrantClient(path=str(tmp_path)).close()
    three = QdrantSink(tmp_path, "docs")
    del three
    gc.collect()
    QdrantClient(path=str(tmp_path)).close()


def test_a_folder_that_was_deleted_is_another_one(engine: Engine, records: list[Record], tmp_path: Path) -> None:
    with QdrantSink(tmp_path / "db", "docs", dimensions=[64]) as old:
        ingest(records, engine=engine, sink=old, show_progress=False)
        shutil.rmtree(tmp_path / "db")
        with QdrantSink(tmp_path / "db", "docs", dimensions=[64]) as new:
            assert new.count() == 0 and new.client is not old.client


def test_a_folder_in_use_is_an_error_that_says_so(tmp_path: Path) -> None:
    place = tmp_path / "db"
    program = "import sys; from millpond_qdrant import QdrantSink; QdrantSink(sys.argv[1], 'docs')"
    message = (
        f"the folder {str(place)!r} is in use by another process or client; close that one, or run a Qdrant server"
    )
    with QdrantSink(place, "docs"):
        other = subprocess.run([sys.executable, "-c", program, place], capture_output=True, text=True, timeout=60)
        assert other.returncode == 1 and f"millpond.errors.SinkError: {message}" in other.stderr
        if "fork" in multiprocessing.get_all_start_methods():
            assert message in forked(place)
    client = QdrantClient(path=str(place))
    with pytest.raises(SinkError, match="in use by another process or client"):
        QdrantSink(place, "docs")
    client.close()
    QdrantSink(place, "docs").close()


def forked(place: Path) -> str:
    """What a forked child is told when it opens the folder, which it has not opened itself."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_open_in_child, args=(place, answers))
    child.start()
    answer: str = answers.get(timeout=60)
    child.join(60)
    return answer


def _open_in_child(place: Path, answers: multiprocessing.Queue[str]) -> None:
    try:
        QdrantSink(place, "docs")
    except SinkError as error:
        answers.put(str(error))
    else:
        answers.put("opened")


@pytest.mark.slow
def test_what_another_process_wrote_while_the_folder_was_read_is_there(
    engine: Engine, records: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "db"
    with QdrantSink(place, "docs", dimensions=[4]) as sink:
        ingest(records, engine=engine, sink=sink, show_progress=False)
    program = """if True:
        import sys
        from qdrant_client import QdrantClient, models
        client = QdrantClient(path=sys.argv[1])
        client.upsert("docs", [models.PointStruct(id=1, vector={"d4": [1.0] * 4}, payload={"text": "late"})])
        client.create_collection("more", {"d4": models.VectorParams(size=4, distance=models.Distance.COSINE)})
        client.close()
    """
    lock = portalocker.lock
    others: list[subprocess.CompletedProcess[bytes]] = []

    def late(*arguments: object) -> object:
        if not others:  # the client has read the folder, and has not locked it yet
            others.append(subprocess.run([sys.executable, "-c", program, str(place)], timeout=60, check=True))
        return lock(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(portalocker, "lock", late)
    with QdrantSink(place, "docs", dimensions=[4]) as sink:
        assert others and sink.count() == 13
        ingest(records, engine=engine, sink=QdrantSink(place, "new", dimensions=[4]), show_progress=False)
    with QdrantSink(place, "more") as sink:  # creating a collection has not dropped it
        assert sink.count() == 0 and sink.client.collection_exists("more")
