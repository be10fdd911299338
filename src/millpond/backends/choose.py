"""The backend of a model: native on a CPU where it can run, else torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from importlib import import_module

from millpond.backends.backend import BackendName, LoadedModels
from millpond.backends.devices import INSTALL, has_torch, resolve_devices
from millpond.backends.native import backend as native
from millpond.backends.native.model import missing_head
from millpond.backends.native.packing.weight_packer import NotSupported
from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.checkpoint import Checkpoint
from millpond.checkpoints.description import ModelDescription
from millpond.errors import ModelLoadError
from millpond.values.config import EngineConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A backend, and why it is not the other one."""

    backend: BackendName
    reason: str  # a clause like "GPT-2 has no native plan"


def choose(checkpoint: Checkpoint, architecture: Architecture, config: EngineConfig) -> Choice:
    """The backend of a backbone, by config.json alone.

    Raises:
        ModelLoadError: The backend that was asked for, or the only one, cannot run it.
    """
    name = checkpoint.source.name
    if config.backend == "torch":
        if not has_torch():
            raise ModelLoadError(f'{name}: backend="torch" needs the extra torch: {INSTALL}')
        return Choice(backend="torch", reason='backend="torch"')
    resolved = replace(config, device=",".join(resolve_devices(config.device)))
    obstacle = native.cannot_run(checkpoint, architecture, resolved)
    if obstacle is None:
        return Choice(backend="native", reason="compiled kernels on this CPU")
    return _instead(obstacle, name, config)


def resolve_quantization(checkpoint: Checkpoint, architecture: Architecture, config: EngineConfig) -> EngineConfig:
    """``auto`` is ``int8`` where compiled kernels run the backbone and are right by the self-check, else none."""
    if config.quantization != "auto":
        return config
    resolved = replace(config, device=",".join(resolve_devices(config.device)))
    fast = config.backend != "torch" and native.cannot_run(checkpoint, architecture, resolved) is None
    return replace(config, quantization="int8" if fast and native.is_right_in_int8(config) else None)


def choose_with_heads(choice: Choice, description: ModelDescription, config: EngineConfig) -> Choice:
    """The backend of a described checkpoint, given that of its backbone; no weights are read.

    Raises:
        ModelLoadError: As :func:`choose` does, for a head.
    """
    obstacle = missing_head(description) if choice.backend == "native" else None
    return choice if obstacle is None else _instead(obstacle, description.checkpoint.source.name, config)


def _instead(obstacle: str, name: str, config: EngineConfig) -> Choice:
    """torch, for what the native backend cannot run, if the options and the installation allow it."""
    if config.backend == "native":
        raise ModelLoadError(f'{name} cannot run with backend="native": {obstacle}; backend="auto" chooses torch')
    if not has_torch():
        raise ModelLoadError(f"{name} needs torch ({obstacle}): {INSTALL}")
    return Choice(backend="torch", reason=obstacle)


def load(
    choice: Choice, description: ModelDescription, config: EngineConfig, *, check: bool | None = None
) -> LoadedModels:
    """Read the weights and build a model on each device; ``choice`` is that of the backbone.

    ``check``: whether to compare the kernels that the model may use with float32, those that were right before, too;
    by default those that were not compared yet, unless ``MILLPOND_SELF_CHECK=0`` is set.
    """
    choice = choose_with_heads(choice, description, config)
    if choice.backend == "native":
        try:
            return native.load(description, config, check=check)
        except NotSupported as error:
            if config.backend == "native" or not has_torch():
                raise ModelLoadError(f"{description.spec.name} needs torch ({error}): {INSTALL}") from error
            choice = Choice(backend="torch", reason=str(error))
    logger.debug("%s runs in torch: %s", description.spec.name, choice.reason)
    torch_backend = import_module("millpond.backends.torch.backend")
    loaded: LoadedModels = torch_backend.load(description, config, check=check)
    return loaded
