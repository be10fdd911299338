"""nDCG@10 of MaxSim retrieval over one set: widths, codecs, token pooling, MUVERA.

Every ranking here is over all documents, or says how many candidates it rescored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond import Ragged
from peers.ranking import Indices, exact_ranking, exact_scores, ndcg, recall, top
from peers.token_indexes import documents_of, ids_of, plaid, searching
from peers.token_peers import best
from peers.token_states import FloatArray, TokenStates

CODECS = ("int8", "bfloat16", "float32")
FACTORS = (2, 3)
PLAID_CODECS = ("int8", "4", "2")


def quality(
    sets: Mapping[str, TokenStates], *, dense: Callable[[], tuple[FloatArray, FloatArray]] | None
) -> dict[str, Any]:
    """Figures of one set in several encodings.

    Args:
        sets: Encodings of one set, by what is special about them: width, and where queries are cut.
        dense: Gives the embeddings of queries ``[q, d]`` and documents ``[n, d]``; None leaves that line out.
    """
    rows: dict[str, Any] = {}
    if dense is not None:
        states = next(iter(sets.values()))
        queries, documents = dense()
        rows["dense"] = {"ndcg@10": ndcg(top(queries @ documents.T, 10).tolist(), states.grades)}
    for name, states in sets.items():
        exact = top(exact_scores(states, len(states.queries)), 10)
        rows[f"exact, {name}"] = {"ndcg@10": ndcg(exact.tolist(), states.grades)}
        for codec in CODECS:
            rows[f"{codec}, {name}"] = _judged(_codec(states, codec), exact, states)
        for factor in FACTORS:
            pooled = _pooled(states, factor)
            found = top(exact_scores(pooled, len(states.queries)), 10)
            rows[f"pooling {factor}, {name}"] = {
                **_judged(found.tolist(), exact, states),
                "tokens": len(pooled.flat) / len(states.flat),
            }
    return rows


def residuals(states: TokenStates, folder: Path) -> dict[str, Any]:
    """nDCG@10 and recall of the exact ten of each codec of PlaidIndex."""
    exact = top(exact_scores(states, len(states.queries)), 10)
    rows = {}
    for codec in PLAID_CODECS:
        built = plaid(states, folder / codec, codec=codec)
        found = [built.settings["default"](query) for query in states.queries]
        rows[f"PlaidIndex, {codec}"] = _judged(found, exact, states)
        built.close()
    return rows


def databases(states: TokenStates) -> dict[str, Any]:
    """nDCG@10 and recall of QdrantIndex in Qdrant's local mode, for each vector that finds its candidates."""
    from millpond_qdrant import QdrantIndex

    exact = top(exact_scores(states, len(states.queries)), 10)
    rows = {}
    for prefetch, name in ((None, "every document"), ("muvera", "prefetch by MUVERA"), ("dense", "prefetch by means")):
        with QdrantIndex(":memory:", "passages", None, prefetch=prefetch) as index:
            index.add_embeddings(ids_of(states), documents_of(states))
            rows[f"QdrantIndex, {name}"] = _judged([searching(index)(query) for query in states.queries], exact, states)
    return rows


def muvera(states: TokenStates, *, queries: int, folder: Path | None) -> dict[str, Any]:
    """How many of the exact ten are among the best of 2,560-dimensional encodings, and nDCG after rescoring them."""
    from millpond.late_interaction.encoding.muvera import Muvera

    encoder = Muvera(width=states.flat.shape[1])
    exact = exact_ranking(states, queries, folder=folder)
    began = time.process_time()
    documents = np.concatenate([encoder.encode_documents(piece) for piece in _pieces(states)])
    seconds = time.process_time() - began
    asked = Ragged.from_matrices(states.queries[:queries], width=states.flat.shape[1])
    began = time.process_time()
    encoded = encoder.encode_queries(asked)
    query_seconds = time.process_time() - began
    # int8 with one scale for each document, as a database stores them
    scales = np.maximum(np.abs(documents).max(1, keepdims=True), 1e-12) / 127
    rounded = np.rint(documents / scales)
    result: dict[str, Any] = {
        "dimensions": encoder.output_dimensions,
        "cpu_ms_document": 1e3 * seconds / max(1, len(states)),
        "cpu_ms_query": 1e3 * query_seconds / len(asked),
    }
    for name, vectors in (("float32", documents), ("int8", rounded)):
        order = _nearest(encoded, vectors, scales if name == "int8" else None, 1000)
        for kept in (100, 200, 500, 1000):
            if kept <= len(states) // 2:
                result[f"{name}: share of the exact ten in the best {kept}"] = recall(
                    order[:, :kept].tolist(), exact, len(states)
                )
        kept = min(200, len(states))
        rescored = [_rescored(states, query, row[:kept]) for query, row in zip(states.queries, order, strict=False)]
        result[f"{name}: ndcg@10 of the best {kept}, rescored"] = ndcg(rescored, states.grades)
        result[f"{name}: recall@10 of the best {kept}, rescored"] = recall(rescored, exact)
    result["ndcg@10 exact"] = ndcg(exact.tolist(), states.grades)
    return result


def _nearest(queries: FloatArray, documents: FloatArray, scales: FloatArray | None, k: int) -> Indices:
    scores = queries @ documents.T
    if scales is not None:
        scores *= scales.T
    return top(scores, min(k, len(documents)))


def _rescored(states: TokenStates, query: FloatArray, documents: Sequence[int] | Indices) -> list[int]:
    from millpond.late_interaction import maxsim

    matrices = [np.asarray(states.flat[states.offsets[i] : states.offsets[i + 1]], np.float32) for i in documents]
    width = states.flat.shape[1]
    scores = maxsim(Ragged.from_matrices([query], width=width), Ragged.from_matrices(matrices, width=width))
    return [int(documents[at]) for at in best(np.asarray(scores)[0])]


def _pieces(states: TokenStates, count: int = 1000) -> Iterator[Ragged]:
    for start in range(0, len(states), count):
        offsets = states.offsets[start : start + count + 1]
        rows = np.asarray(states.flat[offsets[0] : offsets[-1]], np.float32)
        yield Ragged(flat=rows, offsets=offsets - offsets[0])


def _codec(states: TokenStates, codec: str) -> list[list[int]]:
    from millpond.late_interaction.codecs.rows import CODECS as ROW_CODECS
    from millpond.late_interaction.scoring.exact import Tokens, score

    rows, scales = ROW_CODECS[codec].pack(np.asarray(states.flat, np.float32))
    tokens = Tokens(codec=ROW_CODECS[codec], rows=rows, scales=scales, offsets=np.asarray(states.offsets))
    queries = Ragged.from_matrices(list(states.queries), width=states.flat.shape[1])
    return [best(row) for row in score(queries, tokens)]


def _pooled(states: TokenStates, factor: int) -> TokenStates:
    from millpond.late_interaction.encoding.token_pooling import pool_tokens

    pooled = [pool_tokens(piece, factor) for piece in _pieces(states)]
    lengths = np.concatenate([np.diff(piece.offsets) for piece in pooled])
    flat: npt.NDArray[Any] = np.concatenate([piece.flat for piece in pooled])
    return TokenStates(
        name=f"{states.name}/{factor}",
        flat=flat,
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        queries=states.queries,
        grades=states.grades,
    )


def _judged(found: Sequence[Sequence[int]], exact: Indices, states: TokenStates) -> dict[str, float]:
    return {"ndcg@10": ndcg(found, states.grades), "recall@10": recall(found, exact)}
