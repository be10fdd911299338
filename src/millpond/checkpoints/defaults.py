"""What transformers' config classes fill in: the values that a config.json may leave out, and those that follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.checkpoints.architecture import Architecture
from millpond.errors import ModelLoadError

_BERT: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
_ROBERTA = {**_BERT, "pad_token_id": 1}
_DECODER: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_LLAMA = {
    **_DECODER,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": None,
}
_QWEN = {
    **_DECODER,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA: dict[str, Any] = {
    "vocab_size": 256000,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": None,
}
_GEMMA2 = {
    **_GEMMA,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
MINISTRAL_ROPE: dict[str, Any] = {
    "type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "max_position_embeddings": 262144,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_DEBERTA: dict[str, Any] = {
    **_BERT,
    "vocab_size": 128100,
    "hidden_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 24,
    "intermediate_size": 6144,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
    "relative_attention": False,
    "max_relative_positions": -1,
    "position_biased_input": True,
    "pos_att_type": None,
    # The class has no fields of these; its modules fill them in.
    "position_buckets": -1,
    "share_att_key": False,
    "norm_rel_ebd": "none",
    "conv_kernel_size": 0,
    "conv_groups": 1,
    "conv_act": "tanh",
    "embedding_size": None,
    "key_bias": True,  # which v1 has not
}
_T5: dict[str, Any] = {
    "vocab_size": 32128,
    "hidden_size": 512,
    "head_dim": 64,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "pad_token_id": 0,
    # The class has no fields of these, or works them out.
    "hidden_act": "relu",
    "gated": False,
    "max_position_embeddings": 8192,
}
# The fields that a forward reads, by `model_type` of the row; `None`: none, or what :func:`complete` works out.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bert": _BERT,
    "roberta": {**_ROBERTA, "vocab_size": 50265},
    "xlm-roberta": _ROBERTA,
    "ernie": {**_BERT, "task_type_vocab_size": 3, "use_task_id": False},
    "data2vec-text": {**_ROBERTA, "vocab_size": 30522},
    "megatron-bert": {
        **_BERT,
        "vocab_size": 29056,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "xlm-roberta-xl": {
        **_ROBERTA,
        "vocab_size": 250880,
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 10240,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
    },
    "roformer": {**_BERT, "vocab_size": 50000, "embedding_size": None, "max_position_embeddings": 1536},
    "rembert": {
        **_BERT,
        "vocab_size": 250300,
        "hidden_size": 1152,
        "num_hidden_layers": 32,
        "num_attention_heads": 18,
        "input_embedding_size": 256,
        "intermediate_size": 4608,
    },
    "jina_bert": _BERT,
    "mobilebert": {
        **_BERT,
        "hidden_size": 512,
        "num_hidden_layers": 24,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "hidden_act": "relu",
        "embedding_size": 128,
        "intra_bottleneck_size": 128,
        "num_feedforward_networks": 4,
    },
    "longformer": {**_ROBERTA, "attention_window": None},
    "big_bird": {
        **_BERT,
        "vocab_size": 50358,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 4096,
        "use_bias": True,
        "rescale_embeddings": False,
    },
    "distilbert": {
        "vocab_size": 30522,
        "dim": 768,
        "n_layers": 6,
        "n_heads": 12,
        "hidden_dim": 3072,
        "activation": "gelu",
        "max_position_embeddings": 512,
        "pad_token_id": 0,
    },
    "mpnet": {
        **{name: value for name, value in _ROBERTA.items() if name != "type_vocab_size"},
        "vocab_size": 30527,
        "relative_attention_num_buckets": 32,
    },
    "electra": {
        **_BERT,
        "embedding_size": 128,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
    "albert": {
        **_BERT,
        "vocab_size": 30000,
        "embedding_size": 128,
        "hidden_size": 4096,
        "num_hidden_groups": 1,
        "num_attention_heads": 64,
        "intermediate_size": 16384,
        "inner_group_num": 1,
        "hidden_act": "gelu_new",
    },
    "deberta-v2": _DEBERTA,
    "deberta": {**_DEBERTA, **_BERT, "vocab_size": 50265, "type_vocab_size": 0, "layer_norm_eps": 1e-7},
    "modernbert": {
        "vocab_size": 50368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "norm_bias": False,
        "pad_token_id": 50283,
        "attention_bias": False,
        "mlp_bias": False,
        "layer_types": None,
        "local_attention": 128,
    },
    "nomic_bert_moe": {
        **_BERT,
        "max_position_embeddings": 2048,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-5,
        "num_experts": 8,
        "moe_every_n_layers": 2,
        "moe_top_k": 2,
        "moe_normalize_expert_weights": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
    },
    "nomic_bert": {**_BERT, "vocab_size": 30528, "hidden_act": "silu", "max_position_embeddings": 2048},
    "gte": {
        **_BERT,
        "vocab_size": 250048,
        "max_position_embeddings": 8192,
        "type_vocab_size": 1,
        "pad_token_id": 1,
    },
    "jina_embeddings_v3": {
        **_ROBERTA,
        "vocab_size": 250002,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 8194,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
    },
    "eurobert": {
        **_LLAMA,
        "vocab_size": 128256,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 128001,
    },
    "ultrabert": {
        **_LLAMA,
        "max_position_embeddings": 32768,
        "pad_token_id": 0,
        "sliding_window": 128,
        "layer_types": None,
    },
    "neomme": {
        "vocab_size": 131072,
        "embedding_rank": 256,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "hidden_act": "relu2",
        "mlp_bias": False,
        "num_hidden_layers": 17,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 16384,
        "norm_eps": 1e-6,
        "attention_bias": False,
        "pad_token_id": 0,
        "sliding_window": 256,
        "residual_multiplier": None,
        "layer_types": None,
    },
    "llama": _LLAMA,
    "internlm2": _LLAMA,
    "mistral": {
        **_DECODER,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
    "qwen3_moe": {
        **_DECODER,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "head_dim": None,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "phi3": {
        **_LLAMA,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 32000,
        "sliding_window": None,
    },
    "olmo2": {**_LLAMA, "vocab_size": 50304, "rms_norm_eps": 1e-5, "pad_token_id": 1},
    "granite": {
        **_LLAMA,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    "smollm3": {
        **_LLAMA,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "pad_token_id": 128004,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": None,
        "layer_types": None,
    },
    "ministral3": {
        **_DECODER,
        "vocab_size": 131072,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 11,
        "sliding_window": None,
        "rope_parameters": MINISTRAL_ROPE,
    },
    "gpt_neox": {
        "vocab_size": 50432,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "pad_token_id": None,
        "use_parallel_residual": True,
        "attention_bias": True,
    },
    "lfm2": {
        "vocab_size": 65536,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "pad_token_id": 0,
        "conv_bias": False,
        "conv_L_cache": 3,
    },
    "bart": {
        "vocab_size": 50265,
        "hidden_size": 1024,
        "encoder_layers": 12,
        "decoder_layers": 12,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
        "hidden_act": "gelu",
        "scale_embedding": False,
        "decoder_start_token_id": 2,
        "pad_token_id": 1,
    },
    "t5gemma2": {
        "hidden_size": 2304,
        "vocab_size": 262208,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "head_dim": 256,
        "encoder_chunk_size": 4,
    },
    "t5": _T5,
    "umt5": {
        **_T5,
        "vocab_size": 250112,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "hidden_act": "gelu_new",
        "gated": True,
    },
    "gemma": {
        **_GEMMA,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "gemma2": _GEMMA2,
    "gemma3_text": {
        **_GEMMA2,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    "embedding_gemma2": {
        "vocab_size": 262144,
        "hidden_size": 768,  # what translate() calls so, of the states
        "layer_width": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 512,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "pad_token_id": 0,
        "attention_bias": False,
        "sliding_window": 512,
        "layer_types": None,
    },
}
# Base of the rotary angles where config.json gives none; 10,000 for other families.
_THETA = {
    "lfm2": 1_000_000.0,
    "smollm3": 2_000_000.0,
    "nomic_bert": 1000.0,
    "gte": 160_000.0,
    "jina_embeddings_v3": 20_000.0,
}
# Of the families whose layers differ: the base of each kind, and the field of config.json that gives it.
_THETA_BY_KIND = {
    "modernbert": {
        "full_attention": (160_000.0, "global_rope_theta"),
        "sliding_attention": (10_000.0, "local_rope_theta"),
    },
    "ultrabert": {"full_attention": (2_560_000.0, ""), "sliding_attention": (10_000.0, "")},
    "neomme": {
        "full_attention": (1_000_000.0, "rope_theta"),
        "sliding_attention": (10_000.0, "rope_theta"),
    },
    "embedding_gemma2": {"full_attention": (1_000_000.0, ""), "sliding_attention": (10_000.0, "")},
    "gemma3_text": {
        "full_attention": (1_000_000.0, "rope_theta"),
        "sliding_attention": (10_000.0, "rope_local_base_freq"),
    },
}
# The part of a head that rotary positions turn, by the kind of layer, where config.json gives none.
_PARTS = {"neomme": {"full_attention": 0.25, "sliding_attention": 1.0}}
# Fields that may be null, besides those whose default is.
_NULLABLE = frozenset(
    (
        "pad_token_id num_key_value_heads head_dim sliding_window final_logit_softcapping attn_logit_softcapping "
        "encoder_chunk_size"
    ).split()
)
# Fields of `rope_parameters` that are positive numbers.
_NUMBERS = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "partial_rotary_factor"),
)
_SIZED_BY_TRAINING = ("llama3", "yarn", "longrope")
# Numbers of things that a model has, if it has the field.
_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "max_position_embeddings", "embedding_size", "num_hidden_groups", "inner_group_num"),
    *("input_embedding_size", "task_type_vocab_size", "intra_bottleneck_size", "num_feedforward_networks"),
    *("dim", "n_layers", "n_heads", "hidden_dim", "relative_attention_num_buckets", "query_pre_attn_scalar"),
    *("moe_intermediate_size", "num_experts", "num_experts_per_tok", "decoder_sparse_step"),
    *("moe_every_n_layers", "moe_top_k", "layer_width", "hidden_size_per_layer_input", "embedding_rank"),
    *("local_attention", "sliding_window", "global_attn_every_n_layers", "sliding_window_pattern"),
)
_DISTILBERT_NAMES = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}


def complete(config: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """``config``, in the native terms, with every field that the family's class has in transformers.

    ``rope_parameters`` hold the ``rope_type`` and ``rope_theta``, for ModernBERT and Gemma 3 by the kind of layer;
    ``sliding_window`` and ``layer_types`` are those that the class works out.

    Raises:
        ModelLoadError: A field is of another type than the class takes.
    """
    family = architecture.unmasked or architecture.model_type
    completed = dict(config)
    if family == "distilbert":
        completed |= {short: config[name] for name, short in _DISTILBERT_NAMES.items() if name in config}
    for name, default in _DEFAULTS.get(family, {}).items():
        completed[name] = _checked(name, completed.get(name, default), default)
    if "num_key_value_heads" in completed and completed["num_key_value_heads"] is None:
        completed["num_key_value_heads"] = completed["num_attention_heads"]
    if family in ("qwen2", "qwen3", "qwen3_moe") and not completed["use_sliding_window"]:
        completed["sliding_window"] = None
    for name in _SIZES:
        size = completed.get(name, 1)
        if size is not None and (type(size) is not int or size < 1):
            raise ModelLoadError(f"{name} is {size!r} in config.json; it must be at least 1")
    _complete_family(family, completed)
    if architecture.positions == "rotary" and completed.get("head_dim") is None:
        completed["head_dim"] = completed["hidden_size"] // completed["num_attention_heads"]
    if "layer_types" in completed and family != "lfm2":  # whose translate() does it
        _complete_layers(family, completed)
    if architecture.positions == "rotary":
        completed["rope_parameters"] = _rope(family, completed)
    return completed


def _checked(name: str, value: Any, default: Any) -> Any:
    """The value of a field, of its default's type; null where the field may be."""
    if value is None:
        return None if name in _NULLABLE else default
    if default is None or (type(default) is float and type(value) is int):
        return value
    if type(value) is not type(default):
        raise ModelLoadError(f"{name} is {value!r} in config.json; it must be of type {type(default).__name__}")
    return value


