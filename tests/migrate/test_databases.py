"""What a migration does in every database: killed at any moment, written to and searched meanwhile."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.migrate.engines import Turned, WordModel
from tests.migrate.test_migrate import contents

from millpond.errors import FingerprintMismatchError
from millpond.ingest import Record, ingest, open_sink, point_id
from millpond.ingest.sinks.driver import CollectionDriver
from millpond.migrate import migration as module
from millpond.migrate.change import Change
from millpond.migrate.migration import Migration
from millpond.migrate.plan import status
from millpond.migrate.row_copy import CopyOptions, Pass, RowCopy
from millpond.testing.sink import records

pytestmark = pytest.mark.contract

URLS = {
    "qdrant": ("millpond_qdrant", "qdrant+path:{folder}/q#docs"),
    "milvus": ("milvus_lite", "milvus+file:{folder}/m.db#docs"),
    "lancedb": ("millpond_lancedb", "lancedb+path:{folder}/l#docs"),
    "chroma": ("millpond_chroma", "chroma+path:{folder}/c#docs"),
    "pgvector": ("millpond_pgvector", ""),
}
KILLED = Path(__file__).with_name("killed.py")
OLD, NEW = WordModel("old"), WordModel("new", dimensions=64)
QUESTION = "how to mend zip archives"
Open = Callable[..., Any]


@pytest.fixture(params=[name for name in URLS if name != "chroma"] + [pytest.param("chroma", marks=pytest.mark.door)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    package, url = URLS[request.param]
    pytest.importorskip(package)
    if url:
        return url.format(folder=tmp_path)
    dsn = request.getfixturevalue("postgres").schema()
    return f"pgvector+{dsn.partition(':')[0]}:{dsn.partition(':')[2]}#docs"


@pytest.fixture
def opened(url: str) -> Iterator[Open]:
    sinks: list[Any] = []

    def opened(**options: Any) -> Any:
        sinks.append(open_sink(url, **options))
        return sinks[-1]

    yield opened
    for sink in sinks:
        sink.close()


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLED", 0.0)


def write(sink: Any, rows: list[Record], engine: WordModel = OLD) -> None:
    assert ingest(rows, engine=engine, sink=sink, show_progress=False).failed == 0  # type: ignore[arg-type]


def run(
    head: Any, engine: WordModel = NEW, *, bridge: bool = False, options: CopyOptions | None = None, **change: Any
) -> Any:
    return Migration(head, Change(spec=engine.spec, **change), options=options).run(engine, bridge=bridge)  # type: ignore[arg-type]


def test_there_and_back_and_to_the_end(opened: Open) -> None:
    write(opened(), records())
    before = contents(opened(), OLD)
    assert run(opened()).phase == "live"
    assert contents(opened(), NEW) == before
    assert opened().search(OLD, QUESTION, k=3)[0].id == "how to mend/zip archives"
    write(opened(), [Record("late", "a late text", {"n": 1})], NEW)
    outcome = Migration(opened()).rollback(OLD)  # type: ignore[arg-type]
    assert (outcome.phase, outcome.rows, outcome.written) == ("rolled back", 49, 1)
    assert contents(opened(), OLD).keys() == {*before, point_id("late")}
    opened().delete(["late"])
    assert run(opened()).phase == "live" and contents(opened(), NEW) == before
    assert Migration(opened()).finish().phase == "finished"
    assert contents(opened(), NEW) == before
    assert opened().search(NEW, QUESTION, k=3)[0].id == "how to mend/zip archives"
    again = run(opened(), OLD, dimensions=[64, 384])
    assert again.rows == 48 and Migration(opened()).finish().serving == again.serving
    assert contents(opened(dimensions=[384]), OLD) == before
    assert set(opened().collections()) == {"docs", again.serving}


@pytest.mark.parametrize("url", ["qdrant", "milvus"], indirect=True)
def test_aliases_of_the_database_go_there_and_back(opened: Open) -> None:
    """Programs that read by an alias with the database's own client see the collection that serves."""
    old = opened()
    write(old, records())
    client = old.client

    def named() -> str:
        if hasattr(client, "get_aliases"):  # Qdrant
            return str({each.alias_name: each.collection_name for each in client.get_aliases().aliases}["live"])
        return str(client.describe_alias("live")["collection_name"])

    old.swap_alias("live") if hasattr(old, "swap_alias") else client.create_alias("docs", "live")
    assert named() == "docs"
    run(opened())
    assert named() == opened().succession().serving != "docs"
    assert Migration(opened()).rollback(OLD).phase == "rolled back"  # type: ignore[arg-type]
    assert named() == "docs"


def test_a_bridge_is_kept_in_the_database(opened: Open) -> None:
    rows = [
        Record(f"r{n}", f"{record.text} {n % 7} {n % 11} {n % 13}", {"n": n}) for n, record in enumerate(records() * 6)
    ]
    write(opened(), rows)
    turned = Turned(OLD)
    expected = [hit.id for hit in opened().search(OLD, rows[7].text, k=10)]
    stopped = CopyOptions()
    migration = Migration(opened(), Change(spec=turned.spec), options=stopped)
    passed = migration._pass

    def stop_first(copy: RowCopy) -> Pass | None:
        stopped.stop.set()
        return passed(copy)

    migration._pass = stop_first  # type: ignore[method-assign]
    outcome = migration.run(turned, bridge=True)  # type: ignore[arg-type]
    assert outcome.stopped and outcome.recall == pytest.approx(1, abs=0.05)
    found = opened().search(turned, rows[7].text, k=10)
    assert len(set(expected) & {hit.id for hit in found}) >= 9
    assert run(opened(), turned).phase == "live"
    Migration(opened()).finish()
    found = opened().search(OLD, rows[7].text, k=10)
    assert len(set(expected) & {hit.id for hit in found}) >= 9


