"""Conversion of transformers' tensors to the names and shapes of a family's checkpoints on the hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tests.tiny.noise import Noise

Tensors = dict[str, np.ndarray]


_HEADS = ("lm_head.", "classifier.", "score.")  # not part of the backbone; keep their names
_QKV = tuple(f"self_attn.{letter}_proj" for letter in "qkv")


def _gpt2(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Adds the causal masks, a former buffer that the hub's files still contain."""
    length = int(config["n_positions"])
    prefix = "transformer." if any(name.startswith("transformer.") for name in tensors) else ""
    mask = np.tril(np.ones((length, length), np.float32))[None, None]
    return tensors | {f"{prefix}h.{i}.attn.bias": mask for i in range(int(config["n_layer"]))}


def _gpt_neox(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """The former name of the language model's head, and the causal masks, a former buffer in the hub's files."""
    length = int(config["max_position_embeddings"])
    prefix = "gpt_neox." if any(name.startswith("gpt_neox.") for name in tensors) else ""
    mask = np.tril(np.ones((length, length), np.float32))[None, None]
    found = {name.replace("lm_head.", "embed_out."): tensor for name, tensor in tensors.items()}
    for i in range(int(config["num_hidden_layers"])):
        found[f"{prefix}layers.{i}.attention.bias"] = mask
        found[f"{prefix}layers.{i}.attention.masked_bias"] = np.float32([-1e9])
    return found


def _roformer(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Sines and cosines in the table of positions, as its class makes and saves them."""
    name = next(name for name in tensors if name.endswith("encoder.embed_positions.weight"))
    positions, dim = tensors[name].shape
    angles = np.arange(positions)[:, None] / 10_000.0 ** (np.arange(0, dim, 2) / dim)
    return tensors | {name: np.concatenate((np.sin(angles), np.cos(angles)), 1).astype(np.float32)}


def _bart(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """One table of words, under each of its names."""
    table = next(tensor for name, tensor in tensors.items() if name.endswith("shared.weight"))
    tied = ("embed_tokens.weight", "lm_head.weight")
    return {name: table if name.endswith(tied) else tensor for name, tensor in tensors.items()}


def _t5(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Without the names that the table of words has in the two halves of the model."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("coder.embed_tokens.weight")}


def _mobilebert(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Smaller matrices: there is no norm that bounds the states."""
    return {
        name: tensor * np.float32(0.5) if tensor.ndim > 1 and ".layer." in name else tensor
        for name, tensor in tensors.items()
    }


def _jamba(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Splits the experts' fused tensors into three matrices per expert."""
    originals = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            originals[name] = tensor
            continue
        prefix, _, kind = name.rpartition(".")
        for i, expert in enumerate(tensor):
            parts = (
                {"gate_proj": np.split(expert, 2)[0], "up_proj": np.split(expert, 2)[1]}
                if "up" in kind
                else {kind: expert}
            )
            originals |= {f"{prefix}.{i}.{part}.weight": value for part, value in parts.items()}
    return originals


def _internlm2(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """InternLM2's names; q, k and v are fused by key head, as the original's ``rearrange(.., "(h gs d) n")`` reads."""
    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    names = {
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
    }
    originals = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            key, value = (tensors[name.replace("q_proj", other)] for other in ("k_proj", "v_proj"))
            dim, each = len(tensor) // heads, heads // kv_heads
            rows = []
            for head in range(kv_heads):
                rows += [tensor[head * each * dim : (head + 1) * each * dim]]
                rows += [part[head * dim : (head + 1) * dim] for part in (key, value)]
            originals[name.replace("self_attn.q_proj", "attention.wqkv")] = np.concatenate(rows)
        elif not re.search(r"[kv]_proj", name):
            for native, original in names.items():
                name = name.replace(native, original)
            originals[name] = tensor
    return originals


def _embedding_gemma2(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """The factor of each layer, a buffer, and a tensor of the tower of images; scores are scaled by a norm alone."""
    noise = Noise(17)
    tensors = {
        name: tensor * np.float32(0.5) if name.endswith("q_norm.weight") else tensor for name, tensor in tensors.items()
    }
    found = {
        f"language_model.layers.{i}.layer_scalar": noise.normal(1) * np.float32(0.2) + np.float32(0.8)
        for i in range(int(config["text_config"]["num_hidden_layers"]))
    }
    return tensors | found | {"vision_tower.encoder.layers.0.input_layernorm.weight": noise.normal(5)}


def _nv_embed(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """The backbone under its name, and the latent attention beside it."""
    latent, noise = config["latent_attention_config"], Noise(13)
    width, inner = latent["latent_dim"], latent["num_cross_heads"] * latent["cross_dim_head"]
    matrices = {
        "latents": (latent["num_latents_value"], width),
        "cross_attend_blocks.0.fn.to_q.weight": (inner, width),
        "cross_attend_blocks.0.fn.to_kv.weight": (2 * inner, width),
        "cross_attend_blocks.0.fn.to_out.weight": (width, inner),
        "cross_attend_blocks.1.fn.net.0.weight": (8 * width, width),
        "cross_attend_blocks.1.fn.net.2.weight": (width, 4 * width),
    }
    found = {
        name if name.startswith(_HEADS) else f"embedding_model.{name.removeprefix('model.')}": tensor
        for name, tensor in tensors.items()
    }
    for name, shape in matrices.items():
        found[f"latent_attention_model.{name}"] = noise.normal(*shape) * np.float32(1.3 / shape[-1] ** 0.5)
    for name in ("0.norm", "0.norm_context", "1.norm"):
        weight = f"latent_attention_model.cross_attend_blocks.{name}.weight"
        found[weight] = noise.normal(width) * np.float32(0.2) + np.float32(1)
        found[weight.replace("weight", "bias")] = noise.normal(width) * np.float32(0.2)
    for part, rows in (("net.0", 8 * width), ("net.2", width)):
        found[f"latent_attention_model.cross_attend_blocks.1.fn.{part}.bias"] = noise.normal(rows) * np.float32(0.2)
    return found


def nomic(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Names of the original NomicBert; in the language model, the backbone has the prefix ``bert.``.

    A mixture of experts has them already, since transformers has no class of it.
    """
    if config.get("num_experts"):
        return tensors
    return _renamed(
        tensors,
        fused={"attn.Wqkv": _QKV},
        names={
            "nomic_bert.": "bert.",
            "embeddings.LayerNorm": "emb_ln",
            "self_attn.o_proj": "attn.out_proj",
            "mlp.up_proj": "mlp.fc11",
            "mlp.gate_proj": "mlp.fc12",
            "mlp.down_proj": "mlp.fc2",
            "post_attention_layernorm": "norm1",
            "post_mlp_layernorm": "norm2",
            "layers.": "encoder.layers.",
        },
    )


def gte(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Names of the original GTE: with the prefix ``new.`` if there is a head, else without a prefix."""
    found = _renamed(
        tensors,
        fused={"attention.qkv_proj": _QKV, "mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj")},
        names={
            "gte.": "",
            "self_attn.o_proj": "attention.o_proj",
            "post_attention_layernorm": "attn_ln",
            "post_mlp_layernorm": "mlp_ln",
            "layers.": "encoder.layer.",
            "lm_head.layer_norm": "lm_head.norm",
        },
    )
    claimed = config["architectures"][0]
    if claimed.endswith("Model"):
        return found
    width = int(config["hidden_size"])
    found = {name if name.startswith(_HEADS) else f"new.{name}": tensor for name, tensor in found.items()}
    if "classifier.weight" in found:
        return found
    if "Classification" in claimed:
        count = 1 if "Token" in claimed else 2
        noise = Noise(7)
        found["classifier.weight"] = noise.normal(count, width) / np.float32(width**0.5)
        found["classifier.bias"] = noise.normal(count)
    if "Sequence" in claimed:
        found["new.pooler.dense.weight"] = noise.normal(width, width) / np.float32(width**0.5)
        found["new.pooler.dense.bias"] = noise.normal(width)
    return found


def jina(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Names of the flash implementation; every matrix is a parametrization with one adapter for each task.

    A plain XLM-RoBERTa has the same ``model_type`` and is returned unchanged.
    """
    if config.get("position_embedding_type") != "rotary":
        return tensors
    found = _renamed(
        tensors,
        fused={"mixer.Wqkv": _QKV},
        names={
            "roberta.": "",
            "embeddings.LayerNorm": "emb_ln",
            "self_attn.o_proj": "mixer.out_proj",
            "post_attention_layernorm": "norm1",
            "post_mlp_layernorm": "norm2",
            "layers.": "encoder.layers.",
        },
    )
    found = {name if name.startswith(_HEADS) else f"roberta.{name}": tensor for name, tensor in found.items()}
    tasks = len(config.get("lora_adaptations") or ())
    return _with_adapters(found, tasks, int(config["lora_rank"])) if tasks else found


def _with_adapters(tensors: Tensors, tasks: int, rank: int) -> Tensors:
    """Adds adapters, about a third as large as the weights that they change."""
    noise = Noise(11)
    found = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or name.startswith(_HEADS):
            found[name] = tensor
            continue
        rows, columns = tensor.shape
        # The factors of an embedding table are swapped.
        first, second = ((rows, rank), (rank, columns)) if "embeddings" in name else ((rank, columns), (rows, rank))
        size = np.float32(tensor.std(ddof=1) * rank**0.5 * 0.35)
        prefix = name.removesuffix(".weight") + ".parametrizations.weight"
        found[f"{prefix}.original"] = tensor
        found[f"{prefix}.0.lora_A"] = noise.normal(tasks, *first) * size
        found[f"{prefix}.0.lora_B"] = noise.normal(tasks, *second)
    return found


def _renamed(tensors: Tensors, *, fused: Mapping[str, tuple[str, ...]], names: Mapping[str, str]) -> Tensors:
    found = {}
    for native, tensor in tensors.items():
        name = native
        for fused_name, parts in fused.items():
            if parts[0] in native:
                tensor = np.concatenate([tensors[native.replace(parts[0], part)] for part in parts])
                name = native.replace(parts[0], fused_name)
        for native_part, original in names.items():
            name = name.replace(native_part, original, 1)
        if not any(part in native for parts in fused.values() for part in parts[1:]):
            found[name] = tensor
    return found


ORIGINALS: Mapping[str, Callable[[Tensors, Mapping[str, Any]], Tensors]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "roformer": _roformer,
    "mobilebert": _mobilebert,
    "jamba": _jamba,
    "qwen3_moe": _jamba,
    "bart": _bart,
    **dict.fromkeys(("t5", "mt5", "umt5"), _t5),
    "internlm2": _internlm2,
    "nvembed": _nv_embed,
    "embedding_gemma2": _embedding_gemma2,
    "nomic_bert": nomic,
    "new": gte,
    "gte": gte,
    "xlm-roberta": jina,
}
