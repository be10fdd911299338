"""ingest: a run from a source to a sink, and every way it can stop. The engine is real, the sink a dict."""

import itertools
import re
import threading
from concurrent.futures import Future
from dataclasses import replace
from datetime import date
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tests.ingest.crashes import small, some
from tests.tiny import Layout, write_checkpoint

from millpond import AsyncEngine, Engine
from millpond.errors import EngineOverloadedError, InvalidDimensionsError, InvalidRequestError, MillpondError
from millpond.ingest import Record, Rejected, ingest, point_id


class DictSink:
    """Stores rows in a dict by id."""

    def __init__(self, dimensions=None, refuse=()):
        self.dimensions = dimensions
        self.refuse = refuse
        self.prepared = 0
        self.writes = []  # rows of each write
        self.rows = {}

    def prepare(self, spec):
        self.prepared += 1

    def check(self, record):
        if record.text in self.refuse:
            raise InvalidRequestError("refused by the sink")

    def write(self, batch):
        self.writes.append(len(batch))
        for index, (record, point) in enumerate(zip(batch.records, batch.ids, strict=True)):
            self.rows[point] = (record, {width: rows[index] for width, rows in batch.vectors.items()})

    def close(self):
        raise AssertionError("ingest leaves the sink open")

    @property
    def texts(self):
        return {record.id: record.text for record, _ in self.rows.values()}


class Around:
    """The real engine with some attributes replaced."""

    def __init__(self, engine, **changes):
        self.spec, self.tasks, self.submit = engine.spec, engine.tasks, engine.submit
        vars(self).update(changes)


@pytest.fixture
def engine(engine_of):
    return engine_of("bert", hf_overrides={"is_matryoshka": True})


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name == "millpond-writer"]


def run(records, engine, sink, **options):
    return ingest(records, engine=engine, sink=sink, show_progress=False, **options)


def test_rows_are_the_engines_own_at_every_width(engine):
    sink = DictSink([16, 48, 8])
    report = run(some(10), engine, sink)
    assert (report.read, report.embedded, report.written) == (10, 10, 10)
    assert report.cached == report.failed == report.duplicates == report.retried == 0 and report.seconds > 0
    for width in (8, 16, 48):
        wanted = engine.embed([r.text for r in some(10)], role="document", dimensions=width, normalize=True).embeddings
        for record, row in zip(some(10), wanted, strict=True):
            stored, vectors = sink.rows[point_id(record.id)]
            assert stored == record and sorted(vectors) == [8, 16, 48]
            np.testing.assert_allclose(vectors[width], row, atol=1e-6)


BLANK = ["", " ", "\n\t\r\n", "\u00a0\u3000", "\ufeff", "\u200b\u200d", "\0\x7f", "\u3164\u2800\ufe0f", "\u00ad"]


class DeletingSink(DictSink):
    """A DictSink that can delete, and has what an earlier run wrote."""

    def __init__(self, *records):
        super().__init__()
        self.deleted = []
        self.rows = {point_id(record.id): (record, {}) for record in records}

    def delete(self, ids):
        self.deleted.append(list(ids))
        for record_id in ids:
            self.rows.pop(point_id(record_id), None)


def test_blank_texts_are_left_out_counted_and_named(engine, caplog):
    sink = DictSink()
    visible = ["a", " \u200b.", "\u200b" * 100 + "é", "🙂", "\ue000", "\u0301"]
    source = [Record(f"r{number}", text) for number, text in enumerate([*BLANK, *visible, *[" "] * 5])]
    report = run(source, engine, sink)
    assert (report.read, report.blank, report.written, report.failed) == (20, 14, 6, 0)
    assert list(sink.texts.values()) == visible
    assert caplog.messages == [
        "left out 14 of 20 records, whose text is blank (keep_blank=True, or --keep-blank, keeps them): "
        "r0, r1, r2, r3, r4, r5, r6, r7, r8, r15 and 4 more"
    ]
    sink = DeletingSink(Record("r0", "old"))
    report = run(source[:9], engine, sink, keep_blank=True)
    assert (report.written, report.blank, sink.deleted) == (9, 0, [])


