"""What is injected into a collection in memory is named, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.audit.corpus import FAULTS, Bench, ids, records
from tests.audit.memory import MemoryCollection

from millpond.audit.audit import AuditOptions, audit
from millpond.audit.candidates import Models

ROWS = records(160)


@pytest.fixture(scope="module")
def models(model: Path, other: Path) -> Iterator[Models]:
    opened = Models([str(model), str(other)], settings={"dtype": "float32", "device": "cpu"})
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def clean(bench: Bench) -> np.ndarray:
    return bench.embed([row.text for row in ROWS])


# A collection that is not millpond's has no hashes of texts.
@pytest.mark.parametrize("name", [name for name, (fault, _) in FAULTS.items() if fault != "stale hash"])
def test_each_fault_is_named(name: str, bench: Bench, models: Models, clean: np.ndarray):
    fault, make = FAULTS[name]
    longest = sorted(ROWS, key=lambda row: -len(row.text))
    damage = make(bench, longest[3:9])
    places = {row_id: number for number, row_id in enumerate(ids(ROWS))}
    vectors, absent = clean.copy(), []
    for row_id, row in damage.vectors.items():
        if row is None:
            vectors[places[row_id]] = 0
            absent.append(places[row_id])
        else:
            vectors[places[row_id]] = row
    fields = [{"text": row.text, "metadata": dict(row.metadata)} for row in ROWS]
    collection = MemoryCollection(vectors, fields, absent=absent)
    report = audit(collection, models)  # type: ignore[arg-type]
    wanted = dict.fromkeys((str(places[row_id]) for row_id in damage.vectors), fault)
    assert {each.id: each.fault for each in report.findings} == wanted
    # Also of those that are not in the sample, if a test of every row sees them.
    drawn = audit(collection, models, AuditOptions(sample=8))  # type: ignore[arg-type]
    seen = {each.id for each in drawn.findings}
    assert seen <= wanted.keys()
    if fault in ("zero", "not finite", "length", "padded", "precision", "duplicate", "missing"):
        assert seen == wanted.keys()
    every = audit(collection, models, AuditOptions(sample=8, every=True))  # type: ignore[arg-type]
    assert {each.id: each.fault for each in every.findings} == wanted


def test_a_text_that_is_gone_is_named(models: Models, clean: np.ndarray):
    fields = [{"text": row.text} for row in ROWS]
    fields[4], fields[5] = {"text": ""}, {}
    report = audit(MemoryCollection(clean, fields), models)  # type: ignore[arg-type]
    assert [(each.id, each.fault) for each in report.findings] == [("4", "no text"), ("5", "no text")]


def test_the_vector_of_an_empty_text_is_right(bench: Bench, models: Models, clean: np.ndarray):
    vectors, fields = clean.copy(), [{"text": row.text} for row in ROWS]
    vectors[4], fields[4] = bench.embed([""])[0], {"text": ""}
    assert audit(MemoryCollection(vectors, fields), models).clean  # type: ignore[arg-type]


def test_equal_vectors_of_texts_that_the_model_reads_alike_are_right(bench: Bench, models: Models):
    """Texts that differ behind the cut, or in their spaces, have the same vector."""
    texts = [row.text for row in ROWS]
    long = max(texts, key=len)
    texts += [f"{long} {word}" for word in ("one", "two", "three")] + [f"  {texts[0]}"]
    report = audit(MemoryCollection(bench.embed(texts), [{"text": text} for text in texts]), models)  # type: ignore[arg-type]
    assert report.clean and not report.findings


def test_rows_that_differ_in_several_things_are_named(bench: Bench, models: Models, clean: np.ndarray, other: Path):
    vectors = clean.copy()
    texts = [row.text for row in ROWS]
    vectors[:8] = bench.embed([text.lower() for text in texts[:8]], bench.pooled, role="query")
    vectors[8:12] = bench.embed(texts[8:12], bench.other, role="query")
    report = audit(MemoryCollection(vectors, [{"text": text} for text in texts]), models)  # type: ignore[arg-type]
    assert [(each.fault, each.detail) for each in report.findings] == [
        *[("pooling", "cls, query prompt 'find: ', lower case")] * 8,
        *[("model", f"{other}, query prompt 'find: '")] * 4,
    ]
