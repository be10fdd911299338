"""Loading: an EngineConfig turned into a tokenizer, a runner and the description of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millpond.checkpoints.checkpoint import Checkpoint, read_checkpoint
from millpond.checkpoints.sentence_transformers import Layout
from millpond.config import EngineConfig
from millpond.engine.runner import Runner
from millpond.engine.tokenize import TextTokenizer
from millpond.models.architectures import Architecture, find
from millpond.models.load import load_backbone
from millpond.models.placement import resolve_device, resolve_dtype
from millpond.models.specify import Options, complete, specify
from millpond.pooling.pooler import Pooler
from millpond.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint in memory.

    Attributes:
        spec: What it is.
        tokenizer: Its tokenizer.
        runner: Backbone and pooler on their device.
        dtype: Precision of the backbone, by name.
        include_prompt: Whether pooling counts the prompt's tokens.
    """

    spec: ModelSpec
    tokenizer: TextTokenizer
    runner: Runner
    dtype: str
    include_prompt: bool


@dataclass(frozen=True, kw_only=True)
class _Described:
    """What the files say, before any weight is read."""

    checkpoint: Checkpoint
    architecture: Architecture
    layout: Layout
    tokenizer: TextTokenizer
    spec: ModelSpec


def describe(config: EngineConfig) -> ModelSpec:
    """What an engine of this configuration would be; no weights are read."""
    return _read(config).spec


def load(config: EngineConfig) -> Loaded:
    """Read, check and build; every question that the files can answer wrongly is asked before the weights are read."""
    device = resolve_device(config.device)
    found = _read(config)
    pooling, architecture = found.layout.pooling, found.architecture
    assert pooling is not None  # complete() answered it
    dtype = resolve_dtype(config.dtype, device, architecture, _stored_dtype(found.checkpoint.config))
    pooler = Pooler(pooling, token_heads=found.layout.token_heads, heads=found.layout.heads, device=device)
    backbone = load_backbone(found.checkpoint, architecture, device=device, dtype=dtype)
    offset = architecture.position_offset(found.checkpoint.config)
    return Loaded(
        spec=found.spec,
        tokenizer=found.tokenizer,
        runner=Runner(backbone, pooler, architecture=architecture, device=device, offset=offset),
        dtype=str(dtype).removeprefix("torch."),
        include_prompt=pooling.include_prompt,
    )


def _read(config: EngineConfig) -> _Described:
    checkpoint = read_checkpoint(config.model, revision=config.revision, hf_overrides=config.hf_overrides)
    architecture = find(checkpoint.config, checkpoint.source.name)
    options = Options(
        max_length=config.max_length,
        pooling=config.pooling,
        normalize=config.normalize,
        hf_overrides=config.hf_overrides,
    )
    layout = complete(checkpoint, architecture, options)
    tokenizer = TextTokenizer.load(layout.transformer, lower=layout.do_lower_case)
    spec = specify(checkpoint, architecture, layout, options, tokenizer_limit=tokenizer.limit)
    return _Described(checkpoint=checkpoint, architecture=architecture, layout=layout, tokenizer=tokenizer, spec=spec)


def _stored_dtype(config: Mapping[str, Any]) -> str | None:
    stored = config.get("dtype") or config.get("torch_dtype")
    return None if stored is None else str(stored).removeprefix("torch.")
