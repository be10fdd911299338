"""Collections that were migrated are copied, traced and audited as what answers by their name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.migrate.engines import WordModel

from millpond.errors import FingerprintMismatchError, InvalidRequestError
from millpond.ingest import Record, copy, ingest, trace
from millpond.migrate import migration as module
from millpond.migrate.change import Change
from millpond.migrate.migration import Migration

sinks = pytest.importorskip("millpond_qdrant")

OLD, NEW = WordModel("old"), WordModel("new", dimensions=64)
ROWS = [Record(f"r{number}", f"text of the number {number}", {"n": number}) for number in range(20)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Opens sinks of collections in one folder, of which docs was migrated from OLD to NEW."""
    monkeypatch.setattr(module, "SETTLED", 0.0)
    monkeypatch.setattr(module, "IN_FLIGHT", 0.0)
    with ExitStack() as stack:

        def opened(collection: str = "docs", **options: Any) -> Any:
            return stack.enter_context(closing(sinks.QdrantSink(tmp_path / "q", collection, **options)))

        ingest(ROWS, engine=OLD, sink=opened(), show_progress=False)  # type: ignore[arg-type]
        Migration(opened(), Change(spec=NEW.spec)).run(NEW)  # type: ignore[arg-type]
        yield opened


def vectors(sink: Any) -> dict[str, Any]:
    rows = sink.read_rows([row_id for row_id, _ in sink.scan()], widths=[64])
    return {row.record_id: row.vectors[64] for row in rows.values()}


def test_a_copy_has_the_vectors_that_serve_and_no_succession(place: Any) -> None:
    target = place("copied")
    assert copy(place(), target, show_progress=False).written == 20
    assert target.open().model == "new" and target.succession() is None
    expected = {record.id: NEW.embed([record.text], normalize=True).embeddings[0] for record in ROWS}
    for record_id, vector in vectors(target).items():
        np.testing.assert_allclose(vector, expected[record_id], atol=1e-5)


def test_a_copy_into_it_reaches_what_serves(place: Any) -> None:
    more, docs = place("more"), place()
    ingest([Record("late", "a late text")], engine=NEW, sink=more, show_progress=False)  # type: ignore[arg-type]
    assert copy(more, docs, show_progress=False).written == 1
    assert "late" in vectors(place()) and place().count() == 21
    with closing(place().sibling("docs")) as former:
        assert former.count() == 20  # the old vectors
    old = place("old")
    ingest([Record("late", "a late text")], engine=OLD, sink=old, show_progress=False)  # type: ignore[arg-type]
    with pytest.raises((FingerprintMismatchError, InvalidRequestError)):
        copy(old, place(), show_progress=False)


def test_a_collection_and_the_one_that_serves_its_name_are_the_same(place: Any) -> None:
    serving = place(place().succession().serving)
    assert place().is_same(serving) and serving.is_same(place())
    with pytest.raises(InvalidRequestError, match="are the same collection"):
        copy(place(), serving, show_progress=False)


def test_a_row_is_traced_to_the_runs_before_the_migration(place: Any) -> None:
    (origin,) = trace(place(), "r3")
    assert origin.hash_fits and origin.metadata == {"n": 3} and origin.norms == {64: pytest.approx(1)}
    first, second = origin.runs
    assert (first.source, second.source.split(" of ")[0]) == ("list", "a migration") and second.source.endswith(" docs")
    Migration(place()).finish()
    (after,) = trace(place(), "r3")
    assert after.runs == origin.runs


def test_an_audit_looks_at_the_vectors_that_serve(place: Any) -> None:
    raw = place().raw()
    (field,) = raw.fields()
    assert field.width == 64 and sum(len(page) for page in raw.pages(field)) == 20
    assert place().answering().describe().manifest.model == "new"
