"""IngestProgress, as a terminal shows it; the thread that looks at the counts is replaced by calls."""

import fcntl
import io
import logging
import os
import pty
import re
import struct
import sys
import termios
import threading
from unittest import mock

import pytest

from millpond.ingest import IngestReport, RunTrace
from millpond.ingest.sources.compression import SourcePosition
from millpond.ingest.telemetry.progress_bar import IngestProgress

QUEUES = {"embed": (2, 2), "write": (1, 2)}


class Terminal(io.StringIO):
    """Standard error of so many columns."""

    def isatty(self):
        return True

    def fileno(self):
        return self.follower


@pytest.fixture
def terminal():
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    terminal = Terminal()
    terminal.follower = follower
    yield terminal
    os.close(leader)
    os.close(follower)


class File(SourcePosition):
    """A file of a million bytes, of which some are read."""

    size = 1_000_000
    at = 0

    def __init__(self):
        pass

    def read(self):
        return self.at


def states(terminal):
    """What the line with the bar showed, one after another."""
    drawn = [state.rstrip() for state in re.split(r"[\r\n]", terminal.getvalue()) if "records in" in state]
    return list(dict.fromkeys(drawn))


def draw(terminal, options, finished, computed=0):
    """The bar after some looks at the counts, and at the end of the run."""
    counts = dict.fromkeys(("read", "finished", "cached", "embedded", "failed", "retried", "written"), 0)
    position = options.get("position")
    trace = RunTrace()
    with mock.patch.object(sys, "stderr", terminal):
        progress = IngestProgress(
            lambda: counts, lambda: QUEUES, show=True, trace=trace, computed=lambda: computed, **options
        )
    for done in (0, finished):
        counts |= {"read": done + 2000 if done else 0, "finished": done, "cached": done // 2, "embedded": done // 2}
        counts["failed"] = done // 4000
        if position is not None:
            position.at = 100 * counts["read"]
        progress._move(counts)
        progress._draw(counts, QUEUES)
    report = IngestReport(read=10_000, cached=5000, embedded=4999, failed=1, duplicates=0, written=9999, seconds=1)
    progress.finish(report)
    progress._bar.close()
    return trace


@pytest.mark.parametrize(
    ("options", "state", "last"),
    [
        ({"total": 10_000}, r" 40%\|#+\d? *\| 4,000/10,000 records in 00:00, 00:00 left", "100%|#"),
        ({"position": File()}, r" 40%\|#+\d? *\| 4,000 records in 00:00, 00:00 left", "100%|#"),
        ({}, r"4,000 records in 00:00", "10,000 records in 00:00"),
    ],
    ids=["a list", "a file", "a stream"],
)
def test_the_bar_shows_rate_time_left_hits_and_queues(terminal, options, state, last):
    trace = draw(terminal, options, 4000, computed=2200)
    middle, end = states(terminal)[-2:]
    assert re.fullmatch(state + r", [\d,]+/s, 200 computed, hits 50 %, 1 failed, embed 2/2, write 1/2", middle), middle
    assert end.startswith(last) and re.search(r"10,000(/10,000)? records in 00:00, [\d,]+/s, hits 50 %, 1 failed$", end)
    assert trace.samples[-1].counts["written"] == 9999


@pytest.mark.parametrize("options", [{"total": 0}, {}], ids=["no records", "a stream"])
def test_an_empty_source_has_a_bar_too(terminal, options):
    draw(terminal, options, 0)
    assert states(terminal)[0].startswith(("0 records in", "0/0 records in"))


def test_the_thread_looks_at_the_counts_until_the_run_ends_and_the_log_appears_above_the_bar(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal)
    looked = threading.Event()
    counts = dict.fromkeys(("read", "finished", "cached", "embedded", "failed", "retried"), 7)

    def now():
        if len(trace.samples) >= 2:
            looked.set()
        return counts

    trace, logger = RunTrace(), logging.getLogger("millpond")
    handler = logging.StreamHandler(terminal)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.addHandler(handler)
    try:
        with IngestProgress(now, lambda: QUEUES, show=True, trace=trace, total=10):
            assert looked.wait(30)
            logger.warning("left out record 7")
        assert handler in logger.handlers
    finally:
        logger.removeHandler(handler)
    assert trace.samples[0].counts == counts and trace.samples[0].queues == {"embed": 2, "write": 1}
    assert "\rWARNING: left out record 7\n" in re.sub(r" +(?=[\r\n])", "", terminal.getvalue()).replace("\r\r", "\r")
    assert "millpond-progress" not in {thread.name for thread in threading.enumerate()}


def test_where_nobody_sees_it_nothing_is_drawn_and_the_log_is_left_alone(capsys):
    handlers = list(logging.getLogger().handlers)
    with IngestProgress(dict, dict, show=True, trace=RunTrace(), total=10):
        assert logging.getLogger().handlers == handlers
    assert capsys.readouterr().err == ""
