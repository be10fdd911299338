"""The contracts of :mod:`millpond.testing`: over a stranger's dict, the sink of the docs, and Qdrant in memory."""

import sys

import pytest
from tests.ingest.memory_sink import MemorySink

import millpond.testing
from millpond.errors import FingerprintMismatchError, MissingExtraError
from millpond.ingest import StoredRow, content_hash
from millpond.testing import CollectionSinkContract, SinkContract

QdrantSink = pytest.importorskip("millpond_qdrant").QdrantSink


class DictSink:
    dimensions, model = (64, 384), None

    def __init__(self):
        self.rows = {}

    def prepare(self, spec):
        if self.model not in (None, spec.fingerprint):
            raise FingerprintMismatchError("another model filled it")
        self.model = spec.fingerprint

    def write(self, batch):
        for n, (row_id, record) in enumerate(zip(batch.ids, batch.records, strict=True)):
            vectors = {width: rows[n] for width, rows in batch.vectors.items()}
            self.rows[row_id] = StoredRow(record_id=record.id, content_hash=content_hash(record.text), vectors=vectors)

    def close(self):
        pass


class TestDictSink(SinkContract):
    def make(self, folder, **options):
        return DictSink()

    def stored(self, sink):
        return sink.rows


class TestMemorySink(CollectionSinkContract):
    def make(self, folder, *, collection="docs", **options):
        return MemorySink(":memory:", collection, **options)


class TestQdrantInMemory(CollectionSinkContract):
    def make(self, folder, *, collection="docs", **options):
        return QdrantSink(":memory:", collection, **options)


class Forgetful(DictSink):
    """Acknowledges what it does not store."""

    def write(self, batch):
        super().write(batch)
        self.rows.popitem() if self.rows else None


class Mixed(DictSink):
    """Takes vectors of any model."""

    def prepare(self, spec):
        self.model = spec.fingerprint


@pytest.mark.parametrize(
    ("kind", "test"), [(Forgetful, "test_what_is_written_is_stored"), (Mixed, "test_another_model_is_refused")]
)
def test_the_contract_finds_a_sink_that_breaks_it(kind, test):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(TestDictSink(), test)(kind(), millpond.testing.WordEngine())


def test_pytest_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytest", None)
    monkeypatch.delitem(sys.modules, "millpond.testing.sink")
    with pytest.raises(MissingExtraError, match="SinkContract needs pytest: pip install pytest"):
        assert millpond.testing.SinkContract
