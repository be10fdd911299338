"""The table of ``millpond env --check``: each kernel, whether it ran, how near it came to float32, and its time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from millpond.backends.kernel_check import KernelCheck
from millpond.backends.torch.attention.kernels import KERNELS
from millpond.backends.torch.attention.self_check import DeviceBrokenError, Row, attention_rows, run
from millpond.backends.torch.native.self_check import encoder_rows
from millpond.cli.output.columns import aligned
from millpond.native import library

if TYPE_CHECKING:
    from millpond.values.config import EngineConfig


def of_machine() -> list[KernelCheck]:
    """Every row of the self-check, whatever was right before; nothing is disabled."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    rows: list[Row] = []
    for device in devices:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            rows += attention_rows(device, dtype)
    for dtype in (torch.float32, torch.bfloat16):
        rows += encoder_rows(dtype, "none") + encoder_rows(dtype, "feeds") + encoder_rows(dtype, "all")
    found: list[KernelCheck | None] = []
    for row in rows:
        try:
            found.append(run(row))
        except (DeviceBrokenError, torch.AcceleratorError) as error:  # no other call would run there
            broken = f"the device computes nothing any more ({str(error).partition(chr(10))[0]})"
            found.append(KernelCheck(kernel=row.kernel, call=row.precision, obstacle=broken, raised=True))
    return _with_absent([check for check in found if check is not None])


def of_model(config: EngineConfig) -> list[KernelCheck]:
    """The rows of the kernels that a model may use, and its graphs on a GPU."""
    from millpond.engine.loading import load

    return _with_absent(list(load(config, check=True).checks))


def table(checks: list[KernelCheck]) -> Iterator[str]:
    """The lines of the table, aligned."""
    rows = [("kernel", "result", "similarity", "ms", "call")]
    for check in checks:
        ran = check.similarity is not None
        rows.append(
            (
                check.kernel,
                "WRONG" if check.wrong else "right" if ran else "not run",
                f"{check.similarity:.6f}" if ran else "",
                f"{check.seconds * 1e3:.1f}" if ran or check.raised else "",
                check.call if check.obstacle is None else f"{check.call}: {check.obstacle}",
            )
        )
    return aligned(rows)


def _with_absent(found: list[KernelCheck]) -> list[KernelCheck]:
    """A line for each kernel that has none, and why."""
    names = {check.kernel for check in found}
    for kernel in KERNELS:
        if kernel.NAME not in names:
            reason = kernel.unavailable() or "serves no such call here"
            found.append(KernelCheck(kernel=kernel.NAME, call=kernel.SERVES, obstacle=reason))
    if not any(name.startswith("encoder") for name in names):
        reason = library.absent() or "has no kernels of this precision here"
        found.append(KernelCheck(kernel="encoder", call="whole forwards on a CPU", obstacle=reason))
    return found
