"""MillpondReranker: LanceDB's reranker over a millpond engine in this process."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from lancedb.rerankers import Reranker

from millpond.compat.composed import Scorer
from millpond.errors import InvalidRequestError


class MillpondReranker(Reranker):
    """Sorts the results of a search by relevance to its text, best first, by a model that runs in this process.

    For ``table.search(..., query_type="hybrid").rerank(...)``, and of vector and full-text searches. A cross-encoder
    (also an LLM reranker in its own template) and a late-interaction checkpoint score as they were trained to; an
    embedder scores by MaxSim over its token states. The scores are in the column ``_relevance_score``; rows without a
    text, or not scored within ``budget_ms``, have none and come last. The model is loaded at first use.

    Args:
        model: Hub id or local folder.
        column: The column of the texts.
        return_score: ``"all"`` keeps ``_distance`` and ``_score`` of the searches, ``"relevance"`` drops them.
        **options: The fields of :class:`millpond.compat.adapter.RankerSource` and the class that it derives from, as
            ``method``, ``instruction`` and ``engine``.

    Raises:
        ValueError: An option that is unknown or not valid.
    """

    def __init__(
        self, model: str | None = None, *, column: str = "text", return_score: str = "relevance", **options: Any
    ) -> None:
        super().__init__(return_score)
        self.column = column
        self._source = Scorer(model=model, **options)

    def __str__(self) -> str:
        return f"MillpondReranker({self._source.name})"

    def rerank_vector(self, query: str, vector_results: pa.Table) -> pa.Table:
        """Rank the results of a vector search.

        Args:
            query: The text of the search.
            vector_results: Its rows.

        Returns:
            The rows, best first.
        """
        return self._ranked(query, vector_results)

    def rerank_fts(self, query: Any, fts_results: pa.Table) -> pa.Table:
        """Rank the results of a full-text search.

        Args:
            query: The text of the search, or a query of LanceDB's that has one.
            fts_results: Its rows.

        Returns:
            The rows, best first.
        """
        return self._ranked(query, fts_results)

    def rerank_hybrid(self, query: Any, vector_results: pa.Table, fts_results: pa.Table) -> pa.Table:
        """Rank the rows that either search found, each once.

        Args:
            query: The text of the search.
            vector_results: Rows of the vector search.
            fts_results: Rows of the full-text search.

        Returns:
            The rows, best first.
        """
        if not len(vector_results) or not len(fts_results):  # an empty one may lack the ids of rows
            merged = fts_results if len(fts_results) else vector_results
        else:
            merged = self.merge_results(vector_results, fts_results)
        if self.score == "all":
            for name, found in (("_distance", vector_results), ("_score", fts_results)):
                merged = _with_column(merged, name, found)
        return self._ranked(query, merged)

    def _ranked(self, query: Any, rows: pa.Table) -> pa.Table:
        texts = dict(enumerate(self._texts(rows)))
        known = {place: text for place, text in texts.items() if text is not None}
        places = list(known)
        best = self._source.rank(_text(query), list(known.values()), top_n=None, scaled=None) if known else ()
        order = [places[each.index] for each in best] + [place for place in texts if place not in known]
        scores = [each.score_or_none for each in best] + [None] * (len(texts) - len(known))
        ranked = rows.take(pa.array(order, pa.int64()))
        ranked = ranked.append_column("_relevance_score", pa.array(scores, pa.float32()))
        return self._keep_relevance_score(ranked)

    def _texts(self, rows: pa.Table) -> list[str | None]:
        if self.column not in rows.column_names:
            raise InvalidRequestError(
                f"column={self.column!r} is not among the results' columns {rows.column_names}; select it, or pass the "
                "column that has the texts"
            )
        texts: list[str | None] = rows[self.column].to_pylist()
        return texts


def _with_column(rows: pa.Table, name: str, found: pa.Table) -> pa.Table:
    """The rows with a search's column: null for rows that it did not find."""
    values = pa.nulls(len(rows), pa.float32())
    if len(rows) and len(found):
        values = pc.take(found[name], pc.index_in(rows["_rowid"], found["_rowid"].combine_chunks()))
    if name in rows.column_names:
        rows = rows.drop_columns([name])
    return rows.append_column(name, values)


def _text(query: Any) -> str:
    text = query if isinstance(query, str) else getattr(query, "query", None)  # MatchQuery, PhraseQuery, ...
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"query={query!r:.200} has no text to compare rows with; search by a text, a MatchQuery or a PhraseQuery"
        )
    return text
