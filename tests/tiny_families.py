"""The model families of tiny checkpoints, each with the config.json of its checkpoints on the hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.tiny_layouts import Normalize, Pooling

from tests import tiny_rotary

MAX_TOKENS = 64

Classification = Literal["SequenceClassification", "TokenClassification"]

_SIZE = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
_ENCODER = {
    **_SIZE,
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "absolute",
    "use_cache": True,
}
_ROBERTA = {
    **_ENCODER,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": MAX_TOKENS + 2,
    "type_vocab_size": 1,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
}
_DECODER = {
    **_SIZE,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "max_position_embeddings": MAX_TOKENS,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_cache": True,
}
_QWEN2 = {
    **_DECODER,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "max_window_layers": 1,
    "rope_theta": 1000000.0,
    "sliding_window": 5,
    "use_sliding_window": False,
}
_GEMMA = {
    **_DECODER,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "head_dim": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_GEMMA3 = {
    **{key: value for key, value in _GEMMA.items() if key != "hidden_act"},
    "num_hidden_layers": 3,
    "_sliding_window_pattern": 3,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 48,
    "rope_local_base_freq": 100.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 5,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A row of :data:`FAMILIES`.

    Attributes:
        prefix: Prefix of the class names in config.json.
        tokenizer: Key of the tokenizer kinds.
        config: config.json of the hub's checkpoints (4.x style), without the vocabulary's size.
        head: Suffix of the language model's class, for ``wrapped`` checkpoints.
        modules: The usual modules of its embedding checkpoints.
        position_ids: Whether older files contain this buffer.
        shifted_norms: Whether norm weights are stored as their difference from 1 (Gemma).
        native: Fields to replace in the config so that transformers' class accepts it.
        native_prefix: Prefix of transformers' class names, if it differs from ``prefix``.
        wrapped: The language model's class, if it is not ``prefix + head``.
    """

    prefix: str
    tokenizer: str
    config: Mapping[str, Any]
    head: Literal["ForMaskedLM", "ForCausalLM", "LMHeadModel"] = "ForMaskedLM"
    modules: tuple[Any, ...] = (Pooling(modes=("mean",)), Normalize())
    position_ids: bool = False
    shifted_norms: bool = False
    native: Mapping[str, Any] = field(default_factory=dict)
    native_prefix: str = ""
    wrapped: str = ""

    def claimed(self, *, wrapped: bool, head: Classification | None = None) -> str:
        """The class named in config.json."""
        if head is not None:
            return f"{self.prefix}For{head}"
        return (self.wrapped or self.prefix + self.head) if wrapped else f"{self.prefix}Model"

    def native_class(self, *, wrapped: bool, head: Classification | None = None) -> str:
        """transformers' class for the same weights."""
        if not self.native_prefix:
            return self.claimed(wrapped=wrapped, head=head)
        return self.native_prefix + (f"For{head}" if head else self.head if wrapped else "Model")


def _decoder(
    prefix: str,
    tokenizer: str,
    config: Mapping[str, Any],
    *,
    shifted_norms: bool = False,
    native: Mapping[str, Any] | None = None,
    native_prefix: str = "",
    wrapped: str = "",
) -> Family:
    last = (Pooling(modes=("lasttoken",)), Normalize())
    return Family(
        prefix=prefix,
        tokenizer=tokenizer,
        config=config,
        head="ForCausalLM",
        modules=last,
        shifted_norms=shifted_norms,
        native=native or {},
        native_prefix=native_prefix,
        wrapped=wrapped,
    )


