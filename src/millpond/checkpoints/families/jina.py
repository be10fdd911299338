"""jina-embeddings-v3: XLM-RoBERTa with rotary positions and adapters of every matrix; jina-colbert-v2 has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.checkpoints.families.renaming import QKV, AnyTensor, Renaming
from millpond.errors import UnsupportedArchitectureError

PREFIX = "roberta"  # of the backbone's tensors in the files
# torch's names for a parametrized weight and for the two factors added to it.
WEIGHT, DOWN, UP = (f".parametrizations.weight.{part}" for part in ("original", "0.lora_A", "0.lora_B"))
_RENAMING = Renaming(
    prefixes=(PREFIX,),
    parts={
        "encoder.layers": "layers",
        "emb_ln": "embeddings.LayerNorm",
        "mixer.out_proj": "self_attn.o_proj",
        "norm1": "post_attention_layernorm",
        "norm2": "post_mlp_layernorm",
    },
    fused={"mixer.Wqkv": QKV},
)


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json in transformers' terms."""
    if config.get("model_type") == "jina_embeddings_v3":
        return dict(config)
    if config.get("rope_scaling"):
        raise UnsupportedArchitectureError(
            f"{name}: rope_scaling {config['rope_scaling']!r}, which millpond does not run for jina-embeddings-v3"
        )
    native = {key: value for key, value in config.items() if key != "position_embedding_type"}
    base = float(config.get("rotary_emb_base") or 20_000.0)
    return native | {
        "model_type": "jina_embeddings_v3",
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
    }


def rename(tensors: Mapping[str, AnyTensor], config: Mapping[str, Any]) -> dict[str, AnyTensor]:
    """The checkpoint's tensors under transformers' names, without the adapters."""
    plain = {name.replace(WEIGHT, ".weight"): tensor for name, tensor in tensors.items() if not of_adapter(name)}
    return _RENAMING.apply(plain)


def adapter_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The tasks that a checkpoint has adapters for; an adapter's number is its index in this tuple."""
    return tuple(config.get("lora_adaptations") or ())


def of_adapter(name: str) -> bool:
    """Whether a checkpoint's tensor is part of an adapter."""
    return name.endswith((DOWN, UP))
