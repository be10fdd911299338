"""Recorded requests: what products send that ask for vectors and rankings themselves, and how they read the answers.

Each was written down from the source that it names; docs/databases_that_ask.md has the products' configuration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[3] / "docs" / "databases_that_ask.md").read_text(encoding="utf-8")
KEY = "KEY"  # as the page has it
EMBEDDER, RERANKER = "bge-small", "bge-reranker"  # the same
TEXTS = ["The mill stands by the pond.", "Water turns the wheel."]
QUERY = 'Who turns the "wheel"?'
DOCUMENTS = ["It is late.", "Water turns the wheel.", "The miller sells flour."]

JSON = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A request of a product.

    Attributes:
        product: Its name.
        source: Where the request was read.
        path: Of the request, a POST.
        headers: That matter to the server.
        body: JSON as it was sent.
        kind: ``vectors`` of TEXTS, or ``scores`` of DOCUMENTS in their order.
        read: What the product makes of the answer.
        options: The engine's options for the same vectors or scores.
    """

    product: str
    source: str
    path: str
    body: Any
    kind: str
    read: Callable[[Any], Any]
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)
    options: Mapping[str, Any] = field(default_factory=dict)


def _in_order(items: list[dict[str, Any]], score: str) -> list[float]:
    """The scores by index, as the products sort them."""
    return [each[score] for each in sorted(items, key=lambda each: int(each["index"]))]


def _elastic_ranking(answer: list[dict[str, Any]]) -> list[float]:
    """As HuggingFaceRerankResponseEntity, which fails at a field that it does not know."""
    for each in answer:
        assert each.keys() <= {"index", "score", "relevance_score", "text", "document"}, each
    return _in_order(answer, "score")


def _dify_ranking(answer: dict[str, Any]) -> list[float]:
    """The scores before dify scales them; it takes the text from the answer."""
    assert [each["document"]["text"] for each in answer["results"]] == [
        DOCUMENTS[each["index"]] for each in answer["results"]
    ]
    return _in_order(answer["results"], "relevance_score")


def extracted(value: Any, path: str) -> Any:
    """What a path such as ``$.data[*].embedding[*]`` selects, as Elasticsearch's MapPathExtractor does."""
    name, _, rest = path.removeprefix("$.").partition(".")
    part = value[name.removesuffix("[*]")]
    if not rest:
        return part
    return [extracted(each, rest) for each in part] if name.endswith("[*]") else extracted(part, rest)


def configured(words: str) -> dict[str, Any]:
    """The JSON of the page below the request line that has these words, or that has them in itself."""
    for block in re.findall(r"```json\n(?:PUT|POST) (.*?)```", PAGE, re.DOTALL):
        if words in block:
            content: dict[str, Any] = json.loads(block[block.index("{") :])
            return content
    raise AssertionError(words)


def _elastic(words: str, kind: str, values: Mapping[str, Any], **options: Any) -> Recorded:
    """A request of the custom service as the page configures it, with JSON in the place of the placeholders."""
    settings = configured(words)["service_settings"]
    parser, body = settings["response"]["json_parser"], settings["request"]
    translation = settings.get("input_type", {}).get("translation", {})
    for name, value in values.items():
        sent = translation[value] if name == "input_type" else value
        body = body.replace(f"${{{name}}}", json.dumps(sent))

    def ranking(answer: Any) -> list[float]:
        columns = {name: extracted(answer, path) for name, path in parser.items()}
        assert columns["document_text"] == [DOCUMENTS[index] for index in columns["reranked_index"]]
        scores = dict(zip(columns["reranked_index"], columns["relevance_score"], strict=True))
        return [scores[index] for index in range(len(DOCUMENTS))]

    headers = {name: value.replace("${api_key}", KEY) for name, value in settings["headers"].items()}
    return Recorded(
        product=f"Elasticsearch's custom service: {values.get('input_type', kind)}",
        source="elastic/elasticsearch: services/custom/request/CustomRequest.java",
        path=settings["url"].removeprefix("http://MILLPOND:8000"),
        headers={"Content-Type": "application/json", **headers},
        body=json.loads(body),
        kind=kind,
        read=ranking if kind == "scores" else lambda answer: extracted(answer, parser["text_embeddings"]),
        options=options,
    )


