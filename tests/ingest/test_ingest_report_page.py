"""The page about a run: what it says, what it hides, that it loads nothing, and that it is written at once."""

import os
import re
import shutil
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest

from millpond.errors import InvalidRequestError, MissingExtraError
from millpond.ingest import IngestReport, RunTrace
from millpond.ingest.pages import charts
from millpond.ingest.pages.charts import bytes_text, seconds_text
from millpond.ingest.pages.html_page import write_page
from millpond.ingest.pages.report_page import check_report, write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHARTS = ["Throughput", "Queue depths", "Length of the texts", "Recall by width"]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


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


SETTINGS = {
    "source": "docs <1>.jsonl",
    "to": "qdrant+path:x#docs",
    "model": "m",
    "dimensions": [16, 32],
    "revision": None,
}


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
    assert {"processor", "torch", "numpy", "python", "docs.jsonl:7"} <= set(page.texts["th"])


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


@pytest.mark.parametrize(
    "content", [b'{"id": "a"}\n', b"\x00\xff", b"<!DOCTYPE html>\n<p>"], ids=["jsonl", "binary", "page"]
)
def test_only_a_page_is_replaced(tmp_path, content):
    path = tmp_path / "docs.jsonl"
    path.write_bytes(content)
    if content.startswith(b"<!"):
        check_report(path)
        return
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


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1400, "dark")])
def test_a_browser_shows_it_at_any_width_without_a_request(tmp_path, width, scheme):
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    written(tmp_path, stored=[16, 32])
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        requests, messages = [], []
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: messages.append(message.text))
        page.goto((tmp_path / "report.html").as_uri())
        assert len(requests) == 1 and messages == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        boxes = page.evaluate("[...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect().width)")
        assert len(boxes) == 4 and min(boxes) > 300
        ink = page.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
        assert (sum(map(int, re.findall(r"\d+", ink)[:3])) > 400) == (scheme == "dark")
        browser.close()
