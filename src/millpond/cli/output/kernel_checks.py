"""The table of ``millpond env --check``: each kernel, whether it ran, how near it came to float32, and its time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from millpond.backends.kernel_check import KernelCheck, run
from millpond.backends.native.kernels import Int8, Precision
from millpond.backends.native.self_check import encoder_rows
from millpond.cli.output.columns import aligned
from millpond.native import library

if TYPE_CHECKING:
    from millpond.values.config import EngineConfig

_PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
_INT8: tuple[Int8, ...] = ("none", "feeds", "all")


def of_machine() -> list[KernelCheck]:
    """Every row of the self-check, those of torch where it is installed; nothing is disabled."""
    rows = [row for dtype in _PRECISIONS for int8 in _INT8 for row in encoder_rows(dtype, int8)]
    found = [result for row in rows if (result := run(row)) is not None]
    if find_spec("torch") is not None:
        from millpond.backends.torch.environment import attention_checks

        found += attention_checks()
    return _with_absent(found)


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
    """A line for each kernel that has none, and why; those of torch if that was used."""
    names = {check.kernel for check in found}
    if "torch" in sys.modules:
        from millpond.backends.torch.attention.kernels import KERNELS

        for kernel in KERNELS:
            if kernel.NAME not in names:
                reason = kernel.unavailable() or "serves no such call here"
                found.append(KernelCheck(kernel=kernel.NAME, call=kernel.SERVES, obstacle=reason))
    if not any(name.startswith("encoder") for name in names):
        reason = library.absent() or "has no kernels of this precision here"
        found.append(KernelCheck(kernel="encoder", call="whole forwards on a CPU", obstacle=reason))
    return found
