"""A disk that is full, or fails, under each file of a run: what it says, and that the run after it loses nothing."""

import json
import re
import subprocess
import sys
import textwrap

import pytest
from tests.tiny import write_checkpoint

from millpond.ingest import open_sink, point_id

resource = pytest.importorskip("resource")
pytestmark = pytest.mark.contract

ROWS = 600
DATABASES = {
    "qdrant": ("millpond_qdrant", "qdrant+path:{}/qdrant#docs"),
    "milvus": ("millpond_milvus", "milvus+file:{}/m.db#docs"),
}

# A file that grows beyond the limit fails with EFBIG, as one does with ENOSPC on a full disk. The limit is for all
# files of the process, so those of one kind are made to reach it first: the others are small, or exist already.
_RUN = """
    import json, resource, signal, sys
    from dataclasses import asdict
    from millpond import Engine
    from millpond.ingest import Record, ingest, open_sink
    model, url, folder, limit, cached, rows = sys.argv[1:7]
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    cache = f"{folder}/cache.db" if cached == "yes" else None
    class Discard:
        dimensions = None
        def prepare(self, spec): ...
        def write(self, batch): ...
        def close(self): ...

    sink = Discard()
    try:
        if url != "discard":
            sink = open_sink(url, dimensions=None)
        with Engine(model, dtype="float32", device="cpu", cache=cache) as engine:
            sink.prepare(engine.spec)
            if int(limit):
                resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
            records = (Record(f"r{n}", f"text {n} " + "stone " * 40) for n in range(int(rows)))
            report = ingest(records, engine=engine, sink=sink, journal=f"{folder}/journal", show_progress=False)
            print(json.dumps({"report": asdict(report)}))
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
    try:
        sink.close()
    except Exception as error:
        print("closing:", error, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", "bert")


def attempt(model, url, folder, *, limit=0, cached=True):
    """A run in a new process; returns its report, or its error."""
    words = [str(model), url.format(folder), str(folder), str(limit), "yes" if cached else "no", str(ROWS)]
    program = [sys.executable, "-c", textwrap.dedent(_RUN), *words]
    done = subprocess.run(program, capture_output=True, text=True, timeout=250)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, (done.returncode, done.stderr[-3000:])
    return json.loads(lines[-1])


def check(url, folder):
    """Every row is there once."""
    sink = open_sink(url.format(folder), dimensions=None)
    try:
        ids = [row_id for row_id, _ in sink.scan()]
        assert len(ids) == len(set(ids)) == sink.count() == ROWS
        assert set(ids) == {point_id(f"r{n}") for n in range(ROWS)}
    finally:
        sink.close()


@pytest.fixture(params=sorted(DATABASES))
def url(request):
    module, url = DATABASES[request.param]
    pytest.importorskip(module)
    return url


@pytest.mark.slow
@pytest.mark.parametrize("limit", [60_000, 130_000, 250_000])
def test_a_full_disk_stops_or_is_reported_and_the_next_run_completes(model, url, tmp_path, limit):
    """Whichever file reaches the limit first: the journal, the cache or the database."""
    first = attempt(model, url, tmp_path, limit=limit)
    if "error" in first:
        assert re.match("(Sink(Rejected|Unavailable)?|Journal|CacheFile)Error:", first["error"])
    again = attempt(model, url, tmp_path)
    assert again["report"]["failed"] == 0 and again["report"]["uncached"] == 0, again
    check(url, tmp_path)


def test_a_full_disk_under_the_cache_is_reported_and_every_row_is_written(model, tmp_path):
    """The vectors take more room than the marks, so the cache reaches the limit, and the journal does not."""
    report = attempt(model, "discard", tmp_path, limit=150_000)["report"]
    assert report["written"] == report["embedded"] == ROWS
    assert report["uncached"] > 0 and "cache.db" in report["cache_error"]
    report = attempt(model, "discard", tmp_path)["report"]
    assert (report["cached"], report["uncached"], report["written"]) == (ROWS, 0, 0)


def test_a_full_disk_under_the_journal_stops_the_run(model, tmp_path):
    error = attempt(model, "discard", tmp_path, limit=20_000, cached=False)["error"]
    assert error.startswith(f"JournalError: the journal {tmp_path}/journal cannot") and "space" in error
    report = attempt(model, "discard", tmp_path)["report"]
    assert report["unchanged"] + report["written"] == ROWS