def _complete_family(family: str, config: dict[str, Any]) -> None:
    """Fields that follow from others in one family."""
    if family == "modernbert":
        config["sliding_window"] = config["local_attention"] // 2
    elif family == "gemma" and config["hidden_act"] == "gelu":  # older files mean the approximation by tanh
        config["hidden_act"] = "gelu_pytorch_tanh"
    elif family == "smollm3" and config["no_rope_layers"] is None:
        every = config.get("no_rope_layer_interval") or 4
        config["no_rope_layers"] = [int((i + 1) % every != 0) for i in range(config["num_hidden_layers"])]
    elif family == "phi3" and config.get("partial_rotary_factor") is None:
        config["partial_rotary_factor"] = 1.0
    elif family == "gpt_neox":
        config["rope_theta"] = config.get("rope_theta") or config.get("rotary_emb_base") or 10_000.0
        if config.get("partial_rotary_factor") is None:
            config["partial_rotary_factor"] = config.get("rotary_pct", 0.25)
    elif family == "neomme" and config["residual_multiplier"] is None:
        config["residual_multiplier"] = (2 * config["num_hidden_layers"]) ** -0.5
    elif family in ("granite", "neomme") and not config["residual_multiplier"] > 0:
        raise ModelLoadError(
            f"residual_multiplier is {config['residual_multiplier']!r} in config.json; it must be more than 0"
        )
    elif family == "gemma3_text" and config["use_bidirectional_attention"] and config["sliding_window"]:
        config["sliding_window"] = config["sliding_window"] // 2 + 1
    elif family in ("deberta", "deberta-v2", "roformer"):
        config["embedding_size"] = config["embedding_size"] or config["hidden_size"]
    if family in ("deberta", "deberta-v2"):
        if isinstance(config["pos_att_type"], str):
            config["pos_att_type"] = [part.strip() for part in config["pos_att_type"].lower().split("|")]
        if not isinstance(config["pos_att_type"], list | None):
            raise ModelLoadError(f"pos_att_type is {config['pos_att_type']!r} in config.json; it must be a list")


