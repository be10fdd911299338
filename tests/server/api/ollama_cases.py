"""Ollama's routes."""

from __future__ import annotations

import re
from typing import Any

from tests.server.api.cases import LONG, TEXTS, Case, refused

from millpond import PoolingParams

EMBED: dict[str, Any] = {"normalize": True, "prompt": ""}
NINE = PoolingParams(normalize=True, prompt="", truncate="end", truncate_prompt_tokens=9)
UNKNOWN = 'model "no" not found, try pulling it first'


def embed(same: dict[str, Any], *, model: str = "prompted", texts: list[str] = TEXTS, **body: Any) -> Case:
    """A case of ``/api/embed`` whose vectors have the options ``same``."""
    name = body.pop("name", model)
    return Case(
        path="/api/embed",
        body={"model": name, "input": texts, **body},
        same=lambda e: {
            "model": name,
            "embeddings": e[model].embed(texts, **same).embeddings,
            "prompt_eval_count": e[model].embed(texts, **same).usage.prompt_tokens,
            "total_duration": int,
            "load_duration": 0,
        },
    )


def described(name: str, width: int) -> Case:
    return Case(
        path="/api/show",
        body={"model": name},
        same=lambda _: {
            "capabilities": ["embedding"],
            "details": {"family": "bert", "quantization_level": "float32"},
            "model_info": {
                "general.architecture": "bert",
                "bert.embedding_length": width,
                "bert.context_length": 64,
            },
            "modified_at": re.compile(r"^20\d\d-"),
        },
    )


OLLAMA = [
    embed(EMBED),
    embed(EMBED, name="prompted:latest"),
    embed({**EMBED, "dimensions": 16}, dimensions=16),
    embed(EMBED, dimensions=0, keep_alive="5m", options=None),
    embed(EMBED, keep_alive=-1, options={"temperature": 0.5, "num_ctx": None, "num_gpu": 1}),
    embed(EMBED, keep_alive="1h30m", options={"num_ctx": 100_000}),
    embed({**EMBED, "truncate": "end"}, texts=[LONG]),
    Case(
        path="/api/embed",
        body={"model": "prompted", "input": [LONG], "options": {"num_ctx": 9}},
        same=lambda e: {"embeddings": e["prompted"].encode([LONG], task="embed", params=NINE).embeddings},
    ),
    embed(EMBED, texts=[""]),
    *(
        Case(path="/api/embed", body={"model": "embedder", **body}, same=lambda _: {"embeddings": []})
        for body in ({"input": []}, {"input": ""}, {})
    ),
    Case(
        path="/api/embed",
        body={"model": "embedder", "input": TEXTS[0]},
        same=lambda e: {"embeddings": e["embedder"].embed(TEXTS[:1]).embeddings},
    ),
    Case(
        path="/api/embeddings",
        body={"model": "embedder", "prompt": TEXTS[0]},
        same=lambda e: {"embedding": e["embedder"].embed(TEXTS[:1], normalize=False).embeddings[0]},
    ),
    Case(path="/api/embeddings", body={"model": "embedder", "prompt": ""}, same=lambda _: {"embedding": []}),
    described("embedder", 48),
    described("prompted:latest", 48),
    Case(path="/api/show", body={"name": "llm"}, same=lambda _: {"details": {"family": "qwen3"}}),
    Case(
        path="/api/tags",
        same=lambda e: {
            "models": [
                {"name": f"{name}:latest", "model": f"{name}:latest", "digest": re.compile("^[0-9a-f]{64}$")}
                for name, engine in e.items()
                if "embed" in engine.tasks
            ]
        },
    ),
    Case(
        path="/api/ps",
        same=lambda e: {
            "models": [
                {"name": f"{name}:latest", "context_length": engine.spec.max_length, "expires_at": str}
                for name, engine in e.items()
                if "embed" in engine.tasks
            ]
        },
    ),
    Case(path="/api/version", same=lambda _: {"version": re.compile(r"^0\.\d+\.\d+$")}),
    *refused(
        "/api/embed",
        "prompted",
        [
            ({"input": "a", "model": "no"}, UNKNOWN, 404),
            ({"input": "a", "model": "cross_encoder"}, "The model does not support Embeddings API", 501),
            ({"input": "a", "model": None}, "several models serve"),
            ({"input": ["a", LONG], "truncate": False}, "maximum context length is 64 tokens.* index 1"),
            ({"input": LONG, "truncate": False, "options": {"num_ctx": 9}}, "maximum context length is 9 tokens"),
            ({"input": [1, 2]}, "input.0: Input should be a valid string"),
            ({"input": {"a": 1}}, "input: Input should be a valid array"),
            ({"input": "a", "dimensions": 17}, re.escape("only supports Matryoshka dimensions [16, 32]")),
            ({"input": "a", "dimensions": 17, "model": "embedder"}, "does not support Matryoshka"),
            ({"input": "a", "dimensions": -1}, "dimensions"),
            ({"input": "a", "keep_alive": "soon"}, "invalid duration"),
            ({"input": "a", "keep_alive": "5"}, "invalid duration"),
            ({"input": "a", "keep_alive": True}, "keep_alive"),
            ({"input": "a", "options": {"num_ctx": 0}}, "num_ctx=0"),
            ({"input": "a", "options": {"num_ctx": "9"}}, "num_ctx=9"),
            ({"input": ["a"] * 401}, "this server takes 400"),
        ],
    ),
    *refused("/api/embeddings", "embedder", [({"prompt": "a", "model": "no"}, UNKNOWN, 404)]),
    *refused("/api/show", None, [({"model": "no"}, UNKNOWN, 404), ({}, "model is required")]),
    *refused("/api/generate", "embedder", [({"prompt": "a"}, "Not Found", 404)]),
]
