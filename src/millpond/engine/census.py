"""The census: what millpond makes of published checkpoints, found from their layouts by the code that loads any."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from millpond.backends.native.families import missing_plan
from millpond.checkpoints.published import Published, published
from millpond.checkpoints.task_detection import MISSING_TEMPLATE, detect_tasks
from millpond.engine.loading import identify
from millpond.errors import ModelLoadError
from millpond.tasks import Task
from millpond.values.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What millpond makes of one published checkpoint."""

    name: str  # hub id
    family: str = ""  # class of the row that serves it
    tasks: tuple[Task, ...] = ()  # what it serves; empty: nothing
    backend: str = ""  # on a CPU
    reason: str = ""  # why it is not served

    @property
    def served(self) -> bool:
        """Whether it is served."""
        return not self.reason


def census() -> Iterator[Verdict]:
    """A verdict for every name of the table, in its order."""
    with TemporaryDirectory(prefix="millpond-census-") as root:
        for layout in published():
            for name in layout.names:
                yield verdict(name, layout, Path(root))


def verdict(name: str, layout: Published, root: Path) -> Verdict:
    """What millpond makes of a checkpoint of this name and layout, whose files are written to ``root``."""
    adapter = layout.files.get("adapter_config.json")
    if (
        adapter is not None and not layout.config
    ):  # its base model is looked for on the hub, and this reads nothing there
        base = adapter["base_model_name_or_path"]
        return Verdict(
            name=name,
            reason=f"{name} is an adapter of PEFT, with which its base model, {base}, has to be at hand: they are "
            "merged at load, if millpond runs the base model",
        )
    folder = root / name
    layout.write(folder)
    try:
        checkpoint, row, _ = identify(EngineConfig(model=str(folder)), cache=root / "cache")
        detected = detect_tasks(checkpoint, row, convert="auto", token_id=lambda _: 0)
        torch = missing_plan(checkpoint.config, row) is not None
    except ModelLoadError as error:
        return Verdict(name=name, reason=str(error).replace(f"{root}/", ""))
    if detected.needs_template:
        return Verdict(name=name, reason=MISSING_TEMPLATE.format(name))
    table = row.model_type == "static"
    return Verdict(
        name=name,
        family=row.prefix,
        tasks=tuple(sorted(detected.tasks)),
        backend="torch" if torch and not table else "native",
    )
