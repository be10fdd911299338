"""The model families of tiny checkpoints; families.json has the config.json of their checkpoints on the hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.tiny.layouts import Codes, Normalize, Pooling

MAX_TOKENS = 64

Classification = Literal["SequenceClassification", "TokenClassification"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A row of :data:`FAMILIES`."""

    # config.json of the hub's checkpoints (4.x style), without the size of the vocabulary and what only training needs
    config: Mapping[str, Any]
    prefix: str  # of the class names in config.json
    tokenizer: str  # key of the tokenizer kinds
    head: Literal["ForMaskedLM", "ForCausalLM", "LMHeadModel"] = "ForMaskedLM"  # of the language model's class
    modules: tuple[Any, ...] = (Pooling(modes=("mean",)), Normalize())  # usual for its embedding checkpoints
    position_ids: bool = False  # whether older files contain this buffer
    shifted_norms: bool = False  # whether norm weights are stored as their difference from 1 (Gemma)
    native: Mapping[str, Any] = field(default_factory=dict)  # fields to replace so that transformers' class accepts it
    native_prefix: str = ""  # of transformers' class names, if it differs from `prefix`
    plain: str = ""  # the class without a head, if it is not `prefix + Model`
    wrapped: str = ""  # the language model's class, if it is not `prefix + head`

    def claimed(self, *, wrapped: bool, head: Classification | None = None) -> str:
        """The class named in config.json."""
        if head is not None:
            return f"{self.prefix}For{head}"
        return (self.wrapped or self.prefix + self.head) if wrapped else self.plain or f"{self.prefix}Model"

    def native_class(self, *, wrapped: bool, head: Classification | None = None) -> str:
        """transformers' class for the same weights."""
        if not self.native_prefix:
            return self.claimed(wrapped=wrapped, head=head)
        return self.native_prefix + (f"For{head}" if head else self.head if wrapped else "Model")


_CONFIGS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
_NOMIC = {
    "native": {"model_type": "nomic_bert", **_SIZES, "max_position_embeddings": MAX_TOKENS},
    "native_prefix": "NomicBert",
    "wrapped": "NomicBertForPreTraining",
}
_MEAN = (Pooling(modes=("mean",), include_prompt=False), Normalize())
_CLS = (Pooling(modes=("cls",)), Normalize())
_NEW = {"modules": _CLS, "native": {"model_type": "gte", "rope_scaling": None}, "native_prefix": "Gte"}
_LAST = (Pooling(modes=("lasttoken",)), Normalize())
_DECODER = {"head": "ForCausalLM", "modules": _LAST}
_LLAMA = {**_DECODER, "native_prefix": "Llama"}
_QWEN3 = {**_DECODER, "native": {"model_type": "qwen3"}, "native_prefix": "Qwen3"}
_GEMMA = {**_DECODER, "shifted_norms": True}
_GEMMA3 = {**_GEMMA, "wrapped": "Gemma3ForCausalLM"}


