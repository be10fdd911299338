"""THE table: one row per family that millpond runs as packed rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from millpond.errors import UnsupportedArchitectureError
from millpond.spec import PoolingMode

# What a checkpoint may call the class around one backbone. The backbone is loaded; heads are built here.
_SUFFIXES = (
    "Model",
    "ForMaskedLM",
    "ForCausalLM",
    "LMHeadModel",
    "ForPreTraining",
    "PreTrainedModel",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForRewardModel",
    "ForProcessRewardModel",
    "SpladeSparseEmbeddingModel",
    "EmbeddingModel",  # this and the rest: what vLLM's table of suffixes knows besides
    "ForTextEncoding",
    "ClassificationModel",
    "RewardModel",
    "ForRewardModeling",
)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A family of backbones.

    Attributes:
        prefix: What the checkpoints' class names begin with: ``Bert`` for ``BertModel``.
        model_type: ``model_type`` in config.json.
        aliases: Other ``model_type`` values of the same family.
        names: Class names besides ``prefix`` and a suffix.
        native: transformers' class, where it is not ``{prefix}Model``.
        family: A module of :mod:`millpond.models` with what transformers does not do by itself: any of
            ``translate(config, name) -> dict`` (config.json in the native class's terms, its ``model_type`` included),
            ``tensors(state, config) -> dict`` (the checkpoint's tensors under the native names),
            ``backbone_class() -> type`` (the class to load them into, where transformers may lack it) and
            ``finish(backbone, checkpoint) -> module`` (whatever the loaded class still lacks).
        adapters: The backbone takes ``adapter_ids [1, tokens]``, an adapter for each token (-1: none).
        pooling: How a repository without modules.json is pooled.
        positions: ``absolute`` (a learned table), ``rotary``, ``relative`` (distances only) or ``none``.
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
    aliases: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    native: str = ""
    family: str | None = None
    adapters: bool = False
    offset_positions: bool = False
    token_types: bool = False
    decoder: bool = False
    pooler: bool = False
    half: str = "float16"

    @property
    def model_class(self) -> str:
        """transformers' class of the backbone."""
        return self.native or f"{self.prefix}Model"

    @property
    def module(self) -> ModuleType | None:
        """The family's own code, if it has any."""
        return None if self.family is None else import_module(f"millpond.models.{self.family}")

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

    def bounded(self, config: Mapping[str, Any]) -> bool:
        """Whether a text must end where :meth:`capacity` does; a family's ``translate`` may say ``positions_end``."""
        return self.positions == "absolute" or bool(config.get("positions_end"))


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
        names=("BgeM3EmbeddingModel",),
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
        prefix="NomicBert",
        model_type="nomic_bert",
        family="nomic",
        pooling="mean",
        positions="rotary",
        token_types=True,
        example="nomic-ai/nomic-embed-text-v1.5",
    ),
    Architecture(
        prefix="Gte",
        model_type="gte",
        aliases=("new",),
        names=(
            "NewModel",
            "NewForMaskedLM",
            "NewForSequenceClassification",
            "NewForTokenClassification",
            "GteNewModel",
            "GteNewForSequenceClassification",
        ),
        family="gte",
        pooling="cls",
        positions="rotary",
        token_types=True,
        example="Alibaba-NLP/gte-multilingual-base",
    ),
    Architecture(
        prefix="JinaEmbeddingsV3",
        model_type="jina_embeddings_v3",
        names=(
            "XLMRobertaModel",
            "XLMRobertaForMaskedLM",
            "XLMRobertaForSequenceClassification",
            "XLMRobertaForTokenClassification",
            "XLMRobertaLoRA",
            "JinaRobertaModel",
            "ColBERTJinaRobertaModel",
        ),
        family="jina",
        adapters=True,
        pooling="mean",
        positions="rotary",
        pooler=True,
        example="jinaai/jina-embeddings-v3",
    ),
    Architecture(
        prefix="Electra",
        model_type="electra",
        pooling="cls",
        positions="absolute",
        token_types=True,
        example="cross-encoder/ms-marco-electra-base",
    ),
    Architecture(
        prefix="Albert",
        model_type="albert",
        pooling="mean",
        positions="absolute",
        token_types=True,
        pooler=True,
        example="sentence-transformers/paraphrase-albert-small-v2",
    ),
    Architecture(
        prefix="DebertaV2",
        model_type="deberta-v2",
        family="deberta",
        pooling="cls",
        positions="relative",
        token_types=True,
        half="bfloat16",
        example="cross-encoder/nli-deberta-v3-base",
    ),
    Architecture(
        prefix="EuroBert",
        model_type="eurobert",
        pooling="mean",
        positions="rotary",
        example="EuroBERT/EuroBERT-210m",
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
        prefix="LlamaBidirectional",
        model_type="llama_bidirec",
        native="LlamaModel",
        family="llama_bidirectional",
        pooling="mean",
        positions="rotary",
        decoder=True,
        half="bfloat16",
        example="nvidia/llama-nemotron-rerank-1b-v2",
    ),
    Architecture(
        prefix="InternLM2",
        model_type="internlm2",
        native="LlamaModel",
        family="internlm2",
        pooling="lasttoken",
        positions="rotary",
        decoder=True,
        half="bfloat16",
        example="internlm/internlm2-1_8b-reward",
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
    Architecture(
        prefix="Gemma3Text",
        model_type="gemma3_text",
        names=("Gemma3ForCausalLM",),
        pooling="lasttoken",
        positions="rotary",
        decoder=True,
        half="bfloat16",
        example="google/embeddinggemma-300m",
    ),
    Architecture(
        prefix="GPT2",
        model_type="gpt2",
        names=("GPT2DoubleHeadsModel",),
        family="gpt2",
        pooling="lasttoken",
        positions="absolute",
        decoder=True,
        example="openai-community/gpt2",
    ),
    Architecture(
        prefix="Jamba",
        model_type="jamba",
        family="jamba",
        pooling="lasttoken",
        positions="none",
        decoder=True,
        half="bfloat16",
        example="ai21labs/Jamba-tiny-reward-dev",
    ),
)

