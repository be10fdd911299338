"""The ModelSpec and the pipeline of a checkpoint under the user's options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast, get_args

from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.checkpoint import NOT_ARITHMETIC, Checkpoint
from millpond.checkpoints.classifiers import entailment
from millpond.checkpoints.layouts.sentence_transformers import PipelineLayout
from millpond.checkpoints.modules import Codes, Convolution, Dense, Lstm, Normalize, Pooling
from millpond.checkpoints.task_detection import DetectedTasks
from millpond.errors import ModelLoadError
from millpond.tasks import Activation
from millpond.values.spec import ModelSpec, PoolingMode

_SPARSE = "{} attends to as a whole, which is what millpond runs; longer texts attend to blocks of tokens"
# Trained to pool the text without its instruction. Their files do not say so; sentence-transformers goes by the names.
_INSTRUCTOR_NAMES = tuple(f"hkunlp/instructor-{size}" for size in ("base", "large", "xl"))
# Exports for fastembed that have no modules.json: pooled by the mean, and whether normalized, as fastembed and the
# checkpoints that they were made from do. Its others are pooled as their families are by default.
_MEAN_EXPORTS = {
    "Qdrant/all-MiniLM-L6-v2-onnx": True,
    "Qdrant/gte-large-onnx": True,
    "Qdrant/multilingual-e5-large-onnx": True,
    "Qdrant/paraphrase-multilingual-MiniLM-L12-v2-onnx-Q": False,
}
# Classes that pool in another way than their family, where the files do not say it.
_POOLED_BY_CLASS: Mapping[str, PoolingMode] = {"Contriever": "mean"}


@dataclass(frozen=True, kw_only=True)
class SpecOptions:
    """Overrides by the user when an engine is built; ``None``: the checkpoint's own setting."""

    max_length: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    hf_overrides: Mapping[str, Any] | None = None
    activation: Activation | None = None
    quantization: str | None = None


def complete_layout(checkpoint: Checkpoint, architecture: Architecture, options: SpecOptions) -> PipelineLayout:
    """The checkpoint's layout with all fields set: from the options, else from the files, else the family's default."""
    layout, field = checkpoint.layout, architecture.pooling_field
    if layout.pooling is None and checkpoint.source.name in _MEAN_EXPORTS:
        layout = replace(layout, pooling=Pooling(modes=("mean",)), normalize=_MEAN_EXPORTS[checkpoint.source.name])
    pooling = layout.pooling
    if pooling is None:
        named = [] if field is None else [checkpoint.config.get(name) for name in field.names]
        value = next((value for value in named if isinstance(value, str)), None)
        default = _POOLED_BY_CLASS.get(checkpoint.architecture or "", architecture.pooling)
        pooling = Pooling(modes=((field and value and field.modes.get(value)) or default,))
    if options.pooling is not None:
        pooling = replace(pooling, modes=_modes(options.pooling))
    if checkpoint.source.name in _INSTRUCTOR_NAMES:
        pooling = replace(pooling, include_prompt=False)
    averaged = (
        architecture.averages_layers or architecture.traits is not None or architecture.model_type == "modernbert"
    )
    if layout.layer_mean is not None and not averaged:
        raise ModelLoadError(
            f"{checkpoint.source.name} has a WeightedLayerPooling over {architecture.prefix}, whose layers' states are "
            "not kept here; millpond averages those of encoders like BERT, of ModernBERT and of decoders like Llama"
        )
    # As in vLLM: a plain repository gives unit vectors; one with modules.json gives them if the list has Normalize.
    normalize = layout.normalize if layout.normalize is not None else True
    return replace(layout, pooling=pooling, normalize=normalize if options.normalize is None else options.normalize)


def override_head(detected: DetectedTasks, options: SpecOptions) -> DetectedTasks:
    """``detected`` with the user's pooling and activation in its head."""
    head = detected.classifier
    if head is not None and options.pooling is not None and head.pooling is not None:
        modes = _modes(options.pooling)
        if len(modes) != 1:
            raise ModelLoadError(f"pooling={'+'.join(modes)!r}: a classifier pools one way; choose one of them")
        head = replace(head, pooling=modes[0])
    return replace(detected, classifier=head, activation=options.activation or detected.activation)


def _modes(pooling: str) -> tuple[PoolingMode, ...]:
    modes = tuple(pooling.split("+"))
    known = get_args(PoolingMode)
    if not all(mode in known for mode in modes):
        raise ModelLoadError(f"pooling={pooling!r} is unknown; choose {', '.join(known)}, or several joined by +")
    return cast("tuple[PoolingMode, ...]", modes)


