"""XLM-RoBERTa: also under the names of jina's flash implementation (jina-reranker-v2-base-multilingual)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.checkpoints.families.renaming import AnyTensor, Renaming

_RENAMING = Renaming(
    prefixes=("roberta",),
    parts={
        "encoder.layers": "encoder.layer",
        "emb_ln": "embeddings.LayerNorm",
        "mixer.out_proj": "attention.output.dense",
        "norm1": "attention.output.LayerNorm",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
        "norm2": "output.LayerNorm",
    },
    fused={"mixer.Wqkv": tuple(f"attention.self.{part}" for part in ("query", "key", "value"))},
)


def rename(tensors: Mapping[str, AnyTensor], config: Mapping[str, Any]) -> Mapping[str, AnyTensor]:
    """The checkpoint's tensors under transformers' names."""
    return _RENAMING.apply(tensors) if any("emb_ln." in name for name in tensors) else tensors
