"""NomicBert, GTE and jina-embeddings-v3 in the format of the hub: config.json, tensor names and shapes.

Tensors are converted from transformers' names to the original ones. Nothing here reads millpond's tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]

JINA_TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
_HEADS = ("lm_head.", "classifier.")  # not part of the backbone; keep their names
_QKV = tuple(f"self_attn.{letter}_proj" for letter in "qkv")


def nomic(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Names of the original NomicBert; in the language model, the backbone has the prefix ``bert.``."""
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
    import torch

    found = _renamed(
        tensors,
        fused={"attention.qkv_proj": _QKV, "mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj")},
        names={
            "gte.": "",
            "self_attn.o_proj": "attention.o_proj",
            "post_attention_layernorm": "attn_ln",
            "post_mlp_layernorm": "mlp_ln",
            "layers.": "encoder.layer.",
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
        generator = torch.Generator().manual_seed(7)
        found["classifier.weight"] = torch.randn(count, width, generator=generator) / width**0.5
        found["classifier.bias"] = torch.randn(count, generator=generator)
    if "Sequence" in claimed:
        found["new.pooler.dense.weight"] = torch.randn(width, width, generator=generator) / width**0.5
        found["new.pooler.dense.bias"] = torch.randn(width, generator=generator)
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
    import torch

    generator = torch.Generator().manual_seed(11)
    found = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or name.startswith(_HEADS):
            found[name] = tensor
            continue
        rows, columns = tensor.shape
        # The factors of an embedding table are swapped.
        first, second = ((rows, rank), (rank, columns)) if "embeddings" in name else ((rank, columns), (rows, rank))
        size = float(tensor.std()) * rank**0.5 * 0.35
        prefix = name.removesuffix(".weight") + ".parametrizations.weight"
        found[f"{prefix}.original"] = tensor
        found[f"{prefix}.0.lora_A"] = torch.randn(tasks, *first, generator=generator) * size
        found[f"{prefix}.0.lora_B"] = torch.randn(tasks, *second, generator=generator)
    return found


def _renamed(tensors: Tensors, *, fused: Mapping[str, tuple[str, ...]], names: Mapping[str, str]) -> Tensors:
    import torch

    found = {}
    for native, tensor in tensors.items():
        name = native
        for fused_name, parts in fused.items():
            if parts[0] in native:
                tensor = torch.cat([tensors[native.replace(parts[0], part)] for part in parts])
                name = native.replace(parts[0], fused_name)
        for native_part, original in names.items():
            name = name.replace(native_part, original, 1)
        if not any(part in native for parts in fused.values() for part in parts[1:]):
            found[name] = tensor
    return found


NOMIC: Mapping[str, Any] = {
    "model_type": "nomic_bert",
    "activation_function": "swiglu",
    "attn_pdrop": 0.0,
    "auto_map": {
        "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
    },
    "bos_token_id": None,
    "causal": False,
    "dense_seq_output": True,
    "embd_pdrop": 0.0,
    "eos_token_id": None,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 64,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_embd": 48,
    "n_head": 4,
    "n_inner": 96,
    "n_layer": 2,
    "n_positions": 256,
    "pad_vocab_size_multiple": 1,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": 2,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "type_vocab_size": 2,
    "use_cache": True,
    "use_flash_attn": True,
    "use_rms_norm": False,
    "use_xentropy": True,
}
_SIZE = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
NOMIC_NATIVE: Mapping[str, Any] = {"model_type": "nomic_bert", **_SIZE, "max_position_embeddings": 64}

GTE: Mapping[str, Any] = {
    "model_type": "new",
    **_SIZE,
    "attention_probs_dropout_prob": 0.0,
    "auto_map": {
        "AutoConfig": "Alibaba-NLP/new-impl--configuration.NewConfig",
        "AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel",
    },
    "classifier_dropout": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "max_position_embeddings": 64,
    "pack_qkv": True,
    "pad_token_id": 1,
    "position_embedding_type": "rope",
    "rope_scaling": {"factor": 8.0, "type": "ntk"},
    "rope_theta": 20000,
    "type_vocab_size": 1,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
}
GTE_NATIVE: Mapping[str, Any] = {"model_type": "gte", "rope_scaling": None}

JINA: Mapping[str, Any] = {
    "model_type": "xlm-roberta",
    **_SIZE,
    "attention_probs_dropout_prob": 0.1,
    "auto_map": {
        "AutoConfig": "jinaai/xlm-roberta-flash-implementation--configuration_xlm_roberta.XLMRobertaFlashConfig",
        "AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA",
    },
    "bos_token_id": 0,
    "classifier_dropout": None,
    "emb_pooler": "mean",
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-05,
    "load_trained_adapters": True,
    "lora_adaptations": list(JINA_TASKS),
    "lora_alpha": 1,
    "lora_dropout_p": 0.0,
    "lora_main_params_trainable": False,
    "lora_rank": 4,
    "matryoshka_dimensions": [16, 32, 48],
    "max_position_embeddings": 66,
    "output_past": True,
    "pad_token_id": 1,
    "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0,
    "task_instructions": {
        "retrieval.query": "Represent the query for retrieving evidence documents: ",
        "retrieval.passage": "Represent the document for retrieval: ",
        "separation": "",
        "classification": "",
        "text-matching": "",
    },
    "truncate_dim": None,
    "type_vocab_size": 1,
    "use_cache": True,
    "use_flash_attn": True,
    "use_reentrant": False,
}
JINA_NATIVE: Mapping[str, Any] = {"model_type": "jina_embeddings_v3"}
