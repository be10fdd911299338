"""Names of devices; torch is asked only where this machine may have another device than its CPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

from millpond.errors import ModelLoadError

# Files of the drivers of NVIDIA's GPUs, of theirs under Windows' Linux, and of AMD's.
_DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd", r"C:\Windows\System32\nvcuda.dll")

INSTALL = 'pip install "millpond[torch]"'


def has_torch() -> bool:
    """Whether the extra ``torch`` is installed; it is not imported for that."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def resolve_devices(device: str | Sequence[str]) -> tuple[str, ...]:
    """One device, or several of one kind joined by commas; ``auto`` is cuda, then mps, then cpu.

    Raises:
        ModelLoadError: A device that cannot be used here.
    """
    names = tuple(name.strip() for name in (device.split(",") if isinstance(device, str) else device))
    if names == ("cpu",) or (names == ("auto",) and not (_may_have_gpu() and has_torch())):
        return ("cpu",)
    if not has_torch():
        raise ModelLoadError(f'device={device!r} needs torch: {INSTALL}; without it, device="cpu"')
    from millpond.backends.torch.loading import placement

    return tuple(map(str, placement.resolve_devices(names)))


def _may_have_gpu() -> bool:
    return sys.platform == "darwin" or any(map(os.path.exists, _DRIVERS))
