"""Code of a checkpoint's own beside a family that millpond runs: what known code computes; unknown code is refused.

A config.json may name classes in files of its repository (``auto_map``). Most hold what transformers has itself since
then; some change the arithmetic under the same ``model_type`` and class names, most often by dropping the causal mask.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.architectures import class_names
from millpond.checkpoints.checkpoint import Checkpoint
from millpond.checkpoints.layouts.sentence_transformers import PipelineLayout
from millpond.checkpoints.layouts.sparse import Splade
from millpond.checkpoints.modules import Dense, Pooling
from millpond.checkpoints.refusals import in_place_of_code
from millpond.checkpoints.weights import find_tensor, tensor_shapes
from millpond.errors import UnsupportedArchitectureError, WeightMismatchError


@dataclass(frozen=True, kw_only=True)
class RemoteCode:
    """What some code computes, in terms of the family that ``model_type`` names."""

    # Of `file.Class`; with a file that may be missing, of a class that no other code has, in `architectures` too
    pattern: str
    model_types: tuple[str, ...]  # the families
    names: str = r".*"  # of the last part of the hub id, in small letters
    # Fields of config.json that say the same; those that are there have precedence
    fields: Mapping[str, Any] = field(default_factory=dict)
    pooling: Pooling | None = None  # where the files name none
    projection: str = ""  # a tensor that every token's states are multiplied with; empty: none
    # A field of config.json, true if missing: states are multiplied by their positions from 1 on, so that a mean is the
    # weighted one; empty: they are not
    weighted: str = ""
    splade: bool = False  # the vocabulary's logits are pooled, where the files name no modules


_BIDIRECTIONAL = {"is_causal": False}
# Code that computes something else than the class of the same name in transformers, or the same.
KNOWN = (
    RemoteCode(
        pattern=r"modeling_gritlm7b\.Mistral\w+",
        model_types=("mistral",),
        fields=_BIDIRECTIONAL,
        pooling=Pooling(modes=("mean",), include_prompt=False),
    ),
    # gte-Qwen2, stella_en_1.5B_v5, inf-retriever: causal only where config.json says so.
    RemoteCode(pattern=r"modeling_qwen\.Qwen2\w+", model_types=("qwen2",), fields=_BIDIRECTIONAL),
    RemoteCode(
        pattern=r"modeling\w*\.Qwen2\w+", model_types=("qwen2",), names=r"kalm-embedding.*", fields=_BIDIRECTIONAL
    ),
    RemoteCode(
        pattern=r"(.*\.)?QZhouModel",
        model_types=("qwen2",),
        fields=_BIDIRECTIONAL,
        pooling=Pooling(modes=("mean",)),
    ),
    # ReasonIR, and LLM2Vec's base models: the mean leaves the instruction out.
    RemoteCode(
        pattern=r"(.*\.)?(ReasonIR|LlamaEncoder)Model",
        model_types=("llama",),
        fields=_BIDIRECTIONAL,
        pooling=Pooling(modes=("mean",), include_prompt=False),
    ),
    # MiniCPM-Embedding.
    RemoteCode(
        pattern=r"(.*\.)?MiniCPM",
        model_types=("minicpm",),
        fields=_BIDIRECTIONAL,
        pooling=Pooling(modes=("mean",)),
        weighted="adapt_mean_pooling",
    ),
    RemoteCode(pattern=r"(.*\.)?Splade", model_types=("qwen3",), fields=_BIDIRECTIONAL, splade=True),
    # voyage-4-nano, whose `architectures` name a language model; the other class is vLLM's.
    RemoteCode(
        pattern=r"modeling_qwen3_bidirectional\.Qwen3BidirectionalModel|(.*\.)?VoyageQwen3BidirectionalEmbedModel",
        model_types=("qwen3",),
        fields=_BIDIRECTIONAL,
        pooling=Pooling(modes=("mean",)),
        projection="linear.weight",
    ),
    # NVIDIA's older names for llama_bidirec.
    RemoteCode(pattern=r"\w+\.LlamaBidirectional\w+", model_types=("llama",), fields=_BIDIRECTIONAL),
    # Equal to transformers.
    RemoteCode(pattern=r"modeling_qwen2_rm\.Qwen2For(Process)?RewardModel", model_types=("qwen2",)),
    RemoteCode(pattern=r"(modeling_xlm_roberta|modeling_lora)\.XLMRoberta\w+", model_types=("xlm-roberta",)),
    RemoteCode(pattern=r"modeling_jamba\.Jamba\w+", model_types=("jamba",)),
    RemoteCode(pattern=r"modeling_phi3\.Phi3\w+", model_types=("phi3",)),
)
# Families that were code of a checkpoint's own before transformers had them, or still are: theirs is what runs here.
_ORIGINALS = frozenset(("nomic_bert", "new", "gte", "eurobert", "ultrabert", "internlm2", "jina_embeddings_v3"))
# The key of auto_map by the ending of the class that config.json names.
_KEYS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
}


def apply(checkpoint: Checkpoint, row: Architecture) -> Checkpoint:
    """``checkpoint`` with what its own code does said in its config and layout.

    Raises:
        UnsupportedArchitectureError: The code is not known, and might compute anything.
    """
    found: list[RemoteCode] = []
    # What a class that only one code has is beside, is that code.
    own = _known(checkpoint.architecture or "", checkpoint)
    for name in [] if own is not None else _used(checkpoint):
        known = _known(name, checkpoint)
        if known is not None and known not in found:
            found.append(known)
        elif known is None and not _is_of(row, name, checkpoint.config):
            raise UnsupportedArchitectureError(_refusal(checkpoint, row, name))
    for known in found if own is None else [own]:
        config = {**known.fields, **checkpoint.config}
        checkpoint = replace(checkpoint, config=config, layout=_layout(known, checkpoint.layout, config))
    return checkpoint


def _layout(known: RemoteCode, layout: PipelineLayout, config: Mapping[str, Any]) -> PipelineLayout:
    """The pipeline with what the code does behind the backbone."""
    if layout.pooling is None and known.pooling is not None:
        layout = replace(layout, pooling=known.pooling)
    weighted = known.weighted and config.get(known.weighted, True)
    if weighted and layout.pooling is not None and layout.pooling.modes == ("mean",):
        layout = replace(layout, pooling=replace(layout.pooling, modes=("weightedmean",)))
    if known.splade and layout.sparse is None and layout.normalize is None:
        layout = replace(layout, sparse=Splade(folder=layout.transformer))
    if known.projection:
        projection = _projection(known.projection, layout.transformer)
        layout = replace(layout, token_heads=(projection, *layout.token_heads))
    return layout


def _projection(name: str, folder: Path) -> Dense:
    """A product of every token's states with a tensor among the backbone's."""
    shapes = tensor_shapes(folder)
    found = find_tensor(shapes, name)
    if found is None:
        raise WeightMismatchError(f"{folder}: its own code multiplies with {name}, which the weights do not have")
    out, width = shapes[found]
    return Dense(
        folder=folder,
        in_features=width,
        out_features=out,
        bias=False,
        activation="torch.nn.modules.linear.Identity",
        residual=False,
        weight=found,
    )


def _used(checkpoint: Checkpoint) -> list[str]:
    """``file.Class`` of the backbone, and of the class that config.json names, if they are code of its own."""
    listed = checkpoint.config.get("auto_map")
    if not isinstance(listed, Mapping):
        return []
    claimed = checkpoint.architecture or ""
    keys = ["AutoModel", *(key for ending, key in _KEYS.items() if claimed.endswith(ending))]
    if isinstance(checkpoint.layout.sparse, Splade):  # which sentence-transformers loads with its head
        keys.append("AutoModelForMaskedLM")
    values = [value[0] if isinstance(value, list) and value else value for value in map(listed.get, keys)]
    return list(dict.fromkeys(str(value).rpartition("--")[2] for value in values if value))


def _is_of(row: Architecture, used: str, config: Mapping[str, Any]) -> bool:
    """Whether the class is one that only this family's own code has."""
    name = used.rpartition(".")[2]
    own = bool(row.recognized_by or row.unmasked) or config.get("model_type") in _ORIGINALS
    return name in row.names or (own and name in class_names(row))


def _known(used: str, checkpoint: Checkpoint) -> RemoteCode | None:
    return next((code for code in KNOWN if _matches(code, used, checkpoint)), None)


def _matches(code: RemoteCode, used: str, checkpoint: Checkpoint) -> bool:
    config, places = checkpoint.config, (checkpoint.source.name, str(checkpoint.config.get("_name_or_path") or ""))
    names = [place.rstrip("/").rpartition("/")[2].lower() for place in places]
    return (
        re.fullmatch(code.pattern, used) is not None
        and config.get("model_type") in code.model_types
        and any(re.fullmatch(code.names, name) for name in names)
    )


def _refusal(checkpoint: Checkpoint, row: Architecture, used: str) -> str:
    return (
        f"{checkpoint.source.name} has code of its own ({used} in auto_map), which millpond neither knows nor runs and "
        f"which may compute something else than transformers' {row.model_class}; "
        f"{in_place_of_code(row, {'auto_map': None})}"
    )
