"""Every architecture that vLLM lists for its pooling models runs the task it is listed for, through LLM."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.tiny import SENTENCES, write_checkpoint
from tests.tiny.hub import WIDTH

from millpond.vllm import LLM, PoolingParams

QUERY = "How deep is it?"
DOCUMENTS = [SENTENCES[1], "The wheel."]


def override(architecture: str, **fields: Any) -> dict[str, Any]:
    return {"hf_overrides": {"architectures": [architecture], **fields}}


MXBAI = override("Qwen2ForSequenceClassification", classifier_from_token=["0", "1"], method="from_2_way_softmax")
QWEN3 = override("Qwen3ForSequenceClassification", classifier_from_token=["no", "yes"], is_original_qwen3_reranker=True)
GEMMA = override("GemmaForSequenceClassification", classifier_from_token=["Yes"], method="no_post_processing")
ROWS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("embed", "BertModel", "BAAI/bge-base-en-v1.5", {}),
    ("embed", "Gemma2Model", "BAAI/bge-multilingual-gemma2", {}),
    ("embed", "LlamaModel", "a/llama-embedder", {}),
    ("embed", "MistralModel", "intfloat/e5-mistral-7b-instruct", {}),
    ("embed", "Qwen2Model", "Alibaba-NLP/gte-Qwen2-7B-instruct", {}),
    ("embed", "Qwen3ForCausalLM", "Qwen/Qwen3-Embedding-0.6B", {}),
    ("embed", "Qwen3Model", "Qwen/Qwen3-Embedding-0.6B", override("Qwen3Model")),
    ("embed", "NomicBertModel", "nomic-ai/nomic-embed-text-v1", {}),
    ("embed", "ModernBertModel", "Alibaba-NLP/gte-modernbert-base", {}),
    ("embed", "NewModel", "Alibaba-NLP/gte-multilingual-base", {}),
    ("embed", "GteNewModel", "Alibaba-NLP/gte-multilingual-base", override("GteNewModel")),
    ("embed", "XLMRobertaModel", "jinaai/jina-embeddings-v3", {}),
    ("classify", "JambaForSequenceClassification", "ai21labs/Jamba-tiny-reward-dev", {}),
    ("classify", "GPT2ForSequenceClassification", "nie3e/sentiment-polish-gpt2-small", {}),
    ("classify", "BertForSequenceClassification", "a/bert-classifier", {}),
    ("classify", "RobertaForSequenceClassification", "a/roberta-classifier", {}),
    ("classify", "Qwen2ForSequenceClassification", "jason9693/Qwen2.5-1.5B-apeach", {}),
    ("score", "BertForSequenceClassification", "cross-encoder/ms-marco-MiniLM-L-6-v2", {}),
    ("score", "XLMRobertaForSequenceClassification", "BAAI/bge-reranker-v2-m3", {}),
    ("score", "Qwen2ForSequenceClassification", "mixedbread-ai/mxbai-rerank-base-v2", MXBAI),
    ("score", "Qwen2ForCausalLM", "mixedbread-ai/mxbai-rerank-base-v2", {}),
    ("score", "Qwen3ForSequenceClassification", "Qwen/Qwen3-Reranker-0.6B", QWEN3),
    ("score", "Qwen3ForCausalLM", "Qwen/Qwen3-Reranker-0.6B", {}),
    ("score", "GemmaForSequenceClassification", "BAAI/bge-reranker-v2-gemma", GEMMA),
    ("score", "GemmaForCausalLM", "BAAI/bge-reranker-v2-gemma", {}),
    ("score", "LlamaBidirectionalForSequenceClassification", "nvidia/llama-nemotron-rerank-1b-v2", {}),
    ("reward", "InternLM2ForRewardModel", "internlm/internlm2-1_8b-reward", {}),
    ("reward", "Qwen2ForRewardModel", "Qwen/Qwen2.5-Math-RM-72B", {}),
    ("reward", "Qwen2ForProcessRewardModel", "Qwen/Qwen2.5-Math-PRM-7B", {}),
    ("reward", "LlamaForCausalLM", "a/llama-reward", {}),
    ("reward", "MistralForCausalLM", "peiyi9979/math-shepherd-mistral-7b-prm", {}),
    ("late", "HF_ColBERT", "answerdotai/answerai-colbert-small-v1", override("HF_ColBERT")),
    ("late", "ColBERTModernBertModel", "lightonai/GTE-ModernColBERT-v1", override("ColBERTModernBertModel")),
    ("late", "ColBERTJinaRobertaModel", "jinaai/jina-colbert-v2", override("ColBERTJinaRobertaModel")),
    ("token", "BertForTokenClassification", "boltuix/NeuroBERT-NER", {}),
    ("token", "ModernBertForTokenClassification", "disham993/electrical-ner-ModernBERT-base", {}),
]


def embed(llm: LLM) -> None:
    vectors = np.array([one.outputs.embedding for one in llm.embed(SENTENCES[:3])])
    assert vectors.shape == (3, WIDTH)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-2


def classify(llm: LLM) -> None:
    probs = np.array([one.outputs.probs for one in llm.classify(SENTENCES[:3])])
    assert len(probs) == 3 and np.abs(probs[0] - probs[1]).max() > 1e-5
    if probs.shape[1] > 1:
        np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-5)


def score(llm: LLM) -> None:
    assert llm.engine.spec.score_type == "cross-encoder"
    first, second = (one.outputs.score for one in llm.score(QUERY, DOCUMENTS))
    assert first != second


def reward(llm: LLM) -> None:
    causal = llm.engine.spec.architecture.endswith("CausalLM")  # the columns of vocabulary entries
    params = PoolingParams(returned_token_ids=[3, 45, 78]) if causal else PoolingParams()
    (ids,) = llm.engine.tokenize([SENTENCES[0]])
    step = llm.engine.spec.step_tag_id
    (output,) = llm.reward([ids if step is None else [*ids, step]], pooling_params=params)
    assert len(output.outputs.data) == (len(ids) if step is None else 1)


def late(llm: LLM) -> None:
    matrix = llm.encode(DOCUMENTS[1], pooling_task="token_embed")[0].outputs.data.numpy()
    np.testing.assert_allclose(np.linalg.norm(matrix, axis=1), 1, atol=1e-5)
    query = llm.engine.token_embed([QUERY], role="query").embeddings[0]
    expected = [(query @ rows.T).max(1).sum() for rows in llm.engine.token_embed(DOCUMENTS).embeddings]
    np.testing.assert_allclose([one.outputs.score for one in llm.score(QUERY, DOCUMENTS)], expected, rtol=1e-5)


def token(llm: LLM) -> None:
    (output,) = llm.encode(SENTENCES[0], pooling_task="token_classify")
    assert len(output.outputs.data) == len(output.prompt_token_ids)
    np.testing.assert_allclose(output.outputs.data.sum(-1), 1, atol=1e-5)


@pytest.mark.contract
@pytest.mark.parametrize(("task", "architecture", "name", "options"), ROWS, ids=[" ".join(row[:2]) for row in ROWS])
def test_an_architecture_runs_its_task(load, task, architecture, name, options):
    llm = load(name, runner="pooling", trust_remote_code=True, **options)
    assert llm.engine.spec.architecture == architecture
    {"embed": embed, "classify": classify, "score": score, "reward": reward, "late": late, "token": token}[task](llm)


# vLLM's MODELS_CONFIG_MAP sets use_activation=False for these; every other classifier is activated.
RAW = {"JambaForSequenceClassification", "Qwen2ForRewardModel"}
NIGHTLY = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gpt2", "roberta", "modernbert", "gte")


@pytest.mark.parametrize("family", ["jamba", "bert", *(pytest.param(name, marks=pytest.mark.slow) for name in NIGHTLY)])
@pytest.mark.parametrize("labels", [1, 3])
def test_logits_are_activated_by_default_as_in_vllm(family, labels, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family, head="SequenceClassification", labels=labels)
    with LLM(folder, dtype="float32") as llm:
        raw = llm.engine.spec.architecture in RAW
        assert raw == (family == "jamba")

        def rows(**options):
            return np.array([one.outputs.probs for one in llm.classify(SENTENCES[:3], **options)])

        def switched(activation):
            return {"pooling_params": PoolingParams(use_activation=activation)}

        logits, probs = rows(**switched(False)), rows(**switched(True))
        expected = 1 / (1 + np.exp(-logits)) if labels == 1 else np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        np.testing.assert_allclose(probs, expected, rtol=1e-5)
        np.testing.assert_array_equal(rows(), logits if raw else probs)
        encoded = [one.outputs.data.numpy() for one in llm.encode(SENTENCES[:3], pooling_task="classify")]
        np.testing.assert_array_equal(encoded, logits if raw else probs)
    with LLM(folder, dtype="float32", pooler_config={"use_activation": True}) as llm:
        np.testing.assert_array_equal(rows(), probs)