# Prefix, tokenizer, and the fields that are not the defaults.
_ROWS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "bert": ("Bert", "bert", {"position_ids": True}),
    "roberta": ("Roberta", "roberta", {"position_ids": True}),
    "xlm-roberta": ("XLMRoberta", "xlm-roberta", {"position_ids": True}),
    "camembert": ("Camembert", "camembert", {"position_ids": True}),
    "ernie": ("Ernie", "bert", {"position_ids": True}),  # ernie-3.0-base-zh
    "data2vec": ("Data2VecText", "roberta", {"position_ids": True}),
    "megatron": ("MegatronBert", "bert", {"position_ids": True}),
    "xlm-roberta-xl": ("XLMRobertaXL", "xlm-roberta", {"position_ids": True}),
    "roformer": ("RoFormer", "bert", {}),  # roformer_chinese_sim_char_base
    "rembert": ("RemBert", "rembert", {}),
    "longformer": ("Longformer", "roberta", {"position_ids": True}),
    "big-bird": ("BigBird", "big-bird", {"position_ids": True}),
    "mobilebert": ("MobileBert", "bert", {"position_ids": True}),
    "distilbert": ("DistilBert", "bert", {}),
    "mpnet": ("MPNet", "mpnet", {"position_ids": True}),
    "modernbert": ("ModernBert", "modernbert", {}),
    "mmbert": ("ModernBert", "mmbert", {}),
    "jina-bert": ("JinaBert", "bert", {"native_prefix": "JinaBert"}),  # jina-embeddings-v2-base-en
    "jina-bert-code": ("JinaBert", "bert", {"native_prefix": "JinaBertCode"}),  # jina-embeddings-v2-base-code
    "electra": ("Electra", "bert", {"position_ids": True}),
    "albert": ("Albert", "albert", {}),
    "deberta-v2": ("DebertaV2", "deberta", {}),  # as in deberta-v3-base, except for the last two fields
    "deberta": ("Deberta", "deberta-v1", {}),
    "eurobert": ("EuroBert", "llama", {}),
    "neomme": ("NeoMME", "llama", {"native_prefix": "NeoMME"}),  # its text
    "ultrabert": ("Ultrabert", "llama", {}),
    "nomic": ("NomicBert", "bert", _NOMIC),
    "nomic-moe": ("NomicBert", "bert", {"native_prefix": "NomicBertMoe"}),  # nomic-embed-text-v2-moe
    "gte": ("New", "xlm-roberta", _NEW),  # gte-multilingual-base
    "gte-en": ("New", "bert", _NEW),  # gte-base-en-v1.5
    "gte-snowflake": ("Gte", "xlm-roberta", {"modules": _CLS}),  # snowflake-arctic-embed-m-v2.0
    "jina": (
        "XLMRoberta",
        "xlm-roberta",
        {"native": {"model_type": "jina_embeddings_v3"}, "native_prefix": "JinaEmbeddingsV3"},
    ),
    "bart": ("Bart", "roberta", {"wrapped": "BartForConditionalGeneration"}),  # bart-large-mnli
    "t5": ("T5", "t5", {"plain": "T5EncoderModel", "wrapped": "T5ForConditionalGeneration"}),
    "mt5": ("MT5", "t5", {"plain": "MT5EncoderModel", "wrapped": "MT5ForConditionalGeneration"}),
    "umt5": ("UMT5", "t5", {"plain": "UMT5EncoderModel", "wrapped": "UMT5ForConditionalGeneration"}),
    "llama": ("Llama", "llama", _DECODER),
    "llama-bidirectional": ("LlamaBidirectional", "llama", {**_LLAMA, "native": {"model_type": "llama"}}),
    "internlm2": ("InternLM2", "mistral", {**_LLAMA, "native": {"model_type": "llama", "rope_scaling": None}}),
    "mistral": ("Mistral", "mistral", _DECODER),
    "mistral-sliding": ("Mistral", "mistral", _DECODER),
    "nv-embed": (
        "NVEmbed",
        "mistral",
        {**_DECODER, "modules": _MEAN, "native": {**_SIZES, "num_key_value_heads": 2}, "native_prefix": "NVEmbed"},
    ),
    "qwen2": ("Qwen2", "qwen", _DECODER),
    "qwen2-sliding": ("Qwen2", "qwen", _DECODER),
    "qwen2-bidirectional": ("Qwen2", "qwen", _DECODER),
    "qwen3": ("Qwen3", "qwen", _DECODER),
    "pplx-embed": ("PPLXQwen3", "qwen", {**_QWEN3, "modules": (Pooling(modes=("mean",)), Codes())}),
    "bidirlm": ("BidirLM", "qwen", _QWEN3),
    "phi3": ("Phi3", "mistral", _DECODER),
    "phi4-mini": ("Phi3", "gpt2", _DECODER),
    "olmo2": ("Olmo2", "gpt2", _DECODER),
    "granite": ("Granite", "gpt2", _DECODER),
    "smollm3": ("SmolLM3", "llama", _DECODER),
    "ministral3": ("Ministral3", "mistral", _DECODER),
    "qwen3-moe": ("Qwen3Moe", "qwen", _DECODER),
    "lfm2": ("Lfm2", "llama", _DECODER),
    "lfm2-bidirectional": (
        "Lfm2Bidirectional",
        "llama",
        {**_DECODER, "modules": _CLS, "native_prefix": "Lfm2", "wrapped": "Lfm2ForCausalLM"},
    ),
    # A gated delta rule, another one, attention; a tower for images beside the text in the hub's layout
    "qwen3.5": ("Qwen3_5Text", "qwen", {**_DECODER, "shifted_norms": True, "wrapped": "Qwen3_5ForCausalLM"}),
    "gpt-neox": ("GPTNeoX", "gpt2", _DECODER),
    "gemma": ("Gemma", "gemma", _GEMMA),
    "gemma2": ("Gemma2", "gemma", _GEMMA),
    "gemma3": ("Gemma3Text", "gemma", _GEMMA3),
    "gemma3-bidirectional": ("Gemma3Text", "gemma", _GEMMA3),  # EmbeddingGemma
    "embedding-gemma2": ("EmbeddingGemma2", "gemma", {"wrapped": "EmbeddingGemma2Model"}),
    "gpt2": ("GPT2", "gpt2", {"head": "LMHeadModel", "modules": _LAST}),
    "jamba": ("Jamba", "llama", _DECODER),  # Mamba, Mamba with experts, attention, Mamba with experts
}
FAMILIES: Mapping[str, Family] = {
    name: Family(config=_CONFIGS[name], prefix=prefix, tokenizer=tokenizer, **fields)
    for name, (prefix, tokenizer, fields) in _ROWS.items()
}
# The families of the fast tests: one of each kind of forward. The others run at night.
FAST = ("bert", "roberta", "modernbert", "nomic", "gte", "jina", "deberta-v2", "qwen3", "gemma3")
JINA_TASKS = tuple(FAMILIES["jina"].config["lora_adaptations"])


def some(families: Iterable[str] = FAMILIES) -> list[Any]:
    """Families as parameters of a test, which is slow for all but :data:`FAST`."""
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in families]
