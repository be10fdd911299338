"""NomicBert: GPT-2's names for BERT's sizes, rotary positions and a gated feed forward without biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.checkpoints.families.renaming import QKV, AnyTensor, Renaming
from millpond.errors import UnsupportedArchitectureError

_SIZES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "layer_norm_epsilon": "layer_norm_eps",
}
_GATES = {"swiglu": "silu", "geglu": "gelu", "glu": "sigmoid"}
# The only values that transformers' class implements.
_FIXED: Mapping[str, Any] = {
    "prenorm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "causal": False,
    "parallel_block": False,
    "use_rms_norm": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
# Of a mixture of experts (v2), whose feed forwards have no gate, and whose layers may have biases.
_PLAIN = {"gelu": "gelu"}
_BIASES = ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")
_FIXED_MIXTURE: Mapping[str, Any] = {"expert_choice_router": False, "num_shared_experts": 0, "ffn_div": 1}
# Beyond these positions the original scales its frequencies by the longest text of a batch.
_TRAINED = 2048
_RENAMING = Renaming(
    prefixes=("nomic_bert", "bert"),
    parts={
        "encoder.layers": "layers",
        "emb_ln": "embeddings.LayerNorm",
        "attn.out_proj": "self_attn.o_proj",
        "mlp.fc11": "mlp.up_proj",
        "mlp.fc12": "mlp.gate_proj",
        "mlp.fc2": "mlp.down_proj",
        "norm1": "post_attention_layernorm",
        "norm2": "post_mlp_layernorm",
    },
    fused={"attn.Wqkv": QKV},
)


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json in transformers' terms; one already in them only gets ``positions_end``."""
    if "n_embd" not in config:
        return {**config, "positions_end": True}
    mixture = int(config.get("num_experts") or 0) > 1
    fixed = {key: only for key, only in _FIXED.items() if not (mixture and key in _BIASES)}
    for key, only in {**fixed, **(_FIXED_MIXTURE if mixture else {})}.items():
        if (config.get(key, only) or None) != (only or None):  # false and null mean the same
            raise UnsupportedArchitectureError(
                f"{name}: {key} {config[key]!r}, which millpond does not run for NomicBert (only {only!r})"
            )
    activation, known = config.get("activation_function", "swiglu"), _PLAIN if mixture else _GATES
    if activation not in known:
        raise UnsupportedArchitectureError(
            f"{name}: activation_function {activation!r}, which millpond does not run for NomicBert "
            f"{'with' if mixture else 'without'} experts; it runs {', '.join(known)}"
        )
    native = {_SIZES.get(key, key): value for key, value in config.items() if key != "activation_function"}
    lengths = [config.get("max_trained_positions") or _TRAINED, config.get("n_positions")]
    return native | {
        **({"model_type": "nomic_bert_moe"} if mixture else {}),
        "hidden_act": known[activation],
        "intermediate_size": native.get("intermediate_size") or 4 * int(native["hidden_size"]),
        "max_position_embeddings": min(int(length) for length in lengths if length),
        "positions_end": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(config.get("rotary_emb_base", 1000.0))},
    }


def rename(tensors: Mapping[str, AnyTensor], config: Mapping[str, Any]) -> dict[str, AnyTensor]:
    """The checkpoint's tensors under transformers' names."""
    return _RENAMING.apply(tensors)
