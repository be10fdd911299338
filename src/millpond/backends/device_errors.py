"""Device errors: memory that ran out, and devices that are lost to the process."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from millpond.errors import DeviceLostError

# Of a plain RuntimeError: torch's allocators, cuBLAS and cuDNN without a workspace, and an assertion of torch's CUDA
# allocator. In torch 2.11 and 2.12 a capture that ends with an error leaves the allocator believing that it goes on,
# and a later attempt to free memory, made because memory is short, then fails with that assertion.
_OUT_OF_MEMORY = (
    "out of memory",
    "not enough memory",
    "DefaultCPUAllocator: can't allocate",
    "_STATUS_ALLOC_FAILED",
    "captures_underway",
)

# After these errors every call of the CUDA runtime in this process fails, whatever it is asked to do.
_LOST = (
    "an illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "misaligned address",
    "an illegal instruction",
    "invalid program counter",
    "hardware stack error",
    "operation not supported on global/shared address space",
    "the launch timed out",
    "uncorrectable",  # errors of ECC memory and of NVLink
    "context is destroyed",
    "device lost",
    "device is lost",
    "gpu is lost",
    "fallen off the bus",
    "no cuda-capable device",
    "busy or unavailable",
    "driver shutting down",
)

# Errors of one call of the runtime, after which the device goes on: what was asked for cannot be done. Of the rest of
# the errors nothing good is known. Numbers of ``cudaError_t``, and parts of their messages.
_HARMLESS_CODES = frozenset((1, 9, 98, 200, 209, 218, 222, 300, 400, 500, 600, 701, 720, 800, 801, *range(900, 911)))
_HARMLESS = (
    "invalid argument",
    "invalid configuration argument",
    "invalid device function",
    "device kernel image is invalid",
    "no kernel image is available",
    "invalid resource handle",
    "too many resources requested",
    "too many blocks in cooperative launch",
    "operation not permitted",
    "operation not supported",
    "captur",  # of a stream: its error ends the capture, and nothing else
)

_MAX_REASON = 300


@dataclass(frozen=True, kw_only=True)
class LostDevice:
    """A device that no batch can run on any more."""

    device: str
    reason: str  # its error, in one line

    @classmethod
    def of(cls, device: str, error: BaseException) -> LostDevice:
        """``device``, lost by ``error``."""
        lines = str(error).strip().splitlines()
        return cls(device=device, reason=(lines[0] if lines else type(error).__name__)[:_MAX_REASON])

    def error(self) -> DeviceLostError:
        """A new error for a caller: one that was raised keeps a traceback."""
        return DeviceLostError(
            f"the device {self.device} is lost ({self.reason}): nothing runs on it again in this process; "
            "restart the process, or send the call to another replica",
            device=self.device,
            reason=self.reason,
        )


class LostDevices:
    """Those of an engine's devices that are lost; thread-safe."""

    def __init__(self, count: int = 1) -> None:
        """``count``: the engine's devices."""
        self._count = count
        self._lock = threading.Lock()
        self._lost: tuple[LostDevice, ...] = ()

    def add(self, lost: LostDevice) -> None:
        """One more device is lost."""
        with self._lock:
            self._lost += (lost,)

    @property
    def lost(self) -> tuple[LostDevice, ...]:
        """In the order of their loss."""
        return self._lost

    @property
    def left(self) -> int:
        """Number of devices that work."""
        return max(0, self._count - len(self._lost))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on any device."""
    if isinstance(error, MemoryError) or _is_of_torch(error, "OutOfMemoryError"):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _OUT_OF_MEMORY)


def is_device_lost(error: BaseException) -> bool:
    """Whether an error means that the device is lost to this process, so that trying again is of no use.

    An error of the accelerator that is not known to be harmless counts: a batch that is halved down to single texts on
    a broken device fails them all, and so do the batches after it.
    """
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    text = str(error).lower()
    if any(phrase in text for phrase in _LOST):
        return True
    if not _is_of_torch(error, "AcceleratorError"):
        return False
    code = getattr(error, "error_code", None)  # set by torch's C++
    return code not in _HARMLESS_CODES and not any(phrase in text for phrase in _HARMLESS)


def _is_of_torch(error: BaseException, name: str) -> bool:
    """Whether an error is of torch's class of this name, which is not imported for it."""
    return any(kind.__name__ == name and kind.__module__.startswith("torch") for kind in type(error).__mro__)
