"""What torch finds on this machine, for ``millpond env``: devices, threads, and its kernels, compared with float32."""

from __future__ import annotations

import torch

from millpond.backends.kernel_check import DeviceBrokenError, KernelCheck, run
from millpond.backends.torch.attention.kernels import KERNELS
from millpond.backends.torch.attention.self_check import attention_rows
from millpond.backends.torch.loading.placement import has_native_bfloat16, unusable_gpu


def facts(device: str) -> dict[str, str]:
    """What torch is and has here, by name; ``device`` is what "auto" chooses."""
    found = {
        "accelerator": _accelerator(device),
        "torch's threads": f"{torch.get_num_threads()} in an operation, {torch.get_num_interop_threads()} across",
        "torch's bfloat16": "native on this processor" if has_native_bfloat16() else "not native on this processor",
    }
    for kernel in KERNELS:  # in the order in which a call tries them
        found[f"attention {kernel.NAME}"] = f"for {kernel.SERVES}: {kernel.unavailable() or 'can run'}"
    return found


def _accelerator(device: str) -> str:
    if not torch.cuda.is_available():
        unusable = unusable_gpu()
        if unusable is not None:
            return f"none that can be used: {unusable}"
        return "none" if device == "cpu" else device
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{', '.join(names)}; CUDA {torch.version.cuda}"


def attention_checks() -> list[KernelCheck]:
    """Every attention kernel on each device; nothing is disabled."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    found: list[KernelCheck] = []
    for row in (
        row
        for device in devices
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for row in attention_rows(device, dtype)
    ):
        try:
            result = run(row)
        except (DeviceBrokenError, torch.AcceleratorError) as error:  # no other call would run there
            broken = f"the device computes nothing any more ({str(error).partition(chr(10))[0]})"
            result = KernelCheck(kernel=row.kernel, call=row.precision, obstacle=broken, raised=True)
        found += [] if result is None else [result]
    return found
