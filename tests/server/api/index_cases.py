"""/v1/indexes, on the indexes of tests.server.conftest: three documents of a ColBERT."""

from __future__ import annotations

from typing import Any

from tests.server.api.cases import LONG, QUERY, Case, Engines, refused
from tests.server.mutations import QUERY as STORED
from tests.server.mutations import TEXTS

IDS = ["wheel", "pond", "query"]
METADATA: list[dict[str, Any] | None] = [{"year": 1790}, {"year": 1812}, None]


def hits(engines: Engines, query: str, **options: Any) -> list[dict[str, Any]]:
    """What an index in memory finds; its scores are exact."""
    from millpond.late_interaction import MemoryIndex

    with MemoryIndex(engines["colbert"], codec="float32") as index:
        index.add(IDS, [*TEXTS, STORED], METADATA)
        return [
            {"id": hit.id, "text": hit.text, "metadata": dict(hit.metadata)}
            for hit in index.search([query], **options)[0]
        ]


def cut(engines: Engines, query: str) -> bool:
    return bool(engines["colbert"].token_embed([query], role="query").truncated[0])


INDEX_CASES = [
    Case(
        path="/v1/indexes",
        same=lambda _: {
            "data": [{"name": "docs", "state": "ready", "model": "colbert", "documents": 3}, {"name": "drafts"}]
        },
    ),
    Case(
        path="/v1/indexes/docs/search",
        body={"query": QUERY, "k": 2, "exact": True},
        same=lambda e: {
            "index": "docs",
            "model": "colbert",
            "results": hits(e, QUERY, k=2),
            "truncated": cut(e, QUERY),
        },
    ),
    Case(
        path="/v1/indexes/docs/search",
        body={"queries": [LONG, "flour"], "exact": True},
        same=lambda e: {"results": [hits(e, LONG), hits(e, "flour")], "truncated": [True, False]},
    ),
    Case(path="/v1/indexes/docs/search", body={"queries": []}, same=lambda _: {"results": [], "truncated": []}),
    Case(
        path="/v1/indexes/docs/search",
        body={"query": LONG, "exact": True, "truncate": "start"},
        same=lambda _: {"results": list, "truncated": True},
    ),
    Case(
        path="/v1/indexes/docs/search",
        body={"query": QUERY, "filter": {"year": [1812]}},
        same=lambda e: {"results": hits(e, QUERY, filter={"year": 1812})},
    ),
    Case(
        path="/v1/indexes/docs/search",
        body={"query": QUERY, "filter": {"year": {"gt": 1790, "lte": 1812.5}}},
        same=lambda e: {"results": hits(e, QUERY, filter={"year": 1812})},
    ),
    Case(
        path="/v1/indexes/docs/search",
        body={"query": QUERY, "ids": ["wheel", "query", "unknown"], "exact": True},
        same=lambda e: {"results": hits(e, QUERY, ids=["wheel", "query"])},
    ),
    Case(
        path="/v1/indexes/docs/explain",
        body={"query": QUERY, "id": "pond"},
        same=lambda _: {"index": "docs", "id": "pond", "text": TEXTS[1], "score": float, "matches": list},
    ),
    *(
        Case(
            path="/v1/indexes/docs/explain",
            body={"query": query, "id": "pond", "truncate": truncate},
            same=lambda _, cut=cut: {"truncated": cut},
        )
        for query, truncate, cut in (("flour", "error", False), (LONG, "end", True), (LONG, None, True))
    ),
    Case(
        path="/v1/indexes/drafts/add",
        body={"ids": ["pond", "new", "blank"], "texts": ["Dry.", "New.", " "], "metadata": [None, {"n": 9}, None]},
        same=lambda _: {"index": "drafts", "added": 1, "replaced": 1, "blank": 1, "truncated": 0},
    ),
    Case(
        path="/v1/indexes/drafts/delete",
        body={"ids": ["query", "gone"]},
        same=lambda _: {"index": "drafts", "deleted": 1},
    ),
    Case(
        path="/v1/indexes/drafts/delete",
        body={"filter": {"year": 1790}},
        same=lambda _: {"index": "drafts", "deleted": 1},
    ),
    *refused(
        "/v1/indexes/docs/search",
        None,
        [
            ({}, "query or queries"),
            ({"query": "a", "queries": ["a"]}, "query or queries"),
            ({"query": " "}, "blank"),
            ({"query": "a", "k": 5, "candidates": 2}, "candidates=2"),
            ({"query": "a", "filter": {"year": {"$gt": 1}}}, "has the word '.gt'; a range has gt, gte"),
            ({"query": "a", "filter": {"year": {"gt": "soon"}}}, "='soon' is no bound"),
            ({"query": "a", "top_k": 3}, "top_k"),
            ({"queries": ["a", LONG], "truncate": "error"}, "It is the one at index 1."),
            ({"queries": ["a"] * 401}, "401 queries"),
        ],
    ),
    *refused("/v1/indexes/other/search", None, [({"query": "a"}, "index `other`", 404)]),
    *refused(
        "/v1/indexes/docs/explain",
        None,
        [
            ({"query": "a", "id": "gone"}, "document `gone`", 404),
            ({"query": LONG, "id": "pond", "truncate": "error"}, "maximum context length"),
        ],
    ),
    *refused(
        "/v1/indexes/docs/add",
        None,
        [({"ids": ["a"], "texts": []}, "1 ids for 0 texts"), ({"ids": [""], "texts": ["b"]}, "ids")],
    ),
    *refused("/v1/indexes/docs/delete", None, [({}, "ids or filter"), ({"filter": {}}, "every document")]),
]
