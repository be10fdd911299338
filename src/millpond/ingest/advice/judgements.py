"""Judgements: which documents answer a query, read from TREC and BEIR files, nDCG by them, and folders of BEIR."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
class Evaluation:
    """How well a search ranks: the means over its queries.

    Attributes:
        k: How many results of a query count.
        queries: The queries that were evaluated.
        ndcg: nDCG@k, with the grades as gains.
        mrr: MRR@k: 1 / rank of the first relevant result, 0 without one.
        recall: The share of the relevant documents that is among the first ``k``.
        precision: The share of ``k`` that is relevant.
        by_query: nDCG@k of each query, to see where the search fails.
    """

    k: int
    queries: int
    ndcg: float
    mrr: float
    recall: float
    precision: float
    by_query: Mapping[str, float]


def evaluate(results: Mapping[str, Iterable[Any]], judgements: Judgements, *, k: int = 10) -> Evaluation:
    """Compare what a search found with what was judged relevant.

    Args:
        results: For each query id the results, best first: ids, or objects with an ``id`` or a ``node_id``, as a
            :class:`Hit`, a ``Document`` of LangChain or a node of LlamaIndex is. A document that comes twice, as the
            chunks of a record do, counts where it comes first.
        judgements: ``{query id: {document id: grade}}``, as :func:`read_judgements` reads them. A grade above 0 is
            relevant; a document without one is not.
        k: How many results of a query count.

    Returns:
        The means over the queries of ``results`` that have a relevant document.

    Raises:
        InvalidRequestError: ``k`` is no int from 1, a result has no id, no query has a relevant document, or an
            argument has another form.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise InvalidRequestError(f"k={k!r} must be an int from 1")
    for name, value, form in (("results", results, "[results]"), ("judgements", judgements, "{document id: grade}")):
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"{name} is a {type(value).__name__}; pass a dict {{query id: {form}}}")
    by_query: dict[str, float] = {}
    totals = [0.0, 0.0, 0.0]  # of MRR, recall and precision
    for query, found in results.items():
        grades = judgements.get(query, {})
        relevant = {document for document, grade in grades.items() if grade > 0}
        if not relevant:
            continue
        if isinstance(found, str):
            raise InvalidRequestError(f"the results of query {query!r} are a str; pass a list")
        ranking = list(dict.fromkeys(_id_of(each) for each in found))[:k]
        ranks = [rank for rank, document in enumerate(ranking, start=1) if document in relevant]
        by_query[query] = ndcg(ranking, grades, k)
        of_query = (1 / ranks[0] if ranks else 0.0, len(ranks) / len(relevant), len(ranks) / k)
        totals = [total + value for total, value in zip(totals, of_query, strict=True)]
    if not by_query:
        raise InvalidRequestError(
            "no query of the results has a relevant document; are the query ids those of the judgements?"
        )
    count = len(by_query)
    mrr, recall, precision = (total / count for total in totals)
    mean = sum(by_query.values()) / count
    return Evaluation(k=k, queries=count, ndcg=mean, mrr=mrr, recall=recall, precision=precision, by_query=by_query)


def _id_of(result: Any) -> str:
    for identity in (result, getattr(result, "id", None), getattr(result, "node_id", None)):
        if isinstance(identity, str):
            return identity
    raise InvalidRequestError(
        f"a result is of type {type(result).__name__}, without an id; pass ids, or objects with an id"
    )


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
