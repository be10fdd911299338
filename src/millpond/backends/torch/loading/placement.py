"""Device and precision of a model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch

from millpond.checkpoints.architecture import Architecture
from millpond.errors import ModelLoadError
from millpond.native.precision import bfloat16_is_fast

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def resolve_devices(device: str | Sequence[str]) -> tuple[torch.device, ...]:
    """One device, or several of one kind joined by commas; each gets a replica of the model."""
    names = device.split(",") if isinstance(device, str) else list(device)
    devices = tuple(resolve_device(name.strip()) for name in names)
    if len({device.type for device in devices}) > 1:
        raise ModelLoadError(f"device={names} names devices of several kinds; replicas run on devices of one kind")
    return devices


def resolve_device(device: str) -> torch.device:
    """``auto`` is cuda, then mps, then cpu; a GPU that this torch cannot use is named in a warning."""
    if device == "auto":
        if torch.cuda._is_in_bad_fork() and torch.cuda.device_count():  # is_available() would say no
            raise ModelLoadError(
                'device="auto": this process was forked from one that had used the GPU, which CUDA does not allow; '
                'start it with the "spawn" method, fork before the GPU is used, or pass device="cpu"'
            )
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        if kind == "cpu":
            _warn_of_unusable_gpu()
        return torch.device(kind)
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ModelLoadError(f"device={device!r} is not usable here: {str(error).splitlines()[0]}") from error
    return chosen


def unusable_gpu() -> str | None:
    """Why this torch, which is built for CUDA, cannot use the GPU of this machine; ``None`` if it can, or has none."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()  # by the driver's library, which an old driver has too
    if not count:
        return None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return "CUDA finds no usable device"


@cache  # one warning in a process
def _warn_of_unusable_gpu() -> None:
    reason = unusable_gpu()
    if reason is not None:
        logger.warning(
            'device="auto" is the CPU: this machine has a GPU, which torch %s for CUDA %s cannot use: %s. Update the '
            "driver, or install a torch for an older CUDA (https://pytorch.org/get-started/locally); "
            'device="cpu" chooses the CPU without this warning',
            torch.__version__,
            torch.version.cuda,
            reason,
        )


def resolve_dtype(dtype: str, device: torch.device, architecture: Architecture, stored: str | None) -> torch.dtype:
    """The precision of the backbone; pooling and heads are always float32.

    ``auto`` on a CPU is bfloat16 if the compiled kernels are faster in it, else float32; without them it is bfloat16 if
    the hardware has bfloat16 products. On a GPU it is bfloat16 if the checkpoint is stored so or its family needs the
    range, else float16.
    """
    if dtype == "auto":
        if device.type == "cpu":
            fast = bfloat16_is_fast()
            return torch.bfloat16 if (has_native_bfloat16() if fast is None else fast) else torch.float32
        return DTYPES["bfloat16" if stored == "bfloat16" else architecture.half]
    return DTYPES[dtype]


def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, or Arm's own), not by widening to float32."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported")
    return any(bool(probe()) for name in probes if (probe := getattr(torch.cpu, name, None)) is not None)
