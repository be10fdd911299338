"""THE table: one row per family that millpond runs as packed rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millpond.errors import UnsupportedArchitectureError
from millpond.spec import PoolingMode

# What a checkpoint may call the class around one backbone; the backbone is loaded, the rest left alone.
_SUFFIXES = ("Model", "ForMaskedLM", "ForCausalLM", "ForPreTraining", "PreTrainedModel")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A family of backbones.

    Attributes:
        prefix: What transformers' class names begin with: ``Bert`` for ``BertModel``.
        model_type: ``model_type`` in config.json.
        pooling: How a repository without modules.json is pooled.
        positions: ``absolute`` (a learned table) or ``rotary``.
        offset_positions: The learned table begins behind the padding row (RoBERTa): ``padding_idx + 1``.
        token_types: The class reads ``token_type_ids``.
        decoder: A causal language model, with a key-value cache to switch off.
        pooler: The class would build BERT's own pooler, which pooling here does not use.
        half: Half precision that suits it on a GPU.
        example: A well-known checkpoint.
    """

    prefix: str
    model_type: str
    pooling: PoolingMode
    positions: str
    example: str
    offset_positions: bool = False
    token_types: bool = False
    decoder: bool = False
    pooler: bool = False
    half: str = "float16"

    @property
    def model_class(self) -> str:
        """transformers' class of the backbone."""
        return f"{self.prefix}Model"

    def position_offset(self, config: Mapping[str, Any]) -> int:
        """Position of a text's first token."""
        if not self.offset_positions:
            return 0
        padding = config.get("pad_token_id")
        return (1 if padding is None else int(padding)) + 1

    def capacity(self, config: Mapping[str, Any]) -> int | None:
        """Most tokens the position table (or the rotary training length) covers; ``None`` if the config names none."""
        length = config.get("max_position_embeddings")
        return None if length is None else int(length) - self.position_offset(config)


ARCHITECTURES = (
    Architecture(
        prefix="Bert",
        model_type="bert",
        pooling="cls",
        positions="absolute",
        token_types=True,
        pooler=True,
        example="BAAI/bge-base-en-v1.5",
    ),
    Architecture(
        prefix="Roberta",
        model_type="roberta",
        pooling="cls",
        positions="absolute",
        offset_positions=True,
        pooler=True,
        example="sentence-transformers/all-roberta-large-v1",
    ),
    Architecture(
        prefix="XLMRoberta",
        model_type="xlm-roberta",
        pooling="cls",
        positions="absolute",
        offset_positions=True,
        pooler=True,
        example="intfloat/multilingual-e5-base",
    ),
    Architecture(
        prefix="DistilBert",
        model_type="distilbert",
        pooling="mean",
        positions="absolute",
        example="sentence-transformers/msmarco-distilbert-base-v4",
    ),
    Architecture(
        prefix="MPNet",
        model_type="mpnet",
        pooling="mean",
        positions="absolute",
        offset_positions=True,
        pooler=True,
        example="sentence-transformers/all-mpnet-base-v2",
    ),
    Architecture(
        prefix="ModernBert",
        model_type="modernbert",
        pooling="cls",
        positions="rotary",
        example="Alibaba-NLP/gte-modernbert-base",
    ),
    Architecture(
        prefix="Llama",
        model_type="llama",
        pooling="lasttoken",
        positions="rotary",
        decoder=True,
        example="samaya-ai/RepLLaMA-reproduced",
    ),
    Architecture(
        prefix="Mistral",
        model_type="mistral",
        pooling="lasttoken",
        positions="rotary",
        decoder=True,
        example="intfloat/e5-mistral-7b-instruct",
    ),
    Architecture(
        prefix="Qwen2",
        model_type="qwen2",
        pooling="lasttoken",
        positions="rotary",
        decoder=True,
        example="Alibaba-NLP/gte-Qwen2-1.5B-instruct",
    ),
    Architecture(
        prefix="Qwen3",
        model_type="qwen3",
        pooling="lasttoken",
        positions="rotary",
        decoder=True,
        example="Qwen/Qwen3-Embedding-0.6B",
    ),
    Architecture(
        prefix="Gemma",
        model_type="gemma",
        pooling="lasttoken",
        positions="rotary",
        decoder=True,
        half="bfloat16",
        example="google/gemma-2b",
    ),
    Architecture(
        prefix="Gemma2",
        model_type="gemma2",
        pooling="lasttoken",
        positions="rotary",
        decoder=True,
        half="bfloat16",
        example="BAAI/bge-multilingual-gemma2",
    ),
)

_BY_TYPE = {row.model_type: row for row in ARCHITECTURES}


def find(config: Mapping[str, Any], name: str) -> Architecture:
    """The row for a checkpoint's config.json.

    Raises:
        UnsupportedArchitectureError: No row fits, or a row fits by name but the config changes its arithmetic.
    """
    model_type, claimed = config.get("model_type"), (config.get("architectures") or [None])[0]
    row = _BY_TYPE.get(str(model_type))
    if row is None:
        remote = " and needs code of its own (auto_map)" if config.get("auto_map") else ""
        raise UnsupportedArchitectureError(
            f"{name} is a {claimed or 'model'} of model_type {model_type!r}{remote}, which millpond cannot run; "
            f"it runs {', '.join(_BY_TYPE)} (`millpond models` lists them)"
        )
    if claimed is not None and claimed not in {row.prefix + suffix for suffix in _SUFFIXES}:
        raise UnsupportedArchitectureError(
            f"{name} is a {claimed}; of model_type {model_type!r} this version runs {row.model_class} only"
        )
    refusal = _changed_arithmetic(row, config)
    if refusal:
        raise UnsupportedArchitectureError(f"{name}: {refusal}, which millpond does not run for {row.model_class}")
    return row


def _changed_arithmetic(row: Architecture, config: Mapping[str, Any]) -> str | None:
    """What in a config would make the native class compute something else than the checkpoint was trained with."""
    positions = config.get("position_embedding_type", "absolute")
    if row.positions == "absolute" and positions != "absolute":
        return f"position_embedding_type {positions!r}"
    if config.get("lora_adaptations"):
        return "lora_adaptations"
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, Mapping) else None
    if kind in ("dynamic", "longrope"):
        return f"rope scaling {kind!r} (it would make one text's vector depend on its neighbours')"
    return None
