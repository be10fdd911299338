"""A task of retrieval made of a folder of BEIR."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from mteb.abstasks.abstask import AbsTask
from mteb.abstasks.retrieval import AbsTaskRetrieval

from millpond.errors import InvalidRequestError
from millpond.ingest.advice.judgements import beir_folder, read_judgements
from millpond.mteb.local import SPLIT, LocalTask, local_task


def beir_task(folder: str | os.PathLike[str]) -> AbsTask:
    """A task of retrieval made of a folder with ``corpus.jsonl``, ``queries.jsonl`` and ``qrels/test.tsv``.

    Args:
        folder: The folder, whose name is the task's.

    Returns:
        The task; its files are parsed when it is evaluated.

    Raises:
        InvalidRequestError: One of the files is missing.
    """
    files = beir_folder(folder)
    if files is None or files.queries is None or files.judgements is None:
        raise InvalidRequestError(
            f"{os.fspath(folder)!r} is no BEIR folder: it needs corpus.jsonl, queries.jsonl and qrels/test.tsv"
        )
    paths = [files.corpus, files.queries, files.judgements]
    task: AbsTask = local_task(_BeirTask, Path(folder), paths, type="Retrieval", main_score="ndcg_at_10")
    return task


class _BeirTask(LocalTask, AbsTaskRetrieval):
    files: ClassVar[Sequence[Path]]  # of the corpus, the queries and the judgements

    def _read(self) -> Any:
        corpus, queries, judgements = self.files
        judged = {
            query: {document: _whole(grade, judgements) for document, grade in grades.items()}
            for query, grades in read_judgements(judgements).items()
        }
        asked = [row for row in _rows(queries, "text") if row["id"] in judged]
        if not asked:
            raise InvalidRequestError(f"{queries} has none of the queries that {judgements} judges")
        split = {
            "corpus": Dataset.from_list(list(_rows(corpus, "title", "text"))),
            "queries": Dataset.from_list(asked),
            "relevant_docs": {row["id"]: judged[row["id"]] for row in asked},
            "top_ranked": None,
        }
        return {"default": {SPLIT: split}}


def _rows(file: Path, *texts: str) -> Iterator[dict[str, str]]:
    """The objects of a JSONL with their id; a text that is missing is empty."""
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                yield {"id": str(row["_id"]), **{name: str(row.get(name) or "") for name in texts}}
            except (ValueError, KeyError, TypeError, AttributeError):
                raise InvalidRequestError(f"{file}:{number} is no JSON object with _id and text") from None


def _whole(grade: float, file: Path) -> int:
    if grade != int(grade):
        raise InvalidRequestError(f"{file} has the grade {grade}; mteb takes whole grades only")
    return int(grade)
