"""What is told of a run: its trace, the bar in a terminal, and the page of its report."""

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
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from unittest import mock

import numpy as np
import pytest

from millpond.errors import InvalidRequestError, MissingExtraError
from millpond.ingest import IngestReport, RunTrace
from millpond.ingest.pages import charts
from millpond.ingest.pages.charts import bytes_text, seconds_text
from millpond.ingest.pages.html_page import write_page
from millpond.ingest.pages.report_page import check_report, write_report
from millpond.ingest.sources.compression import SourcePosition
from millpond.ingest.telemetry.progress_bar import IngestProgress


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_stage_sums_its_calls_and_counts_one_that_raises():
    clock = Clock()
    trace = RunTrace(clock=clock)
    for seconds in (1.0, 2.0, 4.0):
        with trace.stage("write", rows=10):
            clock.now += seconds
    with pytest.raises(ValueError, match="refused"):
        _refused_write(trace, clock)
    trace.note_stage("read", 0.5, 7)
    write = trace.stages["write"]
    assert list(trace.stages) == ["write", "read"]
    assert (write.calls, write.rows, write.seconds, write.longest) == (4, 33, 15.0, 8.0)
    assert write.p50 == pytest.approx(2, rel=0.05) and write.p99 == 8.0
    assert write.rows_per_call == pytest.approx(10, rel=0.05)


def _refused_write(trace, clock):
    with trace.stage("write") as call:
        call.rows = 3
        clock.now += 8.0
        raise ValueError("refused")


def test_samples_are_thinned_and_span_the_whole_night():
    clock = Clock()
    trace = RunTrace(clock=clock)
    for step in range(100_000):  # 10,000 s
        trace.sample({"read": step}, {"write": step % 3})
        clock.now += 0.1
    trace.sample({"read": 100_000}, last=True)
    samples = trace.samples
    seconds = np.array([one.seconds for one in samples])
    assert 900 <= len(samples) <= 2001
    assert seconds[0] == 0 and seconds[-1] == pytest.approx(10_000) and (np.diff(seconds) > 0).all()
    assert np.diff(seconds[:-1]).max() < 60
    assert all(one.counts["read"] == round(one.seconds * 10) for one in samples)


def test_the_sample_of_vectors_is_uniform_over_the_run_and_repeats_with_its_seed():
    means = []
    for seed in range(20):
        trace = RunTrace(vectors=50, seed=seed)
        again = RunTrace(vectors=50, seed=seed)
        for start in range(0, 5000, 250):
            rows = np.arange(start, start + 250, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
            trace.note_vectors(rows)
            again.note_vectors(rows)
        kept = trace.vectors
        assert kept.shape == (50, 3) and len(set(kept[:, 0].tolist())) == 50
        np.testing.assert_array_equal(kept, again.vectors)
        means.append(kept[:, 0].mean())
    # Mean 2499.5; the standard error over 40 runs of 50 is 32.
    assert abs(np.mean(means) - 2499.5) < 180


def test_reasons_and_failures_are_bounded():
    trace = RunTrace()
    for number in range(100):
        trace.note_retry(f"reason {number}")
        trace.note_retry("reason 0")
        trace.note_failure(f"record {number}", "x" * 100_000)
    assert sum(trace.retries.values()) == 200 and trace.retries["reason 0"] == 101
    assert len(trace.retries) == 21 and trace.retries["other reasons"] == 80
    assert [where for where, _ in trace.failures] == [f"record {number}" for number in range(20)]
    assert all(len(reason) < 600 for _, reason in trace.failures)


def test_threads_lose_no_count():
    trace = RunTrace(vectors=64)

    def work():
        for _ in range(100):
            with trace.stage("write", rows=2):
                pass
            trace.note_texts([3, 4])
            trace.note_vectors(np.ones((4, 2), np.float32))
            trace.note_retry("503")
            trace.sample({"read": 1})

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(work) for _ in range(8)]:
            done.result()
    assert (trace.stages["write"].calls, trace.stages["write"].rows) == (800, 1600)
    assert trace.chars.count == 1600 and trace.chars.total == 5600
    assert trace.retries == {"503": 800} and trace.vectors.shape == (64, 2)


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
        ({"total": 10_000}, r" 42%\|#+\d? *\| 4,000/10,000 records in 00:00, 00:00 left", "100%|#"),
        ({"position": File()}, r" 42%\|#+\d? *\| 4,000 records in 00:00, 00:00 left", "100%|#"),
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


CHARTS = ["Throughput", "Queue depths", "Length of the texts", "Recall by width"]


