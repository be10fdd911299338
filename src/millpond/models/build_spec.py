"""Checkpoint plus the user's options: the ModelSpec and the pipeline to build."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast, get_args

from millpond.checkpoints.checkpoint import Checkpoint
from millpond.checkpoints.classifiers import LLAMA_POOLING
from millpond.checkpoints.families import matryoshka_family
from millpond.checkpoints.modules import Dense, Pooling
from millpond.checkpoints.sentence_transformers import Layout
from millpond.errors import ModelLoadError
from millpond.models.architectures import Architecture
from millpond.models.task_detection import Purpose, with_pooling
from millpond.spec import ModelSpec, PoolingMode
from millpond.tasks import Activation


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user may override at construction."""

    max_length: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    hf_overrides: Mapping[str, Any] | None = None
    activation: Activation | None = None
    quantization: str | None = None


def complete(checkpoint: Checkpoint, architecture: Architecture, options: Options) -> Layout:
    """The checkpoint's layout with every open question answered: option, then file, then the family's default."""
    layout = checkpoint.layout
    pooling = layout.pooling or Pooling(modes=(_named_pooling(checkpoint.config) or architecture.pooling,))
    if options.pooling is not None:
        pooling = replace(pooling, modes=_modes(options.pooling))
    # As vLLM has it: a plain repository gives unit vectors, one with modules.json what its list says.
    normalize = layout.normalize if layout.normalize is not None else True
    return replace(layout, pooling=pooling, normalize=normalize if options.normalize is None else options.normalize)


def _named_pooling(config: Mapping[str, Any]) -> PoolingMode | None:
    """NVIDIA's bidirectional Llamas name their pooling in config.json."""
    if config.get("model_type") != "llama" or not isinstance(config.get("pooling"), str):
        return None
    return LLAMA_POOLING.get(config["pooling"])


def override(purpose: Purpose, options: Options) -> Purpose:
    """``purpose`` with the user's pooling and activation in its head."""
    head = purpose.classifier
    if head is not None and options.pooling is not None and head.pooling is not None:
        head = with_pooling(head, _modes(options.pooling))
    return replace(purpose, classifier=head, activation=options.activation or purpose.activation)


def _modes(pooling: str) -> tuple[PoolingMode, ...]:
    modes = tuple(pooling.split("+"))
    known = get_args(PoolingMode)
    if not all(mode in known for mode in modes):
        raise ModelLoadError(f"pooling={pooling!r} is unknown; choose {', '.join(known)}, or several joined by +")
    return cast("tuple[PoolingMode, ...]", modes)


def specify(
    checkpoint: Checkpoint,
    architecture: Architecture,
    layout: Layout,
    options: Options,
    purpose: Purpose,
    *,
    tokenizer_limit: int | None,
    token_id: Callable[[str], int | None],
) -> ModelSpec:
    """The public description of an engine's model.

    Raises:
        ModelLoadError: Widths that do not fit each other, or a ``max_length`` that the positions do not cover.
    """
    name, config = checkpoint.source.name, checkpoint.config
    assert layout.pooling is not None and layout.normalize is not None  # answered by complete()
    hidden = _chain_width(backbone_width(config), layout.token_heads, name)
    dimensions = _chain_width(hidden * len(layout.pooling.modes), layout.heads, name)
    trained, declared, smallest = _matryoshka(checkpoint, options)
    max_length = _max_length(architecture, config, layout, options, tokenizer_limit, name)
    # Whatever the user overrides and the files do not show.
    prompts = sorted(layout.prompts.items())
    settings: tuple[object, ...] = (
        layout.pooling.modes,
        layout.pooling.include_prompt,
        max_length,
        prompts,
        layout.default_prompt_name,
        *(() if options.quantization is None else (options.quantization,)),
        # A ColBERT that is converted reads its texts without markers.
        *(("plain",) if layout.late_interaction is not None and purpose.score_type != "late-interaction" else ()),
    )
    return ModelSpec(
        name=name,
        architecture=checkpoint.architecture or architecture.model_class,
        model_type=architecture.model_type,
        pooling=_pools(purpose, layout.pooling),
        normalize=layout.normalize,
        dimensions=dimensions,
        hidden_size=hidden,
        matryoshka=trained,
        matryoshka_dimensions=declared,
        matryoshka_smallest=smallest,
        default_dimensions=_default_width(layout, dimensions, options, name),
        prompts=dict(layout.prompts),
        default_prompt_name=layout.default_prompt_name,
        labels=purpose.labels,
        activation=purpose.activation,
        score_type=purpose.score_type,
        step_tag_id=_step_tag(purpose, token_id),
        adapters=tuple(config.get("lora_adaptations") or ()),
        max_length=max_length,
        tasks=purpose.tasks,
        digest=partial(checkpoint.digest, *settings),
    )


