"""The import layers: import-linter checks them, and these tests check that it finds violations."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADAPTERS = ("langchain", "llama-index", "qdrant", "milvus")
LINT = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"


def lint(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the packages under ``root`` instead of the installed ones."""
    places = [root / "src", *(root / "integrations" / name for name in ADAPTERS)]
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache", "--no-logo", *options],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the tree that a test may damage."""
    for name in ("src", "integrations"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "tests", "*.db"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_contracts_hold():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "6 kept, 0 broken" in result.stdout


@pytest.mark.parametrize(
    ("contract", "file", "line"),
    [
        ("layers", "src/millpond/errors.py", "import millpond.tasks"),
        ("layers", "src/millpond/cache.py", "import millpond.engine.schedule.request"),
        ("layers", "src/millpond/pooling/methods.py", "import millpond.models.placement"),
        ("layers", "src/millpond/utils.py", ""),
        ("layers", "src/millpond/late_interaction/maxsim.py", "import millpond.engine.schedule.request"),
        ("layers", "src/millpond/engine/scoring.py", "import millpond.late_interaction.rerank"),
        ("late_interaction", "src/millpond/late_interaction/maxsim.py", "import millpond.late_interaction.encode"),
        ("late_interaction", "src/millpond/late_interaction/helpers.py", ""),
        ("vocabulary", "src/millpond/spec.py", "import torch"),
        ("core", "src/millpond/ingest/sink.py", "import qdrant_client"),
        ("core", "src/millpond/cli/embed.py", "def late():\n    import millpond_milvus"),
        ("server", "src/millpond/engine/arguments.py", "import pydantic"),
        ("adapters", "integrations/milvus/millpond_milvus/url.py", "import millpond_qdrant"),
    ],
)
def test_a_breach_is_found(copy: Path, contract: str, file: str, line: str):
    with (copy / file).open("a", encoding="utf-8") as module:
        module.write(f"\n{line}\n")
    result = lint(copy, "--contract", contract)
    assert result.returncode == 1
    assert "0 kept, 1 broken" in result.stdout, result.stdout + result.stderr
