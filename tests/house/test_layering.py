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
ADAPTERS = ("langchain", "llama-index", "qdrant", "milvus", "lancedb", "pgvector")
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


def test_everything_but_the_server_is_kept_from_its_libraries():
    names = {path.stem for path in (ROOT / "src/millpond").iterdir() if path.is_dir() or path.suffix == ".py"}
    others = names - {"server", "__init__", "__pycache__"}
    assert set(CONTRACTS["server"]["source_modules"]) == {f"millpond.{name}" for name in others}


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
        ("adapters", "integrations/milvus/millpond_milvus/url.py", "import millpond_qdrant"),
        ("adapters", "integrations/lancedb/millpond_lancedb/url.py", "import millpond_pgvector"),
        ("core", "src/millpond/ingest/table_sink.py", "import psycopg"),
    ],
)
def test_a_forbidden_import_is_found(copy: Path, contract: str, file: str, line: str):
    with (copy / file).open("a", encoding="utf-8") as module:
        module.write(f"\n{line}\n")
    result = lint(copy, "--contract", contract)
    assert result.returncode == 1
    assert "0 kept, 1 broken" in result.stdout, result.stdout + result.stderr


# By contract: a file, a line added to it, and what the report says of it.
BREACHES = (
    (
        "engine",
        "engine/input/plan.py",
        "import millpond.engine.execute.packing",
        "input.plan -> millpond.engine.execute.packing",
    ),
    (
        "engine",
        "engine/schedule/call.py",
        "if TYPE_CHECKING:\n    from millpond.engine.output.assemble import assemble",
        "schedule.call -> millpond.engine.output.assemble",
    ),
    ("engine", "engine/helpers.py", "", "millpond.engine.helpers"),
    (
        "engine-input",
        "engine/input/tokenized.py",
        "import millpond.engine.input.model",
        "tokenized -> millpond.engine.input.model",
    ),
    (
        "engine-schedule",
        "engine/schedule/call.py",
        "import millpond.engine.schedule.request",
        "call -> millpond.engine.schedule.request",
    ),
    (
        "engine-execute",
        "engine/execute/worker.py",
        "import millpond.engine.execute.cuda.graphs",
        "worker -> millpond.engine.execute.cuda.graphs",
    ),
    (
        "engine-siblings",
        "engine/execute/cuda/buckets.py",
        "import millpond.engine.execute.cuda.pipeline",
        "allowed in millpond.engine.execute.cuda.",
    ),
    ("engine-weights", "engine/input/encode.py", "import millpond.models.load", "input.encode -> millpond.models.load"),
    ("ingest", "ingest/record.py", "import millpond.ingest.rows", "record -> millpond.ingest.rows"),
    ("ingest", "ingest/writer.py", "import millpond.ingest.planning", "writer -> millpond.ingest.planning"),
    (
        "ingest_pages",
        "ingest/pages/charts.py",
        "import millpond.ingest.pages.report_page",
        "charts -> millpond.ingest.pages.report_page",
    ),
    (
        "ingest_advice",
        "ingest/advice/codes.py",
        "import millpond.ingest.advice.layouts",
        "codes -> millpond.ingest.advice.layouts",
    ),
    (
        "late-interaction",
        "late_interaction/kmeans.py",
        "import millpond.late_interaction.index",
        "kmeans -> millpond.late_interaction.index",
    ),
    (
        "late-interaction-memory",
        "late_interaction/memory/blocks.py",
        "import millpond.late_interaction.memory.store",
        "blocks -> millpond.late_interaction.memory.store",
    ),
    (
        "late-interaction-plaid",
        "late_interaction/plaid/manifest.py",
        "import millpond.late_interaction.plaid.segment",
        "manifest -> millpond.late_interaction.plaid.segment",
    ),
    ("attention", "attention/flex.py", "import millpond.attention.varlen", "flex -> millpond.attention.varlen"),
    ("server", "engine/input/validate.py", "import pydantic", "validate -> pydantic"),
    ("server", "bench/plan.py", "import pydantic", "bench.plan -> pydantic"),
    ("server", "inputs.py", "import orjson", "inputs -> orjson"),
    ("server_layers", "server/settings/file.py", "import millpond.server.state", "file -> millpond.server.state"),
    ("server_layers", "server/helpers.py", "", "millpond.server.helpers"),
    (
        "server_circles",
        "server/api/tei/schemas.py",
        "import millpond.server.api.tei.embed",
        "allowed in millpond.server.api.tei.",
    ),
)


def test_every_forbidden_import_in_the_packages_is_found(copy: Path):
    """Imports for type checking count too."""
    for _, file, line, _ in BREACHES:
        with (copy / "src/millpond" / file).open("a", encoding="utf-8") as module:
            module.write(f"\nfrom typing import TYPE_CHECKING\n{line}\n")
    contracts = dict.fromkeys(contract for contract, *_ in BREACHES)
    result = lint(copy, *(option for contract in contracts for option in ("--contract", contract)))
    assert result.returncode == 1
    assert f"0 kept, {len(contracts)} broken" in result.stdout, result.stdout + result.stderr
    report = " ".join(result.stdout.split())  # the lines are wrapped
    for _, _, _, reported in BREACHES:
        assert reported in report, reported


def test_every_contract_has_a_breach():
    single = {"layers", "vocabulary", "core", "adapters"}  # of `test_a_forbidden_import_is_found`
    assert set(CONTRACTS) == single | {contract for contract, *_ in BREACHES}
