"""verify: rows that are missing or different are found, and written by the next run."""

from dataclasses import replace

import numpy as np
import pytest
from tests.ingest.crashes import CrashingDriver, CrashingSink, Words, memory, run, some
from tests.ingest.memory_sink import MemoryDriver

from millpond.ingest import Record, point_id


def rows(client):
    return client["docs"][1]


@pytest.mark.parametrize("chunker", [None, Words(1)], ids=["whole", "chunked"])
def test_a_good_collection_is_good(engine, tmp_path, chunker):
    client = memory()
    for _ in range(2):
        report = run(some(30), engine, CrashingSink(client), journal=tmp_path / "j", chunker=chunker, verify=True)
        found, pieces = report.verification, 1 if chunker is None else 2
        assert found.good and found.rows == found.expected == found.sampled == 30 * pieces
        assert found.missing == found.different == 0


def test_a_database_that_acknowledges_without_storing_is_found_and_the_next_run_writes(engine, tmp_path):
    class Lying(CrashingSink):
        lies = True

        def _upsert(self, batch):
            super()._upsert(batch)
            if self.lies:
                for row_id in batch.ids[::10]:
                    del self._rows[row_id]

    client = memory()
    report = run(some(300), engine, Lying(client), journal=tmp_path / "j", verify=True)
    assert report.verification.missing == 30 and not report.verification.good
    sink = CrashingSink(client)
    report = run(some(300), engine, sink, journal=tmp_path / "j", verify=True)
    assert report.written == 30 and report.verification.good and len(sink.stored) == 300
    assert report.verification.sampled == 256


@pytest.mark.parametrize("what", ["vector", "zero", "nan", "text", "metadata"])
def test_a_row_that_was_changed_behind_our_back_is_found_and_written_again(engine, tmp_path, what):
    client = memory()
    run(some(20), engine, CrashingSink(client), journal=tmp_path / "j")
    record, vectors = rows(client)[point_id("r7")]
    if what == "text":
        rows(client)[point_id("r7")] = (replace(record, text="another"), vectors)
    elif what == "metadata":
        rows(client)[point_id("r7")] = (replace(record, metadata={"n": 8}), vectors)
    else:
        new = {"vector": np.roll(vectors[48], 1), "zero": np.zeros(48), "nan": np.full(48, np.nan)}[what]
        rows(client)[point_id("r7")] = (record, {48: new.astype(np.float32)})

    report = run(some(20), engine, CrashingSink(client), journal=tmp_path / "j", verify=True)
    assert (report.verification.different, report.verification.sampled, report.written) == (1, 20, 0)
    sink = CrashingSink(client)
    report = run(some(20), engine, sink, journal=tmp_path / "j", verify=True)
    assert sink.written == ["r7"] and report.verification.good


@pytest.mark.parametrize("what", ["text", "metadata", "key"])
@pytest.mark.parametrize("chunker", [None, Words(1)], ids=["whole", "chunked"])
def test_every_row_is_compared_and_not_the_stored_hash(engine, tmp_path, monkeypatch, what, chunker):
    """Of 600 records the sample has 256; the hash of the text is stored, and does not change with it."""

    def read(driver, row_ids, widths, manifest):
        stored = MemoryDriver.read(driver, row_ids, widths, manifest)
        return {i: replace(row, **wrong) if i in changed else row for i, row in stored.items()}

    wrong = {"text": {"text": "x"}, "metadata": {"metadata": {"n": 4}}, "key": {"metadata": {}}}[what]
    changed = {point_id(f"r{number}") for number in range(0, 600, 20)}
    monkeypatch.setattr(CrashingDriver, "read", read)
    source = [Record(f"r{number}", f"text {number}", {"n": -number - 1}) for number in range(600)]
    options = {"journal": tmp_path / "j", "chunker": chunker}
    client = memory()
    found = run(source, engine, CrashingSink(client), verify=True, **options).verification
    assert (found.different, found.missing, found.compared) == (30, 0, 600 if chunker is None else 1200)
    assert not found.good
    changed.clear()
    report = run(source, engine, CrashingSink(client), verify=True, **options)
    assert report.written == (30 if chunker is None else 60) and report.verification.good


def test_a_sink_that_does_not_name_its_collection_is_said(engine, tmp_path, caplog):
    class Nameless:
        def prepare(self, spec): ...
        def write(self, batch): ...
        def close(self): ...

    run(some(2), engine, Nameless())
    assert not caplog.records
    run(some(2), engine, Nameless(), journal=tmp_path / "j")
    assert "has no attribute target" in caplog.text
