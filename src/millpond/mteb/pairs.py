"""A task of semantic textual similarity made of a table of pairs."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from mteb.abstasks.abstask import AbsTask
from mteb.abstasks.sts import AbsTaskSTS

from millpond.errors import InvalidRequestError, SourceNotFoundError
from millpond.mteb.local import SPLIT, LocalTask, local_task

_SCORE, *_SENTENCES = ("score", "sentence1", "sentence2")


def sts_task(file: str | os.PathLike[str]) -> AbsTask:
    """A task of semantic textual similarity made of a .tsv or .csv with columns score, sentence1 and sentence2.

    Args:
        file: The file, whose name without its ending is the task's. A .tsv has no quoting.

    Returns:
        The task; its file is parsed when it is evaluated.

    Raises:
        SourceNotFoundError: There is no such file.
    """
    path = Path(file)
    if not path.is_file():
        raise SourceNotFoundError(f"there is no file at {str(path)!r}")
    task: AbsTask = local_task(_PairTask, path, [path], type="STS", main_score="cosine_spearman")
    return task


class _PairTask(LocalTask, AbsTaskSTS):
    files: ClassVar[Sequence[Path]]

    def _read(self) -> Any:
        return {SPLIT: Dataset.from_list(list(_pairs(self.files[0])))}


def _pairs(file: Path) -> Iterator[Mapping[str, Any]]:
    """The rows."""
    tabs: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if file.suffix == ".tsv" else {}
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, **tabs)
        if missing := [name for name in (_SCORE, *_SENTENCES) if name not in (rows.fieldnames or ())]:
            raise InvalidRequestError(
                f"{file} has no column {', '.join(missing)}; its first line must name score, sentence1 and sentence2"
            )
        for row in rows:
            try:
                yield {_SCORE: float(row[_SCORE]), **{name: row[name] or "" for name in _SENTENCES}}
            except (TypeError, ValueError):
                raise InvalidRequestError(f"{file}:{rows.line_num}: {row[_SCORE]!r} is no score") from None
