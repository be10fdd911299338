"""The measured error of every family: packed float32 states of both backends beside a reference, one text at a time.

    python -m tests.parity.measured [FAMILY ...]

writes the file that docs/models.md shows them from, or the named families' errors in it. An error is the largest
difference of a text's states, relative to their largest value.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from docs.site.models import ERRORS, cell
from tests.parity.test_backbones import difference, expected_of, states
from tests.parity.test_encoder_decoder import ALL, Reference, write
from tests.tiny import FAMILIES, TEXTS, write_checkpoint
from tests.tiny.columns import row_of

from millpond import Engine


def measured(family: str, folder: Path) -> dict[str, float]:
    """The error of each backend that runs a tiny checkpoint of this family."""
    write_checkpoint(folder, family)
    expected = expected_of(folder, TEXTS)
    errors = {}
    backends: tuple[Any, ...] = ("native", "torch") if cell(row_of(family), "embedder") == "native" else ("torch",)
    for backend in backends:
        with Engine(folder, backend=backend, dtype="float32", device="cpu") as engine:
            errors[backend] = float(f"{difference(states(engine, TEXTS), expected):.0e}")
    return errors


def measured_scores(folder: Path) -> dict[str, float]:
    """The error of a tiny KaLM-Reranker's scores, which has no states of one text."""
    write(folder)
    expected = Reference(folder).of(ALL)
    queries, documents = ([pair[side] for pair in ALL] for side in (0, 1))
    errors = {}
    backends: tuple[Any, ...] = ("native", "torch")
    for backend in backends:
        with Engine(folder, backend=backend, dtype="float32", device="cpu") as engine:
            actual = engine.score(queries, documents, activation=False).scores
            errors[backend] = float(f"{np.abs(actual - expected).max() / np.abs(expected).max():.0e}")
    return errors


def main(families: Collection[str]) -> None:
    """Measure these families."""
    found = json.loads(ERRORS.read_text(encoding="utf-8")) if families and ERRORS.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        for family in families or FAMILIES:
            errors = measured(family, Path(folder) / family)
            own = found.setdefault(row_of(family).prefix, {})
            for backend, error in errors.items():  # the largest of those of a row's tiny families
                own[backend] = error if families else max(error, own.get(backend, 0.0))
        if not families:
            found["T5Gemma2"] = measured_scores(Path(folder) / "KaLM-Reranker-V1-Nano")
    ERRORS.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
