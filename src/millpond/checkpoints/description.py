"""ModelDescription: what a checkpoint's files say about its model; a backend builds the model from it."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.checkpoint import Checkpoint
from millpond.checkpoints.layouts.sentence_transformers import PipelineLayout
from millpond.checkpoints.modules import Pooling
from millpond.checkpoints.task_detection import DetectedTasks
from millpond.values.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A checkpoint, read before any of its weights."""

    checkpoint: Checkpoint  # its config.json is in transformers' terms
    architecture: Architecture  # the backbone's row in the architecture table
    layout: PipelineLayout  # the modules after the backbone
    pooling: Pooling
    detected: DetectedTasks  # its tasks, and its classifier
    spec: ModelSpec

    @property
    def has_language_head(self) -> bool:
        """Whether the checkpoint is a decoder with the head of a language model."""
        name = self.checkpoint.architecture or ""
        return self.architecture.decoder and name.endswith(("ForCausalLM", "HeadModel", "ForConditionalGeneration"))

    @property
    def position_offset(self) -> int:
        """Position of a text's first token."""
        return self.architecture.position_offset(self.checkpoint.config)
