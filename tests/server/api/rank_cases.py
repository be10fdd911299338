"""/score, /rerank in its four formats, and /explain."""

from __future__ import annotations

from typing import Any

from tests.server.api.cases import DOCUMENTS, LONG, QUERY, Case, Engines, refused

SHORT = "How deep is it?"  # the ColBERT reads 12 tokens of a query

PAIR = {"text_1": QUERY, "text_2": DOCUMENTS}
NULLS = dict.fromkeys(("max_tokens_per_query", "max_tokens_per_doc", "priority", "truncate_prompt_tokens", "softmax"))


def score(model: str, same: Any, path: str = "/score", **body: Any) -> Case:
    """A case whose scores are those of ``same(engine)``."""

    def expected(engines: Engines) -> Any:
        output = same(engines[model])
        return {
            "model": model,
            "object": "list",
            "data": [{"index": i, "object": "score", "score": each} for i, each in enumerate(output.scores)],
            "method": output.method,
            "usage": {"total_tokens": output.usage.prompt_tokens},
        }

    return Case(path=path, body={"model": model, **body}, same=expected)


def pairs(queries: Any, documents: Any, **options: Any) -> Any:
    return lambda engine: engine.score(queries, documents, **options)


def shortened(engine: Any) -> Any:
    return engine.score(engine.truncate_texts([QUERY], 3)[0], engine.truncate_texts([LONG, "pond"], 5))


SCORE = [
    *(score(model, pairs(QUERY, DOCUMENTS), **PAIR) for model in ("cross_encoder", "colbert", "embedder")),
    score("llm_reranker", pairs(QUERY, DOCUMENTS, instruction="Judge."), **PAIR, instruction="Judge."),
    score("cross_encoder", pairs(QUERY, DOCUMENTS), "/v1/score", **PAIR, **NULLS),
    score("embedder", pairs(QUERY, DOCUMENTS, method="maxsim"), **PAIR, method="maxsim"),
    *(
        score("cross_encoder", pairs(DOCUMENTS, DOCUMENTS[::-1]), **{first: DOCUMENTS, second: DOCUMENTS[::-1]})
        for first, second in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
    ),
    score(
        "cross_encoder",
        pairs(QUERY, ["A wheel turns.", DOCUMENTS[0]]),
        text_1={"content": [{"type": "text", "text": QUERY}]},
        text_2=[{"content": "A wheel turns."}, {"text": DOCUMENTS[0]}],
    ),
    *(
        score("cross_encoder", pairs(QUERY, DOCUMENTS, activation=False), **PAIR, **{field: False})
        for field in ("use_activation", "activation", "softmax")
    ),
    score("embedder", pairs(QUERY, DOCUMENTS), **PAIR, use_activation=True),
    score("cross_encoder", pairs(QUERY, [LONG]), text_1=QUERY, text_2=[LONG], truncate_prompt_tokens=-1),
    score(
        "cross_encoder", shortened, text_1=QUERY, text_2=[LONG, "pond"], max_tokens_per_query=3, max_tokens_per_doc=5
    ),
    *refused(
        "/score",
        "cross_encoder",
        [
            ({"text_1": [], "text_2": ["a"]}, "At least one text element must be given"),
            ({"text_1": "a", "text_2": []}, "At least one text_pair element must be given"),
            ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "Input lengths must be either 1:1, 1:N or N:N"),
            ({"queries": "a", "text_2": "b"}, "one is missing"),
            ({"text_1": "a", "text_2": [{"content": [{"type": "image_url"}]}]}, "at index 0"),
            ({"text_1": "a", "text_2": ["b", {"title": "c"}]}, "text_2 has {'title': 'c'} at index 1"),
            ({**PAIR, "max_tokens_per_doc": -1}, "must be a non-negative integer"),
            ({**PAIR, "chat_template": "{{ messages }}"}, "--trust-request-chat-template"),
            ({**PAIR, "add_special_tokens": False}, "add_special_tokens", "add_special_tokens"),
            ({**PAIR, "method": "dot"}, "should be 'auto', 'cosine' or 'maxsim'", "method"),
            ({**PAIR, "method": "cosine"}, r"^method='cosine' compares vectors, and cross_encoder \("),
            ({"text_1": QUERY, "text_2": [LONG]}, "maximum context length"),
            ({"text_1": QUERY, "text_2": ["a"] * 401}, "401 documents in one request"),
            ({**PAIR, "model": "classifier"}, "^The model does not support Score API$", 501),
            ({**PAIR, "model": None}, "name one as model: colbert, cross_encoder, llm_reranker"),
        ],
    ),
]


