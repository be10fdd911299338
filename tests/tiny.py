"""Tiny checkpoints: random weights in the layouts that the hub has, written to a folder. Every test starts here.

``write_checkpoint(tmp_path / "model", "bert")`` gives a plain repository (config.json, weights, tokenizer);
``sentence_transformers=Layout(...)`` puts modules.json and its files around it. Everything is deterministic, float32,
two layers deep (ModernBERT: four) and 48 wide; a text may have up to 64 tokens. The weights are much larger than a
fresh model's, so that a wrong position, window or scale moves the result far beyond rounding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tests.tiny_layouts import Dense, Dropout, LayerNorm, Layout, Normalize, Other, Pooling, write_layout
from tests.tiny_tokenizers import KINDS, SENTENCES, write_tokenizer

if TYPE_CHECKING:
    import torch

__all__ = [
    "FAMILIES",
    "MAX_TOKENS",
    "SENTENCES",
    "TEXTS",
    "Dense",
    "Dropout",
    "Family",
    "LayerNorm",
    "Layout",
    "Normalize",
    "Other",
    "Pooling",
    "drop_tensor",
    "edit_json",
    "truncate_file",
    "write_checkpoint",
]

MAX_TOKENS = 64
# One token, several, more than fit; a repeated one; other scripts, which most of these tokenizers hardly know.
TEXTS = (
    "a",
    SENTENCES[0],
    " ".join(SENTENCES[1:8]),
    "How deep is it?",
    SENTENCES[4] + " " + SENTENCES[5],
    "Ein Teich, une étang, 池。",
    SENTENCES[0],
    "The wheel.",
    " ".join(SENTENCES[8:11]),
)

_SIZE = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
_ENCODER = {
    **_SIZE,
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "absolute",
    "use_cache": True,
}
_ROBERTA = {
    **_ENCODER,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": MAX_TOKENS + 2,
    "type_vocab_size": 1,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
}
_DECODER = {
    **_SIZE,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "max_position_embeddings": MAX_TOKENS,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_cache": True,
}
_QWEN2 = {
    **_DECODER,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "max_window_layers": 1,
    "rope_theta": 1000000.0,
    "sliding_window": 5,
    "use_sliding_window": False,
}
_GEMMA = {
    **_DECODER,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "head_dim": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A row of :data:`FAMILIES`.

    Attributes:
        prefix: What transformers' class names begin with.
        tokenizer: Key of the tokenizer kinds.
        config: config.json as the hub's checkpoints have it (4.x style), but for the vocabulary's size.
        head: The language model around the backbone, for ``wrapped`` checkpoints.
        modules: How its embedding checkpoints usually pool.
        position_ids: Its older files carry this buffer.
        shifted_norms: Norm weights are stored as their difference from 1 (Gemma).
    """

    prefix: str
    tokenizer: str
    config: Mapping[str, Any]
    head: Literal["ForMaskedLM", "ForCausalLM"] = "ForMaskedLM"
    modules: tuple[Any, ...] = (Pooling(modes=("mean",)), Normalize())
    position_ids: bool = False
    shifted_norms: bool = False


def _decoder(prefix: str, tokenizer: str, config: Mapping[str, Any], *, shifted_norms: bool = False) -> Family:
    last = (Pooling(modes=("lasttoken",)), Normalize())
    return Family(
        prefix=prefix,
        tokenizer=tokenizer,
        config=config,
        head="ForCausalLM",
        modules=last,
        shifted_norms=shifted_norms,
    )