def _complete_layers(family: str, config: dict[str, Any]) -> None:
    """The kind of each layer: a sliding window or full attention."""
    count = config["num_hidden_layers"]
    given = config["layer_types"]
    if given is not None:
        if not isinstance(given, list) or len(given) != count:
            raise ModelLoadError(f"layer_types in config.json must name the kind of each of {count} layers")
        config["layer_types"] = ["full_attention" if kind == "attention" else kind for kind in given]
        strange = [kind for kind in config["layer_types"] if kind not in ("full_attention", "sliding_attention")]
        if strange:
            raise ModelLoadError(
                f"layer_types in config.json names {strange[0]!r}; full_attention and sliding_attention run"
            )
        return
    if family == "modernbert":
        every = config.get("global_attn_every_n_layers") or 3
        sliding = [i % every != 0 for i in range(count)]
    elif family == "smollm3":
        slides = config["use_sliding_window"] and config["sliding_window"] is not None
        sliding = [bool(slides and not turns) for turns in config["no_rope_layers"]][:count]
    elif family in ("qwen2", "qwen3"):
        sliding = [config["sliding_window"] is not None and i >= config["max_window_layers"] for i in range(count)]
    else:
        patterns = {
            "gemma3_text": config.get("sliding_window_pattern") or 6,
            "ultrabert": 3,
            "embedding_gemma2": 6,
            "neomme": 6,
        }
        every = patterns.get(family, 2)
        sliding = [(i + 1) % every != 0 and (family != "neomme" or i + 1 < count) for i in range(count)]
    config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in sliding]


