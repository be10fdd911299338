"""A checkpoint's backbone: built from its tensors alone if it is BERT-like, else by transformers' class, packed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from millpond.backends.torch.attention import interface
from millpond.backends.torch.forwards.encoder_file import read_encoder
from millpond.backends.torch.forwards.layer_average import LayerAverage
from millpond.backends.torch.forwards.static import StaticEncoder
from millpond.backends.torch.loading.hf_tokenizer import quiet_transformers
from millpond.backends.torch.loading.quantize import quantize
from millpond.backends.torch.weights import read_tensors
from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.architectures import PLAN
from millpond.checkpoints.checkpoint import Checkpoint
from millpond.checkpoints.families.native import rename
from millpond.checkpoints.families.renaming import is_wrapped, without_prefixes
from millpond.checkpoints.head_tensors import is_head_tensor, parts_unread
from millpond.checkpoints.layouts.gliner import of_backbone
from millpond.checkpoints.layouts.sparse import StaticWeights
from millpond.checkpoints.layouts.static import read_rows, read_weights
from millpond.checkpoints.weights import tensor_shapes, weight_files
from millpond.errors import ModelLoadError, UnsupportedArchitectureError, WeightMismatchError
from millpond.support.load_progress import advancing, begin
from millpond.tasks import Quantization


def load_backbone(
    checkpoint: Checkpoint,
    architecture: Architecture,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    packed: bool = True,
) -> nn.Module:
    """The backbone in evaluation mode, on its device; without ``packed`` it is transformers' class."""
    # In a forked child torch creates its thread pool on first use, which fails if two threads do so at once, and
    # transformers loads with several. This call creates it on one thread.
    torch.set_num_threads(torch.get_num_threads())
    if isinstance(checkpoint.layout.sparse, StaticWeights):
        return StaticEncoder(read_weights(checkpoint.layout.sparse)).eval().to(device)
    if checkpoint.layout.static is not None:
        return StaticEncoder(read_rows(checkpoint.layout.static)).eval().to(device)
    mean = checkpoint.layout.layer_mean
    if mean is not None and architecture.averages_layers:
        architecture = replace(architecture, forward=PLAN)
    elif mean is not None:
        averaged = _load_by_transformers(checkpoint, architecture, device=device, dtype=dtype)
        averaged = LayerAverage(averaged.eval().to(device), mean)
        return averaged if quantization is None else quantize(averaged, quantization, device)
    forward = architecture.forward_class()
    if packed and hasattr(forward, "read"):
        read: nn.Module = forward.read(checkpoint, architecture, device=device, dtype=dtype).eval()
        return read if quantization is None else quantize(read, quantization, device)
    backbone = None
    if packed and architecture.encoder is not None and architecture.module is None:
        backbone = read_encoder(
            checkpoint.layout.transformer,
            checkpoint.config,
            architecture.encoder,
            dtype=dtype,
            is_head_tensor=partial(is_head_tensor, architecture=architecture),
        )
    if backbone is None:
        backbone = _load_by_transformers(checkpoint, architecture, device=device, dtype=dtype)
    backbone = backbone.eval().to(device)
    if packed:
        backbone = packed_forward(backbone, architecture)
    return backbone if quantization is None else quantize(backbone, quantization, device)


def packed_forward(backbone: nn.Module, architecture: Architecture) -> nn.Module:
    """``backbone`` in its family's packed forward, which may take it apart; unchanged if none fits."""
    forward = architecture.forward_class()
    if forward is None or (hasattr(forward, "fits") and not forward.fits(backbone, architecture)):
        return backbone
    module: nn.Module = forward(backbone, architecture)
    return module.eval()


