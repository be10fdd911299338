"""Judgements: which documents answer a query, read from TREC and BEIR files, nDCG by them, and folders of BEIR."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millpond.errors import InvalidRequestError, SourceNotFoundError
from millpond.ingest.sources.lines import read_text_lines, too_long

Judgements = Mapping[str, Mapping[str, float]]
# Of BEIR, whose models read the title, a space and the text.
ID_COLUMN = "_id"
TEXT_COLUMNS = ["title", "text"]


def read_judgements(path: str | os.PathLike[str]) -> dict[str, dict[str, float]]:
    """Read ``{query id: {document id: grade}}``.

    ======= ==================================================================
    BEIR    tab-separated ``query-id``, ``corpus-id``, ``score``, with a header
    TREC    ``query iteration document grade``, separated by white space
    ======= ==================================================================

    If a pair is judged twice, the later line counts.

    Args:
        path: The file.

    Returns:
        For each query the grades of its documents.

    Raises:
        SourceNotFoundError: There is no such file.
        InvalidRequestError: A line is of neither kind, or there is none; the message names it.
    """
    file = Path(path)
    if not file.is_file():
        raise SourceNotFoundError(f"there is no file of judgements at {str(file)!r}")
    judgements: dict[str, dict[str, float]] = {}
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(read_text_lines(lines), start=1):
                if isinstance(line, int):
                    raise InvalidRequestError(f"{file}:{number}: {too_long('line', line)}")
                fields = line.split("\t") if line.count("\t") >= 2 else line.split()
                fields = [field.strip() for field in fields]
                if not any(fields):
                    continue
                if number == 1 and fields[-1].casefold() in ("score", "rel", "relevance", "grade", "label"):
                    continue
                query, document, grade = _fields(fields, f"{file}:{number}")
                judgements.setdefault(query, {})[document] = grade
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{file} is not UTF-8 ({error.reason} at byte {error.start})") from None
    if not judgements:
        raise InvalidRequestError(f"{file} holds no judgement; a line is: query id, document id, grade")
    return judgements


def _fields(fields: Sequence[str], where: str) -> tuple[str, str, float]:
    if len(fields) == 4:
        fields = [fields[0], fields[2], fields[3]]
    if len(fields) == 3 and all(fields):
        query, document, grade = fields
        try:
            value = float(grade)
        except ValueError:
            value = math.nan
        if math.isfinite(value):
            return query, document, value
    raise InvalidRequestError(
        f"{where}: {' '.join(fields)[:80]!r} is not a judgement; write query id, document id and a number as the "
        "grade, separated by tabs (BEIR), or query id, 0, document id and grade (TREC)"
    )


def ndcg(ranking: Sequence[str], grades: Mapping[str, float], k: int = 10) -> float:
    """Normalized discounted cumulative gain of a ranking; the gain is the grade itself, as in trec_eval.

    The discount of rank ``r`` (from 1) is ``1 / log2(r + 1)``, and the ideal ranking has all judged documents. A grade
    below 0 counts as 0. Without a document of a higher grade the result is 0.
    """
    ideal = _discounted(sorted(grades.values(), reverse=True)[:k])
    return _discounted([grades.get(document, 0.0) for document in ranking[:k]]) / ideal if ideal else 0.0


def _discounted(gains: Sequence[float]) -> float:
    return sum(max(gain, 0.0) / math.log2(rank + 2) for rank, gain in enumerate(gains))


@dataclass(frozen=True, kw_only=True)
class BeirFolder:
    """The files of a set."""

    corpus: Path  # `corpus.jsonl`: `_id`, `title`, `text`
    queries: Path | None  # `queries.jsonl`: `_id`, `text`; `None` if there is none
    judgements: Path | None  # `qrels/test.tsv`, `qrels.tsv` or the only file in `qrels`; `None` if there is none


def beir_folder(path: str | os.PathLike[str]) -> BeirFolder | None:
    """The set in a folder; ``None`` if it holds no ``corpus.jsonl``."""
    folder = Path(path)
    if not (folder / "corpus.jsonl").is_file():
        return None
    queries, files = folder / "queries.jsonl", sorted((folder / "qrels").glob("*.tsv"))
    named = [file for file in (folder / "qrels" / "test.tsv", folder / "qrels.tsv") if file.is_file()] or files
    if named == files and len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise InvalidRequestError(f"{folder / 'qrels'} holds {names}, and no test.tsv; name one of them")
    return BeirFolder(
        corpus=folder / "corpus.jsonl",
        queries=queries if queries.is_file() else None,
        judgements=named[0] if named else None,
    )
