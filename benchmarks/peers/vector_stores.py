"""Databases that store vectors in several layouts: the bytes on disk, and the rows that each search finds.

Each function yields a :class:`Stored` for each layout. Rows are an int id and the vectors; ids are the rows' numbers.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
Cut = Callable[[int], tuple[FloatArray, FloatArray]]
"""Of a width, the rows ``[n, width]`` and the queries ``[q, width]``, normalized."""

CANDIDATES = 100
K = 10
OVERSAMPLING = 10
EF = 200


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A layout in a database.

    Attributes:
        engine: The database.
        layout: The layout in words.
        width: Width of the vectors that give the final order.
        bytes: Bytes of its files, or of its table and index.
        found: ``[q, k]`` the rows found.
        milliseconds: Median time of one query, one after another.
    """

    engine: str
    layout: str
    width: int
    bytes: int
    found: Indices
    milliseconds: float


def qdrant_edge(cut: Cut, widths: Sequence[int], folder: Path) -> Iterator[Stored]:
    """Qdrant's own engine in this process (qdrant-edge-py): a shard for each layout, with its HNSW graph."""
    import qdrant_edge as edge

    full = max(widths)
    copies = {
        "scalar": edge.ScalarQuantizationConfig(edge.ScalarType.Int8, quantile=0.99, always_ram=True),
        "product": edge.ProductQuantizationConfig(edge.CompressionRatio.X16, always_ram=True),
        "binary": edge.BinaryQuantizationConfig(always_ram=True),
    }
    types = {
        "float32": edge.VectorStorageDatatype.Float32,
        "float16": edge.VectorStorageDatatype.Float16,
        "uint8": edge.VectorStorageDatatype.Uint8,
    }

    def fill(name: str, stored: Mapping[int, str], copy: str | None) -> tuple[Any, int]:
        vectors = {
            f"d{width}": edge.EdgeVectorParams(
                size=width,
                distance=edge.Distance.Euclid if datatype == "uint8" else edge.Distance.Cosine,
                datatype=types[datatype],
                quantization_config=copies.get(copy or ""),
            )
            for width, datatype in stored.items()
        }
        path = folder / name
        path.mkdir()
        optimizers = edge.EdgeOptimizersConfig(indexing_threshold=1, default_segment_number=1)
        shard = edge.EdgeShard.create(str(path), edge.EdgeConfig(vectors=vectors, optimizers=optimizers))
        encoded = {width: uint8(cut(width)[0]) if kind == "uint8" else cut(width)[0] for width, kind in stored.items()}
        count = len(cut(full)[0])
        for start in range(0, count, 1000):
            points = [
                edge.Point(
                    id=row, vector={f"d{width}": rows[row].tolist() for width, rows in encoded.items()}, payload={}
                )
                for row in range(start, min(start + 1000, count))
            ]
            shard.update(edge.UpdateOperation.upsert_points(points))
        shard.optimize()
        shard.flush()
        return shard, disk_bytes(path, without="wal")

    def search(shard: Any, width: int, queries: FloatArray, quantization: Any = None, coarse: int | None = None) -> Any:
        def found(row: int) -> list[int]:
            params = edge.SearchParams(hnsw_ef=EF, quantization=quantization)
            query = edge.Query.Nearest(queries[row].tolist(), using=f"d{width}")
            prefetches = []
            if coarse is not None:
                narrow = edge.Query.Nearest(cut(coarse)[1][row].tolist(), using=f"d{coarse}")
                prefetches = [edge.Prefetch(limit=CANDIDATES, query=narrow, params=edge.SearchParams(hnsw_ef=EF))]
            request = edge.QueryRequest(limit=K, query=query, prefetches=prefetches, params=params)
            return [int(point.id) for point in shard.query(request)]

        return found

    for width in widths:
        for datatype in types:
            shard, size = fill(f"{width}-{datatype}", {width: datatype}, None)
            queries = cut(width)[1]
            queries = uint8(queries) if datatype == "uint8" else queries
            yield _asked("qdrant-edge", f"{width} {datatype}", width, size, search(shard, width, queries), len(queries))
            shard.close()
    for copy in copies:
        shard, size = fill(f"{full}-{copy}", {full: "float32"}, copy)
        queries = cut(full)[1]
        alone = edge.QuantizationSearchParams(rescore=False)
        rescored = edge.QuantizationSearchParams(rescore=True, oversampling=float(OVERSAMPLING))
        for words, quantization in ((copy, alone), (f"{copy}, rescored", rescored)):
            find = search(shard, full, queries, quantization)
            yield _asked("qdrant-edge", f"{full} float32 + {words}", full, size, find, len(queries))
        shard.close()
    for coarse in [width for width in widths if width < full]:
        shard, size = fill(f"{coarse}-{full}", {coarse: "float32", full: "float32"}, None)
        find = search(shard, full, cut(full)[1], coarse=coarse)
        yield _asked("qdrant-edge", f"{coarse} -> {full} float32", full, size, find, len(cut(full)[1]))
        shard.close()