def rerank(model: str, path: str = "/rerank", *, version: str = "1", scored: Any = None, **body: Any) -> Case:
    """A case whose ranking is the engine's of the documents, which ``scored`` may replace."""
    documents = body.get("documents", DOCUMENTS)

    def expected(engines: Engines) -> Any:
        method = "cosine" if model == "embedder" else "auto"
        output = (scored or (lambda engine: engine.rerank(QUERY, documents, method=method)))(engines[model])
        results = [{"index": each.index, "relevance_score": each.relevance_score} for each in output]
        if body.get("return_documents") is not False and scored is None:
            results = [{**each, "document": {"text": documents[each["index"]]}} for each in results]
        return {
            "model": model,
            "results": results,
            "method": output.method,
            "meta": {"api_version": {"version": version}, "billed_units": {"search_units": 1}},
            "usage": {"total_tokens": output.usage.prompt_tokens},
        }

    return Case(path=path, body={"model": model, "query": QUERY, "documents": documents, **body}, same=expected)


def timed(model: str, path: str, budget: float, **body: Any) -> Case:
    """A ranking within a budget: an hour scores all documents, a billionth of a millisecond none."""

    def expected(engines: Engines) -> Any:
        method = "cosine" if model == "embedder" else "auto"
        output = engines[model].rerank(QUERY, DOCUMENTS, method=method, budget_ms=budget, **body)
        scores = [each.relevance_score if each.scored else 0.0 for each in output]
        results = [
            {"index": each.index, "relevance_score": score, "scored": each.scored}
            for each, score in zip(output, scores, strict=True)
        ]
        return {
            "results": results,
            "stopped": output.stopped,
            "scored": int(output.scored.sum()),
            "method": output.method,
        }

    return Case(
        path=path,
        body={
            "model": model,
            "query": QUERY,
            "documents": DOCUMENTS,
            "return_documents": False,
            "budget_ms": budget,
            **body,
        },
        same=expected,
    )


def document(sent: Any, echoed: Any, text: str, fields: list[str] | None = None) -> Case:
    """A document that is an object: what is scored, and what is repeated."""
    return Case(
        path="/v1/rerank",
        body={"model": "cross_encoder", "query": QUERY, "documents": [sent], "rank_fields": fields},
        same=lambda e: {
            "results": [
                {"index": 0, "relevance_score": e["cross_encoder"].score(QUERY, [text]).scores[0], "document": echoed}
            ]
        },
    )


def tei(model: str, method: Any, body: Any) -> Case:
    """A ranking in TEI's format by a model that TEI would not rank by."""

    def expected(engines: Engines) -> Any:
        output = engines[model].rerank(QUERY, DOCUMENTS, method=method)
        return [{"index": each.index, "score": each.relevance_score, "method": method} for each in output]

    return Case(path=f"/rerank?model={model}", body={"query": QUERY, "texts": DOCUMENTS, **body}, same=expected)


