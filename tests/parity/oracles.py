"""Reference hidden states of one text: transformers in eager mode, or the formula if it has no class."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.parity import alibi_oracles, rotary_oracles
from tests.parity.latent_attention_oracle import nv_embed

States = Callable[[torch.Tensor], torch.Tensor]  # ids [n] -> [n, hidden]


def oracle(folder: Path) -> States:
    """The reference of the checkpoint in ``folder``, in float32, one text at a time."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return _OWN.get(config["model_type"], _automatic)(folder, config)


def _automatic(folder: Path, config: dict[str, Any]) -> States:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, trust_remote_code=False, local_files_only=True
    ).eval()
    return lambda ids: model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None]).last_hidden_state[0]


def _llama_bidirectional(folder: Path, config: dict[str, Any]) -> States:
    """Llama without a causal mask."""
    return without_mask(folder, model_type="llama")[0]


def _qwen3_bidirectional(folder: Path, config: dict[str, Any]) -> States:
    """Qwen3 without a causal mask."""
    return without_mask(folder, model_type="qwen3")[0]


def without_mask(folder: Path, **replaced: Any) -> tuple[States, States]:
    """A decoder with every token attending to every other, by an explicit mask; and as it is, with the causal mask.

    ``replaced``: fields of config.json.
    """
    from transformers import AutoConfig, AutoModel

    content = json.loads((folder / "config.json").read_text(encoding="utf-8")) | replaced
    own = ("auto_map", "architectures", "is_causal", "use_bidirectional_attention")
    config = AutoConfig.for_model(**{key: value for key, value in content.items() if key not in own})
    model = AutoModel.from_pretrained(
        folder, config=config, attn_implementation="eager", dtype=torch.float32, local_files_only=True
    ).eval()

    def states(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        hidden: torch.Tensor = model(input_ids=ids[None], attention_mask=mask, use_cache=False).last_hidden_state
        return hidden[0]

    return lambda ids: states(ids, torch.zeros(1, 1, len(ids), len(ids))), lambda ids: states(ids, None)


def _t5(folder: Path, config: dict[str, Any]) -> States:
    """The encoder alone."""
    import transformers

    name = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}[config["model_type"]]
    model = getattr(transformers, f"{name}EncoderModel").from_pretrained(folder, dtype=torch.float32).eval()
    return lambda ids: model(input_ids=ids[None]).last_hidden_state[0]


def _lfm2(folder: Path, config: dict[str, Any]) -> States:
    """With an auto_map it is LFM2.5's embedder."""
    return lfm2(folder, bidirectional="auto_map" in config)


def lfm2(folder: Path, *, bidirectional: bool, centred: bool | None = None) -> States:
    """LFM2 with every token attending to every other, and convolutions around a row (``centred``), as LFM2.5 has it."""
    from transformers import Lfm2Model

    model = Lfm2Model.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    for layer in model.layers:
        if (bidirectional if centred is None else centred) and hasattr(layer, "conv"):
            layer.conv.forward = _centred(layer.conv)

    def states(ids: torch.Tensor) -> torch.Tensor:
        free = torch.zeros(1, 1, len(ids), len(ids))
        mask = {"full_attention": free, "conv": None} if bidirectional else None
        hidden: torch.Tensor = model(input_ids=ids[None], attention_mask=mask, use_cache=False).last_hidden_state
        return hidden[0]

    return states


def _centred(conv: Any) -> Callable[..., torch.Tensor]:
    def forward(hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        before, behind, values = conv.in_proj(hidden_states).transpose(1, 2).chunk(3, 1)
        taps = conv.conv.weight  # [columns, 1, taps]
        mixed = F.conv1d(before * values, taps, padding=taps.shape[2] // 2, groups=len(taps))
        result: torch.Tensor = conv.out_proj((behind * mixed[..., : hidden_states.shape[1]]).transpose(1, 2))
        return result

    return forward


def _internlm2(folder: Path, config: dict[str, Any]) -> States:
    """InternLM2 from its description: pre-norm, rotary halves, grouped heads, SiLU-gated feed forward."""
    from safetensors.torch import load_file

    weights = {name.removeprefix("model."): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config["hidden_size"] // heads

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * weights[f"{name}.weight"]

    def turned(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:  # [n, dim]
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def attention(x: torch.Tensor, layer: str) -> torch.Tensor:
        n = len(x)
        together = F.linear(x, weights[f"{layer}.attention.wqkv.weight"]).view(n, kv_heads, heads // kv_heads + 2, dim)
        angle = torch.arange(n)[:, None] / config["rope_theta"] ** (torch.arange(0, dim, 2) / dim)
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        mixed = []
        for head in range(heads):
            group = together[:, head // (heads // kv_heads)]  # [n, queries + 2, dim]
            query, key, value = group[:, head % (heads // kv_heads)], group[:, -2], group[:, -1]
            scores = turned(query, angle) @ turned(key, angle).T / dim**0.5
            mixed.append(scores.masked_fill(later, float("-inf")).softmax(-1) @ value)
        return F.linear(torch.cat(mixed, -1), weights[f"{layer}.attention.wo.weight"])

    def states(ids: torch.Tensor) -> torch.Tensor:
        x = weights["tok_embeddings.weight"][ids]
        for i in range(config["num_hidden_layers"]):
            layer = f"layers.{i}"
            x = x + attention(norm(x, f"{layer}.attention_norm"), layer)
            y = norm(x, f"{layer}.ffn_norm")
            gate, up = (F.linear(y, weights[f"{layer}.feed_forward.{name}.weight"]) for name in ("w1", "w3"))
            x = x + F.linear(F.silu(gate) * up, weights[f"{layer}.feed_forward.w2.weight"])
        return norm(x, "norm")

    return states


def _xlm_roberta(folder: Path, config: dict[str, Any]) -> States:
    """With rotary positions it is jina's model; its default adapter is the one for calls without a role."""
    rotary = config.get("position_embedding_type") == "rotary"
    return (rotary_oracles.jina if rotary else _automatic)(folder, config)


def _bert(folder: Path, config: dict[str, Any]) -> States:
    """With ALiBi it is jina's model, which transformers does not have."""
    own = config.get("position_embedding_type") == "alibi"
    return (alibi_oracles.jina_bert if own else _automatic)(folder, config)


_OWN: dict[str, Callable[[Path, dict[str, Any]], States]] = {
    "bert": _bert,
    "llama_bidirec": _llama_bidirectional,
    **dict.fromkeys(("bidirectional_pplx_qwen3", "bidirlm"), _qwen3_bidirectional),
    "internlm2": _internlm2,
    "nvembed": nv_embed,
    "lfm2": _lfm2,
    **dict.fromkeys(("t5", "mt5", "umt5"), _t5),
    "nomic_bert": rotary_oracles.nomic,
    "new": rotary_oracles.gte,
    "gte": rotary_oracles.gte,
    "xlm-roberta": _xlm_roberta,
}
