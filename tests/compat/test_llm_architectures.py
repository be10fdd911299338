"""Every architecture that vLLM lists for its pooling models runs the tasks it is listed for, through LLM."""

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


@pytest.mark.parametrize(
    ("architecture", "name", "options"),
    [
        ("BertModel", "BAAI/bge-base-en-v1.5", {}),
        ("Gemma2Model", "BAAI/bge-multilingual-gemma2", {}),
        ("LlamaModel", "a/llama-embedder", {}),
        ("MistralModel", "intfloat/e5-mistral-7b-instruct", {}),
        ("Qwen2Model", "Alibaba-NLP/gte-Qwen2-7B-instruct", {}),
        ("Qwen3ForCausalLM", "Qwen/Qwen3-Embedding-0.6B", {}),
        ("Qwen3Model", "Qwen/Qwen3-Embedding-0.6B", override("Qwen3Model")),
        ("NomicBertModel", "nomic-ai/nomic-embed-text-v1", {}),
        ("ModernBertModel", "Alibaba-NLP/gte-modernbert-base", {}),
        ("NewModel", "Alibaba-NLP/gte-multilingual-base", {}),
        ("GteNewModel", "Alibaba-NLP/gte-multilingual-base", override("GteNewModel")),
        ("XLMRobertaModel", "jinaai/jina-embeddings-v3", {}),
    ],
)
def test_embedding(load, architecture, name, options):
    llm = load(name, runner="pooling", trust_remote_code=True, **options)
    assert llm.engine.spec.architecture == architecture
    vectors = np.array([one.outputs.embedding for one in llm.embed(SENTENCES[:3])])
    assert vectors.shape == (3, WIDTH)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-2
    assert llm.encode(SENTENCES[0], pooling_task="token_embed")[0].outputs.data.shape[1] == WIDTH


@pytest.mark.parametrize(
    ("architecture", "name", "count"),
    [
        ("JambaForSequenceClassification", "ai21labs/Jamba-tiny-reward-dev", 1),
        ("GPT2ForSequenceClassification", "nie3e/sentiment-polish-gpt2-small", 2),
        ("BertForSequenceClassification", "a/bert-classifier", 2),
        ("RobertaForSequenceClassification", "a/roberta-classifier", 2),
        ("Qwen2ForSequenceClassification", "jason9693/Qwen2.5-1.5B-apeach", 2),
    ],
)
def test_classification(load, architecture, name, count):
    llm = load(name, runner="pooling")
    assert llm.engine.spec.architecture == architecture
    probs = np.array([one.outputs.probs for one in llm.classify(SENTENCES[:3])])
    assert probs.shape == (3, count)
    assert np.abs(probs[0] - probs[1]).max() > 1e-5
    if count > 1:
        np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-5)
    assert llm.encode(SENTENCES[0], pooling_task="token_classify")[0].outputs.data.shape[1] == count


MXBAI = override("Qwen2ForSequenceClassification", classifier_from_token=["0", "1"], method="from_2_way_softmax")
QWEN3 = override("Qwen3ForSequenceClassification", classifier_from_token=["no", "yes"], is_original_qwen3_reranker=True)
GEMMA = override("GemmaForSequenceClassification", classifier_from_token=["Yes"], method="no_post_processing")


@pytest.mark.parametrize(
    ("architecture", "name", "options"),
    [
        ("BertForSequenceClassification", "cross-encoder/ms-marco-MiniLM-L-6-v2", {}),
        ("XLMRobertaForSequenceClassification", "BAAI/bge-reranker-v2-m3", {}),
        ("Qwen2ForSequenceClassification", "mixedbread-ai/mxbai-rerank-base-v2", MXBAI),
        ("Qwen2ForCausalLM", "mixedbread-ai/mxbai-rerank-base-v2", {}),
        ("Qwen3ForSequenceClassification", "Qwen/Qwen3-Reranker-0.6B", QWEN3),
        ("Qwen3ForCausalLM", "Qwen/Qwen3-Reranker-0.6B", {}),
        ("GemmaForSequenceClassification", "BAAI/bge-reranker-v2-gemma", GEMMA),
        ("GemmaForCausalLM", "BAAI/bge-reranker-v2-gemma", {}),
        ("LlamaBidirectionalForSequenceClassification", "nvidia/llama-nemotron-rerank-1b-v2", {}),
    ],
)
def test_scores(load, architecture, name, options):
    llm = load(name, runner="pooling", trust_remote_code=True, **options)
    assert llm.engine.spec.architecture == architecture
    assert llm.engine.spec.score_type == "cross-encoder"
    first, second = (one.outputs.score for one in llm.score(QUERY, DOCUMENTS))
    assert first != second
    plain = [one.outputs.score for one in load(name).score(QUERY, DOCUMENTS)]
    np.testing.assert_allclose([first, second], plain, atol=1e-5)  # the overrides repeat what the name implies


