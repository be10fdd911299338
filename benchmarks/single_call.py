"""One text in one call, and small crowds, of this checkout beside an earlier commit, in turns.

    python benchmarks/single_call.py [--smoke] [--before COMMIT or FOLDER] [--cores 0,1] [--rounds 5] [--only WAY,...]

Milliseconds of a call (p50, p90), processor milliseconds of a call (of the server's for HTTP), and tokens per second
with processor seconds for a million of them: for each the best round and, in brackets, the median. A FOLDER is a
checkout with compiled kernels, which is not installed first; so is this one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from peers.shapes import Shapes
from peers.texts import Texts
from record import record
from revisions import ROOT, install

PROCESS = Path(__file__).with_name("peers") / "single_process.py"
COUNT = 400  # calls of a round
QUERIES = (
    "How do I open a file for reading in binary mode?",
    "What raises an error when a key is missing in a dict?",
    "convert a string to an integer with a base",
    "How can I sort a list of tuples by its second item",
)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few calls of this checkout alone, nothing recorded")
    parser.add_argument("--before", default="HEAD~1", help="the commit to compare with, or a folder")
    parser.add_argument("--cores", type=lambda text: set(map(int, text.split(","))), help="of all processes (Linux)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", type=lambda text: text.split(","), help="words in the names of ways")
    options = parser.parse_args()
    if options.cores:
        os.sched_setaffinity(0, options.cores)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        results = run(options, Path(folder), stack)
    if not options.smoke:
        settings = {"before": options.before, "rounds": options.rounds, "cores": sorted(options.cores or ())}
        record("single_call", {**settings, "ways": results})


def run(options: argparse.Namespace, folder: Path, stack: ExitStack) -> dict[str, Any]:
    """By way, revision and figure the best round and the median."""
    shapes = Shapes(folder / "models")
    model = shapes.folder("minilm")
    docs = Texts(model / "tokenizer.json", data=None).workload("docs", limit=256, count=300).between(50, 64)
    inputs = folder / "texts.json"
    inputs.write_text(json.dumps({"queries": QUERIES, "docs": list(docs.texts)}), encoding="utf-8")
    trees = {"now": ROOT}
    if not options.smoke:
        trees = {"before": before_of(options.before, folder), **trees}
    processes = {}
    for name, tree in trees.items():
        path = f"{tree if tree.name == 'site' else tree / 'src'}{os.pathsep}{adapter_of(tree)}"
        command = [sys.executable, str(PROCESS), str(model), str(inputs), "8" if options.smoke else str(COUNT)]
        process = subprocess.Popen(
            command, stdin=-1, stdout=-1, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": path}
        )
        stack.callback(process.wait)
        stack.callback(process.stdin.close)  # type: ignore[union-attr]
        processes[name] = process
    ways = {name: json.loads(process.stdout.readline()) for name, process in processes.items()}  # type: ignore[union-attr]
    results: dict[str, Any] = {}
    for way in ways["now"]:
        if options.only and not any(word in way for word in options.only):
            continue
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in processes}
        for number in range(1 if options.smoke else options.rounds + 1):  # the first round warms up
            for name in list(processes)[:: 1 if number % 2 else -1]:
                print(json.dumps(way), file=processes[name].stdin, flush=True)
                rounds[name].append(json.loads(processes[name].stdout.readline()))  # type: ignore[union-attr]
        results[way] = {name: summary(found[1:] or found) for name, found in rounds.items()}
        print(way)
        for name, figures in results[way].items():
            shown = [f"{figure} {best:.4g} ({middle:.4g})" for figure, (best, middle) in figures.items()]
            print(f"  {name:6} {'  '.join(shown)}", flush=True)
    return results


def summary(rounds: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """The best round and the median of each figure."""
    best = {figure: max if figure == "tokens/s" else min for figure in rounds[0]}
    columns = {figure: [found[figure] for found in rounds] for figure in best}
    return {figure: (best[figure](values), statistics.median(values)) for figure, values in columns.items()}


def before_of(revision: str, folder: Path) -> Path:
    """Where the earlier revision is imported from."""
    return Path(revision) if Path(revision).is_dir() else install(revision, folder)


def adapter_of(tree: Path) -> Path:
    """The LangChain adapter of a revision: a copy of the checkout lies beside what was installed from it."""
    return (tree.parent / "checkout" if tree.name == "site" else tree) / "integrations" / "langchain"


if __name__ == "__main__":
    main()
