"""Random runs that crash at random points: the run after them makes the collection equal to the source."""

import itertools
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ingest.crashes import Countdown, Crash, CrashingSink, Words, crash_at, expected, memory, run, small
from tests.tiny import write_checkpoint

from millpond import Engine
from millpond.ingest import Record

numbers = itertools.count()
TEXTS = ("a pond", "the wheel turns", "one two three four five", "a b c d e f g h i j k l", "", " ")

records = st.builds(
    lambda number, text, n: Record(f"r{number}", text, {"n": n} if n else {}),
    st.integers(0, 5),
    st.sampled_from(TEXTS),
    st.integers(0, 2),
)
crashes = st.one_of(
    st.none(),
    st.tuples(st.sampled_from(["write", "delete", "add", "invalidate", "remove"]), st.integers(0, 4), st.booleans()),
)
steps = st.fixed_dictionaries(
    {
        # One record is stored whatever the others are: else a run deletes nothing.
        "source": st.lists(records, max_size=10).map(lambda found: [*found, Record("kept", "a pond")]),
        "crash": crashes,
        "resume": st.sampled_from([True, True, True, False]),
        "sync": st.booleans(),
        "batch": st.integers(1, 4),
        "write": st.integers(1, 5),
    }
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", "bert")
    with Engine(folder, dtype="float32", device="cpu", cache=folder.parent / "cache.db") as engine:
        yield engine


@pytest.fixture
def folder():
    """A folder in memory if there is one: these runs open hundreds of files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        yield Path(name)


def attempt(step, engine, client, journal, chunker):
    """A run that may crash; returns whether it ended."""
    sink = CrashingSink(client)
    options = {"journal": journal, "resume": step["resume"], "sync": step["sync"], "sync_max": 1, "chunking": chunker}
    method, calls, after = step["crash"] or ("write", None, False)
    if method == "write":
        sink.upserts = Countdown(calls, after=after)
    elif method == "delete":
        sink.deletes = Countdown(calls, after=after)
    try:
        with small(step["batch"], step["write"]):
            if method in ("write", "delete"):
                run(step["source"], engine, sink, **options)
            else:
                with crash_at(method, calls, after=after):
                    run(step["source"], engine, sink, **options)
    except Crash:
        return False
    return True


def check(history, last, engine, folder, chunker):
    client, journal = memory(), folder / f"journal{next(numbers)}"
    for step in history:
        attempt(step, engine, client, journal, chunker)
    # Without sync: every record of the source is there as it is, whatever else is.
    sink = CrashingSink(client)
    with small(last["batch"], last["write"]):
        report = run(last["source"], engine, sink, journal=journal, chunking=chunker, sync_max=1)
    wanted = expected(last["source"], chunker)
    ids = {record.id for record in last["source"]}
    assert {key: text for key, text in sink.stored.items() if key[0] in ids} == wanted
    assert report.failed == 0
    with small(last["batch"], last["write"]):
        run(last["source"], engine, sink, journal=journal, chunking=chunker, sync=True, sync_max=1, verify=True)
        assert sink.stored == wanted
        # Another one finds nothing to do, if no id occurs twice.
        if len(ids) == len(last["source"]):
            sink.written.clear()
            report = run(last["source"], engine, sink, journal=journal, chunking=chunker, verify=True)
            assert sink.written == [] and report.unchanged == len(wanted and {key[0] for key in wanted})
            assert report.verification.good and report.verification.rows == len(wanted)


@pytest.mark.parametrize("chunker", [None, Words()], ids=["whole", "chunked"])
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(steps, max_size=4), last=steps)
def test_the_run_after_crashes_makes_the_collection_equal_to_the_source(engine, folder, chunker, history, last):
    check(history, last, engine, folder, chunker)


@pytest.mark.slow
@pytest.mark.parametrize("chunker", [None, Words()], ids=["whole", "chunked"])
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(steps, max_size=6), last=steps)
def test_many_histories_of_crashes(engine, folder, chunker, history, last):
    check(history, last, engine, folder, chunker)