RERANK = [
    *(rerank(model) for model in ("cross_encoder", "colbert", "embedder")),
    rerank("cross_encoder", "/v1/rerank", return_documents=False),
    rerank("cross_encoder", "/v2/rerank", version="2", return_documents=None),
    rerank("cross_encoder", "/v2/rerank", version="2", documents=[DOCUMENTS[0], LONG], max_tokens_per_doc=4096),
    rerank("cross_encoder", documents=[DOCUMENTS[0], LONG], truncate_prompt_tokens=64),
    rerank("cross_encoder", scored=lambda e: e.rerank(QUERY, DOCUMENTS, top_n=2), top_n=2),
    *(rerank("embedder", path, version=path[2]) for path in ("/v1/rerank", "/v2/rerank")),
    rerank("embedder", method="auto"),
    rerank("embedder", scored=lambda e: e.rerank(QUERY, DOCUMENTS, method="maxsim"), method="maxsim"),
    *(tei("embedder", method, body) for method, body in (("cosine", {}), ("maxsim", {"method": "maxsim"}))),
    tei("colbert", "maxsim", {}),
    *(timed(model, "/rerank", 3.6e6) for model in ("cross_encoder", "colbert", "embedder", "llm_reranker")),
    *(timed(model, "/v2/rerank", 1e-9) for model in ("cross_encoder", "embedder")),
    timed("cross_encoder", "/rerank", 1e-9, first_scores=list(range(len(DOCUMENTS)))),
    Case(
        path="/rerank?model=cross_encoder",
        body={"query": QUERY, "texts": ["a pond", "a mill"], "budget_ms": 1e-9},
        same=lambda _: [{"index": i, "score": 0.0, "scored": False} for i in (0, 1)],
    ),
    Case(
        path="/rerank?model=cross_encoder",
        body={"query": QUERY, "texts": ["a pond"], "budget_ms": 3600000},
        same=lambda e: [
            {
                "index": 0,
                "score": e["cross_encoder"].score(QUERY, ["a pond"], activation="sigmoid").scores[0],
                "scored": True,
            }
        ],
    ),
    document({"text": "Turns.", "id": [{"a": 1 << 90}]}, {"text": "Turns.", "id": [{"a": 1 << 90}]}, "Turns."),
    document({"content": [{"type": "text", "text": "Turns."}]}, {"text": "Turns."}, "Turns."),
    document({"title": "Wheel", "year": 9}, {"title": "Wheel", "year": 9}, "9\nWheel", ["year", "title", "author"]),
    document("A wheel turns.", {"text": "A wheel turns."}, "A wheel turns.", ["title"]),
    Case(
        path="/v2/rerank",
        body={"model": "cross_encoder", "query": QUERY, "documents": [LONG], "max_tokens_per_doc": 4},
        same=lambda e: {
            "results": [
                {
                    "relevance_score": e["cross_encoder"]
                    .score(QUERY, e["cross_encoder"].truncate_texts([LONG], 4))
                    .scores[0],
                    "document": {"text": LONG},  # the caller's
                }
            ]
        },
    ),
    Case(
        path="/rerank?model=cross_encoder",
        body={"query": QUERY, "texts": ["a pond"], "return_text": True},
        same=lambda e: [
            {
                "index": 0,
                "score": e["cross_encoder"].score(QUERY, ["a pond"], activation="sigmoid").scores[0],
                "text": "a pond",
            }
        ],
    ),
    Case(
        path="/v2/rerank",
        body={"model": "cross_encoder", "query": QUERY, "texts": [LONG], "raw_scores": True},
        same=lambda e: [{"index": 0, "score": e["cross_encoder"].score(QUERY, [LONG], activation=False).scores[0]}],
    ),
    *refused(
        "/rerank",
        "cross_encoder",
        [
            ({"query": QUERY, "documents": []}, "At least one text_pair element must be given"),
            ({"query": QUERY, "documents": ["a", {"title": "b"}]}, "index 1"),
            ({"query": QUERY, "documents": ["a", {"title": "b"}], "rank_fields": ["text"]}, "index 1"),
            ({"query": QUERY, "documents": [LONG], "max_tokens_per_doc": 4096}, "max_tokens_per_doc"),
            ({"query": QUERY, "documents": ["a"], "budget_ms": 0}, "greater than 0", "budget_ms"),
            ({"query": QUERY, "documents": ["a"], "budget_ms": "9"}, "valid number", "budget_ms"),
            ({"query": QUERY, "documents": ["a"], "first_scores": [1.0]}, "^first_scores decides which"),
            ({"query": QUERY, "documents": ["a"], "first_scores": [], "budget_ms": 9}, "pass one score for each"),
            ({"query": QUERY, "documents": [], "budget_ms": 9}, "At least one text_pair element must be given"),
            ({"query": QUERY, "documents": ["a"], "budget_ms": 9, "method": "maxsim"}, "^method='maxsim' compares"),
            ({"query": QUERY, "texts": ["a", LONG], "truncate": False, "budget_ms": 3600000}, "at index 1"),
            ({"query": QUERY, "documents": ["a"], "method": "maxsim"}, "^method='maxsim' compares .* and cross_enc"),
            ({"query": QUERY, "texts": ["a", LONG], "truncate": False}, "at index 1"),
            ({"query": QUERY, "texts": ["a"], "model": None}, "several models serve"),
        ],
    ),
]


def explained(model: str, text: str, **body: Any) -> Case:
    """A case whose matches are those of an index in memory."""

    def expected(engines: Engines) -> Any:
        from millpond.late_interaction import MemoryIndex

        with MemoryIndex(engines[model], codec="float32") as index:
            index.add(["a"], [text])
            matches = index.explain(SHORT, "a")
        return {
            "model": model,
            "truncated": False,
            "score": sum(match.score for match in matches),
            "matches": [
                {
                    "token": match.token,
                    "score": match.score,
                    "start": match.start,
                    "end": match.end,
                    "text": text[match.start : match.end],
                }
                for match in matches
            ],
        }

    return Case(path="/explain", body={"model": model, "query": SHORT, "document": text, **body}, same=expected)


EXPLAIN = [
    explained("colbert", DOCUMENTS[0]),
    explained("colbert", "  池 is deep 🌊, \r\nHow deep? 👩‍🔬 שלום", truncate=None),
    explained("embedder", DOCUMENTS[0]),
    Case(
        path="/explain",
        body={"model": "colbert", "query": SHORT, "document": "deep pond " * 80_000, "truncate": "end"},
        same=lambda _: {"truncated": True},
    ),
    *refused(
        "/explain",
        "colbert",
        [
            (
                {"query": "deep pond " * 50, "document": "a"},
                r"^the query is too long: it has .* model reads 12;",
                "query",
            ),
            (
                {"query": "a", "document": "deep pond " * 50},
                r"^the document is too long: .* model reads 24;",
                "document",
            ),
            ({"query": "a", "document": "a" * ((1 << 21) + 1)}, "most to be tokenized whole"),
            ({"query": " \u200b", "document": "a"}, "the query is blank"),
            ({"query": "a", "document": "a", "model": "classifier"}, "Explain API", 501),
            ({"query": "a", "document": "a", "model": None}, "several models serve the Explain API"),
        ],
    ),
]

RANK = [*SCORE, *RERANK, *EXPLAIN]
