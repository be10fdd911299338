"""Families: which architectures have a native plan, and a checkpoint's native encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from millpond.backends.native.encoder import NativeEncoder
from millpond.backends.native.kernels import Int8, Kernels, Precision, kernels_of
from millpond.backends.native.plan import PlanBuilder
from millpond.backends.native.plans.post_norm import bert_plan
from millpond.backends.native.plans.tensors import Tensors, without_prefixes
from millpond.backends.native.weight_packer import NotSupported
from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.checkpoint import Checkpoint
from millpond.checkpoints.head_tensors import is_head_tensor
from millpond.checkpoints.weights import StoredTensor, stored_tensors
from millpond.native import library


def build_encoder(
    checkpoint: Checkpoint, architecture: Architecture, *, dtype: Precision, int8: Int8 = "none"
) -> NativeEncoder:
    """A checkpoint's backbone; ``checkpoint.config`` is in the native terms.

    Raises:
        NotSupported: There are no kernels for what the backbone computes, or none for this processor.
        WeightMismatchError: config.json and the weights disagree.
        ModelLoadError: A weight file is missing or damaged.
    """
    kernels = kernels_of(dtype, int8=int8)
    if kernels is None:
        raise NotSupported(library.absent() or f"this processor has no kernels for {dtype} with int8 {int8!r}")
    stored = stored_tensors(checkpoint.layout.transformer)
    return encoder_of(stored, checkpoint, architecture, kernels)


def encoder_of(
    stored: Mapping[str, StoredTensor], checkpoint: Checkpoint, architecture: Architecture, kernels: Kernels
) -> NativeEncoder:
    """The encoder of a checkpoint's tensors with these kernels; raises what :func:`build_encoder` does."""
    is_head = partial(is_head_tensor, architecture=architecture)
    prefix = _prefix(architecture)
    tensors = Tensors(without_prefixes(stored, prefix), checkpoint.source.name, is_head)
    builder = PlanBuilder(kernels)
    _steps(architecture)(builder, tensors, checkpoint.config, architecture)
    tensors.check()
    return NativeEncoder(builder.build())


def missing_plan(config: Mapping[str, Any], architecture: Architecture) -> str | None:
    """Why there is no native plan, by ``config`` in the native terms alone; ``None``: there is one."""
    kernels = kernels_of("float32") or _NO_KERNELS
    try:
        steps = _steps(architecture)
        steps(PlanBuilder(kernels), Tensors({}, "", bool), config, architecture)
    except NotSupported as reason:
        return str(reason)
    return None


_Steps = Callable[[PlanBuilder, Tensors, Mapping[str, Any], Architecture], None]
# Only their shapes are looked at, so a plan can be made without a processor that runs it.
_NO_KERNELS = Kernels(dtype="float32", pack=None, encode=None, workspace=None, lanes=16, isa="")


def _steps(architecture: Architecture) -> _Steps:
    if architecture.encoder is not None:
        return bert_plan
    raise NotSupported(f"{architecture.prefix} has no native plan")


def _prefix(architecture: Architecture) -> str:
    """The backbone's name within a class with a head."""
    return "model" if architecture.encoder is None else architecture.encoder.prefix
