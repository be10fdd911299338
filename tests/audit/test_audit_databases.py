"""An audit over each database: what is injected is named, what is clean stays so, and what is fixed is clean."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.audit.corpus import FAULTS, Bench, records
from tests.audit.editors import IMPOSSIBLE, edit

from millpond.audit.audit import AuditOptions, audit
from millpond.audit.candidates import Models
from millpond.audit.repair import repair
from millpond.ingest import Chunking, Record, ingest, open_sink
from millpond.ingest.record import point_id

FLOAT32 = {"dtype": "float32", "device": "cpu"}
_BAD = 4  # rows with each fault


def fill(url: str, bench: Bench, rows: list[Record], **options: Any) -> None:
    with closing(open_sink(url)) as sink:
        ingest(rows, engine=bench.engine, sink=sink, **options)


def look(url: str, *models: Path, **options: Any) -> Any:
    with (
        closing(open_sink(url, must_exist=True)) as sink,
        closing(Models([*map(str, models)], settings=FLOAT32)) as all_,
    ):
        return audit(sink, all_, AuditOptions(**options))


def test_each_fault_is_named_and_fixed(database: str, bench: Bench, model: Path, other: Path):
    url, kind = f"{database}#docs", database.partition("+")[0]
    rows = records(400)
    fill(url, bench, rows)
    clean = look(url, model, other)
    assert clean.clean and clean.bounds.rows == 400 and not clean.findings
    faults = {name: each for name, each in FAULTS.items() if name not in IMPOSSIBLE[kind]}
    assert len(faults) >= 15
    longest = iter(sorted(rows, key=lambda row: -len(row.text))[: _BAD * len(faults)])  # all of them are cut at 32
    wanted: dict[str, str] = {}
    for name, make in faults.values():
        damage = make(bench, [next(longest) for _ in range(_BAD)])
        edit(url, damage.vectors, damage.texts)
        wanted |= dict.fromkeys([*damage.vectors, *damage.texts], name)
    report = look(url, model, other)
    assert not report.clean and report.found.setting == clean.found.setting
    assert {each.id: each.fault for each in report.findings} == wanted
    with closing(open_sink(url, must_exist=True)) as sink:
        fixed = repair(sink, bench.engine, report)
    blank = {row_id for row_id, _ in fixed.unfixed}
    assert fixed.fixed + len(blank) == len(wanted) and len(blank) == _BAD  # those without a text
    again = look(url, model, other)
    assert {each.id for each in again.findings} == blank


def test_a_chunk_with_the_vector_of_its_document_is_named(database: str, bench: Bench, model: Path):
    url = f"{database}#docs"
    rows = records(60)
    fill(url, bench, rows, chunking=Chunking(max_tokens=24, overlap=0.0))
    assert look(url, model).clean
    whole = max(rows, key=lambda row: len(row.text))
    short = [row for row in rows if 40 < bench.engine.count_tokens([row.text])[0] < 56][:2]
    damage = {point_id(row.id, 1): bench.embed([row.text])[0] for row in short}
    edit(url, damage)
    report = look(url, model)
    assert {each.id: each.fault for each in report.findings} == dict.fromkeys(damage, "chunk")
    assert {each.detail for each in report.findings} <= {"the whole document", "with the chunk before it"}
    assert whole.id  # and of a document that is longer than the model reads, nothing can be said


def by_hand(url: str, rows: list[Record], vectors: np.ndarray) -> None:
    """A collection as people make one with the database's own client: names of their own, and no manifest."""
    kind, width = url.partition("+")[0], vectors.shape[1]
    with closing(open_sink(url)) as sink:
        _BY_HAND[kind](sink.client, width, rows, vectors)


def _qdrant(client: Any, width: int, rows: list[Record], vectors: np.ndarray) -> None:
    from qdrant_client import models

    client.create_collection("docs", models.VectorParams(size=width, distance=models.Distance.DOT))
    client.upsert(
        "docs",
        [
            models.PointStruct(
                id=n, vector=vector.tolist(), payload={"document": row.text, "metadata": dict(row.metadata)}
            )
            for n, (row, vector) in enumerate(zip(rows, vectors, strict=True))
        ],
    )


def _milvus(client: Any, width: int, rows: list[Record], vectors: np.ndarray) -> None:
    client.create_collection("docs", dimension=width, metric_type="IP")
    found = [
        {"id": n, "vector": list(map(float, vector)), "content": row.text, **row.metadata}
        for n, (row, vector) in enumerate(zip(rows, vectors, strict=True))
    ]
    client.insert("docs", found)


def _lancedb(client: Any, width: int, rows: list[Record], vectors: np.ndarray) -> None:
    found = [{"vector": vector, "chunk": row.text, **row.metadata} for row, vector in zip(rows, vectors, strict=True)]
    client.create_table("docs", found)


def _pgvector(client: Any, width: int, rows: list[Record], vectors: np.ndarray) -> None:
    with client.cursor() as cursor:
        cursor.execute("CREATE TABLE docs (nr serial, body text, title text, embedding vector)")  # of no fixed width
        cursor.executemany(
            "INSERT INTO docs (body, title, embedding) VALUES (%s, %s, %s::vector)",
            [
                (row.text, row.metadata["title"], str(vector.tolist()))
                for row, vector in zip(rows, vectors, strict=True)
            ],
        )


_BY_HAND = {"qdrant": _qdrant, "milvus": _milvus, "lancedb": _lancedb, "pgvector": _pgvector}


def test_a_collection_made_by_hand_is_read(database: str, bench: Bench, model: Path, other: Path):
    url, rows = f"{database}#docs", records(80)
    vectors = bench.embed([f"{row.metadata['title']}: {row.text}" for row in rows], role="query")
    vectors[5] = bench.embed([rows[5].text], bench.other)[0]
    vectors[7] = 0
    vectors[9] *= 3
    by_hand(url, rows, vectors)
    report = look(url, other, model)
    setting = report.found.setting
    assert setting is not None and setting.model == str(model)
    assert (setting.prompt, setting.text, report.length) == ("find: ", "title, colon, text", "normalized")
    assert sorted(each.fault for each in report.findings) == ["length", "model", "zero"]
    assert report.text in ("document", "content", "chunk", "body") and report.bounds.off == 3


@pytest.mark.slow
def test_clean_collections_raise_no_alarm(database: str, bench: Bench, model: Path, other: Path):
    kind = database.partition("+")[0]
    for seed in range(25):
        rows = records(40 + seed, seed=100 + seed)
        url = f"{database}#c{seed}"
        options = {"chunking": Chunking(max_tokens=24 + seed)} if seed % 3 == 1 else {}
        with closing(open_sink(url)) as sink:
            ingest(rows, engine=[bench.engine, bench.other, bench.pooled][seed % 3], sink=sink, **options)
        models = [model, other] if seed % 2 else [other, model]
        report = look(url, *models, sample=50)
        assert report.clean and not report.findings, (kind, seed, report.findings)
