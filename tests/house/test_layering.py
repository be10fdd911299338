"""The import layers: import-linter checks them, and these tests check that it finds violations."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADAPTERS = ("langchain", "llama-index", "qdrant", "milvus")
LINT = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"


def lint(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the packages under ``root`` instead of the installed ones."""
    folders = [root / "src", *(root / "integrations" / name for name in ADAPTERS)]
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache", "--no-logo", *options],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the tree that a test may change."""
    for name in ("src", "integrations"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "tests", "*.db"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_contracts_hold():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert f"{len(contracts)} kept, 0 broken" in result.stdout


@pytest.mark.parametrize(
    ("contract", "file", "line"),
    [
        ("layers", "src/millpond/errors.py", "import millpond.tasks"),
        ("layers", "src/millpond/cache.py", "import millpond.engine.schedule.request"),
        ("layers", "src/millpond/pooling/methods.py", "import millpond.models.placement"),
        ("layers", "src/millpond/utils.py", ""),
        ("layers", "src/millpond/late_interaction/similarity.py", "import millpond.engine.schedule.request"),
        ("layers", "src/millpond/late_interaction/reranking.py", "import millpond.engine.engine"),
        ("layers", "src/millpond/late_interaction/encode.py", "import millpond.models.placement"),
        ("vocabulary", "src/millpond/spec.py", "import torch"),
        ("core", "src/millpond/ingest/sink.py", "import qdrant_client"),
        ("core", "src/millpond/cli/embed.py", "def late():\n    import millpond_milvus"),
        ("server", "src/millpond/engine/input/validate.py", "import pydantic"),
        ("adapters", "integrations/milvus/millpond_milvus/url.py", "import millpond_qdrant"),
    ],
)
def test_a_forbidden_import_is_found(copy: Path, contract: str, file: str, line: str):
    with (copy / file).open("a", encoding="utf-8") as module:
        module.write(f"\n{line}\n")
    result = lint(copy, "--contract", contract)
    assert result.returncode == 1
    assert "0 kept, 1 broken" in result.stdout, result.stdout + result.stderr


# By contract: a file of the engine, a line added to it, and the import or module that the report names.
ENGINE_BREACHES = (
    (
        "engine",
        "input/plan.py",
        "import millpond.engine.execute.packing",
        "input.plan -> millpond.engine.execute.packing",
    ),
    (
        "engine",
        "schedule/call.py",
        "if TYPE_CHECKING:\n    from millpond.engine.output.assemble import assemble",
        "schedule.call -> millpond.engine.output.assemble",
    ),
    ("engine", "helpers.py", "", "millpond.engine.helpers"),
    (
        "engine-input",
        "input/tokenized.py",
        "import millpond.engine.input.model",
        "tokenized -> millpond.engine.input.model",
    ),
    (
        "engine-schedule",
        "schedule/call.py",
        "import millpond.engine.schedule.request",
        "call -> millpond.engine.schedule.request",
    ),
    (
        "engine-execute",
        "execute/worker.py",
        "import millpond.engine.execute.cuda.graphs",
        "worker -> millpond.engine.execute.cuda.graphs",
    ),
    ("engine-siblings", "execute/cuda/buckets.py", "import millpond.engine.execute.cuda.pipeline", "execute.cuda"),
    ("engine-weights", "input/encode.py", "import millpond.models.load", "input.encode -> millpond.models.load"),
)


def test_every_forbidden_import_in_the_engine_is_found(copy: Path):
    """Imports for type checking count too."""
    for _, file, line, _ in ENGINE_BREACHES:
        with (copy / "src/millpond/engine" / file).open("a", encoding="utf-8") as module:
            module.write(f"\nfrom typing import TYPE_CHECKING\n{line}\n")
    contracts = dict.fromkeys(contract for contract, *_ in ENGINE_BREACHES)
    result = lint(copy, *(option for contract in contracts for option in ("--contract", contract)))
    assert result.returncode == 1
    assert f"0 kept, {len(contracts)} broken" in result.stdout, result.stdout + result.stderr
    for _, _, _, reported in ENGINE_BREACHES:
        assert reported in result.stdout, reported
