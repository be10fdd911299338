"""Tiny substitutes for checkpoints of the hub: the same architecture and file layout, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.tiny import Layout, Normalize, Pooling, write_checkpoint
from tests.tiny.heads import headed, linears, write_pylate, write_stanford

WIDTH = 48
LONG = 512  # tokens, enough for a reranker's template in these vocabularies
ONE = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
TWO = {"id2label": {"0": "calm", "1": "flood"}, "label2id": {"calm": 0, "flood": 1}}
_ROBERTA = linears(("classifier.dense", WIDTH, WIDTH), ("classifier.out_proj", 1, WIDTH))
_BERT = linears(("bert.pooler.dense", WIDTH, WIDTH), ("classifier", 2, WIDTH))
_ROBERTA2 = linears(("classifier.dense", WIDTH, WIDTH), ("classifier.out_proj", 2, WIDTH))
_QWEN_REWARD = linears(("score.0", WIDTH, WIDTH), ("score.2", 2, WIDTH))
_QWEN_REWARD1 = linears(("score.0", WIDTH, WIDTH), ("score.2", 1, WIDTH))


_BERT1 = linears(("bert.pooler.dense", WIDTH, WIDTH), ("classifier", 1, WIDTH))
_MODERN = {"head.dense.weight": (WIDTH, WIDTH), "head.norm.weight": (WIDTH,), **linears(("classifier", 2, WIDTH))}
_LONG = {"max_position_embeddings": LONG}


def language_model(family: str, architecture: str, *tokens: str, template: str | None = "$A") -> Callable[[Path], Path]:
    """A writer of a language model that scores pairs by its logits; ``tokens`` are added to the vocabulary."""
    return headed(
        family,
        _LONG,
        architecture,
        {},
        prefix="model.",
        wrapped=True,
        tokens=tokens,
        tokenizer_limit=LONG,
        template=template,
    )


def prompted(folder: Path) -> Path:
    layout = Layout(
        modules=(Pooling(modes=("mean",)), Normalize()),
        prompts={"query": "find: ", "document": "keep: "},
        default_prompt_name="document",
    )
    return write_checkpoint(folder, "bert", sentence_transformers=layout)


STAND_INS: dict[str, Callable[[Path], Path]] = {
    "intfloat/e5-small": lambda folder: write_checkpoint(folder, "bert"),
    "Alibaba-NLP/gte-multilingual-base": lambda folder: write_checkpoint(folder, "gte"),
    "Qwen/Qwen3-Embedding-0.6B": lambda folder: write_checkpoint(folder, "qwen3", wrapped=True),
    "jinaai/jina-embeddings-v3": lambda folder: write_checkpoint(folder, "jina"),
    "a/prompted-embedder": prompted,
    "BAAI/bge-base-en-v1.5": lambda folder: write_checkpoint(folder, "bert"),
    "BAAI/bge-multilingual-gemma2": lambda folder: write_checkpoint(folder, "gemma2"),
    "a/llama-embedder": lambda folder: write_checkpoint(folder, "llama"),
    "intfloat/e5-mistral-7b-instruct": lambda folder: write_checkpoint(folder, "mistral"),
    "Alibaba-NLP/gte-Qwen2-7B-instruct": lambda folder: write_checkpoint(folder, "qwen2-bidirectional"),
    "nomic-ai/nomic-embed-text-v1": lambda folder: write_checkpoint(folder, "nomic"),
    "Alibaba-NLP/gte-modernbert-base": lambda folder: write_checkpoint(folder, "modernbert"),
    "ai21labs/Jamba-tiny-reward-dev": headed(
        "jamba", {}, "JambaForSequenceClassification", {"score.weight": (1, WIDTH)}, prefix="model.", config=ONE
    ),
    "a/roberta-classifier": headed(
        "roberta", {}, "RobertaForSequenceClassification", _ROBERTA2, prefix="roberta.", config=TWO
    ),
    "cross-encoder/ms-marco-MiniLM-L-6-v2": headed(
        "bert", {}, "BertForSequenceClassification", _BERT1, prefix="bert.", config=ONE
    ),
    "mixedbread-ai/mxbai-rerank-base-v2": language_model("qwen2", "Qwen2ForCausalLM"),
    "BAAI/bge-reranker-v2-gemma": language_model("gemma", "GemmaForCausalLM", "Yes", template=None),
    "nvidia/llama-nemotron-rerank-1b-v2": headed(
        "llama-bidirectional",
        _LONG,
        "LlamaBidirectionalForSequenceClassification",
        {"score.weight": (1, WIDTH)},
        prefix="model.",
        config=ONE,
        tokenizer_limit=LONG,
    ),
    "Qwen/Qwen2.5-Math-RM-72B": headed("qwen2", {}, "Qwen2ForRewardModel", _QWEN_REWARD1, prefix="model."),
    "a/llama-reward": lambda folder: write_checkpoint(folder, "llama", wrapped=True),
    "jinaai/jina-colbert-v2": lambda folder: write_stanford(folder, "jina", attend_to_mask_tokens=None),
    "disham993/electrical-ner-ModernBERT-base": headed(
        "modernbert", {}, "ModernBertForTokenClassification", _MODERN, prefix="model.", config=TWO
    ),
    "jason9693/Qwen2.5-1.5B-apeach": headed(
        "qwen2", {}, "Qwen2ForSequenceClassification", {"score.weight": (2, WIDTH)}, prefix="model.", config=TWO
    ),
    "nie3e/sentiment-polish-gpt2-small": headed(
        "gpt2", {}, "GPT2ForSequenceClassification", {"score.weight": (2, WIDTH)}, prefix="transformer.", config=TWO
    ),
    "a/bert-classifier": headed("bert", {}, "BertForSequenceClassification", _BERT, prefix="bert.", config=TWO),
    "boltuix/NeuroBERT-NER": headed(
        "bert", {}, "BertForTokenClassification", linears(("classifier", 2, WIDTH)), prefix="bert.", config=TWO
    ),
    "BAAI/bge-reranker-v2-m3": headed(
        "xlm-roberta", {}, "XLMRobertaForSequenceClassification", _ROBERTA, prefix="roberta.", config=ONE
    ),
    "Qwen/Qwen3-Reranker-0.6B": language_model("qwen3", "Qwen3ForCausalLM", "no", "yes"),
    "somebody/tuned": language_model("qwen3", "Qwen3ForCausalLM", "no", "yes"),
    "internlm/internlm2-1_8b-reward": headed(
        "internlm2", {}, "InternLM2ForRewardModel", {"v_head.weight": (1, WIDTH)}, prefix="model."
    ),
    "Qwen/Qwen2.5-Math-PRM-7B": headed(
        "qwen2", {}, "Qwen2ForProcessRewardModel", _QWEN_REWARD, prefix="model.", tokens=("<extra_0>",)
    ),
    "peiyi9979/math-shepherd-mistral-7b-prm": lambda folder: write_checkpoint(folder, "mistral", wrapped=True),
    "answerdotai/answerai-colbert-small-v1": write_stanford,
    "lightonai/GTE-ModernColBERT-v1": write_pylate,
}
