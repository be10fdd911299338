"""Families: which architectures have a native plan, and a checkpoint's native encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from millpond.backends.kernel_check import disabled
from millpond.backends.native.encoder import NativeEncoder
from millpond.backends.native.kernels import Int8, Kernels, Precision, encoder_name, kernels_of, missing_kernels
from millpond.backends.native.packing.packed_file import identity_of
from millpond.backends.native.packing.weight_packer import NotSupported
from millpond.backends.native.plans.adapters import Adapters
from millpond.backends.native.plans.albert import albert_plan
from millpond.backends.native.plans.bart import bart_plan
from millpond.backends.native.plans.deberta import deberta_plan
from millpond.backends.native.plans.decoder import decoder_plan
from millpond.backends.native.plans.embedding_gemma2 import embedding_gemma2_plan
from millpond.backends.native.plans.gpt_neox import gpt_neox_plan
from millpond.backends.native.plans.jina_bert import jina_bert_plan
from millpond.backends.native.plans.lfm2 import lfm2_plan
from millpond.backends.native.plans.mobilebert import mobilebert_plan
from millpond.backends.native.plans.modernbert import modernbert_plan
from millpond.backends.native.plans.neomme import neomme_plan
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.backends.native.plans.post_norm import bert_plan
from millpond.backends.native.plans.rotary_post_norm import (
    GTE_BIASES,
    NOMIC_BIASES,
    jina_plan,
    nomic_moe_plan,
    rotary_plan,
)
from millpond.backends.native.plans.t5 import t5_plan
from millpond.backends.native.plans.t5gemma2 import t5gemma2_plan
from millpond.backends.native.plans.tensors import Tensors
from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.architectures import STATIC
from millpond.checkpoints.checkpoint import Checkpoint
from millpond.checkpoints.defaults import complete
from millpond.checkpoints.families.native import rename
from millpond.checkpoints.families.renaming import without_prefixes
from millpond.checkpoints.head_tensors import is_head_tensor
from millpond.checkpoints.layouts.gliner import of_backbone
from millpond.checkpoints.modules import LayerMean
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.checkpoints.token_tensors import layer_shares
from millpond.checkpoints.weights import stored_tensors, weight_files

# The plans of families that have no names or traits in their row, by `model_type`.
_PLANS: Mapping[str, Callable[[PlanBuilder, Tensors, Mapping[str, Any]], None]] = {
    "albert": albert_plan,
    "bart": bart_plan,
    **dict.fromkeys(("deberta", "deberta-v2"), deberta_plan),
    "embedding_gemma2": embedding_gemma2_plan,
    "gpt_neox": gpt_neox_plan,
    "gte": partial(rotary_plan, biases=GTE_BIASES),
    "jina_bert": jina_bert_plan,
    "mobilebert": mobilebert_plan,
    "lfm2": lfm2_plan,
    "modernbert": modernbert_plan,
    "neomme": neomme_plan,
    "t5": t5_plan,
    "t5gemma2": t5gemma2_plan,
    "umt5": partial(t5_plan, shared=False),
    "nomic_bert": partial(rotary_plan, biases=NOMIC_BIASES),
    "nomic_bert_moe": nomic_moe_plan,
}
# Only shapes are looked at, so a plan can be told without a processor that runs it.
_NO_KERNELS = Kernels(dtype="float32", pack=None, copy=None, encode=None, workspace=None, lanes=16, isa="")


def build_encoder(
    checkpoint: Checkpoint, architecture: Architecture, *, dtype: Precision, int8: Int8 = "none"
) -> NativeEncoder:
    """A checkpoint's backbone; ``checkpoint.config`` is in the native terms.

    Raises:
        NotSupported: There are no kernels for what the backbone computes, or none for this processor.
        WeightMismatchError: config.json and the weights disagree.
        ModelLoadError: A weight file is missing or damaged, or config.json has a wrong value.
    """
    kernels = kernels_of(dtype, int8=int8)
    if kernels is None:
        raise NotSupported(str(missing_kernels(dtype)))
    wrong = disabled(encoder_name(dtype, int8))
    if wrong is not None:
        raise NotSupported(f"the kernel of the {encoder_name(dtype, int8)} {wrong}")
    folder = checkpoint.layout.transformer
    files = identity_of(weight_files(folder, None))
    stored = of_backbone(stored_tensors(folder), checkpoint.layout.gliner)
    return encoder_of(stored, checkpoint, architecture, kernels, files)


def encoder_of(
    stored: Mapping[str, StoredTensor],
    checkpoint: Checkpoint,
    architecture: Architecture,
    kernels: Kernels,
    files: Sequence[object] = (),
) -> NativeEncoder:
    """The encoder of a checkpoint's tensors with these kernels; raises what :func:`build_encoder` does.

    ``files`` identify those of the tensors; without them packed weights are not kept on disk.
    """
    tensors, config = tensors_of(stored, checkpoint, architecture)
    adapters = None
    if architecture.adapters:
        adapters = Adapters(without_prefixes(stored, architecture.tensor_prefix), config, checkpoint.source.name)
    shares = shares_of(checkpoint.layout.layer_mean, config, architecture)
    builder = _told(tensors, config, architecture, kernels, adapters, shares)
    tensors.check()
    return NativeEncoder(builder.build([files, config, repr(architecture)] if files else None))


def tensors_of(
    stored: Mapping[str, StoredTensor], checkpoint: Checkpoint, architecture: Architecture
) -> tuple[Tensors, dict[str, Any]]:
    """A checkpoint's tensors under the names that its plan takes, and its completed config."""
    config = _completed(checkpoint.config, architecture)
    plain = without_prefixes(stored, architecture.tensor_prefix)
    is_head = partial(is_head_tensor, architecture=architecture, config=config)
    return Tensors(rename(architecture, plain, config), checkpoint.source.name, is_head), config


