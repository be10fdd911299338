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
ADAPTERS = ("langchain", "llama-index", "haystack", "qdrant", "milvus", "lancedb", "pgvector", "chroma")
CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}
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
    assert f"{len(CONTRACTS)} kept, 0 broken" in result.stdout


# By contract: a file, a line added to it, and what the report says of it.
BREACHES = (
    ("layers", "errors.py", "import millpond.tasks", "errors -> millpond.tasks"),
    ("layers", "utils.py", "", "millpond.utils"),
    (
        "engine",
        "engine/schedule/call.py",
        "if TYPE_CHECKING:\n    from millpond.engine.output.assemble import assemble",
        "schedule.call -> millpond.engine.output.assemble",
    ),
    (
        "late-interaction",
        "late_interaction/kernels/exact.py",
        "import millpond.late_interaction.scoring",
        "exact -> millpond.late_interaction.scoring",
    ),
    ("ingest", "ingest/record.py", "import millpond.ingest.sources", "record -> millpond.ingest.sources"),
    (
        "circles",
        "backends/torch/cuda/buckets.py",
        "import millpond.backends.torch.cuda.pipeline",
        "allowed in millpond.backends.torch.cuda.",
    ),
    (
        "weights",
        "engine/input/validate.py",
        "import millpond.backends.torch.loading.load",
        "input.validate -> millpond.backends.torch.loading.load",
    ),
    (
        "kernels",
        "backends/torch/attention/triton.py",
        "import millpond.backends.torch.attention.varlen",
        "triton -> millpond.backends.torch.attention.varlen",
    ),
    ("torch", "cli/commands/env.py", "def late():\n    import transformers", "commands.env -> transformers"),
    ("vocabulary", "values/spec.py", "import torch", "values.spec -> torch"),
    (
        "native",
        "backends/native/encoder.py",
        "import millpond.late_interaction.kernels.compiled",
        "native.encoder -> millpond.late_interaction.kernels.compiled",
    ),
    (
        "backends",
        "backends/device_errors.py",
        "import millpond.backends.native.structs",
        "backends.device_errors -> millpond.backends.native.structs",
    ),
    ("core", "cli/app.py", "def late():\n    import millpond_milvus", "app -> millpond_milvus"),
    ("server", "values/inputs.py", "import orjson", "values.inputs -> orjson"),
    ("server-layers", "server/errors.py", "import millpond.server.app", "errors -> millpond.server.app"),
    (
        "adapters",
        "../../integrations/milvus/millpond_milvus/__init__.py",
        "import millpond_qdrant",
        "millpond_milvus -> millpond_qdrant",
    ),
)


def test_every_forbidden_import_is_found(copy: Path):
    """Imports for type checking count too."""
    for _, file, line, _ in BREACHES:
        with (copy / "src/millpond" / file).open("a", encoding="utf-8") as module:
            module.write(f"\nfrom typing import TYPE_CHECKING\n{line}\n")
    result = lint(copy)
    assert result.returncode == 1
    assert f"0 kept, {len(CONTRACTS)} broken" in result.stdout, result.stdout + result.stderr
    report = " ".join(result.stdout.split())  # the lines are wrapped
    for _, _, _, reported in BREACHES:
        assert reported in report, reported


def test_every_contract_has_a_breach():
    assert set(CONTRACTS) == {contract for contract, *_ in BREACHES}
