"""What an installation costs: bytes, packages, the first vector of a process, memory; each engine as pip installs it.

    python benchmarks/light.py [--smoke] [--engines millpond,fastembed,...] [--rounds 9] [--before COMMIT]
                               [--environments FOLDER]

Every engine gets a fresh environment of its own, which is removed at the end. Their processes take turns over
all-MiniLM-L6-v2, with files that are in the system's cache; medians are compared. fastembed and onnxruntime run an
export to ONNX, made here; model2vec a table of MiniLM's word vectors, so its rows are another class of model: they
answer what a table costs, not what a transformer costs. With ``--before`` an earlier commit of millpond runs beside
this checkout. The large checkpoint has Qwen3-0.6B's shape: 1.2 GB in bfloat16, random weights.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from compare import show
from peers.environments import cache_folder
from peers.light.environments import ENGINES, Installed, Installer
from peers.light.page import summary
from peers.light.started import Started, run_command
from peers.shapes import Shapes
from record import RESULTS, record

TEXT = "The mill stands by the pond."
TOGETHER = 10  # processes over one model
# The least cosine with sentence-transformers; a row of another class has none.
EQUAL = 0.999


class Light:
    """A run: the installed engines, and their models.

    Args:
        installed: The engines by name.
        models: The folder of MiniLM for an engine.
        folder: A temporary folder for homes and caches.
    """

    def __init__(self, installed: Mapping[str, Installed], models: Callable[[str], Path], folder: Path) -> None:
        self.installed = installed
        self.models = models
        self.folder = folder

    def start(self, name: str, *, kept: bool = False, model: Path | None = None) -> Started:
        """A new process of an engine; with ``kept`` it finds the cache folder of the earlier ones."""
        cache = self.folder / f"{name}-cache" if kept else Path(tempfile.mkdtemp(dir=self.folder))
        cache.mkdir(exist_ok=True)
        installed = self.installed[name]
        return Started(installed.python, installed.engine.family, model or self.models(name), cache)

    def starts(self, rounds: int) -> dict[str, Any]:
        """Times until the first vector, with nothing kept and, for millpond, with what earlier processes kept."""
        cases = [(name, False) for name in self.installed]
        cases += [(name, True) for name, installed in self.installed.items() if installed.ours]
        taken: dict[tuple[str, bool], list[dict[str, Any]]] = {case: [] for case in cases}
        vectors: dict[str, Any] = {}
        for number in range(rounds + 1):  # the first fills the system's cache of files, and millpond's
            for name, kept in cases if number % 2 else reversed(cases):
                with self.start(name, kept=kept) as process:
                    vectors[name] = np.array(process.first.pop("vector"))
                    memory = process.ask("memory")
                    taken[name, kept].append(process.first | {f"{key}_bytes": value for key, value in memory.items()})
        rows: dict[str, Any] = {}
        for (name, kept), each in taken.items():
            counted = each[1:] or each
            middle = {key: statistics.median(one[key] for one in counted) for key in counted[0]}
            rows.setdefault(name, {})["kept" if kept else "fresh"] = {
                **{key: round(value, 4) for key, value in middle.items()},
                "all_seconds": [round(one["seconds"], 4) for one in counted],
            }
        reference = vectors.get("sentence-transformers")
        for name, row in rows.items():
            if reference is not None and len(vectors[name]) == len(reference):
                row["cosine"] = round(float(vectors[name] @ reference / np.linalg.norm(reference)), 6)
        return rows

    def commands(self, rounds: int) -> dict[str, Any]:
        """Seconds of ``millpond embed`` with one text, from its start to its end."""
        names = [name for name, installed in self.installed.items() if installed.ours]
        taken: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds + 1):
            for name in names:
                python, home = self.installed[name].python, self.folder / f"{name}-cache"
                line = [str(python.with_name("millpond")), "embed", "--model", str(self.models(name))]
                home.mkdir(exist_ok=True)
                taken[name].append(run_command(python, line, home=home, text=TEXT))
        return {name: round(statistics.median(each[1:] or each), 4) for name, each in taken.items()}

    def speeds(self, rounds: int) -> dict[str, Any]:
        """Seconds of one call with many texts and of one with a single text, of processes that take turns."""
        names = [name for name, installed in self.installed.items() if installed.ours]
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        with ExitStack() as stack:
            started = {name: stack.enter_context(self.start(name, kept=True)) for name in names}
            for number in range(rounds + 1):
                for name in names if number % 2 else reversed(names):
                    taken[name].append(started[name].ask("speed"))
        return {
            name: {key: round(statistics.median(one[key] for one in each[1:] or each), 6) for key in each[0]}
            for name, each in taken.items()
        }

    def together(self, name: str, count: int = TOGETHER) -> dict[str, Any]:
        """``count`` processes over one model at once: their pages, each counted once, and what one has for itself."""
        with ExitStack() as stack:
            started = [stack.enter_context(self.start(name, kept=True)) for _ in range(count)]
            found = [process.ask("memory") for process in started]
        return {
            "processes": count,
            "bytes": sum(each["pss"] for each in found),
            "private_bytes": round(statistics.median(each["private"] for each in found)),
        }

    def forked(self, name: str, children: int) -> dict[str, Any]:
        """Children of a process that has embedded a text; each loads the model and embeds it too."""
        with self.start(name, kept=True) as process:
            return process.ask("forks", count=children)

    def large(self, name: str, model: Path, rounds: int) -> dict[str, Any]:
        """Peak memory of a large checkpoint, at its first start and later."""
        found = []
        for _ in range(rounds + 1):
            with self.start(name, kept=True, model=model) as process:
                found.append(process.first | process.ask("memory"))
        size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        return {
            "file_bytes": size,
            "first_peak_bytes": found[0]["peak"],
            "peak_bytes": round(statistics.median(each["peak"] for each in found[1:])),
            "first_seconds": round(found[0]["seconds"], 3),
            "seconds": round(statistics.median(each["seconds"] for each in found[1:]), 3),
        }


def measure(light: Light, options: argparse.Namespace, large: Path | None) -> dict[str, Any]:
    """All rows, by engine."""
    rows: dict[str, Any] = {
        name: {"title": each.engine.title, "class": each.engine.kind, **each.sizes}
        for name, each in light.installed.items()
    }
    print("first vectors", flush=True)
    for name, found in light.starts(options.rounds).items():
        rows[name] |= found
        if found.get("cosine", 1) < EQUAL and light.installed[name].engine.kind == "transformer":
            raise SystemExit(f"{name}: cosine {found['cosine']} with sentence-transformers")
    print("commands", flush=True)
    for name, seconds in light.commands(options.rounds).items():
        rows[name]["command_seconds"] = seconds
    print("speed", flush=True)
    for name, found in light.speeds(options.rounds).items():
        rows[name]["speed"] = found
    for name in light.installed:
        print(f"processes of {name}", flush=True)
        rows[name]["together"] = light.together(name, 2 if options.smoke else TOGETHER)
        rows[name]["forks"] = light.forked(name, options.children)
        if large is not None and light.installed[name].engine.large:
            rows[name]["checkpoint"] = light.large(name, large, min(options.rounds, 3))
    return rows


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="this environment's millpond alone, once, not recorded")
    parser.add_argument("--engines", type=lambda text: text.split(","), default=None, metavar="ENGINE,...")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--children", type=int, default=200, help="of a process that forks")
    parser.add_argument("--before", help="a commit of millpond to measure beside this checkout")
    parser.add_argument("--environments", type=Path, help="keep the environments in this folder, and use those in it")
    parser.add_argument(
        "--torch-args", default=os.environ.get("TORCH_ARGS", ""), help="more arguments of pip for torch"
    )
    options = parser.parse_args()
    known = [name for name in ENGINES if name != "millpond-before" or options.before]
    options.engines = options.engines or known
    if unknown := set(options.engines) - set(known):
        parser.error(f"--engines has no {', '.join(sorted(unknown))}; choose of {', '.join(known)}")
    if options.before and not re.fullmatch(r"[\w./~^-]+", options.before):
        parser.error(f"--before {options.before!r} is no commit")
    if options.smoke:
        options.engines, options.rounds, options.children = ["millpond"], 0, 2
    return options


def main() -> None:
    """Install, measure, print and record."""
    options = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shapes = Shapes(folder / "models" if options.smoke else cache_folder() / "models")
        installer = Installer(
            options.environments or folder / "environments",
            before=options.before,
            torch_args=options.torch_args,
            here=options.smoke,
        )
        installed = {name: installer.install(name) for name in options.engines}
        models = {name: installer.model(each.engine.model, shapes) for name, each in installed.items()}
        large = None if options.smoke else shapes.folder("large")
        rows = measure(Light(installed, models.__getitem__, folder), options, large)
        results = {"rows": rows, "rounds": options.rounds, "before": options.before, "versions": installer.versions()}
        print(summary(results))
        target = folder / "results" if options.smoke else RESULTS
        record("light", results, folder=target)
        show(target)


if __name__ == "__main__":
    main()
