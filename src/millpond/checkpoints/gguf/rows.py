"""Rows: for each architecture in GGUF, its config.json and the names of its tensors before the conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_DECODER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DECODER_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}
_DECODER_FIELDS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}


@dataclass(frozen=True, kw_only=True)
class GgufRow:
    """An architecture, as llama.cpp's converter writes it."""

    layers: str  # what precedes the number of a layer
    parts: Mapping[str, str]  # names within a layer, by those in GGUF
    names: Mapping[str, str]  # names outside of the layers
    config: Mapping[str, Any]  # fields of config.json with one value
    fields: Mapping[str, str]  # fields of config.json, by the keys of the metadata
    pooling: str | None  # where the metadata name none; `None`: they must
    vocabulary: str  # kind of the tokenizer
    # Fields that config.json may lack a key for, and their values in the source
    defaults: Mapping[str, Any] = field(default_factory=dict)
    causal: bool = False  # whether a token attends to those before it only, unless the metadata say otherwise
    centred: bool = False  # the converter adds 1 to the weights of norms
    dense: tuple[str, ...] = ()  # tensors of linear layers behind the pooling, which the file must have


ROWS: Mapping[str, GgufRow] = {
    "bert": GgufRow(
        layers="encoder.layer",
        parts={
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
        names={
            "token_embd": "embeddings.word_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "position_embd": "embeddings.position_embeddings",
            "token_embd_norm": "embeddings.LayerNorm",
        },
        config={"model_type": "bert", "architectures": ["BertModel"], "hidden_act": "gelu"},
        fields={
            "hidden_size": "embedding_length",
            "num_hidden_layers": "block_count",
            "num_attention_heads": "attention.head_count",
            "intermediate_size": "feed_forward_length",
            "max_position_embeddings": "context_length",
            "layer_norm_eps": "attention.layer_norm_epsilon",
        },
        pooling=None,
        vocabulary="bert",
    ),
    "nomic-bert": GgufRow(
        layers="encoder.layers",
        parts={
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "attn_output_norm": "norm1",
            "ffn_up": "mlp.fc11",
            "ffn_gate": "mlp.fc12",
            "ffn_down": "mlp.fc2",
            "layer_output_norm": "norm2",
        },
        names={
            "token_embd": "embeddings.word_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "token_embd_norm": "emb_ln",
        },
        config={"model_type": "nomic_bert", "architectures": ["NomicBertModel"], "activation_function": "swiglu"},
        fields={
            "n_embd": "embedding_length",
            "n_layer": "block_count",
            "n_head": "attention.head_count",
            "n_inner": "feed_forward_length",
            "n_positions": "context_length",
            "max_trained_positions": "context_length",
            "layer_norm_epsilon": "attention.layer_norm_epsilon",
            "rotary_emb_base": "rope.freq_base",
        },
        pooling=None,
        vocabulary="bert",
    ),
    "qwen3": GgufRow(
        layers="layers",
        parts={**_DECODER_PARTS, "ffn_norm": "post_attention_layernorm"},
        names=_DECODER_NAMES,
        config={
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_act": "silu",
            "tie_word_embeddings": True,
        },
        fields=_DECODER_FIELDS,
        pooling="lasttoken",
        causal=True,
        vocabulary="gpt2",
    ),
    "gemma-embedding": GgufRow(
        layers="layers",
        parts={
            **_DECODER_PARTS,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        names=_DECODER_NAMES,
        config={
            "model_type": "gemma3_text",
            "architectures": ["Gemma3TextModel"],
            "hidden_activation": "gelu_pytorch_tanh",
            "use_bidirectional_attention": True,
            "rope_local_base_freq": 10000.0,
            "_sliding_window_pattern": 6,
        },
        fields={
            **_DECODER_FIELDS,
            "sliding_window": "attention.sliding_window",
            "query_pre_attn_scalar": "attention.key_length",
        },
        pooling="mean",
        vocabulary="llama",
        defaults={"rope_theta": 1_000_000.0},
        centred=True,
        dense=("dense_2", "dense_3"),
    ),
}