def a_trace(rows=4000, width=32):
    clock = Clock()
    trace = RunTrace(clock=clock)
    random = np.random.default_rng(0)
    for done in range(100, rows + 1, 100):
        with trace.stage("read", rows=100):
            clock.now += 0.01
        with trace.stage("write", rows=100):
            clock.now += 0.2
        trace.note_texts(random.integers(1, 4000, 100))
        trace.note_vectors(random.normal(size=(100, width)).astype(np.float32))
        counts = {"read": done, "embedded": done // 2, "cached": done // 2, "written": done}
        trace.sample(counts, {"embed": done // 100 % 3, "write": 1})
    trace.note_failure("docs.jsonl:7", "<script>alert('no')</script> & so on")
    trace.note_retry("503 from postgresql://me:hunter2@db/x")
    return trace


def a_report(**counts):
    values = {"read": 4001, "cached": 2000, "embedded": 2000, "failed": 1, "written": 4000, "seconds": 8.4}
    return IngestReport(duplicates=0, **(values | counts))


SETTINGS = {"source": "docs <1>.jsonl", "to": "qdrant+path:x#docs", "model": "m", "dimensions": [16, 32]}


class Page(HTMLParser):
    """The text of a page by tag, and everything that would be loaded."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.loads, self.texts, self._open = [], {}, []
        self.feed(self.source)

    def handle_starttag(self, tag, attributes):
        names = dict(attributes)
        self.loads += [
            names[name] for name in ("src", "href", "xlink:href") if not names.get(name, "#").startswith("#")
        ]
        self.loads += [tag] if tag in ("script", "link", "iframe", "img") else []
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if self._open and data.strip():
            self.texts.setdefault(self._open[-1], []).append(data.strip())


def written(tmp_path, report=None, trace=None, settings=SETTINGS, **options):
    path = tmp_path / "report.html"
    write_report(path, a_report() if report is None else report, trace or a_trace(), settings, **options)
    return Page(path)


def test_the_page_has_all_charts_counts_settings_and_versions(whole):
    page = whole
    assert page.texts["h2"][:4] == CHARTS
    assert page.source.count("<svg") == 4
    assert {"rows written", "records a second", "from the cache"} <= set(page.texts["dt"])
    assert page.texts["dd"][0] == "4,000" and "50%" in page.texts["dd"]
    cells = page.texts["td"]
    assert {"docs <1>.jsonl", "16, 32", "4,001", "<script>alert('no')</script> & so on"} <= set(cells)
    assert {"processor", "numpy", "python", "docs.jsonl:7"} <= set(page.texts["th"])


def test_the_page_loads_nothing_and_is_the_same_for_the_same_run(tmp_path, whole):
    page = whole
    assert page.loads == []
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page.source).replace("http-equiv", "")
    assert re.search(r"url\((?!#)", page.source) is None
    again = written(tmp_path, stored=[16, 32])
    assert charts_of(page) == charts_of(again)
    for svg in charts_of(page):
        ElementTree.fromstring(svg)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return written(tmp_path_factory.mktemp("page"), stored=[16, 32])


def charts_of(page):
    return re.findall(r"<svg.*?</svg>", page.source, flags=re.DOTALL)


def test_secrets_are_not_shown(tmp_path):
    settings = {
        "to": "pgvector+postgresql://user:hunter2@host/db?api_key=hunter2&ssl=on#docs",
        "QDRANT_API_KEY": "hunter2",
        "hf_overrides": {"auth_token": "hunter2", "width": 3},
    }
    page = written(tmp_path, settings=settings)
    assert "hunter2" not in page.source
    assert "user:***@host/db?api_key=***&amp;ssl=on#docs" in page.source and "&quot;width&quot;: 3" in page.source


@pytest.mark.contract
@pytest.mark.parametrize("rows", [0, 12])
def test_a_run_of_few_rows_has_a_page_too(tmp_path, rows):
    trace = RunTrace()
    if rows:
        trace.note_texts([1] * rows)
        trace.note_vectors(np.eye(rows, 12, dtype=np.float32))
        trace.note_stage("write", 0.0, rows)
    trace.sample({"read": rows}, {}, last=True)
    report = a_report(read=rows, embedded=rows, cached=0, failed=0, written=rows, seconds=0.0)
    page = written(tmp_path, report, trace, {})
    assert page.texts["h2"][:4] == CHARTS
    assert "nan" not in re.sub(r"<style>.*?</style>", "", page.source, flags=re.DOTALL).lower()


def test_a_run_that_stopped_says_why_and_shows_the_counts_so_far(tmp_path):
    path = tmp_path / "report.html"
    write_report(path, None, a_trace(), SETTINGS, stopped="SIGTERM; the same command goes on")
    page = Page(path)
    assert "SIGTERM; the same command goes on" in page.texts["p"]
    assert page.texts["dd"][0] == "4,000"


def test_a_failed_write_leaves_the_earlier_page(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("earlier")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_page(path, "new")
    assert path.read_text() == "earlier" and [one.name for one in tmp_path.iterdir()] == ["report.html"]


def test_a_path_that_cannot_be_written_is_refused_before_the_run(tmp_path, monkeypatch):
    with pytest.raises(InvalidRequestError, match="is a folder; name a file in it"):
        check_report(tmp_path)
    with pytest.raises(InvalidRequestError, match="there is no folder"):
        check_report(tmp_path / "missing" / "report.html")
    monkeypatch.chdir(tmp_path)
    check_report("report.html")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InvalidRequestError, match="cannot be written to"):
        check_report("report.html")


def test_only_a_page_is_replaced(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_bytes(b"<!DOCTYPE html>\n<p>")
    check_report(path)
    for content in (b'{"id": "a"}\n', b"\x00\xff"):
        path.write_bytes(content)
        with pytest.raises(InvalidRequestError, match=r"is not an HTML page, so it is not replaced; .*docs\.html"):
            check_report(path)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(charts, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'pip install "millpond\[report\]"'):
        check_report(tmp_path / "report.html")


def test_quantities_are_written_for_a_reader():
    texts = [seconds_text(value) for value in (3e-6, 0.012, 1.5, 119, 121, 9000, float("nan"))]
    assert texts == ["3 µs", "12 ms", "1.5 s", "119 s", "2.02 min", "2.5 h", "-"]
    assert [bytes_text(value) for value in (48, 1536, 3.07e9, 5e12)] == ["48 B", "1.54 kB", "3.07 GB", "5 TB"]


def test_a_terminal_that_does_not_know_its_size_gets_a_bar(terminal):
    fcntl.ioctl(terminal.follower, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    draw(terminal, {"total": 10_000}, 4000)
    assert "4,000/10,000 records" in states(terminal)[-2]
