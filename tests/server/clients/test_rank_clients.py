"""Cohere's and Hugging Face's own clients against a server on a port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import httpx
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from millpond.server import ModelConfig, ServedModels, ServerConfig
from tests.server.conftest import running

pytestmark = pytest.mark.contract

QUERY = "How deep is the mill pond?"
DOCUMENTS = ["A wheel turns.", "The pond is two metres deep.", "The miller sells flour."]
LONG = "The wheel of the mill turns in the water of the pond. " * 20
KEY = "a-key"


@pytest.fixture(scope="module")
def models(embedder: Path, cross_encoder: Path, classifier: Path, colbert: Path) -> ServedModels:
    folders = {"embedder": embedder, "reranker": cross_encoder, "classifier": classifier}
    configs = [ModelConfig(model=str(path), names=(name,), dtype="float32") for name, path in folders.items()]
    colbert_name = "answerdotai/answerai-colbert-small-v1"
    return ServedModels.load([*configs, ModelConfig(model=str(colbert), names=(colbert_name,), dtype="float32")])


@pytest.fixture(scope="module")
def address(models: ServedModels) -> Iterator[str]:
    with running(models, ServerConfig(api_keys=(KEY,))) as address:
        yield address


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    """The HTTP client for Cohere's clients, which do not close their own."""
    with httpx.Client(timeout=60) as client:
        yield client


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets huggingface_hub, otherwise offline in tests, connect to this machine."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()
    yield
    huggingface_hub.close_session()


def engine_of(models: ServedModels, name: str) -> Any:
    return models.find(name, tasks=(), api="").engine


def test_coheres_client_embeds(models: ServedModels, address: str, http: httpx.Client) -> None:
    client = cohere.ClientV2(api_key=KEY, base_url=address, httpx_client=http)
    types = ["float", "int8", "ubinary", "base64"]
    answer = client.embed(model="embedder", input_type="search_query", texts=[*DOCUMENTS, LONG], embedding_types=types)
    expected = engine_of(models, "embedder").embed([*DOCUMENTS, LONG], role="query")
    np.testing.assert_allclose(answer.embeddings.float_ or [], expected.embeddings, atol=1e-6)
    assert len(answer.embeddings.int8 or []) == len(answer.embeddings.base64 or []) == 4
    assert answer.texts == [*DOCUMENTS, LONG]
    assert answer.meta is not None
    assert answer.meta.billed_units is not None
    assert answer.meta.billed_units.input_tokens == expected.usage.prompt_tokens
    with pytest.raises(cohere.BadRequestError, match="maximum context length"):
        client.embed(model="embedder", input_type="search_query", texts=[LONG], truncate="NONE")


def test_coheres_client_reranks(models: ServedModels, address: str, http: httpx.Client) -> None:
    client = cohere.ClientV2(api_key=KEY, base_url=address, httpx_client=http)
    answer = client.rerank(model="reranker", query=QUERY, documents=[*DOCUMENTS, LONG], top_n=3)
    expected = engine_of(models, "reranker").rerank(QUERY, [*DOCUMENTS, LONG], top_n=3)
    assert [each.index for each in answer.results] == [each.index for each in expected]
    scores = [each.relevance_score for each in answer.results]
    np.testing.assert_allclose(scores, [each.relevance_score for each in expected], atol=1e-6)
    assert answer.meta is not None
    assert answer.meta.billed_units is not None
    assert answer.meta.billed_units.search_units == 1
    with pytest.raises(cohere.NotFoundError, match="does not exist"):
        client.rerank(model="other", query=QUERY, documents=DOCUMENTS)
    stranger = cohere.ClientV2(api_key="wrong", base_url=address, httpx_client=http)
    with pytest.raises(cohere.UnauthorizedError):
        stranger.rerank(model="reranker", query=QUERY, documents=DOCUMENTS)


def test_an_embedder_ranks_by_the_cosine_on_which_clients_set_thresholds(
    minilm_folder: Path, http: httpx.Client
) -> None:
    """As with vLLM, in every format; MaxSim, a sum of many cosines, has to be asked for, and says what it is."""
    models = ServedModels.load([ModelConfig(model=str(minilm_folder), names=("minilm",), dtype="float32")])
    query, *documents = models.find(None, tasks=(), api="").engine.embed([QUERY, *DOCUMENTS]).embeddings
    cosines = [float(query @ document) for document in documents]
    assert max(cosines) > 0.7
    with running(models) as address:
        answer = cohere.ClientV2(api_key="none", base_url=address, httpx_client=http).rerank(
            model="minilm", query=QUERY, documents=DOCUMENTS
        )
        scores = {each.index: each.relevance_score for each in answer.results}
        for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"):
            texts = ("text_1", "text_2") if "score" in path else ("query", "documents")
            body: dict[str, Any] = dict(zip(texts, (QUERY, DOCUMENTS), strict=True))
            content = http.post(address + path, json=body).json()
            found = {
                each["index"]: each.get("score") or each["relevance_score"]
                for each in content.get("data") or content["results"]
            }
            assert [found[i] for i in range(3)] == pytest.approx(cosines, abs=1e-6), path
            assert content["method"] == "cosine"
            asked = http.post(address + path, json={**body, "method": "maxsim"}).json()
            assert asked["method"] == "maxsim"
        ranked = http.post(f"{address}/rerank", json={"query": QUERY, "texts": DOCUMENTS}).json()
    assert [scores[i] for i in range(3)] == pytest.approx(cosines, abs=1e-6)
    assert {each["index"]: each["score"] for each in ranked} == pytest.approx(scores, abs=1e-6)


# The client itself uses what pydantic is about to drop.


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("path", ["/embed", ""])
def test_hugging_faces_client_extracts_features(models: ServedModels, address: str, path: str) -> None:
    client = InferenceClient(model=f"{address}{path}?model=embedder", token=KEY)
    one = client.feature_extraction(DOCUMENTS[0])
    several = client.feature_extraction(DOCUMENTS, truncate=True, truncation_direction="right")
    expected = engine_of(models, "embedder").embed(DOCUMENTS).embeddings
    np.testing.assert_allclose(one, expected[:1], atol=1e-6)
    np.testing.assert_allclose(several, expected, atol=1e-6)
    with pytest.raises(HfHubHTTPError, match="maximum context length"):
        client.feature_extraction(LONG, truncate=False)


@pytest.mark.usefixtures("hub")
def test_hugging_faces_client_compares_and_classifies(models: ServedModels, address: str) -> None:
    compared = InferenceClient(model=f"{address}/similarity", token=KEY).sentence_similarity(QUERY, DOCUMENTS)
    rows = engine_of(models, "embedder").embed([QUERY, *DOCUMENTS]).embeddings
    np.testing.assert_allclose(compared, rows[1:] @ rows[0], atol=1e-6)
    short = InferenceClient(model=f"{address}?model=embedder", token=KEY)
    assert short.sentence_similarity(QUERY, DOCUMENTS) == pytest.approx(compared, abs=1e-6)
    client = InferenceClient(model=f"{address}/predict?model=classifier", token=KEY)
    (probs,) = engine_of(models, "classifier").classify(DOCUMENTS[:1]).probs
    response = client.text_classification(DOCUMENTS[0])
    assert [each.score for each in response] == pytest.approx(sorted(probs.tolist(), reverse=True), abs=1e-6)
    assert {each.label for each in response} == {"level_0", "level_1", "level_2"}
    assert len(client.text_classification(DOCUMENTS[0], top_k=2)) == 2
