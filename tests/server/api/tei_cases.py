"""Text Embeddings Inference's routes."""

from __future__ import annotations

from typing import Any

from tests.server.api.cases import LONG, QUERY, TEXTS, Case, refused

COMPARED = {"source_sentence": TEXTS[0], "sentences": [TEXTS[1], TEXTS[0]]}
EMBED: dict[str, Any] = {"normalize": True, "prompt": ""}


def embed(same: dict[str, Any], *, model: str = "prompted", texts: list[str] = TEXTS, **body: Any) -> Case:
    """A case of ``/embed`` whose vectors have the options ``same``."""
    return Case(
        path="/embed",
        body={"model": model, "inputs": texts, **body},
        same=lambda e: e[model].embed(texts, **same).embeddings,
    )


def ranked(engine: Any, texts: list[str], top: int | None = None, **options: Any) -> list[list[dict[str, Any]]]:
    output = engine.classify(texts, **options)
    return [[{"score": each.prob, "label": each.label} for each in row] for row in output.top(top or 3)]


def similarities(engine: Any, **options: Any) -> Any:
    rows = engine.embed([TEXTS[1], TEXTS[0]], normalize=True, **options).embeddings
    return rows @ rows[1]


TEI = [
    embed(EMBED),
    embed({**EMBED, "normalize": False}, normalize=False),
    embed({"normalize": True, "prompt_name": "query"}, prompt_name="query"),
    embed({**EMBED, "dimensions": 16}, dimensions=16),
    embed({**EMBED, "truncate": "start"}, texts=[LONG], truncate=True, truncation_direction="Left"),
    embed({**EMBED, "truncate": "end"}, texts=[LONG], truncate=None, truncation_direction="right"),
    Case(
        path="/embed?model=embedder",
        body={"inputs": [[2, 5, 6, 3], TEXTS[1]]},
        same=lambda e: [list, e["embedder"].embed(TEXTS[1:2]).embeddings[0]],
    ),
    Case(
        path="/embed_all",
        body={"model": "embedder", "inputs": TEXTS[:2]},
        same=lambda e: list(e["embedder"].token_embed(TEXTS[:2], normalize=False).embeddings),
    ),
    Case(
        path="/embed_all",
        body={"model": "colbert", "inputs": TEXTS[0]},
        same=lambda e: list(e["colbert"].token_embed(TEXTS[:1]).embeddings),
    ),
    Case(
        path="/embed_sparse",
        body={"model": "sparse_embedder", "inputs": TEXTS[:2]},
        same=lambda e: [
            [{"index": token, "value": float(weight)} for token, weight in sorted(each.items())]
            for each in e["sparse_embedder"].sparse_embed(TEXTS[:2])
        ],
    ),
    Case(
        path="/similarity", body={"model": "embedder", "inputs": COMPARED}, same=lambda e: similarities(e["embedder"])
    ),
    Case(
        path="/similarity?model=prompted",
        body={"inputs": COMPARED, "parameters": {"prompt_name": "query"}},
        same=lambda e: similarities(e["prompted"], prompt_name="query"),
    ),
    Case(
        path="/predict",
        body={"model": "classifier", "inputs": [TEXTS[0]]},
        same=lambda e: ranked(e["classifier"], TEXTS[:1])[0],
    ),
    Case(
        path="/predict",
        body={"model": "classifier", "inputs": [[TEXTS[0]], [TEXTS[1]]], "raw_scores": True},
        same=lambda e: ranked(e["classifier"], TEXTS[:2], activation=False),
    ),
    Case(
        path="/predict",
        body={"model": "classifier", "inputs": TEXTS[0], "parameters": {"top_k": 2, "function_to_apply": "sigmoid"}},
        same=lambda e: ranked(e["classifier"], TEXTS[:1], 2, activation="sigmoid"),
    ),
    Case(
        path="/predict",
        body={"model": "cross_encoder", "inputs": [QUERY, "Two metres."]},
        same=lambda e: [{"score": e["cross_encoder"].score([QUERY], ["Two metres."], activation="sigmoid").scores[0]}],
    ),
    Case(
        path="/?model=prompted", body={"inputs": TEXTS}, same=lambda e: e["prompted"].embed(TEXTS, **EMBED).embeddings
    ),
    Case(path="/?model=embedder", body={"inputs": COMPARED}, same=lambda e: similarities(e["embedder"])),
    Case(path="/?model=classifier", body={"inputs": "a"}, same=lambda e: ranked(e["classifier"], ["a"])[0]),
    Case(path="/?model=cross_encoder", body={"query": "a", "texts": ["b"]}, same=lambda _: [{"index": 0}]),
    Case(path="/?model=sparse_embedder", body={"inputs": "a pond"}, same=lambda _: [list]),
    Case(
        path="/info?model=classifier",
        same=lambda e: {
            "model_id": "classifier",
            "model_dtype": "float32",
            "max_input_length": 64,
            "max_client_batch_size": 400,
            "max_batch_tokens": e["classifier"].max_batch_tokens,
            "model_type": {"classifier": {"id2label": {"0": "level_0", "1": "level_1", "2": "level_2"}}},
            "served_models": list(e),
        },
    ),
    *(
        Case(path=f"/info?model={name}", same=lambda _, kind=kind: {"model_type": {kind: dict}})  # type: ignore[misc]
        for name, kind in (("embedder", "embedding"), ("sparse_embedder", "embedding"), ("cross_encoder", "reranker"))
    ),
    *refused(
        "/embed",
        "prompted",
        [
            ({"inputs": [10**6]}, "index 0"),
            ({"inputs": "a", "prompt_name": "other"}, "other"),
            ({"inputs": [1, 2], "prompt_name": "query"}, "token ids at index 0", "prompt_name"),
            ({"inputs": "a", "truncation_direction": "Up"}, "truncation_direction"),
            ({"inputs": "a", "model": "cross_encoder"}, "The model does not support Embed API", 501),
            ({"inputs": "a", "model": None}, "several models serve"),
        ],
    ),
    *refused(
        "/predict",
        "classifier",
        [
            ({"inputs": ["a", "b", "c"]}, "list of 3 texts"),
            ({"inputs": [["a"], []]}, "inputs at index 1"),
            ({"inputs": []}, "empty list"),
            ({"inputs": "a", "model": "embedder"}, "Predict API", 501),
        ],
    ),
    *refused("/embed_sparse", "embedder", [({"inputs": "a"}, "Embed Sparse API", 501)]),
    *refused("/embed_all", "colbert", [({"inputs": ["a", LONG], "truncate": False}, "at index 1")]),
    *refused(
        "/similarity",
        "embedder",
        [
            ({"inputs": {"source_sentence": "a", "sentences": []}}, "empty list"),
            (
                {"inputs": {"source_sentence": "a", "sentences": ["a", LONG]}, "parameters": {"truncate": False}},
                "at index 1",
            ),
            ({"inputs": "a"}, "inputs"),
        ],
    ),
]