def _opensearch(words: str, kind: str, values: Mapping[str, Any]) -> Recorded:
    """A request of a remote connector as the page configures it: lists as JSON, texts escaped for their quotes."""
    connector = configured(words)
    (action,) = connector["actions"]
    body = action["request_body"]
    for name, value in {**connector["parameters"], **values}.items():
        content = json.dumps(value)
        body = body.replace(f"${{parameters.{name}}}", content[1:-1] if isinstance(value, str) else content)
    headers = {name: value.replace("${credential.key}", KEY) for name, value in action["headers"].items()}
    return Recorded(
        product=f"OpenSearch: {kind}",
        source="opensearch-project/ml-commons: docs/remote_inference_blueprints",
        path=action["url"].removeprefix("http://MILLPOND:8000"),
        headers={"Content-Type": "application/json", **headers},
        body=json.loads(body),
        kind=kind,
        read=_openai_vectors if kind == "vectors" else lambda answer: _in_order(answer["results"], "relevance_score"),
    )


def _openai_vectors(answer: dict[str, Any]) -> list[list[float]]:
    return [each["embedding"] for each in answer["data"]]


_MILVUS = "milvus-io/milvus: internal/util/function/models/tei/tei.go"
_ELASTIC = "elastic/elasticsearch: services/huggingface/request"
_DIFY = "langgenius/dify-plugin-sdks: interfaces/model/openai_compatible"
_OPEN_WEBUI = "open-webui/open-webui: backend/open_webui/retrieval"

RECORDED = [
    Recorded(
        product="Milvus TEXTEMBEDDING",
        source=_MILVUS,
        path="/embed",
        body={"inputs": TEXTS, "truncate": True, "truncation_direction": "Left"},
        kind="vectors",
        read=lambda answer: answer,
        options={"normalize": True},
    ),
    Recorded(
        product="Milvus TEI ranker",
        source=_MILVUS,
        path="/rerank",
        body={"query": QUERY, "texts": DOCUMENTS, "truncate": True, "truncation_direction": "Right"},
        kind="scores",
        read=lambda answer: _in_order(answer, "score"),
        options={"activation": "sigmoid"},
    ),
    Recorded(
        product="Elasticsearch's hugging_face: vectors",
        source=_ELASTIC,
        path="/embed",
        body={"inputs": TEXTS},
        kind="vectors",
        read=lambda answer: answer,
        options={"normalize": True},
    ),
    Recorded(
        product="Elasticsearch's hugging_face: scores",
        source=_ELASTIC,
        path="/rerank",
        body={"texts": DOCUMENTS, "query": QUERY, "return_text": True, "top_n": 2},  # which it applies itself
        kind="scores",
        read=_elastic_ranking,
        options={"activation": "sigmoid"},
    ),
    _elastic("text_embedding/millpond-custom", "vectors", {"input": TEXTS, "input_type": "search"}, role="query"),
    _elastic("text_embedding/millpond-custom", "vectors", {"input": TEXTS, "input_type": "ingest"}, role="document"),
    _elastic("rerank/millpond-custom", "scores", {"input": DOCUMENTS, "query": QUERY}),
    _opensearch("millpond embeddings", "vectors", {"input": TEXTS}),
    _opensearch("millpond rerank", "scores", {"documents": DOCUMENTS, "query": QUERY}),
    Recorded(
        product="dify: vectors",
        source=_DIFY,
        path="/v1/embeddings",
        body={"input": TEXTS, "model": EMBEDDER, "user": "a-user", "encoding_format": "float"},
        kind="vectors",
        read=_openai_vectors,
    ),
    Recorded(
        product="dify: scores",
        source=_DIFY,
        path="/v1/rerank",
        body={"model": RERANKER, "query": QUERY, "documents": DOCUMENTS, "top_n": None, "return_documents": True},
        kind="scores",
        read=_dify_ranking,
    ),
    Recorded(
        product="Open WebUI: vectors",
        source=f"{_OPEN_WEBUI}/utils.py",
        path="/v1/embeddings",
        headers={**JSON, "X-OpenWebUI-User-Name": "Some%20Body", "X-OpenWebUI-User-Role": "user"},
        body={"input": TEXTS, "model": EMBEDDER},
        kind="vectors",
        read=_openai_vectors,
    ),
    Recorded(
        product="Open WebUI: scores",
        source=f"{_OPEN_WEBUI}/models/external.py",
        path="/v2/rerank",
        body={"model": RERANKER, "query": QUERY, "documents": DOCUMENTS, "top_n": len(DOCUMENTS)},
        kind="scores",
        read=lambda answer: _in_order(answer["results"], "relevance_score"),
    ),
    Recorded(
        product="Open WebUI by Ollama's route",
        source=f"{_OPEN_WEBUI}/utils.py",
        path="/api/embed",
        body={"input": TEXTS, "model": EMBEDDER, "truncate": True},
        kind="vectors",
        read=lambda answer: answer["embeddings"],
        options={"normalize": True},
    ),
]
