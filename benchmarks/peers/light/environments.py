"""The environments of `benchmarks/light.py`: what pip installs for each engine, its bytes, and its form of MiniLM."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.environments import HERE, ROOT, Environments, Recipe
from peers.shapes import Shapes

MAKER = Path(__file__).with_name("models.py")
# What a virtual environment has before anything is installed into it.
TOOLS = {"pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence.pth"}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine, as a user installs it.

    Attributes:
        title: Its name in tables.
        family: A key of ``process.FAMILIES``.
        packages: What pip is asked for; none: the wheel of millpond.
        torch: Whether torch is installed first, as the build without CUDA.
        model: Its form of MiniLM: ``"minilm"``, ``"onnx"`` or ``"static"``.
        kind: ``"transformer"`` or ``"static table"``.
        large: Whether the large checkpoint runs as it is.
    """

    title: str
    family: str
    packages: tuple[str, ...] = ()
    torch: bool = False
    model: str = "minilm"
    kind: str = "transformer"
    large: bool = False


ENGINES: Mapping[str, Engine] = {
    "millpond": Engine(title="millpond", family="millpond", large=True),
    "millpond-before": Engine(title="millpond before", family="millpond", torch=True, large=True),
    "fastembed": Engine(title="fastembed", family="fastembed", packages=("fastembed",), model="onnx"),
    "onnxruntime": Engine(
        title="onnxruntime, tokenizers", family="onnxruntime", packages=("onnxruntime", "tokenizers"), model="onnx"
    ),
    "sentence-transformers": Engine(
        title="sentence-transformers",
        family="sentence-transformers",
        packages=("sentence-transformers",),
        torch=True,
        large=True,
    ),
    "model2vec": Engine(
        title="model2vec", family="model2vec", packages=("model2vec",), model="static", kind="static table"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An engine in its environment.

    Attributes:
        engine: What was installed.
        python: The interpreter.
        sizes: ``environment_bytes`` and ``packages``; for millpond also those of LangChain's adapter beside it.
    """

    engine: Engine
    python: Path
    sizes: Mapping[str, int]

    @property
    def ours(self) -> bool:
        """Whether it is millpond, which has a command line and keeps what it prepares."""
        return self.engine.family == "millpond"


class Installer:
    """Makes the environments below ``root``.

    Args:
        root: Their folder.
        before: The commit of the engine ``millpond-before``.
        torch_args: More arguments of pip for torch.
        here: Whether millpond is that of the running interpreter: nothing is installed, and nothing has a size.
    """

    def __init__(self, root: Path, *, before: str | None, torch_args: str, here: bool = False) -> None:
        self._root = root
        self._before = before
        self._here = here
        self._recipes: dict[str, Recipe] = {}
        self._environments = Environments(root, interpreters={}, torch_args=torch_args, recipes=self._recipes)

    def install(self, name: str) -> Installed:
        """Install an engine.

        Raises:
            UnavailableError: pip failed.
        """
        engine = ENGINES[name]
        if self._here:
            return Installed(engine=engine, python=Path(sys.executable), sizes={})
        wheels = {} if engine.packages else self._wheels(name)
        packages = engine.packages or (wheels["millpond"],)
        python = self._environment(name, packages, torch=engine.torch)
        sizes = measured(python)
        if wheels:
            both = self._environment(f"{name}-langchain", tuple(wheels.values()), torch=engine.torch)
            sizes |= {f"langchain_{key}": value for key, value in measured(both).items()}
        return Installed(engine=engine, python=python, sizes=sizes)

    def model(self, kind: str, shapes: Shapes) -> Path:
        """The folder of a form of MiniLM, which is made if it does not exist."""
        if kind == "minilm":
            return shapes.folder("minilm")
        maker = {"onnx": "sentence-transformers", "static": "model2vec"}[kind]

        def export(source: Path, target: Path) -> None:
            python = self.install(maker).python
            if kind == "onnx":  # the exporter needs onnx, which is no part of the measured environment
                below, python = python, self._environment("onnx-export", ("onnx",), torch=False)
                (site(python) / "below.pth").write_text(f"{site(below)}\n", encoding="utf-8")
            subprocess.run([python, "-I", MAKER, kind, source, target], check=True)

        return shapes.exported("minilm", f"light-{kind}", export)

    def versions(self) -> dict[str, Any]:
        """Versions of packages by environment."""
        return {name: found for name, found in self._environments.versions().items() if name != HERE}

    def _environment(self, name: str, packages: tuple[str, ...], *, torch: bool) -> Path:
        self._recipes[name] = Recipe(packages=packages, torch=None if torch else "")
        return Path(self._environments.python(name))

    def _wheels(self, name: str) -> dict[str, str]:
        """The wheels of millpond and its adapter for LangChain, of this checkout or of the earlier commit."""
        source, dist = ROOT, self._root / f"{name}-dist"
        if name == "millpond-before":
            source = self._root / "checkout"
            if not source.exists():
                subprocess.run(["git", "clone", "--quiet", "--no-checkout", str(ROOT), str(source)], check=True)
                subprocess.run(["git", "-C", str(source), "checkout", "--quiet", str(self._before)], check=True)
        line = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
        line += ["--no-build-isolation", "--wheel-dir", str(dist), str(source), str(source / "integrations/langchain")]
        if not dist.exists():
            subprocess.run(line, check=True)
        return {"millpond": str(*dist.glob("millpond-*.whl")), "langchain": str(*dist.glob("langchain_millpond-*.whl"))}


def measured(python: Path) -> dict[str, int]:
    """Bytes of an environment's packages as pip leaves them, with compiled Python, and their number."""
    entries = [entry for entry in site(python).iterdir() if not {entry.name, entry.name.partition("-")[0]} & TOOLS]
    files = [file for entry in entries for file in (entry.rglob("*") if entry.is_dir() else [entry])]
    return {
        "environment_bytes": sum(file.stat().st_size for file in files if file.is_file()),
        "packages": sum(entry.suffix == ".dist-info" for entry in entries),
    }


def site(python: Path) -> Path:
    """The folder of an environment's packages."""
    (folder,) = python.parents[1].glob("lib/python*/site-packages")
    return folder
