"""Is this checkout as fast as an earlier commit, and are its answers the same? Both take turns in one run.

Each is installed with its kernels into a folder of its own and runs in a process of its own, over the same texts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from peers.engines import Competitor
from peers.fleet import Peer
from peers.shapes import Shapes
from peers.texts import Texts
from record import record

ROOT = Path(__file__).parents[1]
# Texts of each workload.
COUNTS = {"docs": 500, "short": 1500, "passages": 120, "mixed": 90}
SINGLES = 200
CALLERS = 16


def install(revision: str | None, folder: Path) -> Path:
    """Install a revision, or this checkout for None, with its kernels; returns the folder to import it from."""
    source = ROOT
    if revision is not None:
        source = folder / "checkout"
        subprocess.run(["git", "clone", "--quiet", "--no-checkout", str(ROOT), str(source)], check=True)
        subprocess.run(["git", "-C", str(source), "checkout", "--quiet", revision], check=True)
    target = folder / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--target", str(target), str(source)], check=True)
    return target


def take_turns(peers: dict[str, Peer], rounds: int, measure: Callable[[Peer], float]) -> dict[str, Any]:
    """The median of each, and the median of the rounds' ratios: later over earlier revision."""
    values: dict[str, list[float]] = {name: [] for name in peers}
    for index in range(rounds + 1):  # the first round warms up
        order = list(peers) if index % 2 else list(reversed(peers))
        for name in order:
            values[name].append(measure(peers[name]))
    ratios = [now / before for before, now in zip(values["before"][1:], values["now"][1:], strict=True)]
    return {
        **{name: statistics.median(times[1:]) for name, times in values.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure every workload; ``ratio`` above 1 is what is faster now, but for times, where it is below."""
    shapes = Shapes(folder / "models")
    texts = Texts(shapes.folder("minilm") / "tokenizer.json", data=None)
    peers: dict[str, Peer] = {}
    results: dict[str, Any] = {}
    try:
        for name, revision in (("before", options.before), ("now", None)):
            (folder / name).mkdir()
            competitor = Competitor(
                name=name,
                title=name,
                family="millpond",
                environ={"PYTHONPATH": str(install(revision, folder / name))},
            )
            peers[name] = Peer(competitor, sys.executable, folder / f"{name}.log")
        for task, model, names in (
            ("embed", "minilm", list(COUNTS)),
            ("rerank", "cross-encoder", ["mixed"]),
            ("tokens", "colbert", ["passages"]),
        ):
            for peer in peers.values():
                peer.ask("load", family="millpond", task=task, model=str(shapes.folder(model)), options={})
            for workload_name in names:
                count = 8 if options.smoke else COUNTS[workload_name]
                workload = texts.workload(workload_name, limit=256, count=count)
                inputs = folder / f"{task}-{workload_name}.json"
                rerank = {"query": "how is a file read line by line?", "documents": list(workload.texts)}
                inputs.write_text(json.dumps(rerank if task == "rerank" else list(workload.texts)), encoding="utf-8")
                found = take_turns(
                    peers,
                    options.rounds,
                    lambda peer, at=str(inputs), tokens=workload.tokens: tokens / peer.ask("run", inputs=at)["seconds"],
                )
                results[f"{task} {workload_name}, tokens/s"] = found | {"difference": difference(peers, folder)}
            if task == "embed":
                short = str(folder / "embed-short.json")
                results["one short text, ms"] = take_turns(
                    peers,
                    options.rounds,
                    lambda peer, at=short: (
                        1000
                        * statistics.median(
                            peer.ask("singles", inputs=at, start=10, count=8 if options.smoke else SINGLES, discard=10)[
                                "seconds"
                            ]
                        )
                    ),
                )
                results[f"all short texts by {CALLERS} callers, passes/s"] = take_turns(
                    peers,
                    options.rounds,
                    lambda peer, at=short: 1 / peer.ask("crowd", inputs=at, size=1, callers=CALLERS)["seconds"],
                )
    finally:
        for peer in peers.values():
            peer.close()
    return results


def difference(peers: dict[str, Peer], folder: Path) -> float:
    """The largest difference between the two revisions' last results."""
    arrays = []
    for name, peer in peers.items():
        path = folder / f"{name}.npz"
        peer.ask("save", path=str(path))
        arrays.append(np.load(path))
    before, now = arrays
    return max(float(np.abs(before[key] - now[key]).max()) for key in before.files)


def main() -> None:
    """Run, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few texts against this very commit, nothing recorded")
    parser.add_argument("--before", default="HEAD", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.smoke:
        options.rounds = 1
    with tempfile.TemporaryDirectory() as folder:
        results = run(options, Path(folder))
    print("| workload | before | now | now / before | largest difference |\n| --- | ---: | ---: | ---: | ---: |")
    for name, found in results.items():
        print(
            f"| {name} | {found['before']:,.4g} | {found['now']:,.4g} | {found['ratio']:.3f} | "
            f"{found.get('difference', float('nan')):.1e} |"
        )
    if not options.smoke:
        record("revisions", {"before": options.before, "rounds": options.rounds, "workloads": results})


if __name__ == "__main__":
    main()
