"""Delivery: what is sent again, for how long, in which parts, and which rows are left out. Time is the test's own."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from tests.ingest.crashes import CrashingSink, Words, delivery, memory, run, small, some

from millpond.errors import InvalidRequestError, SinkError, SinkRejectedError, SinkTooLargeError, SinkUnavailableError
from millpond.ingest import Record, RetryPolicy, StopRequest, WriteBatch, point_id


class Clock(StopRequest):
    """A stop whose waiting passes at once, on a clock of its own."""

    def __init__(self, stop_at=float("inf")):
        super().__init__()
        self.now = 0.0
        self.stop_at = stop_at
        self.waits = []

    def wait(self, timeout=None):
        self.waits.append(timeout)
        self.now += timeout
        if self.now >= self.stop_at:
            self.set()
        return self.is_set()


@pytest.fixture
def clock():
    clock = Clock()
    with mock.patch("tenacity.time", SimpleNamespace(monotonic=lambda: clock.now)):
        yield clock


def batch(count):
    records = [Record(f"r{number}", f"text {number}") for number in range(count)]
    vectors = {4: np.tile(np.eye(1, 4, dtype=np.float32), (count, 1))}
    return WriteBatch(records=records, ids=[point_id(record.id) for record in records], vectors=vectors)


class Database:
    """Answers requests by a script; each takes ``seconds``."""

    def __init__(self, clock, *answers, seconds=0.0, always=None):
        self.clock, self.answers, self.seconds, self.always = clock, list(answers), seconds, always
        self.requests = []

    def __call__(self, rows=None):
        self.requests.append(rows)
        self.clock.now += self.seconds
        answer = self.answers.pop(0) if self.answers else self.always
        if answer is not None:
            raise answer
        return "done"


@pytest.mark.parametrize("seconds", [0.0, 3.0])
def test_after_the_time_to_give_up_nothing_is_sent_any_more(clock, seconds):
    made, _ = delivery(clock, give_up_after=30, first_wait=0.5, longest_wait=4)
    error = SinkUnavailableError("busy")
    database = Database(clock, seconds=seconds, always=error)
    with pytest.raises(SinkUnavailableError) as caught:
        made.send(database)
    assert caught.value is error
    assert 20 <= clock.now <= 30 + seconds and len(database.requests) > 3
    least = [0.5, 1, 2, *[4] * len(clock.waits)]  # they double up to the longest, and have a random part
    assert all(low <= wait <= low + 0.5 for low, wait in zip(least, clock.waits, strict=False))
    assert len({wait % 0.5 for wait in clock.waits}) > 3
    clock.now = 500
    assert made.send(Database(clock, error)) == "done"  # each request has its own time


def test_a_wait_longer_than_the_time_that_is_left_is_not_begun(clock):
    made, _ = delivery(clock, give_up_after=60)
    for asked in (61, 1e9, float("inf")):
        with pytest.raises(SinkUnavailableError):
            made.send(Database(clock, always=SinkUnavailableError("busy", retry_after=asked)))
    assert clock.waits == []


@pytest.mark.parametrize("error", [SinkError("no"), OSError("gone"), ValueError("x"), KeyboardInterrupt()], ids=repr)
def test_other_errors_come_out_at_once(clock, error):
    made, notes = delivery(clock)
    database = Database(clock, always=error)
    with pytest.raises(type(error)) as caught:
        made.write(database, batch(4))
    assert caught.value is error and len(database.requests) == 1 and not notes


@pytest.mark.parametrize(
    "values", [{"give_up_after": -1}, {"first_wait": 0}, {"longest_wait": float("inf")}, {"first_wait": True},
               {"give_up_after": float("nan")}, {"longest_wait": "1"}], ids=str
)  # fmt: skip
def test_a_policy_out_of_range_is_refused(values):
    with pytest.raises(InvalidRequestError, match=f"{next(iter(values))}="):
        RetryPolicy(**values)


class Picky:
    """Takes at most ``most`` rows at a time, and never those in ``bad``."""

    def __init__(self, most=10**9, bad=(), error=SinkRejectedError):
        self.most, self.bad, self.error = most, bad, error
        self.written, self.requests = [], []

    def __call__(self, rows):
        self.requests.append(len(rows))
        if len(rows) > self.most:
            raise SinkTooLargeError(f"{len(rows)} rows are too many")
        for record in rows.records:
            if record.id in self.bad:
                raise self.error(f"{record.id} is bad")
        self.written += [record.id for record in rows.records]


@pytest.mark.parametrize(("count", "most"), [(1, 1), (7, 3), (64, 1), (64, 100)])
def test_a_batch_that_is_too_large_goes_in_parts_and_in_order(clock, count, most):
    made, _ = delivery(clock)
    database = Picky(most)
    assert made.write(database, batch(count)) == []
    assert database.written == [f"r{number}" for number in range(count)]


def test_rows_that_are_refused_are_found_and_the_others_written(clock):
    made, _ = delivery(clock)
    database = Picky(bad={"r0", "r13", "r14", "r63"})
    refused = made.write(database, batch(64))
    assert refused == [(number, f"r{number} is bad") for number in (0, 13, 14, 63)]
    assert len(database.written) == 60 and len(database.requests) < 50
    bad = {f"r{number}" for number in range(100) if number % 10}  # one that is accepted ends a series of refusals
    assert len(made.write(Picky(bad=bad), batch(100))) == 90


@pytest.mark.parametrize("count", [16, 500])
def test_a_database_that_refuses_one_row_after_another_stops_the_run(clock, count):
    made, _ = delivery(clock)
    database = Picky(bad={f"r{number}" for number in range(500)})
    if count == 16:
        assert len(made.write(database, batch(count))) == 16
    else:
        with pytest.raises(SinkRejectedError):
            made.write(database, batch(count))
        assert len(database.requests) < 60 and not database.written


class Scripted(CrashingSink):
    """Its writes go through a function."""

    def __init__(self, client, before):
        super().__init__(client)
        self.before = before

    def write(self, batch):
        self.before(batch)
        super().write(batch)


QUICK = RetryPolicy(give_up_after=5, first_wait=0.001, longest_wait=0.002)


def test_a_busy_database_is_waited_for_and_counted(engine, caplog, tmp_path):
    left = [SinkUnavailableError("Memory is busy", retry_after=0.01)] * 3

    def before(batch):
        if left:
            raise left.pop()

    sink = Scripted(memory(), before)
    report = run(some(9), engine, sink, retry=QUICK, journal=tmp_path / "journal")
    assert (report.retried, report.written, report.failed) == (3, 9, 0) and len(sink.stored) == 9
    assert caplog.text.count("Memory is busy; trying again in 0.0 s") == 3


def test_refused_rows_are_dead_letters_and_taken_again(engine, tmp_path, caplog):
    bad = {"r2", "r5"}

    def before(batch):
        for record in batch.records:
            if record.id in bad:
                raise SinkRejectedError(f"row {record.id} refused")

    client, letters = memory(), tmp_path / "dead.jsonl"
    report = run(some(9), engine, Scripted(client, before), journal=tmp_path / "j", dead_letters=letters)
    assert (report.written, report.failed, report.embedded) == (7, 2, 7)
    assert caplog.text.count("left out record") == 2 and len(letters.read_text().splitlines()) == 2
    bad.clear()
    report = run(letters, engine, Scripted(client, before), journal=tmp_path / "j", dead_letters=letters)
    assert (report.read, report.written, report.failed) == (2, 2, 0) and not letters.exists()
    report = run(some(9), engine, Scripted(client, before), journal=tmp_path / "j")
    assert report.unchanged == 9


@pytest.mark.parametrize("journaled", [True, False], ids=["journal", "no journal"])
def test_a_record_with_a_refused_piece_leaves_no_row_of_its_longer_text(engine, tmp_path, journaled):
    client, refusing = memory(), False

    def before(batch):
        if refusing and any(record.chunk == 1 for record in batch.records):
            raise SinkRejectedError("refused")

    options = {"chunker": Words(2), "journal": tmp_path / "j" if journaled else None}
    for words, refused, stored in ((20, False, 10), (10, True, 0), (6, False, 3)):
        refusing = refused
        sink = Scripted(client, before)
        report = run([Record("a", "word " * words)], engine, sink, **options)
        assert (report.failed, sorted(sink.stored)) == (int(refused), [("a", number) for number in range(stored)])


def test_a_database_that_stays_away_stops_the_run_which_then_goes_on(engine, tmp_path):
    client, writes = memory(), []

    def before(batch):
        writes.append(len(batch))
        if len(writes) > 2:
            raise SinkUnavailableError("Memory does not answer")

    policy = RetryPolicy(give_up_after=0.01, first_wait=0.001)
    with small(2), pytest.raises(SinkUnavailableError, match="does not answer"):
        run(some(40), engine, Scripted(client, before), retry=policy, journal=tmp_path / "j")
    assert len(CrashingSink(client).stored) == 4
    with small(2):
        assert run(some(40), engine, CrashingSink(client), journal=tmp_path / "j").unchanged == 4


def test_a_stop_while_the_database_is_away_ends_the_run_as_stopped(engine, tmp_path, caplog):
    client, stop, writes = memory(), StopRequest(), []

    def before(batch):
        writes.append(len(batch))
        if len(writes) > 1:
            stop.set()
            raise SinkUnavailableError("Memory does not answer")

    policy = RetryPolicy(give_up_after=1000, first_wait=1000)
    with small(2):
        report = run(some(9), engine, Scripted(client, before), retry=policy, journal=tmp_path / "j", stop=stop)
    assert report.stopped and report.written == 2 and "Memory does not answer" in caplog.text
    with small(2):
        assert run(some(9), engine, CrashingSink(client), journal=tmp_path / "j").unchanged == 2
    assert len(CrashingSink(client).stored) == 9


def test_reads_of_sync_and_verify_are_sent_again(engine, tmp_path):
    class Flaky(CrashingSink):
        calls, looking = 0, False

        def _flake(self):
            self.calls += self.looking
            if self.calls % 2:
                raise SinkUnavailableError("busy")

        def count(self):
            self._flake()
            return super().count()

        def fetch(self, row_ids, *, widths=()):
            self._flake()
            return super().fetch(row_ids, widths=widths)

        def scan(self):
            yield from list(super().scan())[:1]
            self._flake()
            yield from super().scan()

        def write(self, batch):
            super().write(batch)
            self.looking = True

    client = memory()
    run(some(9), engine, CrashingSink(client), journal=tmp_path / "j")
    source = [*some(5), Record("new", "text")]
    report = run(source, engine, Flaky(client), journal=tmp_path / "j", sync=True, verify=True, retry=QUICK)
    assert report.deleted == 4 and report.verification.good and report.retried >= 3
    assert {key for key, _ in CrashingSink(client).stored} == {record.id for record in source}