def _rope(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """How positions rotate: ``rope_type``, ``rope_theta`` and what the type needs; by kind where layers differ."""
    scaling, given = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping) or not isinstance(given, Mapping):
        raise ModelLoadError("rope_scaling and rope_parameters in config.json must be objects")
    kinds = _THETA_BY_KIND.get(family)
    if kinds is None:
        theta = config.get("rope_theta")
        return _standard(scaling or given, theta or _THETA.get(family, 10_000.0), config)
    scaled = kinds if family == "modernbert" else ("full_attention",)
    parts = {kind: {"partial_rotary_factor": part} for kind, part in _PARTS.get(family, {}).items()}
    return {
        kind: _standard(
            {**parts.get(kind, {}), **(given.get(kind) or {}), **(scaling if kind in scaled else {})},
            config.get(field) or theta,
            config,
        )
        for kind, (theta, field) in kinds.items()
    }


def _standard(rope: Mapping[str, Any], theta: float, config: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = config.get("partial_rotary_factor")
    standard = {"rope_theta": theta, **({} if partial is None else {"partial_rotary_factor": partial}), **rope}
    standard["rope_type"] = kind
    if kind in _SIZED_BY_TRAINING:
        length = config.get("original_max_position_embeddings")
        if length is not None:
            standard["original_max_position_embeddings"] = length
        standard.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    for name in _NUMBERS:
        value = standard.get(name, 1)
        if type(value) not in (int, float) or value <= 0:
            raise ModelLoadError(f"{name} of the rotary positions is {value!r} in config.json; it must be positive")
    return standard
