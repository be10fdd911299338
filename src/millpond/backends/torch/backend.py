"""The backend in torch: a described checkpoint as models on its devices."""

from __future__ import annotations

import os
from typing import cast

import torch

from millpond.backends.backend import LoadedModels
from millpond.backends.kernel_check import is_on
from millpond.backends.torch.cuda.buckets import Buckets
from millpond.backends.torch.cuda.streams import Cuda, Streams
from millpond.backends.torch.forwards.linear import bound_compiled_products
from millpond.backends.torch.inherited_pool import outside_inherited_pool
from millpond.backends.torch.loading.load import load_backbone
from millpond.backends.torch.loading.load_check import check_kernels, check_model
from millpond.backends.torch.loading.placement import resolve_devices, resolve_dtype
from millpond.backends.torch.loading.quantize import check_quantization
from millpond.backends.torch.model import TorchModel
from millpond.backends.torch.pooling.classifier import build_classifier
from millpond.backends.torch.pooling.pooler import Pooler
from millpond.backends.torch.pooling.sparse import build_sparse, build_token_vectors
from millpond.checkpoints.build_spec import backbone_width
from millpond.checkpoints.description import ModelDescription
from millpond.support.load_progress import loading_bar
from millpond.tasks import Quantization
from millpond.values.config import EngineConfig


def load(description: ModelDescription, config: EngineConfig, *, check: bool | None = None) -> LoadedModels:
    """Read the weights and build a model on each device.

    ``check``: whether to compare the kernels that the model may use with float32, those that were right before, too;
    by default those that were not compared yet, unless ``MILLPOND_SELF_CHECK=0`` is set.
    """
    return outside_inherited_pool(lambda: _load(description, config, check))


def _load(description: ModelDescription, config: EngineConfig, check: bool | None) -> LoadedModels:
    devices = resolve_devices(config.device)
    if any(device.type == "cpu" for device in devices):
        bound_compiled_products()
    stored = description.checkpoint.config
    quantization = cast("Quantization | None", config.quantization)  # checked by the config
    requested = "bfloat16" if quantization == "fp8" and config.dtype == "auto" else config.dtype
    stored_dtype = str(stored.get("dtype") or stored.get("torch_dtype")).removeprefix("torch.")
    dtype = resolve_dtype(requested, devices[0], description.architecture, stored_dtype)
    for device in devices:
        check_quantization(quantization, device, dtype)
        if config.compile:
            from millpond.backends.torch.forwards.compiled import check_compiler

            check_compiler(device)
    checked = is_on() if check is None else check
    on_cpu = any(device.type == "cpu" for device in devices)
    checks = check_kernels(dtype, remembered=not check) if checked and on_cpu else []
    with loading_bar(os.path.basename(description.spec.name.rstrip("/"))):
        models = tuple(_model(description, device, dtype, quantization, compiled=config.compile) for device in devices)
    for model in models if checked else ():
        if model.placement.type == "cuda":
            vocabulary = int(stored.get("vocab_size") or 1)
            longest = description.spec.max_length
            checks += check_model(model, dtype, vocabulary=vocabulary, longest=longest, remembered=not check)
    return LoadedModels(models=models, dtype=str(dtype).removeprefix("torch."), checks=tuple(checks))


def _model(
    description: ModelDescription,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization | None,
    *,
    compiled: bool,
) -> TorchModel:
    """A replica on one device; its weights are read here."""
    architecture, layout, head = description.architecture, description.layout, description.detected.classifier
    config = description.checkpoint.config
    width = backbone_width(config)
    sparse, vectors = layout.sparse, layout.token_vectors
    pooler = Pooler(
        description.pooling,
        token_heads=layout.token_heads,
        heads=layout.heads,
        device=device,
        classifier=None if head is None else build_classifier(head, width=width, device=device),
        sparse=None if sparse is None else build_sparse(sparse, config, width=width, device=device),
        token_vectors=None if vectors is None else build_token_vectors(vectors, width=width, device=device),
        language_head=layout.transformer if description.has_language_head else None,
        vocabulary=int(config.get("vocab_size") or 1),
        table=layout.static,
    )
    backbone = load_backbone(
        description.checkpoint, architecture, device=device, dtype=dtype, quantization=quantization
    )
    offset = description.position_offset
    if compiled:
        from millpond.backends.torch.forwards.compiled import compile_parts

        compile_parts(backbone, architecture, offset=offset)
    streams = _streams(device)
    graphs = streams is not None and os.environ.get("MILLPOND_CUDA_GRAPHS") != "0"
    return TorchModel(
        backbone,
        pooler,
        architecture=architecture,
        device=device,
        offset=offset,
        streams=streams,
        buckets=Buckets(longest=description.spec.max_length) if graphs else None,
    )


def _streams(device: torch.device) -> Streams | None:
    """The device's streams, where batches can overlap."""
    return Cuda(device) if device.type == "cuda" else None