_BY_TYPE = {name: row for row in ARCHITECTURES for name in (row.model_type, *row.aliases)}


def find(config: Mapping[str, Any], name: str) -> Architecture:
    """The row for a checkpoint's config.json.

    Raises:
        UnsupportedArchitectureError: No row fits.
    """
    model_type, claimed = config.get("model_type"), (config.get("architectures") or [None])[0]
    row = _BY_TYPE.get(_disguised(config) or str(model_type))
    if row is None:
        remote = " and needs code of its own (auto_map)" if config.get("auto_map") else ""
        raise UnsupportedArchitectureError(
            f"{name} is a {claimed or 'model'} of model_type {model_type!r}{remote}, which millpond cannot run; "
            f"it runs {', '.join(_BY_TYPE)} (`millpond models` lists them)"
        )
    # Stanford's late interaction is on any backbone; vLLM's names have the backbone's in them.
    known = {row.prefix + suffix for suffix in _SUFFIXES} | {"HF_ColBERT", f"ColBERT{row.prefix}Model"} | set(row.names)
    if claimed is not None and claimed not in known:
        raise UnsupportedArchitectureError(
            f"{name} is a {claimed}, which millpond does not run; "
            f"of model_type {model_type!r} it runs {', '.join(sorted(known))}"
        )
    return row


def _disguised(config: Mapping[str, Any]) -> str | None:
    """The row of a checkpoint whose ``model_type`` is another family's."""
    if config.get("model_type") == "xlm-roberta" and config.get("position_embedding_type") == "rotary":
        return "jina_embeddings_v3"
    return None


def translate(row: Architecture, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A config.json in the terms of transformers' own class.

    Raises:
        UnsupportedArchitectureError: The config changes the arithmetic to something that class does not do.
    """
    own = getattr(row.module, "translate", None)
    native: dict[str, Any] = dict(config) if own is None else own(config, name)
    refusal = _changed_arithmetic(row, native)
    if refusal:
        raise UnsupportedArchitectureError(f"{name}: {refusal}, which millpond does not run for {row.model_class}")
    return native


def _changed_arithmetic(row: Architecture, config: Mapping[str, Any]) -> str | None:
    """What in a config would make the native class compute something else than the checkpoint was trained with."""
    positions = config.get("position_embedding_type", "absolute")
    if row.positions == "absolute" and positions != "absolute":
        return f"position_embedding_type {positions!r}"
    if config.get("lora_adaptations") and not row.adapters:
        return "lora_adaptations"
    for key in ("is_decoder", "add_cross_attention"):
        if config.get(key) and not row.decoder:  # a BERT trained to attend to earlier tokens only
            return f"{key} {config[key]!r}"
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    by_layer = rope.values() if isinstance(rope, Mapping) else ()  # Gemma 3 has one for each type of layer
    for one in (rope, *by_layer):
        kind = one.get("rope_type", one.get("type")) if isinstance(one, Mapping) else None
        if kind in ("dynamic", "longrope"):
            return f"rope scaling {kind!r} (it would make one text's vector depend on its neighbours')"
    return None
