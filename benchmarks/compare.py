"""millpond compared with other engines in one run: throughput, latency, start-up, memory, reranking, token vectors.

    python benchmarks/compare.py [--smoke] [--only embed,calls,latency,rerank,tokens,startup,shapes] [--rounds 5]
                                 [--engines millpond,st-openvino,...] [--isa avx2]
                                 [--environments FOLDER] [--python openvino=PATH]

Engines are processes that take turns, so that a change in the machine's speed affects all of them; compare ratios only.
Each section is a file of benchmarks/results/PROCESSOR/ with hardware, versions and commit; the tables and plots of
benchmarks/README.md are made from these files. A run on one kind of processor leaves the files of others unchanged, and
so does a run with `--isa`, which caps the instruction set of every engine alike. A peer that needs a separate
environment gets one, which is kept; if it cannot be made, the peer is left out and the table says so.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from peers import measure, page, plots
from peers.caps import CAPS, NOT_CAPPED
from peers.engines import COMPETITORS, REFERENCE, default_engines
from peers.environments import RECIPES, ROOT, Environments, cache_folder
from peers.fleet import BATCH_SIZES, Fleet
from peers.shapes import Shapes
from peers.texts import Texts
from processor import ISAS, processor
from record import RESULTS, record

PAGE = ROOT / "benchmarks" / "README.md"
IMAGES = ROOT / "docs" / "images"
SHARED = {"embed": measure.embed, "calls": measure.calls, "latency": measure.latency}  # one fleet serves these
OWN = {"rerank": measure.rerank, "tokens": measure.tokens}
SHAPE_OF = {"embed": "minilm", "rerank": "cross-encoder", "tokens": "colbert"}
SECTIONS = tuple(page.TABLES)


def main() -> None:
    """Measure the requested sections, and write results, tables and plots."""
    options = arguments()
    began = time.perf_counter()
    if options.page:
        show(options.results)
        return
    with tempfile.TemporaryDirectory() as folder:
        bench = prepare(options, Path(folder))
        target = Path(folder) / "results" if options.smoke else options.results
        for name, results in sections(bench, options):
            results["environments"] = bench.environments.versions()
            results["rounds"] = bench.rounds
            if options.isa:
                results["not_capped"] = [name for name in NOT_CAPPED if name in bench.engines]
            record(name, results, folder=target)
            if options.smoke and (unequal := sorted(set(measure.unequal(results)))):
                raise SystemExit(f"{name}: not equal to {REFERENCE}: {', '.join(unequal)}")
            if options.smoke and results["left_out"]:
                raise SystemExit(f"{name}: left out: {results['left_out']}")
            print(f"-- {name}: after {time.perf_counter() - began:.0f} s", flush=True)
        show(target)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few texts, one round, this environment's engines only")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page from the existing results")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SECTIONS), metavar="SECTION,...")
    parser.add_argument(
        "--shapes", type=lambda text: text.split(","), default=list(measure.SHAPES), metavar="SHAPE,..."
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the texts of a full run")
    parser.add_argument(
        "--batch-sizes",
        type=lambda text: tuple(map(int, text.split(","))),
        default=BATCH_SIZES,
        metavar="SIZE,...",
        help="searched for each engine that takes one and each workload",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder; another one leaves the page unchanged")
    parser.add_argument(
        "--engines",
        default=None,
        help=f"some of {', '.join(COMPETITORS)}; {REFERENCE} always runs; without it: those that suit the processor",
    )
    parser.add_argument("--isa", choices=list(CAPS), default=None, help="the highest instruction set of every engine")
    parser.add_argument("--environments", type=Path, default=None, help=f"folder (default: {cache_folder()})")
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help=f"an interpreter for {' or '.join(RECIPES)}"
    )
    parser.add_argument("--data", type=Path, default=os.environ.get("MILLPOND_DATA"), help="folder with longdocs/*.txt")
    parser.add_argument(
        "--torch-args", default=os.environ.get("TORCH_ARGS", ""), help="further arguments of pip when it installs torch"
    )
    options = parser.parse_args()
    if unknown := set(options.only) - set(SECTIONS):
        parser.error(f"--only has no {', '.join(sorted(unknown))}; choose of {', '.join(SECTIONS)}")
    if unknown := set(options.shapes) - set(measure.SHAPES):
        parser.error(f"--shapes has no {', '.join(sorted(unknown))}; choose of {', '.join(measure.SHAPES)}")
    flag_sets = processor()["instruction_sets"]
    if options.isa and ISAS[options.isa] not in flag_sets:
        parser.error(f"--isa {options.isa}: this processor has no {ISAS[options.isa]}; it has {', '.join(flag_sets)}")
    os.environ |= CAPS[options.isa] if options.isa else {}  # for the engines' processes, and for the record
    selected = options.engines.split(",") if options.engines else default_engines(flag_sets, options.isa)
    if unknown := set(selected) - set(COMPETITORS):
        parser.error(f"--engines has no {', '.join(sorted(unknown))}; choose of {', '.join(COMPETITORS)}")
    options.engines = [name for name in COMPETITORS if name in selected or name == REFERENCE]
    if options.smoke:
        options.engines, options.rounds = [name for name in COMPETITORS if COMPETITORS[name].smoke], 1
    return options


def prepare(options: argparse.Namespace, folder: Path) -> measure.Bench:
    """Everything that the sections share."""
    root = options.environments or cache_folder()
    interpreters = dict(pair.split("=", 1) for pair in options.python)
    # A smoke run leaves no files behind.
    shapes = Shapes(folder / "models" if options.smoke else root / "models")
    data = Path(options.data) if options.data else None
    return measure.Bench(
        environments=Environments(root / "environments", interpreters=interpreters, torch_args=options.torch_args),
        shapes=shapes,
        texts=Texts(shapes.folder("minilm") / "tokenizer.json", data=data),
        folder=folder,
        engines=tuple(options.engines),
        rounds=options.rounds,
        scale=0.012 if options.smoke else options.scale,
        sizes=(32,) if options.smoke else options.batch_sizes,
    )


def sections(bench: measure.Bench, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and results of each requested section, as each is measured."""
    only, smoke = options.only, options.smoke
    tasks = {"embed": [name for name in SHARED if name in only], **{name: [name] for name in OWN if name in only}}
    with ExitStack() as stack:
        fleet: Fleet | None = None
        for task, names in tasks.items():
            if not names:
                continue
            if fleet is None or not smoke:  # a smoke run does not start the engines again
                stack.close()
                left_out: dict[str, str] = {}
                fleet = stack.enter_context(bench.fleet(left_out))
            bench.load(fleet, SHAPE_OF[task], task)
            for name in names:
                yield name, {**SHARED, **OWN}[name](bench, fleet, left_out)
    if "startup" in only:
        yield "startup", measure.startup(bench, {}, {"millpond"} if smoke else None)
    if "shapes" in only and not smoke:
        yield "shapes", measure.shapes(bench, options.shapes, measure.BEST_PEERS, {})


def show(results: Path) -> None:
    """Write tables and plots: into the page for the repository's own results, else beside the results."""
    filled = page.fill(PAGE.read_text(encoding="utf-8"), results)
    ours = results.resolve() == RESULTS.resolve()
    (PAGE if ours else results / PAGE.name).write_text(filled, encoding="utf-8")
    drawn = plots.draw(results, IMAGES if ours else results)
    print(f"{PAGE.name} and {', '.join(path.name for path in drawn)} in {PAGE.parent if ours else results}")


if __name__ == "__main__":
    main()
