"""Twelve faults are inserted into a copy of the code, one at a time; for each, a test of the fast set must fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Fault(NamedTuple):
    """A line to replace, and the test that must then fail."""

    file: str  # below src/millpond
    line: str
    replacement: str
    test: str  # below tests


FAULTS = {
    "the attention window is one token wider": Fault(
        "attention/signature.py",
        "allowed & (distance.abs() < window)",
        "allowed & (distance.abs() <= window)",
        "attention/test_attention.py::test_sdpa_equals_naive",
    ),
    "positions of RoBERTa begin one earlier": Fault(
        "checkpoints/architecture.py",
        "return (1 if padding is None else int(padding)) + 1",
        "return 1 if padding is None else int(padding)",
        "parity/test_backbones.py::test_a_batch_equals_transformers_one_text_at_a_time",
    ),
    "CLS pooling reads the second token": Fault(
        "pooling/methods.py",
        "return starts if skip is None else starts + skip",
        "return starts + 1 if skip is None else starts + skip",
        "pooling/test_pooling_methods.py::test_golden",
    ),
    "the cache's key leaves out the prompt": Fault(
        "engine/dispatcher.py",
        "self._replicas.dtype, plan.prompt, plan.truncate",
        "self._replicas.dtype, plan.truncate",
        "engine/test_engine.py::test_the_cache_serves_every_width_from_one_row",
    ),
    "the texts of a cancelled call are run": Fault(
        "engine/schedule/scheduler.py",
        "for call in [call for call in self._queues if call.done]:",
        "for call in []:",
        "engine/schedule/test_scheduler.py::test_a_cancelled_call_is_dropped",
    ),
    "an overload is answered with 503": Fault(
        "server/errors.py",
        "(EngineOverloadedError, 429, ",
        "(EngineOverloadedError, 503, ",
        "server/test_errors.py::test_what_a_client_can_mend_is_told",
    ),
    "windows of a long text weigh the same": Fault(
        "engine/composite/windows.py",
        "weights = np.asarray(counts, dtype=np.float64)",
        "weights = np.ones(len(rows))",
        "engine/composite/test_windows.py::test_a_mean_weighs_by_tokens",
    ),
    "chunks of a record share one id": Fault(
        "ingest/record.py",
        'record_id if chunk == 0 else f"{record_id}\\0{chunk}"',
        "record_id",
        "ingest/test_ingest_record.py::test_point_ids_never_change",
    ),
    "the key is not compared": Fault(
        "server/middleware.py",
        'return matched and scheme.lower() == "bearer"',
        'return scheme.lower() == "bearer"',
        "server/test_middleware.py::test_without_a_key_nothing_is_answered",
    ),
    "a vector is normalized before the cut": Fault(
        "matryoshka.py",
        'np.einsum("nd,nd->n", head, head, dtype=np.float32)',
        'np.einsum("nd,nd->n", rows, rows, dtype=np.float32)',
        "unit/test_matryoshka.py::test_a_normalized_cut_is_the_unit_vector_of_the_head",
    ),
    "pairs have no token types": Fault(
        "engine/execute/packing.py",
        "np.zeros(r.length, dtype=np.int64) if r.types is None else r.types.astype(np.int64)",
        "np.zeros(r.length, dtype=np.int64)",
        "parity/test_cross_encoders.py::test_a_classic_one",
    ),
    "logits of several classes go through a sigmoid": Fault(
        "pooling/activations.py",
        'return _sigmoid(logits) if activation == "sigmoid" else _softmax(logits)',
        "return _sigmoid(logits)",
        "parity/test_activations.py::test_problem_types_are_those_of_transformers_pipeline",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_line_and_its_test_exist(name: str):
    fault = FAULTS[name]
    assert (ROOT / "src" / "millpond" / fault.file).read_text(encoding="utf-8").count(fault.line) == 1
    file, _, function = fault.test.partition("::")
    assert f"def {function}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name: str, source: Path):
    fault = FAULTS[name]
    path = source / "millpond" / fault.file
    code = path.read_text(encoding="utf-8")
    path.write_text(code.replace(fault.line, fault.replacement), encoding="utf-8")
    run = run_tests(source, fault.test)
    assert run.returncode == 1, run.stdout[-2000:]  # 1: a test failed; 2 and more: pytest could not run
    assert "1 failed" in run.stdout.splitlines()[-1]
    print(f"{name}: {[line for line in run.stdout.splitlines() if line.startswith('FAILED')]}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_a_fault_no_test_fails(source: Path):
    """Otherwise a test that fails anyway, for example because of the copy, would look like a fault that is caught."""
    run = run_tests(source, *dict.fromkeys(fault.test for fault in FAULTS.values()))
    assert run.returncode == 0, run.stdout[-2000:]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the code."""
    return shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))


def run_tests(source: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Some tests of the fast set, on the code in ``source``."""
    options = ("--exitfirst", "-q", "--no-header", "-p", "no:randomly", "-p", "no:cacheprovider")
    fast = "not slow and not gpu and not network and not service"
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-m", fast, *(f"tests/{test}" for test in tests)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=500,
    )
