"""IngestProgress, as a terminal shows it."""

import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading

import pytest

from millpond.ingest.telemetry import progress_bar
from millpond.ingest.telemetry.progress_bar import IngestProgress

RUN = """
import logging
from millpond.ingest.telemetry.progress_bar import IngestProgress

class Clock:
    now = 0.0
    def __call__(self):
        return self.now

SETUP
clock = Clock()
log = logging.getLogger("millpond.ingest")
with IngestProgress(show=True, clock=clock, OPTIONS) as bar:
    for done in range(0, 10_001, 500):
        read = min(10_000, done + 2_000)
        bar.update(
            read=read, finished=done, cached=done // 2, embedded=done - done // 2, failed=done // 7_000,
            queues={"embed": (2, 2), "write": (1, 2)}, position=read * 100,
        )
        if done % 4_000 == 0:
            log.warning("left out record %d", done)
            log.info("not for this level")
        clock.now += 1.0
    END
log.warning("after the bar")
"""
END = "bar.finish(finished=10_000, cached=5_000, embedded=5_000, failed=1)"
CONFIG = "logging.basicConfig(format='%(levelname)s: %(message)s')"


def run_in_terminal(options, *, columns=120, setup=CONFIG, end=END):
    """The lines that a terminal shows at the end, and every state of the line with the bar."""
    code = RUN.replace("OPTIONS", options).replace("SETUP", setup).replace("END", end)
    leader, follower = open_terminal(columns)
    with subprocess.Popen([sys.executable, "-c", code], stdin=follower, stdout=follower, stderr=follower) as process:
        os.close(follower)
        output = read_all(leader)
    assert process.returncode == 0, output
    return screen(output), [state.rstrip() for state in output.split("\r") if "records in" in state]


def open_terminal(columns=120):
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    return leader, follower


def read_all(leader):
    """Everything written to a terminal until nobody has it open."""
    output = b""
    with os.fdopen(leader, "rb", buffering=0) as reader:
        while True:
            try:
                data = reader.read(1 << 16)
            except OSError:  # Linux's end of a terminal
                return output.decode()
            if not data:
                return output.decode()
            output += data


def screen(output):
    """The lines on a terminal after ``output``, which uses no control characters but carriage return and line feed."""
    lines, column = [""], 0
    for character in output:
        if character == "\r":
            column = 0
        elif character == "\n":
            lines.append("")
            column = 0
        else:
            lines[-1] = lines[-1][:column].ljust(column) + character + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


WARNINGS = ["left out record 0", "left out record 4000", "left out record 8000"]


@pytest.mark.parametrize(
    ("options", "state", "last"),
    [
        pytest.param(
            "total=10_000",
            r" 40%\|█+\D* *\| 4,000/10,000 records in 00:08, 500/s, 00:12 left, hits 50 %, embed 2/2, write 1/2",
            r"100%\|█+\| 10,000/10,000 records in 00:21, 476/s, hits 50 %, 1 failed",
            id="a list",
        ),
        pytest.param(
            "size=1_000_000",
            r" 40%\|█+\D* *\| 4,000 records in 00:08, 500/s, 00:12 left, hits 50 %, embed 2/2, write 1/2",
            r"100%\|█+\| 10,000 records in 00:21, 476/s, hits 50 %, 1 failed",
            id="a file",
        ),
        pytest.param(
            "",
            r"4,000 records in 00:08, 500/s, hits 50 %, embed 2/2, write 1/2",
            r"10,000 records in 00:21, 476/s, hits 50 %, 1 failed",
            id="a stream",
        ),
    ],
)
def test_the_bar_shows_rate_time_left_hits_and_queues_and_no_line_of_the_log_is_torn(options, state, last):
    lines, states = run_in_terminal(options)
    assert any(re.fullmatch(state, one) for one in states), states
    assert [line.removeprefix("WARNING: ") for line in lines[:3]] == WARNINGS
    assert re.fullmatch(last, lines[3]), lines
    assert lines[4:] == ["WARNING: after the bar", ""]


def test_without_a_handler_the_lines_of_the_log_are_not_torn_either():
    lines, _ = run_in_terminal("total=10_000", setup="")
    assert lines[:3] == WARNINGS and lines[4] == "after the bar"


@pytest.mark.parametrize("options", ["total=10_000", "size=1_000_000", ""], ids=["list", "file", "stream"])
def test_a_narrow_terminal_cuts_the_line_and_never_wraps_it(options):
    lines, states = run_in_terminal(options, columns=46)
    assert max(map(len, states)) <= 46
    assert lines[:4] == [*(f"WARNING: {text}" for text in WARNINGS), lines[3]] and "10,000" in lines[3]


def test_a_run_that_stops_leaves_its_last_state():
    lines, _ = run_in_terminal("total=20_000", end="")
    assert re.fullmatch(r" 50%\|.*\| 10,000/20,000 records in 00:20, .*write 1/2", lines[3])


@pytest.mark.parametrize("options", ["total=0", "size=0"], ids=["no records", "an empty file"])
def test_an_empty_source_has_a_bar_too(options):
    end = "bar.finish(finished=0)"
    lines, _ = run_in_terminal(options, end=end)
    assert lines[3].startswith(("0 records in", "0/0 records in"))


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_where_nobody_sees_it_nothing_is_drawn_and_the_log_is_left_alone(capsys):
    handlers = [(handler, getattr(handler, "stream", None)) for handler in logging.getLogger().handlers]
    last_resort = logging.lastResort
    with IngestProgress(show=True, total=10) as bar:
        bar.update(read=10, finished=5)
        assert logging.lastResort is last_resort
        bar.finish(finished=10)
    assert [(handler, getattr(handler, "stream", None)) for handler in logging.getLogger().handlers] == handlers
    assert capsys.readouterr().err == ""


def test_a_handler_keeps_its_level_and_gets_its_stream_back(monkeypatch):
    leader, follower = open_terminal()
    logger = logging.getLogger("millpond")
    with os.fdopen(leader, "rb"), os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        handler = logging.StreamHandler(terminal)
        handler.setLevel(logging.ERROR)
        logger.addHandler(handler)
        last_resort = logging.lastResort
        try:
            with IngestProgress(show=True, total=10):
                assert handler.stream is not terminal and handler.level == logging.ERROR
                assert logging.lastResort is not last_resort
        finally:
            logger.removeHandler(handler)
        assert handler.stream is terminal and logging.lastResort is last_resort


def test_it_is_drawn_at_most_five_times_a_second(monkeypatch):
    leader, follower = open_terminal()
    clock = Clock()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with IngestProgress(show=True, clock=clock) as bar:
            for done in range(2000):
                clock.now += 0.001
                bar.update(read=done, finished=done)
    assert 9 <= read_all(leader).count("records in") <= 13


def test_a_bar_that_nobody_updates_shows_its_time_and_what_the_engine_computes(monkeypatch):
    monkeypatch.setattr(progress_bar, "_TICK", 0.001)
    leader, follower = open_terminal()
    clock = Clock()
    drawn = threading.Event()

    def computed():
        if clock.now == 90:
            drawn.set()
        return int(clock.now * 10)

    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with IngestProgress(show=True, total=5000, computed=computed, clock=clock) as bar:
            clock.now = 30
            bar.update(read=4096, finished=100, embedded=100)
            clock.now = 90
            assert drawn.wait(30)
        assert not [thread for thread in threading.enumerate() if thread.name == "millpond-progress"]
    output = read_all(leader)
    assert "100/5,000 records in 00:30, 3.3/s" in output and ", 200 computed" in output
    assert "100/5,000 records in 01:30, 0.0/s" in output and ", 800 computed" in output
