"""What stands in for a checkpoint of the hub: its architecture and its files' layout, tiny, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.parity.vllm_row import headed, linears
from tests.tiny import Layout, Normalize, Pooling, write_checkpoint
from tests.tiny_late import write_pylate, write_stanford

WIDTH = 48
LONG = 512  # tokens, enough for a reranker's template in these vocabularies
ONE = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
TWO = {"id2label": {"0": "calm", "1": "flood"}, "label2id": {"calm": 0, "flood": 1}}
_ROBERTA = linears(("classifier.dense", WIDTH, WIDTH), ("classifier.out_proj", 1, WIDTH))
_BERT = linears(("bert.pooler.dense", WIDTH, WIDTH), ("classifier", 2, WIDTH))
_QWEN_REWARD = linears(("score.0", WIDTH, WIDTH), ("score.2", 2, WIDTH))


def reranker(folder: Path) -> Path:
    return headed(
        "qwen3",
        {"max_position_embeddings": LONG},
        "Qwen3ForCausalLM",
        {},
        prefix="model.",
        wrapped=True,
        tokens=("no", "yes"),
        tokenizer_limit=LONG,
        template="$A",
    )(folder)


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
    "nomic-ai/nomic-embed-text-v1": prompted,
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
    "Qwen/Qwen3-Reranker-0.6B": reranker,
    "somebody/tuned": reranker,
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
