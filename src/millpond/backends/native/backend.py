"""The native backend: a described checkpoint as a model on this CPU, without torch."""

from __future__ import annotations

import os

from millpond.backends.backend import LoadedModels
from millpond.backends.kernel_check import disabled, is_on
from millpond.backends.native.families import missing_plan
from millpond.backends.native.kernels import Int8, Precision, encoder_name, missing_kernels
from millpond.backends.native.model import build_model
from millpond.backends.native.self_check import check_encoder
from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.checkpoint import Checkpoint
from millpond.checkpoints.description import ModelDescription
from millpond.native.precision import bfloat16_is_fast
from millpond.support.load_progress import loading_bar
from millpond.values.config import EngineConfig

# The weights in eight bits, by the names of quantizations.
_INT8: dict[str | None, Int8] = {None: "none", "int8": "feeds", "int8-all": "all", "auto": "feeds"}
_PRECISIONS: dict[str, Precision] = {"float32": "float32", "bfloat16": "bfloat16"}


def cannot_run(checkpoint: Checkpoint, architecture: Architecture, config: EngineConfig) -> str | None:
    """Why a backbone cannot run here, by config.json alone; ``None`` if it can, as far as that says.

    ``config.device`` is resolved.
    """
    if config.device != "cpu":
        return f"device={config.device!r} is torch's"
    if config.compile:
        return "compile=True is torch's"
    if config.quantization not in _INT8:
        return f"quantization={config.quantization!r} is for GPUs"
    if config.dtype not in ("auto", *_PRECISIONS):
        return f"dtype={config.dtype!r} is torch's"
    missing = missing_kernels(_precision(config))
    return missing or missing_plan(checkpoint.config, architecture)


def is_right_in_int8(config: EngineConfig) -> bool:
    """Whether the self-check finds the encoder right with ``quantization="int8"``."""
    precision = _precision(config)
    if is_on():
        check_encoder(precision, "feeds")
    return disabled(encoder_name(precision, "feeds")) is None


def load(description: ModelDescription, config: EngineConfig, *, check: bool | None = None) -> LoadedModels:
    """Read the weights and build the model.

    Raises:
        NotSupported: The weights hold what the kernels do not compute.
        ModelLoadError: The weights cannot be read, or do not fit config.json.
    """
    precision, int8 = _precision(config), _INT8[config.quantization]
    checked = is_on() if check is None else check
    checks = check_encoder(precision, int8, remembered=not check) if checked else []
    with loading_bar(os.path.basename(description.spec.name.rstrip("/"))):
        model = build_model(description, dtype=precision, int8=int8)
    return LoadedModels(models=(model,), dtype=precision, checks=tuple(checks))


def _precision(config: EngineConfig) -> Precision:
    """``auto`` is bfloat16 where the kernels are faster in it."""
    if config.dtype != "auto":
        return _PRECISIONS[config.dtype]
    return "bfloat16" if bfloat16_is_fast() else "float32"
