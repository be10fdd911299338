"""The backend of a model."""

from __future__ import annotations

from millpond.backends.backend import LoadedModels
from millpond.checkpoints.description import ModelDescription
from millpond.values.config import EngineConfig


def load(description: ModelDescription, config: EngineConfig, *, check: bool | None = None) -> LoadedModels:
    """Read the weights and build a model on each device."""
    from millpond.backends.torch import backend as torch_backend

    return torch_backend.load(description, config, check=check)