def _load_by_transformers(
    checkpoint: Checkpoint, architecture: Architecture, *, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """The backbone in transformers' own class, completed by the family's own code."""
    interface.register()
    name, folder = checkpoint.source.name, checkpoint.layout.transformer
    hooks = architecture.hooks()
    model_class = _backbone_class(architecture)
    # transformers reads neither a family's own names, nor those of a wrapper, nor exports, GGUF files, unlisted shards,
    # nor GLiNER's backbone.
    stems, ends = ("model.safetensors", "pytorch_model.bin"), ("", ".index.json")
    others = not any((folder / f"{stem}{end}").is_file() for stem in stems for end in ends)
    renamed = others or checkpoint.layout.gliner is not None or hasattr(architecture.terms(), "rename")
    renamed = renamed or _wrapped(folder, architecture)
    with _loading_errors(name, model_class), quiet_transformers(), _told_to_the_bar(folder):
        hidden = ("auto_map", "_attn_implementation", "quantization_config")  # what the native class must not see
        fields = {key: value for key, value in checkpoint.config.items() if key not in hidden}
        config = model_class.config_class.from_dict(fields)
        backbone, report = model_class.from_pretrained(
            None if renamed else folder,
            config=config,
            **({"state_dict": _renamed(checkpoint, architecture)} if renamed else {}),
            dtype=dtype,
            attn_implementation=interface.NAME,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report names them
            **({"add_pooling_layer": False} if architecture.pooler else {}),
        )
    _check_report(report, architecture, checkpoint.config, name, backbone.state_dict())
    backbone.requires_grad_(False)
    finish = getattr(hooks, "finish", None)
    if finish is not None:
        backbone = finish(backbone.to(device), checkpoint)
    loaded: nn.Module = backbone
    return loaded


def _renamed(checkpoint: Checkpoint, architecture: Architecture) -> Mapping[str, torch.Tensor]:
    tensors = of_backbone(read_tensors(checkpoint.layout.transformer), checkpoint.layout.gliner)
    if is_wrapped(tensors, architecture.tensor_prefix):
        tensors = without_prefixes(tensors, architecture.tensor_prefix)
    return rename(architecture, tensors, checkpoint.config)


def _wrapped(folder: Path, architecture: Architecture) -> bool:
    """Whether names of safetensors have a wrapper's prefix; a pickle is not read twice for it."""
    if any(path.suffix != ".safetensors" for path in weight_files(folder, None)):
        return False
    return is_wrapped(tensor_shapes(folder), architecture.tensor_prefix)


@contextmanager
def _told_to_the_bar(folder: Path) -> Iterator[None]:
    """transformers' own bar of weights advances millpond's."""
    from transformers.utils import logging as transformers_logging

    set_hook = getattr(transformers_logging, "set_tqdm_hook", None)  # of transformers 5
    if set_hook is None:
        yield
        return
    size = sum(path.stat().st_size for name in ("*.safetensors", "*.bin") for path in folder.glob(name))
    begin("reading weights", size)

    def hook(factory: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.get("desc") == "Loading weights" and arguments and isinstance(arguments[0], Sized):
            return advancing(arguments[0], size // max(1, len(arguments[0])))  # type: ignore[arg-type]
        return factory(*arguments, **options)

    previous = set_hook(hook)
    try:
        yield
    finally:
        set_hook(previous)


@contextmanager
def _loading_errors(name: str, model_class: type[Any]) -> Iterator[None]:
    """What transformers raises as millpond's errors."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        if "size mismatch" in str(error) or "ignore_mismatched_sizes" in str(error):
            raise WeightMismatchError(f"{name}: a tensor has another shape than config.json says: {error}") from error
        raise ModelLoadError(f"{name} could not be loaded: {type(error).__name__}: {error}") from error
    except StrictDataclassError as error:
        raise ModelLoadError(f"{name}: config.json does not fit {model_class.__name__}: {error}") from error
    except Exception as error:  # safetensors' own error derives from nothing more specific
        if type(error).__module__.partition(".")[0] not in ("safetensors", "safetensors_rust", "builtins", "_pickle"):
            raise
        if isinstance(error, AssertionError | AttributeError | ZeroDivisionError):  # from the class, not from a reader
            raise ModelLoadError(f"{name} could not be loaded: {type(error).__name__}: {error}") from error
        raise ModelLoadError(f"{name}: a weight file is damaged: {error}; fetch it again") from error


def _backbone_class(architecture: Architecture) -> type[Any]:
    """transformers' class, or the family's replacement for it."""
    import transformers

    stand_in = getattr(architecture.hooks(), "backbone_class", None)
    named = getattr(transformers, architecture.model_class, None)
    model_class: type[Any] | None = named if stand_in is None else stand_in()
    if model_class is None:
        raise UnsupportedArchitectureError(
            f"transformers {transformers.__version__} has no {architecture.model_class}; install a newer one"
        )
    return model_class


def _check_report(
    report: Mapping[str, Any], architecture: Architecture, config: Mapping[str, Any], name: str, known: Iterable[str]
) -> None:
    mismatched = [key[0] if isinstance(key, tuple) else str(key) for key in report.get("mismatched_keys", ())]
    missing = sorted(report["missing_keys"])
    unread = (key for key in report["unexpected_keys"] if not is_head_tensor(key, architecture, config))
    unexpected = parts_unread(unread, known, name)
    for problem, keys in (("misses", missing), ("has a wrong shape for", mismatched), ("does not know", unexpected)):
        if keys:
            raise WeightMismatchError(
                f"{name}: config.json and weights disagree; the model {problem} {keys[0]}"
                + (f" and {len(keys) - 1} more tensors" if len(keys) > 1 else "")
                + "; check that the files belong together"
            )
