"""Ingestion on a local Ray cluster of two workers: what it writes and reports is what a local run does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from unittest import mock

import numpy as np
import pytest
from tests.ingest.crashes import small
from tests.ingest.shared_sink import SharedSink
from tests.tiny import write_checkpoint

from millpond import Engine
from millpond.errors import FingerprintMismatchError, InvalidRequestError, ModelLoadError
from millpond.ingest import Chunking, Record, ingest, point_id, read

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")
from millpond.ingest.ray import DatasetReader, embed_dataset, ingest_dataset  # noqa: E402

pytestmark = [
    pytest.mark.contract,
    pytest.mark.enable_socket,  # Ray looks for this machine's address
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own
]
OPTIONS = {"device": "cpu", "dtype": "float32", "hf_overrides": {"is_matryoshka": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def cluster():
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=3,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
        yield
        ray.shutdown()


@pytest.fixture(autouse=True)
def _small_batches():
    with small(32):
        yield


@pytest.fixture
def distributed(cluster, model):
    return partial(ingest_dataset, model=model, engine_options=OPTIONS, show_progress=False)


def corpus():
    """Lines with duplicates, near and far, blank and long texts, ones that no database takes, and no records."""
    lines = [{"id": f"r{i}", "text": f"text {i} " + "water " * (i % 7), "n": i} for i in range(300)]
    lines[10] = {"id": "r9", "text": "the same id in one batch"}
    lines[250] = {"id": "r20", "text": "the same id in another batch", "metadata": {"late": True}}
    lines[40] = {"id": "r40", "text": " \n"}
    lines[251] = {"id": "r21", "text": ""}  # blank now, but not before
    lines[60] = {"id": "r60", "text": "a long text " * 400}
    lines[70] = {"text": "no id: 池 é"}
    lines[80] = {"id": "r80", "text": "unstorable"}
    lines[90] = {"id": "r90", "text": "refused"}
    lines[100] = {"id": 100, "text": 7}
    return "\n".join([*map(json.dumps, lines), "no json", ""])


def compare(rows, wanted):
    """Ids and payloads are equal, vectors to 1e-6."""
    assert rows.keys() == wanted.keys()
    for row_id, (*payload, vectors) in wanted.items():
        assert list(rows[row_id][:4]) == payload
        for width, vector in vectors.items():
            np.testing.assert_allclose(rows[row_id][4][width], vector, atol=1e-6)


def counts(report, *others):
    """The counts that do not depend on time, on the order, or on what was computed twice."""
    left_out = {"seconds", "truncated_ids", *others}
    return {name: value for name, value in asdict(report).items() if name not in left_out}


@pytest.mark.slow
def test_a_run_with_a_killed_worker_writes_and_reports_what_a_local_run_does(distributed, engine, tmp_path):
    source = tmp_path / "corpus.jsonl"
    source.write_text(corpus())
    for name in ("kill", "busy"):
        (tmp_path / name).touch()
    widths = [16, 48]
    local = SharedSink(tmp_path / "local.db", dimensions=widths, refuse="refused")
    wanted = ingest(source, engine=engine, sink=local, journal=tmp_path / "local", show_progress=False)
    faults = {"refuse": "refused", "kill": tmp_path / "kill", "busy": tmp_path / "busy"}
    make_sink = partial(SharedSink, tmp_path / "ray.db", dimensions=widths, **faults)
    run = partial(distributed, source, sink=make_sink, cache=tmp_path / "cache", workers=2)
    report = run(journal=tmp_path / "ray", verify=True, sync=True)
    assert not (tmp_path / "kill").exists() and not (tmp_path / "busy").exists()
    assert report.retried == 1 and report.verification is not None and report.verification.good
    # The batch of the killed worker was in the cache when it was embedded again.
    assert report.cached + report.embedded == wanted.cached + wanted.embedded
    others = ("cached", "embedded", "retried", "verification")
    assert counts(report, *others) == counts(wanted, *others)
    assert sorted(report.truncated_ids) == sorted(wanted.truncated_ids)
    sink = make_sink()
    compare(sink.rows, local.rows)
    assert os.getpid() not in sink.writers
    dead = [read(tmp_path / f"{name}.dead.jsonl") for name in ("ray", "local")]
    assert sorted(map(repr, dead[0])) == sorted(map(repr, dead[1]))

    # Once more: only what was left out is tried again, and the second text of each doubled id is written again.
    again = run(journal=tmp_path / "ray")
    wanted = ingest(source, engine=engine, sink=local, journal=tmp_path / "local", show_progress=False)
    assert counts(again, "cached", "embedded") == counts(wanted, "cached", "embedded")
    assert again.unchanged > 280
    compare(sink.rows, local.rows)


def test_a_finished_run_starts_no_worker_again(distributed, engine, tmp_path):
    sink = SharedSink(tmp_path / "rows.db")
    records = [Record(f"r{i}", f"text {i}") for i in range(40)]
    journal = tmp_path / "journal"
    ingest(records, engine=engine, sink=sink, journal=journal, show_progress=False)
    before = sink.writers
    options = {**OPTIONS, "max_batch_tokens": 64}  # changes no vector: the same fingerprint
    with mock.patch("millpond.ingest.ray.pool.WorkerPool.call", side_effect=AssertionError("started")):
        make_sink = partial(SharedSink, tmp_path / "rows.db")
        report = distributed(records, engine_options=options, sink=make_sink, journal=journal, workers=2)
    assert (report.unchanged, report.written, sink.writers) == (40, 0, before)


@pytest.mark.slow
def test_a_text_that_kills_its_workers_is_left_out_and_the_others_are_written(distributed, tmp_path):
    records = [Record(f"r{i}", f"text {i}") for i in range(6)]
    make_sink = partial(SharedSink, tmp_path / "rows.db", kill_text="text 4")
    with small(3):
        report = distributed(records, sink=make_sink, journal=tmp_path / "journal", workers=1)
    assert (report.failed, report.written) == (1, 5)
    assert {row[0] for row in SharedSink(tmp_path / "rows.db").rows.values()} == {"r0", "r1", "r2", "r3", "r5"}
    [letter] = read(tmp_path / "journal.dead.jsonl")
    assert letter.id == "r4"


@pytest.mark.slow
def test_the_last_text_of_an_id_stays_though_an_earlier_one_takes_longer(distributed, tmp_path):
    make_sink = partial(SharedSink, tmp_path / "rows.db", slow_text="the first text")
    sink = make_sink()

    def records():
        for number in range(100_000):  # until both workers are there
            yield Record(f"filler {number}", f"text {number}")
            if number % 32 == 31 and len(sink.writers) == 2:
                break
        for text in ("the first text", "the second text", " "):
            for record_id in ("a", "b") if text != " " else ("b",):
                yield Record(record_id, text)
            for number in range(32 if text == " " else 30):
                yield Record(f"{text} {number}", f"text {number}")

    assert distributed(records(), sink=make_sink, workers=2).failed == 0
    texts = {row[0]: row[2] for row in sink.rows.values()}
    assert texts["a"] == "the second text" and "b" not in texts


@pytest.mark.slow
def test_a_ray_dataset_is_read_in_its_order_and_cut_into_chunks(distributed, engine, tmp_path):
    pytest.importorskip("semantic_text_splitter")
    rows = [{"key": f"r{i}", "body": f"text {i}. " * (40 if i % 20 == 0 else 1), "n": i} for i in range(120)]
    rows[100]["key"] = "r7"
    rows[101]["body"] = None
    local, journal = SharedSink(tmp_path / "local.db"), tmp_path / "journal"
    chunking = Chunking(max_tokens=20, overlap=4)
    source = read(rows, id_column="key", text_column="body")
    wanted = ingest(source, engine=engine, sink=local, chunking=chunking, show_progress=False)
    dataset = ray.data.from_items(rows, override_num_blocks=7).rename_columns({"key": "id", "body": "text"})
    make_sink = partial(SharedSink, tmp_path / "ray.db")
    run = partial(distributed, sink=make_sink, journal=journal, chunking=chunking, workers=2)
    report = run(dataset)
    assert counts(report) == counts(wanted) and report.failed == 1 and report.written > 150
    compare(SharedSink(tmp_path / "ray.db").rows, local.rows)
    again = run(DatasetReader(dataset))  # both texts of one id are in one batch now: the last one is written
    assert (again.unchanged, again.duplicates, again.written) == (117, 1, 16)


@pytest.mark.slow
def test_a_database_of_one_process_is_written_by_the_driver(distributed, engine, tmp_path):
    pytest.importorskip("millpond_qdrant")
    from millpond.ingest import open_sink

    source = tmp_path / "corpus.jsonl"
    source.write_text(corpus())
    opened = {
        name: partial(open_sink, f"qdrant+path:{tmp_path / name}#docs", dimensions=[16, 48])
        for name in ("ray", "local")
    }
    journal = tmp_path / "ray.journal"
    report = distributed(source, sink=opened["ray"], journal=journal, verify=True, workers=2)
    options = {"journal": tmp_path / "local.journal", "verify": True, "show_progress": False}
    with opened["local"]() as sink:
        wanted = ingest(source, engine=engine, sink=sink, **options)
    assert counts(report) == counts(wanted)
    stored = {}
    for name in ("ray", "local"):
        sink = opened[name]()
        rows = dict(sink.scan())
        stored[name] = {
            row_id: (rows[row_id], row.content_hash, {width: row.vectors[width] for width in (16, 48)})
            for row_id, row in sink.fetch(list(rows), widths=[16, 48]).items()
        }
        sink.close()
    assert stored["ray"].keys() == stored["local"].keys() and len(stored["ray"]) > 290
    for row_id, (record_id, digest, vectors) in stored["local"].items():
        assert stored["ray"][row_id][:2] == (record_id, digest)
        for width, vector in vectors.items():
            np.testing.assert_allclose(stored["ray"][row_id][2][width], vector, atol=1e-6)


@pytest.mark.slow
def test_a_dataset_is_embedded_as_the_engine_does(cluster, model, engine, tmp_path):
    rows = [{"key": f"r{i % 50}", "body": f"text {i}", "lang": "en", "size": i} for i in range(120)]
    rows[7]["body"], rows[8]["key"] = "  ", ""
    rows[9]["key"] = None
    made = embed_dataset(
        ray.data.from_items(rows),
        model=model,
        engine_options=OPTIONS,
        dimensions=[16, 48],
        id_column="key",
        text_column="body",
        metadata_columns=["lang"],
        cache=tmp_path / "cache",
        keep_failed=True,
        batch_size=64,
    )
    assert made.schema().names == "id point_id text metadata content_hash chunk d16 d48 error".split()
    table = {row["text"]: row for row in made.take_all()}
    assert len(table) == 119 and "  " not in table
    failed = table.pop("text 8", None) or next(row for row in table.values() if row["error"])
    assert failed["error"].startswith("id is empty") and failed["d48"] is None
    table = {text: row for text, row in table.items() if row["error"] is None}
    assert len(table) == 118
    texts = list(table)
    for width in (16, 48):
        wanted = engine.embed(texts, role="document", dimensions=width, normalize=True).embeddings
        np.testing.assert_allclose([table[text][f"d{width}"] for text in texts], wanted, atol=1e-6)
    row = table["text 60"]
    assert (row["id"], row["point_id"], row["metadata"]) == ("r10", point_id("r10"), '{"lang": "en"}')
    assert table["text 9"]["id"] == table["text 9"]["content_hash"]
    with Engine(model, cache=tmp_path / "cache", **OPTIONS) as cached:
        assert cached.embed(texts, role="document", normalize=False).cached.all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "no/such-model"}, ModelLoadError, "no/such-model"),
        ({"engine_options": {"dtyp": "float16"}}, InvalidRequestError, "'dtyp', which is not an argument of Engine"),
        ({"engine_options": {"cache": "x"}}, InvalidRequestError, "pass its path as cache="),
        ({"sink": "qdrant:nothing"}, InvalidRequestError, "is no URL of a collection"),
        ({"dimensions": [16]}, TypeError, "unexpected keyword argument 'dimensions'"),
        ({"workers": 0}, InvalidRequestError, "workers=0 must be an int from 1"),
        ({"workers": 99}, InvalidRequestError, "workers=99 with num_cpus=1 and num_gpus=0 each do not fit"),
        ({"num_gpus": 0.5}, InvalidRequestError, "num_gpus=0.5 each do not fit the cluster, which has 3 CPUs and 0"),
        ({"num_cpus": -1}, InvalidRequestError, "num_cpus=-1 must be a number from 0"),
        ({"source": "no.jsonl"}, InvalidRequestError, "there is no file or folder at 'no.jsonl'"),
    ],
    ids=["model", "option", "cache", "url", "widths", "none", "many", "gpu", "cpu", "source"],
)
def test_what_is_wrong_is_said_before_a_worker_starts(distributed, tmp_path, change, error, message):
    arguments = {"source": [Record("a", "text")], "sink": partial(SharedSink, tmp_path / "rows.db")} | change
    with (
        mock.patch("millpond.ingest.ray.pool.WorkerPool.call", side_effect=AssertionError("started")),
        pytest.raises(error, match=message),
    ):
        distributed(arguments.pop("source"), **arguments)


def test_a_collection_of_another_model_is_refused_before_a_worker_starts(distributed, engine, tmp_path):
    other = write_checkpoint(tmp_path / "other", seed=1)
    ingest([Record("a", "text")], engine=engine, sink=SharedSink(tmp_path / "rows.db"), show_progress=False)
    with (
        mock.patch("millpond.ingest.ray.pool.WorkerPool.call", side_effect=AssertionError("started")),
        pytest.raises(FingerprintMismatchError, match="another model"),
    ):
        distributed([Record("a", "text")], model=other, sink=partial(SharedSink, tmp_path / "rows.db"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"concurrency": (3, 2)}, r"concurrency=\(3, 2\) must be an int from 1"),
        ({"batch_size": 0}, "batch_size=0 must be an int from 1"),
        ({"dimensions": [1000]}, "1000"),
        ({"id_column": "text"}, "id_column and text_column are both 'text'"),
    ],
    ids=["concurrency", "batch", "width", "columns"],
)
def test_arguments_of_a_dataset_are_checked_at_once(cluster, model, change, message):
    with pytest.raises(InvalidRequestError, match=message):
        embed_dataset(ray.data.from_items([{"id": "a", "text": "b"}]), model=model, **change)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_listens_is_refused_at_once(scheme):
    from millpond.ingest.ray import cluster

    with socket.socket() as unused:  # bound, and not listening
        unused.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{unused.getsockname()[1]}"
        with (
            mock.patch.object(cluster.ray, "is_initialized", return_value=False),
            mock.patch.object(cluster.ray, "init", side_effect=AssertionError("Ray would try for minutes")),
            pytest.raises(InvalidRequestError, match="there is no Ray cluster that answers .*refused"),
            cluster.connected(address),
        ):
            pass


@pytest.mark.slow
def test_the_command_ends_by_sigterm_with_143_and_goes_on(model, tmp_path):
    pytest.importorskip("millpond_qdrant")

    journal = tmp_path / "journal"
    lines = [
        json.dumps({"id": f"r{i}", "text": f"text {i}"}) + "\n" for i in range(13_000)
    ]  # more batches than are on their way
    command = [sys.executable, "-m", "millpond", "ingest", "-", "--model", str(model), "--engine", "device=cpu"]
    command += ["--to", f"qdrant+path:{tmp_path / 'db'}#docs", "--journal", str(journal)]
    command += ["--ray", "local", "--ray-workers", "2", "--ray-cpus", "0.5"]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        first.stdin.writelines(lines)
        first.stdin.flush()
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and first.poll() is None:
            time.sleep(0.3)
            if journal.exists() and _marks(journal):
                break
        first.send_signal(signal.SIGTERM)
        assert first.wait(90) == 143, first.stderr.read()
    finally:
        first.kill()
        for pipe in (first.stdin, first.stdout, first.stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    written = _marks(journal)
    assert 0 < written <= 13_000
    second = subprocess.run(command, input="".join(lines), capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    report = json.loads(second.stdout)
    assert (report["unchanged"], report["written"]) == (written, 13_000 - written)


def _marks(journal):
    """How many records the journal knows."""
    with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True, timeout=30)) as database:
        try:
            return database.execute("SELECT COUNT(*) FROM records WHERE digest != x''").fetchone()[0]
        except sqlite3.OperationalError:  # not created yet
            return 0