FAMILIES: Mapping[str, Family] = {
    "bert": Family(
        prefix="Bert",
        tokenizer="bert",
        position_ids=True,
        config={
            "model_type": "bert",
            **_ENCODER,
            "max_position_embeddings": MAX_TOKENS,
            "type_vocab_size": 2,
            "pad_token_id": 0,
        },
    ),
    "roberta": Family(
        prefix="Roberta", tokenizer="roberta", position_ids=True, config={"model_type": "roberta", **_ROBERTA}
    ),
    "xlm-roberta": Family(
        prefix="XLMRoberta",
        tokenizer="xlm-roberta",
        position_ids=True,
        config={"model_type": "xlm-roberta", **_ROBERTA, "output_past": True},
    ),
    "distilbert": Family(
        prefix="DistilBert",
        tokenizer="bert",
        config={
            "model_type": "distilbert",
            "activation": "gelu",
            "attention_dropout": 0.1,
            "dim": 48,
            "dropout": 0.1,
            "hidden_dim": 96,
            "initializer_range": 0.02,
            "max_position_embeddings": MAX_TOKENS,
            "n_heads": 4,
            "n_layers": 2,
            "pad_token_id": 0,
            "sinusoidal_pos_embds": False,
            "tie_weights_": True,
        },
    ),
    "mpnet": Family(
        prefix="MPNet",
        tokenizer="mpnet",
        position_ids=True,
        config={
            "model_type": "mpnet",
            **{key: value for key, value in _ROBERTA.items() if key != "type_vocab_size"},
            "relative_attention_num_buckets": 32,
        },
    ),
    "modernbert": Family(
        prefix="ModernBert",
        tokenizer="modernbert",
        config={
            "model_type": "modernbert",
            **_SIZE,
            "num_hidden_layers": 4,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 2,
            "classifier_pooling": "mean",
            "cls_token_id": 2,
            "eos_token_id": 3,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "hidden_activation": "gelu",
            "layer_norm_eps": 1e-05,
            "local_attention": 8,
            "local_rope_theta": 10000.0,
            "max_position_embeddings": MAX_TOKENS,
            "mlp_bias": False,
            "norm_bias": False,
            "norm_eps": 1e-05,
            "pad_token_id": 0,
            "position_embedding_type": "absolute",
            "sep_token_id": 3,
        },
    ),
    "electra": Family(
        prefix="Electra",
        tokenizer="bert",
        position_ids=True,
        config={
            "model_type": "electra",
            **_ENCODER,
            "classifier_dropout": None,
            "embedding_size": 24,
            "max_position_embeddings": MAX_TOKENS,
            "pad_token_id": 0,
            "summary_activation": "gelu",
            "summary_last_dropout": 0.1,
            "summary_type": "first",
            "summary_use_proj": True,
            "type_vocab_size": 2,
        },
    ),
    "albert": Family(
        prefix="Albert",
        tokenizer="albert",
        config={
            "model_type": "albert",
            **_ENCODER,
            "num_hidden_layers": 3,
            "attention_probs_dropout_prob": 0,
            "bos_token_id": 2,
            "classifier_dropout_prob": 0.1,
            "down_scale_factor": 1,
            "embedding_size": 24,
            "eos_token_id": 3,
            "gap_size": 0,
            "hidden_act": "gelu_new",
            "hidden_dropout_prob": 0,
            "inner_group_num": 1,
            "max_position_embeddings": MAX_TOKENS,
            "net_structure_type": 0,
            "num_hidden_groups": 1,
            "num_memory_blocks": 0,
            "pad_token_id": 0,
            "type_vocab_size": 2,
        },
    ),
    "deberta-v2": Family(  # as in deberta-v3-base, except for the last two fields
        prefix="DebertaV2",
        tokenizer="deberta",
        config={
            "model_type": "deberta-v2",
            **{key: value for key, value in _ENCODER.items() if key not in ("position_embedding_type", "use_cache")},
            "layer_norm_eps": 1e-07,
            "max_relative_positions": -1,
            "norm_rel_ebd": "layer_norm",
            "pad_token_id": 0,
            "pooler_dropout": 0,
            "pooler_hidden_act": "gelu",
            "pooler_hidden_size": 48,
            "pos_att_type": "p2c|c2p",
            "position_biased_input": False,
            "relative_attention": True,
            "share_att_key": True,
            "type_vocab_size": 0,
            "max_position_embeddings": MAX_TOKENS,
            "position_buckets": 16,
        },
    ),
    "eurobert": Family(
        prefix="EuroBert",
        tokenizer="llama",
        config={
            "model_type": "eurobert",
            **{key: value for key, value in _DECODER.items() if key != "use_cache"},
            "attention_bias": False,
            "auto_map": {
                "AutoConfig": "configuration_eurobert.EuroBertConfig",
                "AutoModel": "modeling_eurobert.EuroBertModel",
                "AutoModelForMaskedLM": "modeling_eurobert.EuroBertForMaskedLM",
            },
            "bos_token": "<|begin_of_text|>",
            "bos_token_id": 0,
            "clf_pooling": "late",
            "eos_token": "<|end_of_text|>",
            "eos_token_id": 1,
            "head_dim": 12,
            "hidden_dropout": 0.0,
            "mask_token": "<|mask|>",
            "mask_token_id": 1,
            "mlp_bias": False,
            "pad_token": "<|end_of_text|>",
            "pad_token_id": 1,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 250000,
        },
    ),
    "nomic": Family(
        prefix="NomicBert",
        tokenizer="bert",
        config=tiny_rotary.NOMIC,
        native=tiny_rotary.NOMIC_NATIVE,
        native_prefix="NomicBert",
        wrapped="NomicBertForPreTraining",
    ),
    "gte": Family(  # gte-multilingual-base
        prefix="New",
        tokenizer="xlm-roberta",
        config=tiny_rotary.GTE,
        modules=(Pooling(modes=("cls",)), Normalize()),
        native=tiny_rotary.GTE_NATIVE,
        native_prefix="Gte",
    ),
    "gte-en": Family(  # gte-base-en-v1.5
        prefix="New",
        tokenizer="bert",
        config={
            **tiny_rotary.GTE,
            "pad_token_id": 0,
            "rope_scaling": {"factor": 2.0, "type": "ntk"},
            "rope_theta": 500000,
            "type_vocab_size": 0,
        },
        modules=(Pooling(modes=("cls",)), Normalize()),
        native=tiny_rotary.GTE_NATIVE,
        native_prefix="Gte",
    ),
    "gte-snowflake": Family(  # snowflake-arctic-embed-m-v2.0
        prefix="Gte",
        tokenizer="xlm-roberta",
        config={**tiny_rotary.GTE, "model_type": "gte", "rope_scaling": None, "rope_theta": 160000},
        modules=(Pooling(modes=("cls",)), Normalize()),
    ),
    "jina": Family(
        prefix="XLMRoberta",
        tokenizer="xlm-roberta",
        config=tiny_rotary.JINA,
        native=tiny_rotary.JINA_NATIVE,
        native_prefix="JinaEmbeddingsV3",
    ),
    "llama": _decoder(
        "Llama",
        "llama",
        {
            "model_type": "llama",
            **_DECODER,
            "attention_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "rope_scaling": None,
            "rope_theta": 500000.0,
        },
    ),
    "llama-bidirectional": _decoder(
        "LlamaBidirectional",
        "llama",
        {
            "model_type": "llama_bidirec",
            **_DECODER,
            "attention_bias": False,
            "auto_map": {
                "AutoConfig": "llama_bidirectional_model.LlamaBidirectionalConfig",
                "AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel",
            },
            "bos_token_id": 0,
            "eos_token_id": 1,
            "head_dim": 12,
            "mlp_bias": False,
            "pad_token_id": 1,
            "pooling": "avg",
            "pretraining_tp": 1,
            "rope_theta": 500000.0,
            "temperature": 1.0,
        },
        native={"model_type": "llama"},
        native_prefix="Llama",
    ),
    "internlm2": _decoder(
        "InternLM2",
        "mistral",
        {
            "model_type": "internlm2",
            **_DECODER,
            "attn_implementation": "eager",
            "auto_map": {
                "AutoConfig": "configuration_internlm2.InternLM2Config",
                "AutoModel": "modeling_internlm2.InternLM2ForRewardModel",
            },
            "bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "reward_token_id": 3,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {"factor": 2.0, "type": "dynamic"},
            "rope_theta": 1000000,
        },
        native={"model_type": "llama", "rope_scaling": None},
        native_prefix="Llama",
    ),
    "mistral": _decoder(
        "Mistral",
        "mistral",
        {"model_type": "mistral", **_DECODER, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": None},
    ),
    "mistral-sliding": _decoder(
        "Mistral",
        "mistral",
        {"model_type": "mistral", **_DECODER, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 5},
    ),
    "qwen2": _decoder("Qwen2", "qwen", {"model_type": "qwen2", **_QWEN2}),
    "qwen2-sliding": _decoder("Qwen2", "qwen", {"model_type": "qwen2", **_QWEN2, "use_sliding_window": True}),
    "qwen2-bidirectional": _decoder(
        "Qwen2",
        "qwen",
        {
            "model_type": "qwen2",
            **_QWEN2,
            "is_causal": False,
            "auto_map": {
                "AutoModel": "modeling_qwen.Qwen2Model",
                "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
            },
        },
    ),
    "qwen3": _decoder(
        "Qwen3",
        "qwen",
        {
            "model_type": "qwen3",
            **_QWEN2,
            "attention_bias": False,
            "head_dim": 16,
            "rope_scaling": None,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
    ),
    "gemma": _decoder(
        "Gemma", "gemma", {"model_type": "gemma", **_GEMMA, "num_key_value_heads": 1}, shifted_norms=True
    ),
    "gemma2": _decoder(
        "Gemma2",
        "gemma",
        {
            "model_type": "gemma2",
            **_GEMMA,
            "attention_bias": False,
            "attn_logit_softcapping": 2.0,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 48,
            "sliding_window": 5,
        },
        shifted_norms=True,
    ),
    "gemma3": _decoder(
        "Gemma3Text",
        "gemma",
        {"model_type": "gemma3_text", **_GEMMA3},
        shifted_norms=True,
        wrapped="Gemma3ForCausalLM",
    ),
    "gemma3-bidirectional": _decoder(  # EmbeddingGemma
        "Gemma3Text",
        "gemma",
        {"model_type": "gemma3_text", **_GEMMA3, "sliding_window": 8, "use_bidirectional_attention": True},
        shifted_norms=True,
        wrapped="Gemma3ForCausalLM",
    ),
    "gpt2": Family(
        prefix="GPT2",
        tokenizer="gpt2",
        head="LMHeadModel",
        modules=(Pooling(modes=("lasttoken",)), Normalize()),
        config={
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "attn_pdrop": 0.1,
            "bos_token_id": 0,
            "embd_pdrop": 0.1,
            "eos_token_id": 0,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "n_ctx": MAX_TOKENS,
            "n_embd": 48,
            "n_head": 4,
            "n_layer": 2,
            "n_positions": MAX_TOKENS,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
        },
    ),
    "jamba": _decoder(  # Mamba, Mamba with experts, attention, Mamba with experts
        "Jamba",
        "llama",
        {
            "model_type": "jamba",
            **{key: value for key, value in _DECODER.items() if key != "rope_theta"},
            "num_hidden_layers": 4,
            "attn_layer_offset": 2,
            "attn_layer_period": 4,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_conv_bias": True,
            "mamba_d_conv": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 6,
            "mamba_expand": 2,
            "mamba_proj_bias": False,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_logits_to_keep": 1,
            "output_router_logits": False,
            "pad_token_id": 0,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "use_mamba_kernels": True,
        },
    ),
}