def test_writers_and_eight_readers_notice_nothing(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CollectionDriver, "trusted", 0.05)
    rows = [Record(f"r{n}", f"{record.text} {n}", {"n": n}) for n, record in enumerate(records() * 8)]
    write(opened(), rows)
    done, refused = threading.Event(), threading.Event()
    failures: list[str] = []
    answers = [0] * 8
    readers = [opened() for _ in range(8)]
    writer = opened()

    def search(number: int) -> None:
        while not done.is_set():
            try:
                assert len(readers[number].search(OLD, QUESTION, k=5)) == 5
                answers[number] += 1
            except Exception as error:
                failures.append(repr(error))

    written: dict[str, str] = {}

    def change() -> None:
        for turn in range(1000):
            record = Record(f"r{turn % 30}" if turn % 2 else f"w{turn}", f"turn {turn}", {"turn": turn})
            try:
                ingest([record], engine=OLD, sink=writer, show_progress=False)  # type: ignore[arg-type]
            except FingerprintMismatchError:
                return refused.set()
            except Exception as error:
                failures.append(repr(error))
                return refused.set()
            written[record.id] = record.text
            if done.is_set():
                return

    threads = [threading.Thread(target=search, args=(n,)) for n in range(8)] + [threading.Thread(target=change)]
    for thread in threads:
        thread.start()
    try:
        outcome = run(opened(), options=CopyOptions(rows_per_second=400))
        before = list(answers)
        assert refused.wait(60)
        end = time.monotonic() + 20
        while not all(now > then for now, then in zip(answers, before, strict=True)) and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert failures == [] and outcome.phase == "live" and all(answers)
    stored = {record_id: text for record_id, text, _ in contents(opened(), NEW).values()}
    assert stored == {**{row.id: row.text for row in rows}, **written} and written


def let_go(url: str) -> None:
    """Let another process open a file of Milvus Lite, which this one serves until it ends."""
    if url.startswith("milvus"):
        servers = pytest.importorskip("milvus_lite.server_manager").server_manager_instance
        servers.release_server(os.path.realpath(url.partition(":")[2].rpartition("#")[0]))


# When a migration is killed: the line that it prints then, and how often. Most kills come while rows are written.
MOMENTS = {"write": 5, "begin": 1, "verify": 1, "noted sealed": 1, "noting live": 1, "noted live": 1}


def run_until(url: str, moment: str, chance: random.Random) -> bool:
    """Run a migration to a moment or a little later, and kill it; ``False``: it has ended before."""
    command = [sys.executable, str(KILLED), url, chance.choice(["1000", "100000"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        left = chance.randrange(2, 16) if moment == "write" else 1
        for line in process.stdout:
            left -= line.strip() == moment
            if not left:
                time.sleep(chance.random() * 0.05 if moment in ("write", "begin") else chance.random() * 0.02)
                os.kill(process.pid, signal.SIGKILL)
                break
        errors = process.stderr.read()
    assert process.returncode in (0, -signal.SIGKILL), errors
    return process.returncode != 0


def kill(url: str, opened: Open, moments: list[str]) -> None:
    """Start a migration again and again, and kill it at these moments, while rows are written; then let it end."""
    rows = {f"r{n}": f"{record.text} {n}" for n, record in enumerate(records() * 25)}
    with closing(opened()) as sink:
        write(sink, [Record(name, text) for name, text in rows.items()])
    let_go(url)
    chance, found_in, partly = random.Random(len(moments)), Counter[str](), 0
    for number, moment in enumerate(moments):
        while not run_until(url, moment, chance):  # it has cut over: go back, and begin again
            with closing(opened()) as head:
                Migration(head).rollback(OLD)  # type: ignore[arg-type]
                Migration(head).finish()
            let_go(url)
        with closing(opened()) as head:
            found = status(head)
            found_in[found.phase or "none"] += 1
            there = found.other_rows if found.phase in ("filling", "rolled back") else None
            partly += there is not None and 0 < there < len(rows)
            serving = OLD if found.serving == "docs" else NEW
            assert len(head.search(serving, QUESTION, k=5)) == 5
            names = f"w{number}", f"r{number}"
            rows |= {name: f"{name} written between the kills" for name in names}
            changes = [Record(name, rows[name]) for name in names]
            if found.phase == "live":
                write(head, changes, NEW)
                Migration(head).rollback(OLD)  # type: ignore[arg-type]
            else:
                if found.phase == "sealed":
                    Migration(head).rollback(None)  # nobody waits for the dead one
                write(head, changes)
            if status(head).phase == "rolled back" and chance.random() < 0.8:
                Migration(head).finish()  # the next one fills it from the start; else it goes on with what is there
        let_go(url)
    command = [sys.executable, str(KILLED), url, "100000"]
    assert subprocess.run(command, capture_output=True, text=True).returncode == 0
    stored = contents(opened(), NEW)
    assert sorted(record_id for record_id, _, _ in stored.values()) == sorted(rows)
    assert {record_id: text for record_id, text, _ in stored.values()} == rows
    print(json.dumps({"kills": len(moments), "new collection filled in part": partly, "found": found_in}))
    # Each database is seen in each phase, and most kills come between the first row and the last.
    assert partly >= 0.4 * moments.count("write")
    assert found_in["live"] >= moments.count("noted live") and found_in["sealed"] >= moments.count("noted sealed")


def test_kills_while_it_fills_and_cuts_over(url: str, opened: Open) -> None:
    kill(url, opened, ["write", "noted sealed", "noted live"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills(url: str, opened: Open) -> None:
    moments = [moment for moment, times in MOMENTS.items() for _ in range(times)] * 5
    random.Random(0).shuffle(moments)
    kill(url, opened, moments)
