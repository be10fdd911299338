"""BEIR folders: a corpus, its queries and their judgements."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.read import read

ID_COLUMN = "_id"


@dataclass(frozen=True, kw_only=True)
class BeirFolder:
    """The files of a set."""

    corpus: Path  # `corpus.jsonl`: `_id`, `title`, `text`
    queries: Path | None  # `queries.jsonl`: `_id`, `text`; `None` if there is none
    judgements: Path | None  # `qrels/test.tsv`, `qrels.tsv` or the only file in `qrels`; `None` if there is none

    def documents(self) -> Iterator[Record | Rejected]:
        """The documents; the text is the title, a space and the text, as BEIR's models read it."""
        for item in read(self.corpus, id_column=ID_COLUMN, text_column="text"):
            title = item.metadata.get("title") if isinstance(item, Record) else None
            if isinstance(item, Record) and isinstance(title, str) and title.strip():
                yield Record(item.id, f"{title.strip()} {item.text}".strip(), item.metadata)
            else:
                yield item


def beir_folder(path: str | os.PathLike[str]) -> BeirFolder | None:
    """The set in a folder; ``None`` if it holds no ``corpus.jsonl``."""
    folder = Path(path)
    if not (folder / "corpus.jsonl").is_file():
        return None
    queries = folder / "queries.jsonl"
    return BeirFolder(
        corpus=folder / "corpus.jsonl",
        queries=queries if queries.is_file() else None,
        judgements=_judgements(folder),
    )


def _judgements(folder: Path) -> Path | None:
    for file in (folder / "qrels" / "test.tsv", folder / "qrels.tsv"):
        if file.is_file():
            return file
    files = sorted((folder / "qrels").glob("*.tsv"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise InvalidRequestError(f"{folder / 'qrels'} holds {names}, and no test.tsv; name one of them")
    return files[0] if files else None