def _step_tag(purpose: Purpose, token_id: Callable[[str], int | None]) -> int | None:
    """Id of the token whose rows are rewards: by its text, or where the vocabulary lacks that, the family's own."""
    head = purpose.classifier
    if head is None or head.step_tag is None:
        return None
    found = token_id(head.step_tag[0])
    return head.step_tag[1] if found is None else found


def _pools(purpose: Purpose, pooling: Pooling) -> tuple[PoolingMode, ...]:
    """How a text's tokens become one row: as the head does it, where there are no vectors but its own logits."""
    head = purpose.classifier
    if head is None or head.pooling is None or "embed" in purpose.tasks:
        return pooling.modes
    return (head.pooling,)


def backbone_width(config: Mapping[str, Any]) -> int:
    """Columns of a backbone's hidden states.

    Raises:
        ModelLoadError: The config gives no number.
    """
    width = config.get("hidden_size", config.get("dim", config.get("n_embd", 0)))
    if not isinstance(width, int):
        raise ModelLoadError(f"hidden_size is {width!r} in config.json; it must be an int")
    return width


def _chain_width(width: int, heads: tuple[Any, ...], name: str) -> int:
    """Width behind a chain of heads."""
    for head in heads:
        if isinstance(head, Dense):
            if head.in_features != width:
                raise ModelLoadError(
                    f"{name}: {head.folder.name} takes {head.in_features} features, and gets {width}; "
                    "check its config.json and the pooling"
                )
            width = head.out_features
    return width


def _matryoshka(checkpoint: Checkpoint, options: Options) -> tuple[bool, tuple[int, ...] | None, int]:
    """(trained for it, declared widths, least width); the user's word first, then the files', then known families."""
    overrides, config = options.hf_overrides or {}, checkpoint.config
    if "is_matryoshka" in overrides and "matryoshka_dimensions" not in overrides:
        return bool(overrides["is_matryoshka"]), None, 1
    declared = config.get("matryoshka_dimensions")
    if declared:
        return True, tuple(sorted(int(width) for width in declared)), 1
    if config.get("is_matryoshka") or checkpoint.layout.truncate_dim is not None:
        return True, None, 1
    family = matryoshka_family(checkpoint.source.name)
    if family is not None:
        return True, family.dimensions, family.smallest
    return False, None, 1


def _default_width(layout: Layout, dimensions: int, options: Options, name: str) -> int | None:
    """``truncate_dim`` of a dense embedder, where it cuts anything and the user does not forbid cuts."""
    width = layout.truncate_dim
    if width is None or layout.late_interaction is not None:  # whose rows sentence-transformers does not cut
        return None
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise ModelLoadError(f"{name}: truncate_dim {width!r} of config_sentence_transformers.json is no width")
    if (options.hf_overrides or {}).get("is_matryoshka") is False:
        return None
    return width if width < dimensions else None


def _max_length(
    architecture: Architecture,
    config: Mapping[str, Any],
    layout: Layout,
    options: Options,
    tokenizer_limit: int | None,
    name: str,
) -> int:
    """The user's length, else max_seq_length, else what tokenizer and positions allow; never past a position table."""
    capacity = architecture.capacity(config)
    if options.max_length is not None:
        if capacity is not None and options.max_length > capacity and architecture.bounded(config):
            raise ModelLoadError(
                f"max_length={options.max_length} is more than the positions of {name} cover ({capacity}); "
                f"choose 1 to {capacity}"
            )
        return options.max_length
    limits: list[int | None] = [layout.max_seq_length] if layout.max_seq_length else [tokenizer_limit, capacity]
    if architecture.bounded(config):
        limits.append(capacity)
    known = [int(limit) for limit in limits if limit]
    return min(known) if known else 512