@pytest.mark.parametrize(
    ("architecture", "name", "columns"),
    [
        ("InternLM2ForRewardModel", "internlm/internlm2-1_8b-reward", 1),
        ("Qwen2ForRewardModel", "Qwen/Qwen2.5-Math-RM-72B", 1),
        ("Qwen2ForProcessRewardModel", "Qwen/Qwen2.5-Math-PRM-7B", 2),
        ("LlamaForCausalLM", "a/llama-reward", 3),
        ("MistralForCausalLM", "peiyi9979/math-shepherd-mistral-7b-prm", 3),
        ("JambaForSequenceClassification", "ai21labs/Jamba-tiny-reward-dev", 1),
    ],
)
def test_rewards(load, architecture, name, columns):
    llm = load(name, runner="pooling", trust_remote_code=True)
    assert llm.engine.spec.architecture == architecture
    params = PoolingParams(returned_token_ids=[3, 45, 78]) if columns == 3 else PoolingParams()
    (ids,) = llm.engine.tokenize([SENTENCES[0]])
    step = llm.engine.spec.step_tag_id
    (output,) = llm.reward([ids if step is None else [*ids, step]], pooling_params=params)
    assert tuple(output.outputs.data.shape) == (len(ids) if step is None else 1, columns)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("HF_ColBERT", "answerdotai/answerai-colbert-small-v1"),
        ("ColBERTModernBertModel", "lightonai/GTE-ModernColBERT-v1"),
        ("ColBERTJinaRobertaModel", "jinaai/jina-colbert-v2"),
    ],
)
def test_late_interaction(load, architecture, name):
    llm = load(name, **override(architecture))
    assert llm.engine.spec.architecture == architecture
    assert llm.engine.spec.score_type == "late-interaction"
    matrix = llm.encode(DOCUMENTS[1], pooling_task="token_embed")[0].outputs.data.numpy()
    np.testing.assert_allclose(np.linalg.norm(matrix, axis=1), 1, atol=1e-5)
    scores = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS)]
    query = llm.engine.token_embed([QUERY], role="query").embeddings[0]
    expected = [(query @ rows.T).max(1).sum() for rows in llm.engine.token_embed(DOCUMENTS).embeddings]
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    assert scores[0] != scores[1]


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("BertForTokenClassification", "boltuix/NeuroBERT-NER"),
        ("ModernBertForTokenClassification", "disham993/electrical-ner-ModernBERT-base"),
    ],
)
def test_tokens(load, architecture, name):
    llm = load(name, runner="pooling")
    assert llm.engine.spec.architecture == architecture
    (output,) = llm.encode(SENTENCES[0], pooling_task="token_classify")
    assert tuple(output.outputs.data.shape) == (len(output.prompt_token_ids), 2)
    np.testing.assert_allclose(output.outputs.data.sum(-1), 1, atol=1e-5)


# vLLM's MODELS_CONFIG_MAP sets use_activation=False for these; every other classifier is activated.
RAW = {"JambaForSequenceClassification", "Qwen2ForRewardModel"}
CLASSIFIERS = ("jamba", "llama", "mistral", "qwen2", "qwen3", "gemma", "gpt2", "bert", "roberta", "modernbert", "gte")


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("family", CLASSIFIERS)
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
        if labels == 1:
            score = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS)]
            plain = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS, **switched(not raw))]
            other = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS, **switched(raw))]
            assert score == plain != other
    with LLM(folder, dtype="float32", pooler_config={"use_activation": True}) as llm:
        np.testing.assert_array_equal(rows(), probs)