def shares_of(mean: LayerMean | None, config: Mapping[str, Any], row: Architecture) -> Sequence[float]:
    """The part of each layer's states in the mean of them; empty: the last layer's are the result."""
    if mean is None:
        return ()
    if row.encoder is None or not row.averages_layers:
        raise NotSupported(f"{row.prefix} has no native plan that averages its layers")
    return layer_shares(mean, int(config[row.encoder.fields.layers]))


def missing_plan(config: Mapping[str, Any], architecture: Architecture) -> str | None:
    """Why there is no native plan, by ``config`` in the native terms alone; ``None``: there is one."""
    if architecture is STATIC:
        return None
    try:
        _told(Tensors({}, "", bool), _completed(config, architecture), architecture, _NO_KERNELS, None)
    except NotSupported as reason:
        return str(reason)
    return None


def has_plan(row: Architecture) -> bool:
    """Whether a family has a native plan, whatever its checkpoints' config.json says."""
    return bool(row.encoder or row.traits or row.adapters or row.model_type in _PLANS)


def _completed(config: Mapping[str, Any], row: Architecture) -> dict[str, Any]:
    """Every field that the family's plan reads."""
    if not has_plan(row):
        raise NotSupported(f"{row.prefix} has no native plan")
    return complete(config, row)


def _told(
    tensors: Tensors,
    config: Mapping[str, Any],
    row: Architecture,
    kernels: Kernels,
    adapters: Adapters | None,
    shares: Sequence[float] = (),
) -> PlanBuilder:
    """A builder that knows all steps; ``shares``: as of :class:`PlanBuilder`."""
    count = 0 if adapters is None else adapters.count
    rank = adapters.rank if adapters is not None and count else 0
    builder = PlanBuilder(kernels, adapters=count, rank=rank, shares=shares)
    tell(builder, tensors, config, row, adapters)
    return builder


def tell(
    builder: Any, tensors: Tensors, config: Mapping[str, Any], row: Architecture, adapters: Adapters | None = None
) -> None:
    """Tell a family's steps to a ``PlanBuilder``, or to another class with its methods.

    Raises:
        NotSupported: A step is not computed here.
        ModelLoadError: config.json has a wrong value.
    """
    if config.get("quantization_config"):
        raise NotSupported("weights that are quantized already (quantization_config)")
    if row.encoder is not None:
        bert_plan(builder, tensors, config, row)
    elif row.traits is not None:
        decoder_plan(builder, tensors, config, row)
    elif row.adapters:
        jina_plan(builder, tensors, config, adapters)
    else:
        _PLANS[row.model_type](builder, tensors, config)
