"""/v2/embed and /v1/embed."""

from __future__ import annotations

from typing import Any

from tests.server.api.cases import LONG, TEXTS, Case, Engines, refused

from millpond import PoolingParams


def embed(model: str, same: Any, *, texts: list[str] = TEXTS, **body: Any) -> Case:
    """A case of ``/v2/embed`` whose floats are those of ``same(engine)``."""

    def expected(engines: Engines) -> Any:
        output = same(engines[model])
        return {
            "id": "embd-mine",
            "embeddings": {"float": output.embeddings},
            "texts": texts,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": output.usage.prompt_tokens, "image_tokens": 0},
            },
            "response_type": "embeddings_by_type",
        }

    sent = {} if "inputs" in body else {"texts": texts}
    return Case(path="/v2/embed", body={"model": model, **sent, **body}, same=expected)


def cut(**options: Any) -> Any:
    return lambda engine: engine.encode([LONG], task="embed", params=PoolingParams(**options))


def typed(name: Any) -> Any:
    return lambda e: {"embeddings": {name: e["embedder"].embed(TEXTS, output_dtype=name).embeddings.tolist()}}


COHERE = [
    embed("embedder", lambda e: e.embed(TEXTS), input_type="search_document"),
    embed("embedder", lambda e: e.embed(TEXTS), inputs=[{"content": [{"type": "text", "text": t}]} for t in TEXTS]),
    embed("prompted", lambda e: e.embed(TEXTS, prompt="")),
    embed("prompted", lambda e: e.embed(TEXTS, role="query"), input_type="search_query"),
    embed("prompted", lambda e: e.embed(TEXTS, role="document"), input_type="search_document"),
    embed("prompted", lambda e: e.embed(TEXTS, prompt=""), input_type="classification"),
    embed("prompted", lambda e: e.embed(TEXTS, prompt="", dimensions=16), output_dimension=16),
    embed("embedder", cut(), texts=[LONG], truncate=None, priority=None, max_tokens=None),
    embed("embedder", cut(truncate="start"), texts=[LONG], truncate="START", max_tokens=4096),
    embed("embedder", cut(truncate="start", truncate_prompt_tokens=9), texts=[LONG], truncate="START", max_tokens=9),
    *(
        Case(path="/v2/embed", body={"model": "embedder", "texts": TEXTS, "embedding_types": [name]}, same=typed(name))
        for name in ("binary", "ubinary")
    ),
    Case(
        path="/v1/embed",
        body={"model": "embedder", "texts": TEXTS, "embedding_types": []},
        same=lambda e: {"embeddings": e["embedder"].embed(TEXTS).embeddings, "response_type": "embeddings_floats"},
    ),
    Case(
        path="/v1/embed",
        body={"model": "embedder", "texts": TEXTS, "embedding_types": ["float"]},
        same=lambda e: {"embeddings": {"float": e["embedder"].embed(TEXTS).embeddings}},
    ),
    *refused(
        "/v2/embed",
        "embedder",
        [
            ({"texts": [LONG], "truncate": "NONE"}, "maximum context length is 64"),
            ({"texts": TEXTS, "truncate": "NONE", "max_tokens": 4}, "maximum context length is 4"),
            ({}, "exactly one of texts and inputs"),
            ({"texts": TEXTS, "inputs": [{"content": "a"}]}, "exactly one of texts and inputs"),
            ({"images": ["data:image/png;base64,AA=="]}, "images are not embedded"),
            ({"inputs": [{"content": "a"}, {"content": [{"type": "image_url"}]}]}, "image at index 1"),
            ({"inputs": [{"content": "a"}, {"contents": "b"}]}, "index 1"),
            ({"texts": TEXTS, "input_type": "image"}, "Unsupported input_type 'image'"),
            ({"texts": TEXTS, "max_tokens": 0}, "max_tokens"),
            ({"texts": TEXTS, "output_dimension": 16}, "dimension", "output_dimension"),
            ({"texts": ["a"] * 401}, "401 texts in one request"),
            ({"texts": TEXTS, "model": "cross_encoder"}, "Embeddings API", 501),
        ],
    ),
]
