"""The families a tiny checkpoint may be of, each with the config.json that its checkpoints on the hub have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tests.tiny_layouts import Normalize, Pooling

MAX_TOKENS = 64

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


@dataclass(frozen=True, kw_only=True)
class Family:
    """A row of :data:`FAMILIES`.

    Attributes:
        prefix: What transformers' class names begin with.
        tokenizer: Key of the tokenizer kinds.
        config: config.json as the hub's checkpoints have it (4.x style), but for the vocabulary's size.
        head: The language model around the backbone, for ``wrapped`` checkpoints.
        modules: How its embedding checkpoints usually pool.
        position_ids: Its older files carry this buffer.
        shifted_norms: Norm weights are stored as their difference from 1 (Gemma).
    """

    prefix: str
    tokenizer: str
    config: Mapping[str, Any]
    head: Literal["ForMaskedLM", "ForCausalLM"] = "ForMaskedLM"
    modules: tuple[Any, ...] = (Pooling(modes=("mean",)), Normalize())
    position_ids: bool = False
    shifted_norms: bool = False


def _decoder(prefix: str, tokenizer: str, config: Mapping[str, Any], *, shifted_norms: bool = False) -> Family:
    last = (Pooling(modes=("lasttoken",)), Normalize())
    return Family(
        prefix=prefix,
        tokenizer=tokenizer,
        config=config,
        head="ForCausalLM",
        modules=last,
        shifted_norms=shifted_norms,
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
}