@pytest.mark.parametrize("size", [1, 2, 10])
def test_an_id_whose_text_became_blank_loses_its_old_row(engine, size, caplog):
    sink = DeletingSink(Record("a", "old"), Record("b", "old"), Record("c", "old"))
    source = [Record("a", "new"), Record("a", ""), Record("b", ""), Record("b", "new"), Record("d", "\n")]
    source.append(Record("e", "new"))
    with small(size):
        report = run(source, engine, sink)
    assert sink.texts == {"b": "new", "c": "old", "e": "new"}
    assert report.blank == 3
    assert report.read == report.cached + report.embedded + report.duplicates + report.blank == 6
    run([Record("b", ""), Record("c", ""), Record("f", "new")], engine, sink)
    assert len(sink.texts) == 4 and "the text of 2 records is blank, beside 1 others" in caplog.text


def test_texts_that_were_cut_are_named_once_also_when_they_come_from_the_cache(checkpoint_of, tmp_path, caplog):
    source = [Record(f"r{i}", "word " * (400 if i % 3 == 0 else 4) + str(i)) for i in range(60)]
    with Engine(checkpoint_of("bert"), dtype="float32", device="cpu", cache=tmp_path / "cache") as engine:
        for cached in (0, 60):
            caplog.clear()
            with small(8):
                report = run(source, engine, DictSink())
            assert (report.truncated, report.cached) == (20, cached)
            assert report.truncated_ids == tuple(f"r{i}" for i in range(0, 30, 3))
            assert caplog.messages == [
                f"20 of 60 texts were cut to {engine.spec.max_length} tokens: "
                "r0, r3, r6, r9, r12, r15, r18, r21, r24, r27 and 10 more"
            ]


def test_batches_end_by_count_and_by_characters(engine):
    sink = DictSink()
    with small(4, chars=100):
        run([*some(8), Record("long", "x " * 60), *some(2, "again")], engine, sink)
    assert sink.writes == [4, 4, 1, 2]


def test_documents_get_the_documents_prompt_and_the_width_that_embed_returns(tmp_path):
    prompts = {"query": "search the pond: ", "document": "the wheel turns: "}
    layout = Layout(prompts=prompts, truncate_dim=16)
    write_checkpoint(tmp_path / "model", "bert", sentence_transformers=layout)
    with Engine(tmp_path / "model", dtype="float32", device="cpu") as prompted:
        for dimensions, widths in ((None, [16]), ([48, 8], [8, 48])):
            sink = DictSink(dimensions)
            run([Record("a", "a passage")], prompted, sink)
            ((_, vectors),) = sink.rows.values()
            assert sorted(vectors) == widths
            for width, row in vectors.items():
                options = {"dimensions": width, "normalize": True}
                wanted = prompted.embed(["a passage"], role="document", **options).embeddings[0]
                np.testing.assert_allclose(row, wanted, atol=1e-6)
                assert row @ prompted.embed(["a passage"], role="query", **options).embeddings[0] < 0.99


def test_a_vector_that_is_zero_or_nan_is_left_out(engine, caplog):
    def submit(task, texts, params):
        output = engine.submit(task, texts, params).result()
        rows = output.embeddings.copy()
        rows[1] = np.nan
        rows[2] = 0
        rows[3, :8] = 0  # not zero at full width, zero when cut to 8
        done = Future()
        done.set_result(replace(output, embeddings=rows))
        return done

    sink = DictSink([8, 48])
    report = run(some(6), Around(engine, submit=submit), sink)
    assert (report.failed, report.embedded, report.written) == (3, 3, 3)
    assert set(sink.texts) == {"r0", "r4", "r5"}
    assert caplog.text.count("not finite, or all zero") == 3
    wanted = engine.embed(["text 4"], role="document", normalize=True).embeddings[0]
    np.testing.assert_allclose(sink.rows[point_id("r4")][1][48], wanted, atol=1e-6)


def poisoned(place, *words):
    """A model that returns NaN for texts with these words; without words, for every text."""
    write_checkpoint(place, "bert")
    tensors = load_file(place / "model.safetensors")
    vocabulary = (place / "vocab.txt").read_text(encoding="utf-8").splitlines()
    rows = [vocabulary.index(word) for word in words] if words else slice(None)
    tensors["embeddings.word_embeddings.weight"][rows] = np.nan
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return Engine(place, dtype="float32", device="cpu", cache=place / "cache.db")


