"""NV-Embed's latent attention: a head on the rows of the tokens, whose tensors lie beside the backbone's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millpond.checkpoints.layouts.sentence_transformers import PipelineLayout
from millpond.checkpoints.modules import LatentAttention, Pooling
from millpond.errors import ModelLoadError

_FIELD = "latent_attention_config"
_SIZES = {
    "num_latents_value": 512,
    "num_cross_heads": 8,
    "hidden_dim": 4096,
    "latent_dim": 4096,
    "cross_dim_head": 4096,
}


def with_latent_attention(layout: PipelineLayout, config: Mapping[str, Any]) -> PipelineLayout:
    """``layout`` with the head of an NV-Embed; that of any other checkpoint as it is."""
    if config.get("model_type") != "nvembed":
        return layout
    given = config.get(_FIELD) or {}
    if not isinstance(given, Mapping):
        raise ModelLoadError(f"{_FIELD} is {given!r} in config.json; it must be an object")
    sizes = {name: given.get(name, default) for name, default in _SIZES.items()}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ModelLoadError(f"{name} of {_FIELD} is {size!r} in config.json; it must be at least 1")
    if sizes["hidden_dim"] != sizes["latent_dim"]:  # the result is added to the rows, and both are normalized
        raise ModelLoadError(
            f"{_FIELD} in config.json has rows of {sizes['hidden_dim']} columns and latents of {sizes['latent_dim']}; "
            "they must have the same"
        )
    head = LatentAttention(
        folder=layout.transformer,
        width=sizes["latent_dim"],
        latents=sizes["num_latents_value"],
        heads=sizes["num_cross_heads"],
        dim=sizes["cross_dim_head"],
    )
    pooling, normalize = layout.pooling, layout.normalize
    if pooling is None:  # as its own code pools: instructions are left out where texts are padded behind
        masks = config.get("is_mask_instruction", True) and config.get("padding_side", "right") == "right"
        pooling = Pooling(modes=("mean",), include_prompt=not masks)
        if given.get("output_normalize") is False:
            normalize = False
    return replace(layout, token_heads=(head, *layout.token_heads), pooling=pooling, normalize=normalize)
