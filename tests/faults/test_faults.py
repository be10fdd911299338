"""Faults are inserted into a copy of the code, one at a time; for each, a test of the fast ring must fail.

Each table of ``tests/faults/*.toml`` is one fault:

    name         what is wrong with the code then
    file         the file that gets the fault, below the repository
    line         a text that occurs exactly once in it
    replacement  what stands there instead
    test         the test that must fail: one of the fast ring, so that no fault waits for the night to be seen

``make faults`` inserts all of them; the tests of the fast ring check that each line and each test still exists.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS: dict[str, dict[str, str]] = {
    f"{table.stem}: {fault['name']}": fault
    for table in sorted(Path(__file__).parent.glob("*.toml"))
    for fault in tomllib.loads(table.read_text(encoding="utf-8"))["fault"]
}
# A test may be one that its class inherits.
CONTRACTS = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/millpond/testing").rglob("*.py"))
SOURCES = ["src", *(f"integrations/{path.name}" for path in sorted((ROOT / "integrations").iterdir()))]
FAST = "not contract and not slow and not gpu and not network and not service"


def test_every_line_and_its_test_exist():
    problems = []
    for name, fault in FAULTS.items():
        path = ROOT / fault["file"]
        count = path.read_text(encoding="utf-8").count(fault["line"]) if path.is_file() else 0
        file, _, function = fault["test"].partition("::")
        test = ROOT / file
        function = function.rpartition("::")[2].partition("[")[0]
        if count != 1:
            problems.append(f"{name}: {fault['file']} has the line {count} times")
        if not test.is_file() or f"def {function}(" not in test.read_text(encoding="utf-8") + CONTRACTS:
            problems.append(f"{name}: there is no test {fault['test']}")
    assert not problems, "\n".join(problems)
    assert len(FAULTS) >= 60


def run_tests(source: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Some tests of the fast ring, on the code in ``source``."""
    options = "--exitfirst -q --no-header -p no:randomly -p no:cacheprovider -n 0 -m".split()
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, FAST, *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(source / folder) for folder in SOURCES)},
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the code."""
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "tests", "*.db"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name: str, source: Path):
    fault = FAULTS[name]
    path = source / fault["file"]
    code = path.read_text(encoding="utf-8")
    path.write_text(code.replace(fault["line"], fault["replacement"]), encoding="utf-8")
    run = run_tests(source, fault["test"])
    assert run.returncode == 1, run.stdout[-2000:]  # 1: a test failed; 2 and more: pytest could not run
    print(f"{name}: {[line for line in run.stdout.splitlines() if line.startswith('FAILED')]}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_a_fault_no_test_fails(source: Path):
    """Otherwise a test that fails anyway, for example because of the copy, would look like a fault that is caught."""
    run = run_tests(source, *dict.fromkeys(fault["test"] for fault in FAULTS.values()))
    assert run.returncode == 0, run.stdout[-2000:]