def lancedb(cut: Cut, widths: Sequence[int], folder: Path) -> Iterator[Stored]:
    """LanceDB in a folder: exact, and with the indexes IVF_PQ and IVF_HNSW_SQ, whose hits are refined or not."""
    import lancedb as lance
    import pyarrow as pa

    full = max(widths)
    database = lance.connect(folder / "lance")

    def fill(name: str, width: int, kind: Any) -> Any:
        rows = cut(width)[0]
        values = pa.array(rows.astype(kind.to_pandas_dtype()).ravel(), kind)
        columns = {
            "id": pa.array(range(len(rows)), pa.int64()),
            "vector": pa.FixedSizeListArray.from_arrays(values, width),
        }
        return database.create_table(name, pa.table(columns))

    def search(table: Any, queries: FloatArray, refine: int | None = None) -> Callable[[int], list[int]]:
        def found(row: int) -> list[int]:
            query = table.search(queries[row]).distance_type("cosine").limit(K).nprobes(20)
            query = query if refine is None else query.refine_factor(refine)
            return [int(one["id"]) for one in query.select(["id", "_distance"]).to_list()]

        return found

    for width in widths:
        for datatype, kind in (("float32", pa.float32()), ("float16", pa.float16())):
            name = f"t{width}{datatype}"
            table = fill(name, width, kind)
            queries = cut(width)[1]
            size = disk_bytes(folder / "lance" / f"{name}.lance")
            yield _asked("lancedb", f"{width} {datatype}", width, size, search(table, queries), len(queries))
    rows, queries = cut(full)
    partitions = max(1, round(math.sqrt(len(rows))))
    for index, options in (("IVF_PQ", {"num_sub_vectors": full // 4}), ("IVF_HNSW_SQ", {})):
        name = f"t{index}"
        table = fill(name, full, pa.float32())
        table.create_index(metric="cosine", index_type=index, num_partitions=partitions, **options)
        table.optimize()
        size = disk_bytes(folder / "lance" / f"{name}.lance")
        for words, refine in ((index, None), (f"{index}, refined", OVERSAMPLING)):
            find = search(table, queries, refine)
            yield _asked("lancedb", f"{full} float32 + {words}", full, size, find, len(queries))


def pgvector(cut: Cut, widths: Sequence[int], dsn: str) -> Iterator[Stored]:
    """PostgreSQL with pgvector: vector, halfvec and bit, each with its HNSW index; bits and widths before vectors."""
    import psycopg

    full = max(widths)
    operators = {
        "vector": ("<=>", "vector_cosine_ops"),
        "halfvec": ("<=>", "halfvec_cosine_ops"),
        "bit": ("<~>", "bit_hamming_ops"),
    }

    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET maintenance_work_mem = '256MB'")
        connection.execute(f"SET hnsw.ef_search = {EF}")

        def literal(row: FloatArray, kind: str) -> str:
            if kind == "bit":
                return "".join("01"[int(number > 0)] for number in row)
            return "[" + ",".join(f"{number:.8g}" for number in row) + "]"

        def fill(name: str, columns: Mapping[str, tuple[int, str]], indexed: Sequence[str]) -> int:
            kinds = ", ".join(f"{column} {kind}({width})" for column, (width, kind) in columns.items())
            connection.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, {kinds})")
            with connection.cursor().copy(f"COPY {name} FROM STDIN") as copy:
                for row in range(len(cut(full)[0])):
                    copy.write_row([row, *(literal(cut(width)[0][row], kind) for width, kind in columns.values())])
            for column in indexed:
                _, operator = operators[columns[column][1]]
                connection.execute(f"CREATE INDEX ON {name} USING hnsw ({column} {operator})")
            connection.execute(f"VACUUM ANALYZE {name}")
            ((size,),) = connection.execute(f"SELECT pg_total_relation_size('{name}')").fetchall()
            return int(size)

        def search(name: str, column: str, width: int, kind: str) -> Callable[[int], list[int]]:
            operator, _ = operators[kind]
            query = f"SELECT id FROM {name} ORDER BY {column} {operator} %s::{kind}({width}) LIMIT {K}"
            queries = cut(width)[1]
            return lambda row: [one for (one,) in connection.execute(query, [literal(queries[row], kind)]).fetchall()]

        def coarse_to_fine(name: str, width: int, kind: str) -> Callable[[int], list[int]]:
            operator, _ = operators[kind]
            query = (
                f"SELECT id FROM (SELECT id, vectors FROM {name} ORDER BY narrow {operator} %s::{kind}({width}) "
                f"LIMIT {CANDIDATES}) AS nearest ORDER BY vectors <=> %s::vector({full}) LIMIT {K}"
            )
            narrow, whole = cut(width)[1], cut(full)[1]
            return lambda row: [
                one
                for (one,) in connection.execute(
                    query, [literal(narrow[row], kind), literal(whole[row], "vector")]
                ).fetchall()
            ]

        count = len(cut(full)[1])
        for width in widths:
            for kind, datatype in (("vector", "float32"), ("halfvec", "float16"), ("bit", "bit")):
                name = f"t{width}{kind}"
                size = fill(name, {"vectors": (width, kind)}, ["vectors"])
                find = search(name, "vectors", width, kind)
                yield _asked("pgvector", f"{width} {datatype}", width, size, find, count)
        for width, kind in [
            *((width, "vector") for width in widths if width < full),
            *((width, "bit") for width in widths),
        ]:
            name = f"f{width}{kind}"
            size = fill(name, {"narrow": (width, kind), "vectors": (full, "vector")}, ["narrow"])
            words = f"{width} -> {full} float32" if kind == "vector" else f"{width} bit -> {full} float32"
            yield _asked("pgvector", words, full, size, coarse_to_fine(name, width, kind), count)


def uint8(rows: FloatArray) -> FloatArray:
    """Unit vectors ``[n, width]`` as millpond-qdrant stores them in uint8 vectors, which have Euclidean distance."""
    scale = np.float32(127 * max(1.0, math.sqrt(rows.shape[1]) / 8))
    return np.clip(np.rint(rows * scale) + 128, 0, 255).astype(np.float32)


def disk_bytes(folder: Path, *, without: str = "") -> int:
    """Bytes that the files of a folder take on the disk; files that are reserved and not written take none."""
    total = 0
    for path, names, files in os.walk(folder):
        if without in names:
            names.remove(without)
        total += sum(os.stat(os.path.join(path, name)).st_blocks * 512 for name in files)
    return total


def _asked(engine: str, layout: str, width: int, size: int, find: Callable[[int], list[int]], queries: int) -> Stored:
    rows, seconds = [], []
    for row in range(queries):
        start = time.perf_counter()
        ids = find(row)
        seconds.append(time.perf_counter() - start)
        rows.append((ids + [-1] * K)[:K])  # an index may find fewer
    return Stored(
        engine=engine,
        layout=layout,
        width=width,
        bytes=size,
        found=np.array(rows, np.int64),
        milliseconds=1000 * float(np.median(seconds)),
    )