def test_a_failed_forward_is_tried_by_halves(engine, caplog):
    """torch raises RuntimeError when it runs out of memory, and fewer texts may need less."""
    calls = []

    def submit(task, texts, params):
        calls.append(len(texts))
        if len(texts) > 2 or "text 5" in texts:
            failed = Future()
            failed.set_exception(RuntimeError("no memory"))
            return failed
        return engine.submit(task, texts, params)

    sink = DictSink()
    report = run(some(8), Around(engine, submit=submit), sink)
    assert (report.failed, report.written) == (1, 7) and "left out record 'r5': no memory" in caplog.text
    assert calls == [8, 4, 2, 2, 4, 2, 1, 1, 2]


def test_an_engine_that_embeds_nothing_at_all_stops_the_run(tmp_path):
    endless = (Record(f"r{i}", f"text {i}") for i in itertools.count())
    sink = DictSink()
    with poisoned(tmp_path / "model") as engine, small(4), pytest.raises(MillpondError, match="not finite"):
        run(endless, engine, sink)
    assert sink.writes == []


items = st.one_of(
    st.builds(Record, st.sampled_from("abcde"), st.sampled_from(["one", "two", "three", "refused", " "])),
    st.just(Rejected(where="x:1", reason="bad")),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(source=st.lists(items, max_size=12), size=st.integers(1, 6))
def test_the_numbers_add_up(engine, source, size):
    sink = DeletingSink()
    sink.refuse = {"refused"}
    with small(size):
        report = run(iter(source), engine, sink)
    blank = [item for item in source if isinstance(item, Record) and item.text == " "]
    good = [item for item in source if isinstance(item, Record) and item.text not in ("refused", " ")]
    parts = report.cached + report.embedded + report.failed + report.duplicates + report.blank
    assert report.read == len(source) == parts
    assert report.failed == len(source) - len(good) - len(blank)
    assert report.blank == len(blank)
    assert report.written == sum(sink.writes) == len(good) - report.duplicates
    last = {record.id: record.text for record in source if record in good or record in blank}
    assert sink.texts == {record_id: text for record_id, text in last.items() if text != " "}


def test_writing_waits_for_nothing_that_comes_after_it(engine):
    """The first write ends only after more of the source was read, so reading and writing must overlap."""
    further = threading.Event()
    waited = []

    class Slow(DictSink):
        def write(self, batch):
            waited.append(further.wait(30))
            super().write(batch)

    def source():
        for number, record in enumerate(some(40)):
            if number == 16:  # the first write begins when three batches of four are read
                further.set()
            yield record

    with small(4):
        run(source(), engine, Slow())
    assert waited[0]


def test_an_endless_source_is_read_only_as_fast_as_the_sink_writes(engine):
    reached = 0
    too_far = threading.Event()
    limit = 4 * 20

    def source():
        nonlocal reached
        for reached in itertools.count():
            if reached == limit:
                too_far.set()
            yield Record(f"r{reached}", f"text {reached % 7}")

    class Stuck(DictSink):
        def write(self, batch):
            self.far = too_far.wait(0.3)
            raise OSError("the disk is full")

    sink = Stuck()
    with small(4), pytest.raises(OSError, match="disk is full"):
        run(source(), engine, sink)
    # One batch is written, two queued, one cut, two embedded, one read: far fewer than twenty.
    assert not sink.far and reached < limit


def test_an_overloaded_engine_is_retried(engine):
    refusals = iter([True, True, False, True, False])

    def submit(task, texts, params):
        if next(refusals, False):
            raise EngineOverloadedError("full", retry_after=0.001)
        return engine.submit(task, texts, params)

    with small(2):
        assert run(some(6), Around(engine, submit=submit), DictSink()).written == 6
    assert next(refusals, "used up") == "used up"


class Stop(BaseException):
    """A BaseException like KeyboardInterrupt, which must reach the caller."""


@pytest.mark.parametrize(
    ("error", "after"), [(OSError("gone"), 9), (KeyboardInterrupt(), 0), (Stop(), 23), (GeneratorExit(), 1)], ids=repr
)
def test_an_error_in_the_source_comes_out_and_stops_everything(engine, error, after):
    def source():
        yield from some(after)
        raise error

    sink = DictSink()
    with small(2), pytest.raises(type(error)) as caught:
        run(source(), engine, sink)
    assert caught.value is error
    if isinstance(error, Exception):  # what was read before it is written
        note = f"ingest: raised by the source at item {after} (from 0); those before are written"
        assert len(sink.rows) == after and error.__notes__ == [note]
    else:
        assert sum(sink.writes) <= after


def test_a_run_that_is_stopped_does_not_wait_for_the_rest_of_a_batch(engine):
    first, stopped = threading.Event(), threading.Event()

    class Slow(DictSink):
        def write(self, batch):
            super().write(batch)
            first.set()
            assert stopped.wait(30)

    def source():
        yield from some(40)
        assert first.wait(30)
        raise KeyboardInterrupt

    join = threading.Thread.join

    def waiting(thread, timeout=None):
        if thread.name == "millpond-writer":  # not a thread of another engine
            stopped.set()  # the run waits for its writer, so it is stopping
        join(thread, timeout)

    sink = Slow()
    listening = mock.patch.object(threading.Thread, "join", waiting)
    with small(10, 2), listening, pytest.raises(KeyboardInterrupt):
        run(source(), engine, sink)
    assert sink.writes == [2]


@pytest.mark.parametrize(("error", "after"), [(OSError("gone"), 0), (OSError("gone"), 3), (Stop(), 3)], ids=repr)
def test_an_error_in_the_sink_comes_out_of_an_endless_run(engine, error, after):
    class Failing(DictSink):
        def write(self, batch):
            if len(self.writes) == after:
                raise error
            super().write(batch)

    source = (Record(f"r{i}", "text") for i in itertools.count())
    sink = Failing()
    with small(2), pytest.raises(type(error)) as caught:
        run(source, engine, sink)
    assert caught.value is error and sink.writes == [2] * after


def never():
    raise AssertionError("the source was read")
    yield


def test_widths_the_model_does_not_have_are_refused_before_anything_is_read(engine_of, engine):
    for bad, dimensions in ((engine_of("bert"), [16]), (engine, [16, 500])):
        sink = DictSink(dimensions)
        with pytest.raises(InvalidDimensionsError, match="dimensions="):
            run(never(), bad, sink)
        assert sink.prepared == 0


class Unreadable(date):
    def isoformat(self):
        raise RuntimeError("broken")


BAD_ITEMS = [
    ("a text", r"is of type str; yield Record\(id, text, metadata\), or a dict"),
    (None, "is of type NoneType"),
    ({"id": "a"}, "text is missing"),
    ({"id": "a", "text": 5}, "text is of type int"),
    ({"id": True, "text": "t"}, "id is of type bool"),
    ({"id": "a", "text": "t", "metadata": "x"}, "metadata is a str"),
    ({"id": "a", "text": "t", "metadata": {"x": object()}}, r"metadata\['x'\] is of type object"),
    ({"id": "a", "text": "t", "x": float("nan")}, r"metadata\['x'\]=nan"),
    ({"id": "a", "text": "t", "x": Unreadable(2024, 1, 1)}, "RuntimeError: broken"),
]


def test_items_that_hold_no_record_fail_alone(engine, caplog):
    sink = DictSink()
    report = run(iter([*some(2), *(item for item, _ in BAD_ITEMS), *some(4)[2:]]), engine, sink)
    assert (report.failed, report.written, len(sink.rows)) == (len(BAD_ITEMS), 4, 4)
    for number, (message, (_, reason)) in enumerate(zip(caplog.messages, BAD_ITEMS, strict=True), 2):
        assert message.startswith(f"left out item {number}: ") and re.search(reason, message)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (AsyncEngine, r"engine is an AsyncEngine.*pass the Engine inside it \(engine=engine\.engine\)"),
        (lambda engine: "some/model", r"engine='some/model' is a name.*pass millpond\.Engine\('some/model'\)"),
        (lambda engine: Engine, "engine is the class Engine; pass a millpond.Engine"),
        (lambda engine: None, "engine is of type NoneType; pass a millpond.Engine"),
    ],
)
def test_an_engine_of_another_type_is_refused_before_anything_is_read(engine, wrap, message):
    sink = DictSink()
    with pytest.raises(TypeError, match=message):
        run(never(), wrap(engine), sink)
    assert sink.prepared == 0


@pytest.mark.parametrize(
    ("sink", "message"),
    [("qdrant+path:x#docs", r"open_sink\(url\)"), (None, "sink is of type NoneType"), (DictSink, "the class DictSink")],
)
def test_a_sink_of_another_type_is_refused(engine, sink, message):
    with pytest.raises(TypeError, match=message):
        run(never(), engine, sink)
