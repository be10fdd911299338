"""Other engines of late interaction: each takes the token states of a set and answers queries.

An engine is a function of the states and an empty folder; its package is imported there, so that this module loads in
every environment. It returns its settings, each a function from a query ``[rows, d]`` to document indices, best first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from peers.token_states import FloatArray, TokenStates

Search = Callable[[FloatArray], list[int]]
K = 10


@dataclass(frozen=True, kw_only=True)
class Built:
    """An index that is ready.

    Attributes:
        settings: For each setting of a search, its function.
        stored: Bytes that the index holds, in memory or on disk; None if that cannot be told.
        scanned: For each setting that reads every token, the bytes it reads; its time is compared with the bandwidth.
        notes: More figures of this engine, as they stand in the result.
        more: For each further question its measurement, made after the searches.
        close: Ends what the engine has started.
    """

    settings: Mapping[str, Search]
    stored: int | None = None
    scanned: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    close: Callable[[], Any] = lambda: None


def maxsim_cpu(states: TokenStates, folder: Path) -> Built:
    """maxsim-cpu: float32 documents of different lengths, every one scored."""
    import maxsim_cpu as peer

    documents = matrices(states)

    def search(query: FloatArray) -> list[int]:
        scores = np.asarray(peer.maxsim_scores_variable(np.ascontiguousarray(query), documents))
        return best(scores)

    size = 4 * states.flat.size
    return Built(settings={"": search}, stored=size, scanned={"": size})


def qdrant_edge(states: TokenStates, folder: Path) -> Built:
    """qdrant-edge-py: multivectors with MAX_SIM, without HNSW, so that every point is scored; float32 and float16."""
    import qdrant_edge as edge

    settings, stored, scanned, shards = {}, 0, {}, []
    for name, datatype, size in (
        ("float32", edge.VectorStorageDatatype.Float32, 4),
        ("float16", edge.VectorStorageDatatype.Float16, 2),
    ):
        at = folder / name
        at.mkdir()
        parameters = edge.EdgeVectorParams(
            size=states.flat.shape[1],
            distance=edge.Distance.Dot,
            multivector_config=edge.MultiVectorConfig(comparator=edge.MultiVectorComparator.MaxSim),
            hnsw_config=edge.HnswIndexConfig(m=0, ef_construct=4, full_scan_threshold=10_000),
            datatype=datatype,
        )
        shard = edge.EdgeShard.create(str(at), edge.EdgeConfig(vectors={"tokens": parameters}))
        for start in range(0, len(states), 256):
            stop = min(len(states), start + 256)
            points = [edge.Point(id=i, vector={"tokens": document(states, i).tolist()}) for i in range(start, stop)]
            shard.update(edge.UpdateOperation.upsert_points(points))
        shard.flush()

        def search(query: FloatArray, shard: Any = shard) -> list[int]:
            asked = edge.Query.Nearest(query.tolist(), using="tokens")
            return [point.id for point in shard.query(edge.QueryRequest(limit=K, query=asked))]

        settings[name], scanned[name] = search, size * states.flat.size
        stored = max(stored, folder_size(at))
        shards.append(shard)
    return Built(settings=settings, stored=stored, scanned=scanned, close=lambda: [shard.close() for shard in shards])


def fast_plaid(states: TokenStates, folder: Path) -> Built:
    """fast-plaid: 4 bits, its defaults and two narrower searches."""
    import torch
    from fast_plaid import search as peer

    torch.set_num_threads(1)
    documents = [torch.from_numpy(matrix) for matrix in matrices(states, np.float16)]
    index = peer.FastPlaid(index=str(folder / "index"), device="cpu")
    index.create(documents_embeddings=documents, nbits=4, kmeans_niters=4, use_triton_kmeans=False)

    def searching(**options: int) -> Search:
        def search(query: FloatArray) -> list[int]:
            found = index.search(queries_embeddings=torch.from_numpy(query)[None], top_k=K, **options)
            return [at for at, _ in found[0]]

        return search

    settings = {
        "defaults": searching(),
        "n_full_scores=512": searching(n_full_scores=512),
        "n_ivf_probe=2, n_full_scores=256": searching(n_ivf_probe=2, n_full_scores=256),
    }
    return Built(settings=settings, stored=folder_size(folder))


def colsearch(states: TokenStates, folder: Path) -> Built:
    """colsearch: shards on the CPU behind the router that it trains, with float16 rows, its most precise ones."""
    import torch
    from colsearch import Index

    torch.set_num_threads(1)
    index = Index(str(folder / "index"), dim=states.flat.shape[1], engine="shard", compression="fp16", enable_wal=False)
    index.add(matrices(states), ids=list(range(len(states))))
    index.flush()

    def search(query: FloatArray) -> list[int]:
        return [int(hit.doc_id) for hit in index.search(query, k=K)]

    return Built(settings={"float16": search}, stored=folder_size(folder), close=index.close)


PEERS: Mapping[str, tuple[str, Callable[[TokenStates, Path], Built]]] = {
    # name: environment, engine
    "maxsim-cpu": ("late-peers", maxsim_cpu),
    "qdrant-edge": ("late-peers", qdrant_edge),
    "fast-plaid": ("fast-plaid", fast_plaid),
    "colsearch": ("colsearch", colsearch),
}


def document(states: TokenStates, index: int) -> FloatArray:
    """The rows of one document in float32."""
    return np.asarray(states.flat[states.offsets[index] : states.offsets[index + 1]], np.float32)


def matrices(states: TokenStates, dtype: Any = np.float32) -> list[Any]:
    """Every document as an array of its own."""
    return [document(states, index).astype(dtype) for index in range(len(states))]


def best(scores: FloatArray, k: int = K) -> list[int]:
    """The ``k`` best of ``scores [n]``, for equal ones the lower index first."""
    if len(scores) > k:
        kept = np.flatnonzero(scores >= np.partition(scores, -k)[-k])
        return [int(at) for at in kept[np.argsort(-scores[kept], kind="stable")][:k]]
    return [int(at) for at in np.argsort(-scores, kind="stable")]


def folder_size(folder: Path) -> int:
    """Bytes of the files in ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