FAMILIES: Mapping[str, Family] = {
    "bert": Family(
        prefix="Bert",
        tokenizer="bert",
        position_ids=True,
        config={
            "model_type": "bert",
            **_ENCODER,
            "max_position_embeddings": MAX_TOKENS,
            "type_vocab_size": 2,
            "pad_token_id": 0,
        },
    ),
    "roberta": Family(
        prefix="Roberta", tokenizer="roberta", position_ids=True, config={"model_type": "roberta", **_ROBERTA}
    ),
    "xlm-roberta": Family(
        prefix="XLMRoberta",
        tokenizer="xlm-roberta",
        position_ids=True,
        config={"model_type": "xlm-roberta", **_ROBERTA, "output_past": True},
    ),
    "distilbert": Family(
        prefix="DistilBert",
        tokenizer="bert",
        config={
            "model_type": "distilbert",
            "activation": "gelu",
            "attention_dropout": 0.1,
            "dim": 48,
            "dropout": 0.1,
            "hidden_dim": 96,
            "initializer_range": 0.02,
            "max_position_embeddings": MAX_TOKENS,
            "n_heads": 4,
            "n_layers": 2,
            "pad_token_id": 0,
            "sinusoidal_pos_embds": False,
            "tie_weights_": True,
        },
    ),
    "mpnet": Family(
        prefix="MPNet",
        tokenizer="mpnet",
        position_ids=True,
        config={
            "model_type": "mpnet",
            **{key: value for key, value in _ROBERTA.items() if key != "type_vocab_size"},
            "relative_attention_num_buckets": 32,
        },
    ),
    "modernbert": Family(
        prefix="ModernBert",
        tokenizer="modernbert",
        config={
            "model_type": "modernbert",
            **_SIZE,
            "num_hidden_layers": 4,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 2,
            "classifier_pooling": "mean",
            "cls_token_id": 2,
            "eos_token_id": 3,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "hidden_activation": "gelu",
            "layer_norm_eps": 1e-05,
            "local_attention": 8,
            "local_rope_theta": 10000.0,
            "max_position_embeddings": MAX_TOKENS,
            "mlp_bias": False,
            "norm_bias": False,
            "norm_eps": 1e-05,
            "pad_token_id": 0,
            "position_embedding_type": "absolute",
            "sep_token_id": 3,
        },
    ),
    "llama": _decoder(
        "Llama",
        "llama",
        {
            "model_type": "llama",
            **_DECODER,
            "attention_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "rope_scaling": None,
            "rope_theta": 500000.0,
        },
    ),
    "mistral": _decoder(
        "Mistral",
        "mistral",
        {"model_type": "mistral", **_DECODER, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": None},
    ),
    "mistral-sliding": _decoder(
        "Mistral",
        "mistral",
        {"model_type": "mistral", **_DECODER, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 5},
    ),
    "qwen2": _decoder("Qwen2", "qwen", {"model_type": "qwen2", **_QWEN2}),
    "qwen2-sliding": _decoder("Qwen2", "qwen", {"model_type": "qwen2", **_QWEN2, "use_sliding_window": True}),
    "qwen2-bidirectional": _decoder(
        "Qwen2",
        "qwen",
        {
            "model_type": "qwen2",
            **_QWEN2,
            "is_causal": False,
            "auto_map": {
                "AutoModel": "modeling_qwen.Qwen2Model",
                "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
            },
        },
    ),
    "qwen3": _decoder(
        "Qwen3",
        "qwen",
        {
            "model_type": "qwen3",
            **_QWEN2,
            "attention_bias": False,
            "head_dim": 16,
            "rope_scaling": None,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
    ),
    "gemma": _decoder(
        "Gemma", "gemma", {"model_type": "gemma", **_GEMMA, "num_key_value_heads": 1}, shifted_norms=True
    ),
    "gemma2": _decoder(
        "Gemma2",
        "gemma",
        {
            "model_type": "gemma2",
            **_GEMMA,
            "attention_bias": False,
            "attn_logit_softcapping": 2.0,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 48,
            "sliding_window": 5,
        },
        shifted_norms=True,
    ),
}


def write_checkpoint(
    folder: Path,
    family: str = "bert",
    *,
    sentence_transformers: Layout | None = None,
    config: Mapping[str, Any] | None = None,
    wrapped: bool = False,
    weights: Literal["safetensors", "bin"] = "safetensors",
    lowercase: bool = False,
    tokenizer_limit: int | None = MAX_TOKENS,
    template: str | None = None,
    seed: int = 0,
) -> Path:
    """Write a checkpoint into ``folder`` (made, and empty until now), and return it.

    Args:
        folder: Where.
        family: Key of :data:`FAMILIES`.
        sentence_transformers: The pipeline around the backbone; ``None`` writes a plain repository.
        config: Fields that replace or extend the family's config.json.
        wrapped: Save the language model around the backbone, its head and the keys' prefix included.
        weights: File format of the backbone.
        lowercase: WordPiece only: the tokenizer folds case.
        tokenizer_limit: ``model_max_length`` of the tokenizer; ``None`` is none.
        template: Replaces the tokenizer's special tokens: ``"$A"`` for none.
        seed: Of every weight.
    """
    row = FAMILIES[family]
    layout = sentence_transformers
    folder.mkdir(parents=True, exist_ok=True)
    place = folder if layout is None else folder / layout.transformer_folder
    place.mkdir(exist_ok=True)
    if layout is not None and layout.style == "new" and layout.max_seq_length is not None:
        tokenizer_limit = layout.max_seq_length
    vocabulary = write_tokenizer(place, row.tokenizer, limit=tokenizer_limit, lowercase=lowercase, template=template)
    content = {
        "architectures": [row.prefix + (row.head if wrapped else "Model")],
        **row.config,
        "torch_dtype": "float32",
        "transformers_version": "4.44.2",
        "vocab_size": vocabulary,
        **(config or {}),
    }
    (place / "config.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    _save(_tensors(row, content, wrapped=wrapped, seed=seed), place, weights)
    if layout is not None:
        width = int(content.get("hidden_size", content.get("dim", 0)))
        write_layout(folder, layout, width=width, seed=seed + 1000)
    return folder


def _tensors(row: Family, content: Mapping[str, Any], *, wrapped: bool, seed: int) -> dict[str, torch.Tensor]:
    """The weights of transformers' own class, under the names it saves them by."""
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = {key: value for key, value in content.items() if key not in ("architectures", "auto_map")}
    config = CONFIG_MAPPING[content["model_type"]].from_dict(fields)
    model = getattr(transformers, row.prefix + (row.head if wrapped else "Model"))._from_config(config)
    generator = torch.Generator().manual_seed(seed)
    tied = set(model.all_tied_weights_keys) if wrapped else set()
    tensors = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in tied:
            tensors[name] = _random(name, tuple(parameter.shape), generator, shifted=row.shifted_norms)
    if row.position_ids:
        prefix = model.base_model_prefix + "." if wrapped else ""
        tensors[f"{prefix}embeddings.position_ids"] = torch.arange(content["max_position_embeddings"])[None]
    return tensors


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator, *, shifted: bool) -> torch.Tensor:
    import torch

    noise = torch.randn(shape, generator=generator)
    if "relative_attention_bias" in name:
        return noise  # added to scores of about this size
    if "embed" in name and len(shape) > 1:
        return noise * 0.3
    if len(shape) > 1:
        return noise * 1.3 / shape[-1] ** 0.5
    if name.endswith("weight"):  # a norm's
        return noise * 0.2 + (0.0 if shifted else 1.0)
    return noise * 0.2


def _save(tensors: dict[str, torch.Tensor], folder: Path, kind: str) -> None:
    import torch
    from safetensors.torch import save_file

    if kind == "safetensors":
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / "pytorch_model.bin")


def edit_json(path: Path, **fields: Any) -> None:
    """Replace fields of a JSON object on disk."""
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | fields, indent=2), encoding="utf-8")


def drop_tensor(folder: Path, name: str) -> None:
    """Take one tensor out of ``folder``'s model.safetensors."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def truncate_file(path: Path, *, keep: float = 0.5) -> None:
    """Cut a file to a share of its bytes: a download that was interrupted."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


assert all(row.tokenizer in KINDS for row in FAMILIES.values())
