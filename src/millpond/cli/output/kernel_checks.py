"""The table of ``millpond env --check``: each kernel, whether it ran, how near it came to float32, and its time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from millpond.attention.kernels import KERNELS
from millpond.attention.segments import Segments
from millpond.attention.self_check import LENGTHS, DeviceBrokenError, KernelCheck, compare, device_name, reference
from millpond.attention.signature import Masking

if TYPE_CHECKING:
    from millpond.config import EngineConfig

# Query heads, key heads and width of BERT, MiniLM and Qwen3, and what models ask of a kernel.
_HEADS = ((12, 12, 64), (12, 12, 32), (16, 8, 128))
_MASKINGS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window": 9},
    {"causal": True, "window": 9, "softcap": 2.0},
    {"bias": True},
)
_KEYS = tuple(max(1, length // 3) for length in LENGTHS)
_PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)


def of_machine() -> list[KernelCheck]:
    """The kernels on random numbers: of the table, each in the precisions that it takes, and the native encoder's."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    found: list[KernelCheck] = []
    for kernel in KERNELS:
        obstacle = kernel.unavailable()
        if obstacle is not None:
            found.append(KernelCheck(kernel=kernel.NAME, call=kernel.SERVES, obstacle=obstacle))
            continue
        for device in devices:
            for dtype in _PRECISIONS:
                found += _least(_of_kernel(kernel, device, dtype), device)
    return found + _of_encoder()


def of_model(config: EngineConfig) -> list[KernelCheck]:
    """What is compared when a model is loaded, and why the other kernels of the table were not."""
    from millpond.engine.loading import load

    found = list(load(config, check=True).checks)
    for kernel in KERNELS:
        if all(check.kernel != kernel.NAME for check in found):
            reason = kernel.unavailable() or "serves no short text of this model"
            found.append(KernelCheck(kernel=kernel.NAME, call=kernel.SERVES, obstacle=reason))
    return found


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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def as_objects(checks: list[KernelCheck]) -> list[dict[str, Any]]:
    """The checks for ``--json``."""
    return [{**dataclasses.asdict(check), "wrong": check.wrong} for check in checks]


def _of_kernel(kernel: Any, device: torch.device, dtype: torch.dtype) -> Iterator[KernelCheck]:
    """Every typical call that a kernel fits."""
    for heads, fields, keys in product(_HEADS, _MASKINGS, (None, _KEYS)):
        try:
            call = _call(heads, fields, keys, device, dtype)
            if kernel.fits(*call):
                yield compare(kernel, *call, expected=reference(*call), by_head=True)[0]
        except (MemoryError, torch.OutOfMemoryError) as error:
            yield KernelCheck(kernel=kernel.NAME, call="", obstacle=f"no memory: {error}")
        except (DeviceBrokenError, torch.AcceleratorError) as error:  # no other call would run there
            broken = f"the device computes nothing any more ({str(error).partition(chr(10))[0]})"
            yield KernelCheck(kernel=kernel.NAME, call=str(dtype).removeprefix("torch."), obstacle=broken, raised=True)
            return


def _call(
    heads: tuple[int, int, int],
    fields: dict[str, Any],
    keys: tuple[int, ...] | None,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Segments, Masking]:
    query_heads, kv_heads, dim = heads
    random = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(device=device, dtype=dtype)

    states = drawn(sum(LENGTHS), query_heads + 2 * kv_heads, dim)
    query, key, value = states.split((query_heads, kv_heads, kv_heads), dim=1)
    masking = Masking(
        scale=2 * dim**-0.5,
        **{"causal": False, **fields, "bias": drawn(query_heads, 64, 64) if fields.get("bias") else None},
    )
    return query, key, value, Segments.of(LENGTHS, device, keys=keys), masking


def _least(checks: Iterator[KernelCheck], device: torch.device) -> list[KernelCheck]:
    """One line for a kernel in a precision: that of the least similarity, with the time of all."""
    found = list(checks)
    if not found:
        return []
    worst = min(found, key=lambda check: -1.0 if check.similarity is None else check.similarity)
    call = f"{worst.call} on {device_name(device)}, the least of {len(found)}"
    return [dataclasses.replace(worst, call=call, seconds=sum(check.seconds for check in found))]


def _of_encoder() -> list[KernelCheck]:
    """Native forwards of two random models, a BERT and a Qwen3, in every precision that this processor has."""
    from millpond.native import library

    if library.kernel_table() is None:
        return [KernelCheck(kernel="encoder", call="whole forwards on a CPU", obstacle=library.absent())]
    found = []
    for name in ("bert", "qwen3"):
        for dtype in (torch.float32, torch.bfloat16):
            for int8 in ("none", "feeds", "all"):
                check = _of_random_model(name, dtype, int8)
                if check is not None:
                    found.append(dataclasses.replace(check, call=f"{name}, {check.call}"))
    return found


def _of_random_model(name: str, dtype: torch.dtype, int8: Any) -> KernelCheck | None:
    """A random model's native forward; ``None`` if this processor has no kernels for it."""
    import transformers

    from millpond.attention import interface
    from millpond.checkpoints.architectures import row_of
    from millpond.models.linear import plain_linears
    from millpond.models.load import packed_forward
    from millpond.models.native.families import may_have_plan, native_forward
    from millpond.models.native.self_check import check, expected_of

    interface.register()
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "initializer_range": 0.1,
        "attn_implementation": interface.NAME,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone: Any
        if name == "bert":
            backbone = transformers.BertModel(transformers.BertConfig(**sizes), add_pooling_layer=False)
        else:
            sizes |= {"num_key_value_heads": 2, "head_dim": 64}
            backbone = transformers.Qwen3Model(transformers.Qwen3Config(**sizes))
    row, fields = row_of(name), backbone.config.to_dict()
    assert row is not None
    with plain_linears():
        packed = packed_forward(backbone.eval().requires_grad_(False).to(dtype), row)
    if not may_have_plan(packed, int8):
        return None
    expected = expected_of(packed, row, fields)
    encoder = native_forward(packed, int8)
    return None if expected is None or encoder is None else check(encoder, expected)
