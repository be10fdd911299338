"""GTE (``NewModel``): BERT with rotary positions, a gated feed forward and its own scaling of positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.checkpoints.families.renaming import QKV, AnyTensor, Renaming
from millpond.errors import UnsupportedArchitectureError

# The only values that transformers' class implements.
_FIXED: Mapping[str, Any] = {
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "pack_qkv": True,
}
_RENAMING = Renaming(
    prefixes=("new", "gte"),
    parts={
        "encoder.layer": "layers",
        "attention.o_proj": "self_attn.o_proj",
        "attn_ln": "post_attention_layernorm",
        "mlp_ln": "post_mlp_layernorm",
    },
    fused={"attention.qkv_proj": QKV, "mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj")},
)


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json in transformers' terms."""
    for key, only in _FIXED.items():
        if config.get(key, only) != only:
            raise UnsupportedArchitectureError(
                f"{name}: {key} {config[key]!r}, which millpond does not run for GTE (only {only!r})"
            )
    native = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta", *_FIXED)}
    return native | {"model_type": "gte", "rope_parameters": _rope(config, name)}


def _rope(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The original's fixed NTK scaling as a linear one with the same frequencies.

    The original multiplies the base and then divides every frequency: ``(base factor)^(-2i/d) factor^(-2/d)``, with
    ``d`` the width of a head. It multiplies its maximum length by the factor before it compares lengths with it, so a
    factor above 1 always applies.
    """
    native = config.get("rope_parameters") or {}
    rope = {**(config.get("rope_scaling") or {}), **native}
    default_theta = 10_000.0 if config.get("model_type") == "new" else 160_000.0
    theta = float(rope.get("rope_theta", config.get("rope_theta") or default_theta))
    kind = rope.get("rope_type", rope.get("type")) or "default"
    if rope.get("mixed_b") is not None:
        raise UnsupportedArchitectureError(
            f"{name}: rope scaling with mixed_b {rope['mixed_b']!r}, which millpond does not run for GTE"
        )
    if kind == "default":
        return {"rope_type": "default", "rope_theta": theta}
    if kind != "ntk":
        if native:
            return {**native, "rope_theta": theta}
        raise UnsupportedArchitectureError(f"{name}: rope scaling {kind!r}, which millpond does not run for GTE")
    factor, heads = float(rope["factor"]), int(config.get("num_attention_heads", 12))
    if factor <= 1:
        return {"rope_type": "default", "rope_theta": theta}
    dim = int(config.get("hidden_size", 768)) // heads
    return {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / dim)}


def rename(tensors: Mapping[str, AnyTensor], config: Mapping[str, Any]) -> dict[str, AnyTensor]:
    """The checkpoint's tensors under transformers' names."""
    return _RENAMING.apply(tensors)
