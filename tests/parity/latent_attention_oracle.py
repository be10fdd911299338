"""NV-Embed's states from the description of its code: Mistral without a mask, then attention to the latents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F


def nv_embed(
    folder: Path,
    config: dict[str, Any],
    *,
    causal: bool = False,  # mistakes, for the negative controls
    window: bool = False,
    residual: bool = True,
    swapped: bool = False,
    latent: bool = True,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """States of a text's tokens, in float32, one text at a time."""
    from safetensors.torch import load_file
    from transformers import MistralConfig, MistralModel

    text = {key: value for key, value in config["text_config"].items() if key not in ("model_type", "architectures")}
    sizes = {"vocab_size": config["vocab_size"], **text, **({} if window else {"sliding_window": None})}
    model = MistralModel._from_config(MistralConfig(**sizes), attn_implementation="eager", dtype=torch.float32).eval()
    tensors = load_file(folder / "model.safetensors")
    backbone = {
        name.removeprefix("embedding_model."): tensor
        for name, tensor in tensors.items()
        if name.startswith("embedding_model.")
    }
    model.load_state_dict(backbone)
    width, heads = config["latent_attention_config"]["latent_dim"], config["latent_attention_config"]["num_cross_heads"]

    def part(name: str) -> torch.Tensor:
        return tensors[f"latent_attention_model.{name}"]

    def norm(rows: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(
            rows, (width,), part(f"cross_attend_blocks.{name}.weight"), part(f"cross_attend_blocks.{name}.bias")
        )

    def attended(hidden: torch.Tensor) -> torch.Tensor:  # [n, width]
        context = norm(part("latents"), "0.norm_context")
        query = F.linear(norm(hidden, "0.norm"), part("cross_attend_blocks.0.fn.to_q.weight"))
        key, value = F.linear(context, part("cross_attend_blocks.0.fn.to_kv.weight")).chunk(2, -1)
        split = [rows.unflatten(1, (heads, -1)).transpose(0, 1) for rows in (query, key, value)]
        mixed = F.scaled_dot_product_attention(*split).transpose(0, 1).flatten(1)
        return F.linear(mixed, part("cross_attend_blocks.0.fn.to_out.weight"))

    def fed(hidden: torch.Tensor) -> torch.Tensor:
        block = "cross_attend_blocks.1.fn.net"
        up, gate = F.linear(norm(hidden, "1.norm"), part(f"{block}.0.weight"), part(f"{block}.0.bias")).chunk(2, -1)
        up, gate = (gate, up) if swapped else (up, gate)
        return F.linear(up * F.gelu(gate), part(f"{block}.2.weight"), part(f"{block}.2.bias"))

    def states(ids: torch.Tensor) -> torch.Tensor:
        free = None if causal or window else torch.zeros(1, 1, len(ids), len(ids))
        hidden: torch.Tensor = model(input_ids=ids[None], attention_mask=free, use_cache=False).last_hidden_state[0]
        if not latent:
            return hidden
        hidden = attended(hidden) + (hidden if residual else 0)
        return fed(hidden) + (hidden if residual else 0)

    return states