def build_spec(
    checkpoint: Checkpoint,
    architecture: Architecture,
    layout: PipelineLayout,
    options: SpecOptions,
    detected: DetectedTasks,
    *,
    tokenizer_limit: int | None,
    token_id: Callable[[str], int | None],
) -> ModelSpec:
    """The public description of an engine's model."""
    name, config = checkpoint.source.name, checkpoint.config
    assert layout.pooling is not None and layout.normalize is not None  # complete_layout() set them
    hidden = _chain_width(backbone_width(config), layout.token_heads, name)
    dimensions = _chain_width(hidden * len(layout.pooling.modes), layout.heads, name)
    trained, declared, smallest = _matryoshka(checkpoint, options)
    max_length = _max_length(architecture, config, layout, options, tokenizer_limit, name)
    without_markers = layout.late_interaction is not None and detected.score_type != "late-interaction"
    head = detected.classifier
    own_pooling = None if head is None or "embed" in detected.tasks else head.pooling  # logits, and no vectors
    return ModelSpec(
        name=name,
        architecture=checkpoint.architecture or architecture.model_class,
        model_type=architecture.model_type,
        pooling=(own_pooling,) if own_pooling is not None else layout.pooling.modes,
        has_layers=any(not isinstance(head, Normalize) for head in layout.heads),
        normalize=layout.normalize,
        dimensions=dimensions,
        codes=bool(layout.heads) and isinstance(layout.heads[-1], Codes),
        hidden_size=hidden,
        matryoshka=trained,
        matryoshka_dimensions=declared,
        matryoshka_smallest=smallest,
        default_dimensions=_default_width(layout, dimensions, options, name),
        prompts=dict(layout.prompts),
        default_prompt_name=layout.default_prompt_name,
        labels=detected.labels,
        entailment_id=entailment(config, detected.labels) if "classify" in detected.tasks else None,
        activation=detected.activation,
        score_type=detected.score_type,
        similarity=layout.similarity,
        step_tag_id=_step_tag(detected, token_id),
        adapters=tuple(config.get("lora_adaptations") or ()),
        max_length=max_length,
        has_modules=checkpoint.layout.normalize is not None,
        tasks=detected.tasks,
        settings=_settings(checkpoint, layout, layout.pooling, options, max_length, without_markers),
        digest=partial(checkpoint.digest, *_fingerprint(layout, layout.pooling, options, max_length, without_markers)),
    )


def _fingerprint(
    layout: PipelineLayout, pooling: Pooling, options: SpecOptions, max_length: int, without_markers: bool
) -> tuple[object, ...]:
    """Settings that change vectors but not the files."""
    return (
        pooling.modes,
        pooling.include_prompt,
        max_length,
        sorted(layout.prompts.items()),
        layout.default_prompt_name,
        *(() if options.quantization is None else (options.quantization,)),
        # A ColBERT converted to an embedder reads its texts without markers.
        *(("plain",) if without_markers else ()),
    )


def _settings(
    checkpoint: Checkpoint,
    layout: PipelineLayout,
    pooling: Pooling,
    options: SpecOptions,
    max_length: int,
    without_markers: bool,
) -> dict[str, object]:
    """The same by their names, for people and for indexes."""
    overrides = options.hf_overrides or {}
    return {
        "revision": checkpoint.source.revision,
        "max_length": max_length,
        "pooling": "+".join(pooling.modes),
        "include_prompt": pooling.include_prompt,
        "quantization": options.quantization,
        "convert": "embed" if without_markers else "auto",
        "default_prompt_name": layout.default_prompt_name,
        "prompts": dict(layout.prompts),
        "hf_overrides": {name: value for name, value in overrides.items() if name not in NOT_ARITHMETIC},
    }


def _step_tag(detected: DetectedTasks, token_id: Callable[[str], int | None]) -> int | None:
    """Id of the token whose rows are rewards: looked up by its text; the family's id if the vocabulary lacks it."""
    head = detected.classifier
    if head is None or head.step_tag is None:
        return None
    text, default = head.step_tag
    number = token_id(text)
    return default if number is None else number


def backbone_width(config: Mapping[str, Any]) -> int:
    """Columns of a backbone's hidden states."""
    if config.get("num_hidden_layers", config.get("n_layers", config.get("n_layer"))) == 0:
        raise ModelLoadError("num_hidden_layers is 0 in config.json; a model needs at least one layer")
    width = config.get("hidden_size", config.get("dim", config.get("n_embd", 0)))
    if not isinstance(width, int):
        raise ModelLoadError(f"hidden_size is {width!r} in config.json; it must be an int")
    return width


def _chain_width(width: int, heads: tuple[Any, ...], name: str) -> int:
    """The width after a chain of heads."""
    for head in heads:
        if isinstance(head, Dense | Convolution | Lstm):
            if head.in_features != width:
                raise ModelLoadError(
                    f"{name}: {head.folder.name} takes {head.in_features} features, and gets {width}; "
                    "check its config.json and the pooling"
                )
            width = head.out_features
    return width


