"""A checkpoint's backbone, loaded through transformers' own class with the packed attention in it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from millpond.attention import interface
from millpond.checkpoints.checkpoint import Checkpoint
from millpond.errors import ModelLoadError, WeightMismatchError
from millpond.models.architectures import Architecture
from millpond.models.encoder import FAMILIES, PackedEncoder

logger = logging.getLogger(__name__)

# Tensors of a checkpoint that a backbone rightly leaves alone: heads of other tasks, and buffers of older versions.
_NOT_BACKBONE = re.compile(
    r"^(pooler|cls|lm_head|classifier|score|qa_outputs|pre_classifier|vocab_\w+|head|decoder)\."
    r"|^(\w+\.)?pooler\.|(^|\.)position_ids$|(^|\.)token_type_ids$|inv_freq$"
)


def load_backbone(
    checkpoint: Checkpoint, architecture: Architecture, *, device: torch.device, dtype: torch.dtype, packed: bool = True
) -> torch.nn.Module:
    """The backbone in evaluation mode, on its device.

    ``packed=False`` keeps transformers' own class where millpond has a forward of its own: the tests compare them.

    Raises:
        ModelLoadError: The files cannot be read, or the config describes no valid model.
        WeightMismatchError: Tensors are missing, left over or of another shape.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    interface.register()
    # In a forked child torch makes its thread pool anew on first use, which fails when two threads are first at once;
    # transformers loads with several. Here one thread is first.
    torch.set_num_threads(torch.get_num_threads())
    name, folder = checkpoint.source.name, checkpoint.layout.transformer
    model_class = getattr(transformers, architecture.model_class)
    try:
        config = CONFIG_MAPPING[architecture.model_type].from_dict(_config_fields(checkpoint.config))
        with _quiet_transformers():
            backbone, report = model_class.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=interface.NAME,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report, by name
                **({"add_pooling_layer": False} if architecture.pooler else {}),
            )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        if "size mismatch" in str(error) or "ignore_mismatched_sizes" in str(error):
            raise WeightMismatchError(f"{name}: a tensor has another shape than config.json says: {error}") from error
        raise ModelLoadError(f"{name} could not be loaded: {type(error).__name__}: {error}") from error
    except Exception as error:  # safetensors' own error derives from nothing more specific
        if type(error).__module__.partition(".")[0] not in ("safetensors", "safetensors_rust", "builtins", "_pickle"):
            raise
        raise ModelLoadError(f"{name}: a weight file is damaged: {error}; fetch it again") from error
    _check_report(report, name)
    backbone.requires_grad_(False)
    backbone = backbone.eval().to(device)
    return (
        PackedEncoder(backbone, architecture.model_type).eval()
        if packed and architecture.model_type in FAMILIES
        else backbone
    )


def _config_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json without what must not reach the native class: remote code, and a quantization it would look for."""
    return {key: value for key, value in config.items() if key not in ("auto_map", "_attn_implementation")}


def _check_report(report: Mapping[str, Any], name: str) -> None:
    mismatched = [key[0] if isinstance(key, tuple) else str(key) for key in report.get("mismatched_keys", ())]
    missing = sorted(report["missing_keys"])
    unexpected = sorted(key for key in report["unexpected_keys"] if not _NOT_BACKBONE.search(key))
    for problem, keys in (("misses", missing), ("has a wrong shape for", mismatched), ("does not know", unexpected)):
        if keys:
            raise WeightMismatchError(
                f"{name}: config.json and weights disagree; the model {problem} {keys[0]}"
                + (f" and {len(keys) - 1} more tensors" if len(keys) > 1 else "")
                + "; check that the files belong together"
            )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """transformers prints a load report and a progress bar of its own; the report is checked here instead."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
