"""What the errors of a device mean: memory ran out, the device is lost, or neither."""

from __future__ import annotations

import pickle

import pytest
import torch

from millpond.engine.execute.device_errors import LostDevice, LostDevices, is_device_lost, is_out_of_memory
from millpond.errors import DeviceLostError, MillpondError

HINTS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call\nCompile with `TORCH_USE_CUDA_DSA`"
)
LOST = (
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "CUDA error: misaligned address",
    "CUDA error: an illegal instruction was encountered",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: uncorrectable NVLink error detected during the execution",
    "CUDA error: operation not supported on global/shared address space",
    "CUDA error: the launch timed out and was terminated",
    "CUDA error: hardware stack error",
)
HARMLESS = (
    "CUDA error: invalid configuration argument",
    "CUDA error: no kernel image is available for execution on the device",
    "CUDA error: operation not permitted when stream is capturing",
    "CUDA error: operation failed due to a previous error during capture",
    "CUDA error: too many resources requested for launch",
    "CUDA error: operation not supported",
    "CUDA error: invalid argument",
)
OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    'captures_underway.empty() INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":3941',
)


@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
@pytest.mark.parametrize("text", LOST)
def test_errors_that_stay_are_a_lost_device(text: str, kind: type[Exception]) -> None:
    assert is_device_lost(kind(text + HINTS))
    assert not is_out_of_memory(kind(text + HINTS))


@pytest.mark.parametrize("text", ["CUDA error: unknown error", "no words for it", ""])
def test_an_accelerator_s_error_that_nobody_knows_is_a_lost_device(text: str) -> None:
    assert is_device_lost(torch.AcceleratorError(text))
    assert not is_device_lost(RuntimeError(text))


@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
@pytest.mark.parametrize("text", HARMLESS)
def test_errors_of_one_launch_are_not(text: str, kind: type[Exception]) -> None:
    assert not is_device_lost(kind(text + HINTS))


@pytest.mark.parametrize(("code", "lost"), [(1, False), (9, False), (901, False), (700, True), (999, True)])
def test_the_number_of_an_error_counts_too(code: int, lost: bool) -> None:
    error = torch.AcceleratorError("hip error")
    error.error_code = code  # type: ignore[attr-defined]
    assert is_device_lost(error) is lost


@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
@pytest.mark.parametrize("text", OUT_OF_MEMORY)
def test_memory_that_ran_out_is_no_lost_device(text: str, kind: type[Exception]) -> None:
    assert is_out_of_memory(kind(text)) and not is_device_lost(kind(text))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), ValueError("misaligned")]
)
def test_errors_of_other_kinds_lose_no_device(error: Exception) -> None:
    assert not is_device_lost(error)


def test_the_error_names_device_reason_and_way_out() -> None:
    lost = LostDevice.of("cuda:1", torch.AcceleratorError(LOST[0] + HINTS))
    error = lost.error()
    assert isinstance(error, MillpondError) and error is not lost.error()
    assert (error.device, error.reason) == ("cuda:1", LOST[0])
    for part in ("cuda:1", LOST[0], "restart the process", "another replica"):
        assert part in str(error)
    assert "TORCH_USE_CUDA_DSA" not in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, DeviceLostError)
    assert (str(again), again.device, again.reason) == (str(error), error.device, error.reason)


def test_devices_are_counted() -> None:
    devices = LostDevices(2)
    assert (devices.left, devices.lost) == (2, ())
    first, second = (LostDevice(device=name, reason="x") for name in ("cuda:0", "cuda:1"))
    devices.add(first)
    assert (devices.left, devices.lost) == (1, (first,))
    devices.add(second)
    assert (devices.left, devices.lost) == (0, (first, second))
