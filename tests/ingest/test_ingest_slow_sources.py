"""A source that is slow: what was read of it is written when it is some seconds old, and when the run is stopped."""

import json
import os
import threading

import pytest

from millpond.errors import InvalidRequestError
from millpond.ingest import Record, StopRequest, ingest, read
from millpond.ingest.pipeline import page_timer


class SignalSink:
    """Keeps ids, and sets an event at every write."""

    dimensions = None

    def __init__(self):
        self.ids = []
        self.wrote = threading.Event()

    def prepare(self, spec):
        pass

    def write(self, batch):
        self.ids += [record.id for record in batch.records]
        self.wrote.set()

    def close(self):
        pass


@pytest.fixture
def sink():
    return SignalSink()


@pytest.fixture
def soon(monkeypatch):
    """Records are old at once."""
    monkeypatch.setattr(page_timer, "WRITE_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(page_timer, "_LOOK_SECONDS", 0.01)


def line(name):
    return json.dumps({"id": name, "text": f"text {name}"}).encode() + b"\n"


def test_a_generator_that_waits_has_its_records_written_meanwhile(engine, sink, soon):
    threads = set()

    def records():
        for name in ("a", "b"):
            threads.add(threading.current_thread())
            yield Record(name, name)
            assert sink.wrote.wait(30), "nothing is written while the source waits"
            sink.wrote.clear()

    report = ingest(records(), engine=engine, sink=sink)
    assert (report.written, sink.ids) == (2, ["a", "b"])
    assert threads == {threading.current_thread()}


def test_an_error_of_a_write_meanwhile_ends_the_run(engine, sink, soon):
    failed = threading.Event()

    def submit(*_, **__):
        failed.set()
        raise InvalidRequestError("no engine today")

    class Failing:
        spec, tasks = engine.spec, engine.tasks

    broken = Failing()
    broken.submit = submit

    def records():
        yield Record("a", "a")
        assert failed.wait(30)
        yield Record("b", "b")

    with pytest.raises(InvalidRequestError, match="no engine today"):
        ingest(records(), engine=broken, sink=sink)


def test_a_pipe_is_written_in_parts_and_up_to_the_stop(engine, sink, soon, tmp_path):
    """What was read of a named pipe is written, though its writer neither goes on nor closes it."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    stop, ends = StopRequest(), []

    def write():
        with open(path, "wb", buffering=0) as pipe:
            for name in ("a", "b"):
                pipe.write(line(name))
                ends.append(sink.wrote.wait(30))
                sink.wrote.clear()
            pipe.write(line("c") + line("d") + b'{"id": "torn')
            ends.append(sink.wrote.wait(30))
            stop.set()
            ended.wait(30)

    ended = threading.Event()
    writer = threading.Thread(target=write)
    writer.start()
    report = ingest(path, engine=engine, sink=sink, stop=stop)
    ended.set()
    writer.join()
    assert all(ends) and sink.ids == ["a", "b", "c", "d"]
    assert (report.read, report.written, report.stopped) == (4, 4, True)


@pytest.mark.parametrize("once", [True, False])
def test_a_stop_writes_what_cannot_be_read_again(engine, sink, once):
    stop = StopRequest()

    def records():
        yield Record("a", "a")
        stop.set()
        yield Record("b", "b")

    class Again:
        def __iter__(self):
            return records()

    report = ingest(records() if once else Again(), engine=engine, sink=sink, stop=stop)
    assert report.stopped and report.read == report.written == len(sink.ids)
    assert sink.ids == (["a", "b"] if once else [])


def test_a_device_and_a_descriptor_are_sources(tmp_path):
    assert list(read("/dev/null")) == []
    reading, writing = os.pipe()
    os.write(writing, line("a"))
    os.close(writing)
    (record,) = read(f"/dev/fd/{reading}")
    os.close(reading)
    assert record == Record("a", "text a")


def test_a_pipe_of_another_form_is_refused(tmp_path):
    os.mkfifo(tmp_path / "x.csv")
    with pytest.raises(InvalidRequestError, match=r"x.csv' is a pipe, of which only JSONL can be read; write it"):
        read(tmp_path / "x.csv")


def test_standard_input_that_is_closed_is_refused(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InvalidRequestError, match="standard input is closed"):
        read("-")