def _matryoshka(checkpoint: Checkpoint, options: SpecOptions) -> tuple[bool, tuple[int, ...] | None, int]:
    """(trained for it, declared widths, least width): by the user's override, then the files, then known families."""
    overrides, config = options.hf_overrides or {}, checkpoint.config
    if "is_matryoshka" in overrides and "matryoshka_dimensions" not in overrides:
        return bool(overrides["is_matryoshka"]), None, 1
    declared = config.get("matryoshka_dimensions")
    if declared:
        return True, tuple(sorted(int(width) for width in declared)), 1
    if config.get("is_matryoshka") or checkpoint.layout.truncate_dim is not None:
        return True, None, 1
    family = matryoshka_family(checkpoint.source.name)
    return (False, None, 1) if family is None else (True, family.dimensions, family.smallest)


def _default_width(layout: PipelineLayout, dimensions: int, options: SpecOptions, name: str) -> int | None:
    """``truncate_dim`` of a dense embedder, if it is less than the full width and the user does not forbid cuts."""
    width = layout.truncate_dim
    if width is None or layout.late_interaction is not None:  # sentence-transformers does not cut its rows
        return None
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise ModelLoadError(f"{name}: truncate_dim {width!r} of config_sentence_transformers.json is no width")
    if (options.hf_overrides or {}).get("is_matryoshka") is False:
        return None
    return width if width < dimensions else None


def _max_length(
    architecture: Architecture,
    config: Mapping[str, Any],
    layout: PipelineLayout,
    options: SpecOptions,
    tokenizer_limit: int | None,
    name: str,
) -> int:
    """The user's length, else max_seq_length, else the least of tokenizer's limit and positions; a table bounds it."""
    capacity = architecture.capacity(config)
    if options.max_length is not None:
        if capacity is not None and options.max_length > capacity and architecture.bounded(config):
            covers = "the positions of {} cover" if config.get("longest_text") != capacity else _SPARSE
            raise ModelLoadError(
                f"max_length={options.max_length} is more than {covers.format(name)} ({capacity}); "
                f"choose 1 to {capacity}"
            )
        return options.max_length
    limits: list[int | None] = [layout.max_seq_length] if layout.max_seq_length else [tokenizer_limit, capacity]
    if layout.gliner is not None:  # its words are what is limited, and the encoder's training length is no limit
        limits.append(tokenizer_limit)
    if architecture.bounded(config):
        limits.append(capacity)
    known = [int(limit) for limit in limits if limit]
    return min(known) if known else 512


@dataclass(frozen=True, kw_only=True)
class MatryoshkaFamily:
    """Checkpoints whose name matches ``pattern`` may be cut to ``dimensions``, or to anything from ``smallest``."""

    pattern: str
    dimensions: tuple[int, ...] | None = None
    smallest: int = 1


# Checkpoints that were trained for shorter vectors but do not say so in config.json; widths of their model cards.
MATRYOSHKA_FAMILIES = (
    MatryoshkaFamily(pattern=r"qwen3-embedding-.*", smallest=32),
    MatryoshkaFamily(pattern=r"nomic-embed-text-v1\.5", smallest=64),
    MatryoshkaFamily(pattern=r"nomic-embed-text-v2-moe", smallest=256),
    MatryoshkaFamily(pattern=r"modernbert-embed-(base|large)", smallest=256),
    MatryoshkaFamily(pattern=r"mxbai-embed-large-v1", smallest=64),
    MatryoshkaFamily(pattern=r"snowflake-arctic-embed-(m-v1\.5|m-v2\.0|l-v2\.0)", smallest=256),
    MatryoshkaFamily(pattern=r"embeddinggemma-300m", dimensions=(128, 256, 512, 768)),
    MatryoshkaFamily(pattern=r"gte-multilingual-base", smallest=128),
    MatryoshkaFamily(pattern=r"static-(retrieval|similarity)-mrl-.*", smallest=32),
    MatryoshkaFamily(pattern=r"voyage-4-nano", dimensions=(256, 512, 1024, 2048)),
    MatryoshkaFamily(pattern=r"jina-embeddings-v5-text-(small|nano)(-.*)?", smallest=32),
    MatryoshkaFamily(pattern=r"jina-colbert-v2", dimensions=(64, 96, 128)),
)


def matryoshka_family(name: str) -> MatryoshkaFamily | None:
    """The family of a checkpoint of this name."""
    last = name.rstrip("/").rsplit("/", 1)[-1].lower()
    return next((family for family in MATRYOSHKA_FAMILIES if re.fullmatch(family.pattern, last)), None)
