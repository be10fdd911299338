"""The self-check's rows for the attention kernels, beside SDPA in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from millpond.backends.kernel_check import (
    LENGTHS,
    Case,
    DeviceBrokenError,
    NotComputedError,
    Numbers,
    Row,
    code_hash,
    first_line,
    processor_name,
)
from millpond.backends.torch.attention import kernels, sdpa
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import Kernel, KernelError, Masking

_NO_OTHER = "No other kernel can serve these calls."
# Query heads, key heads and width of BERT, MiniLM and Qwen3, and what models ask of a kernel. Windows and caps are low,
# so that both matter.
_HEADS = ((12, 12, 64), (12, 12, 32), (16, 8, 128))
_MASKINGS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window": 9},
    {"causal": True, "window": 9, "softcap": 2.0},
    {"bias": True},
)
_SEGMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"keys": tuple(max(1, length // 3) for length in LENGTHS)},
    {"prefixes": (-1, -1, -1, 2)},
)
# Lengths of batches for which a kernel may have different code: blocks of 16, 32 and 64 queries, and more than one.
_BLOCKS = ((5, 16), (20, 3, 32), LENGTHS, (130, 7), (300,))


# --- The rows of the attention kernels ------------------------------------------------------------------------------


def attention_rows(
    device: torch.device, dtype: torch.dtype, kinds: Collection[kernels.CallKind] | None = None
) -> list[Row]:
    """The kernels of the table that this machine has, but for the reference itself.

    ``kinds``: the calls of a model, in lengths for which a kernel has different code; ``None``: typical calls.
    """
    rows = []
    for kernel in kernels.KERNELS:
        itself = kernel is kernels.KERNELS[-1] and device.type == "cpu" and dtype is torch.float32
        if kernel.unavailable() is None and not itself:
            row = Row(
                kernel=kernel.NAME,
                name=kernel.NAME,
                precision=str(dtype).removeprefix("torch."),
                device=device_name(device),
                made_of=made_of() if kinds is None else f"{made_of()}, {sorted(map(repr, kinds))}",
                cases=partial(_attention_cases, kernel, device, dtype, kinds),
            )
            rows.append(row if kernel is not kernels.KERNELS[-1] else replace(row, otherwise=_NO_OTHER))
    return rows


def _attention_cases(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, kinds: Collection[kernels.CallKind] | None
) -> Iterator[Case]:
    """Every typical call that a kernel fits, or those of a model; each head of a token is compared by itself."""
    for heads, fields, segments, lengths in _typical() if kinds is None else _of_kinds(kinds):
        shares = "prefixes" in segments  # as rerankers do, on a CPU
        if shares and (device.type != "cpu" or not fields.get("causal")):
            continue
        words = f"{heads[0]} heads of {heads[2]}" + ("" if heads[1] == heads[0] else f", {heads[1]} for keys")
        call = _call(heads, fields, segments, device, dtype, lengths)
        if not kernel.fits(*call):
            continue
        yield Case(
            call=", ".join([words, *kernels.options(*call[3:])]),
            found=partial(computed, device, partial(_attended, kernel, call)),
            expected=lambda call=call: reference(*call).flatten(0, 1).numpy(),  # type: ignore[misc]
        )


_Made = tuple[tuple[int, int, int], dict[str, Any], dict[str, Any], Sequence[int]]


def _typical() -> Iterator[_Made]:
    for heads, fields, segments in product(_HEADS, _MASKINGS, _SEGMENTS):
        yield heads, fields, segments, LENGTHS


def _of_kinds(kinds: Collection[kernels.CallKind]) -> Iterator[_Made]:
    for kind, lengths in product(sorted(kinds, key=repr), _BLOCKS):
        fields: dict[str, Any] = {"causal": kind.causal, "bias": kind.bias}
        fields |= {"window": 9} if kind.window else {}
        fields |= {"softcap": 2.0} if kind.softcap else {}
        yield (kind.heads, kind.kv_heads, kind.dim), fields, {}, lengths


def _attended(kernel: Kernel, call: tuple[Any, ...]) -> torch.Tensor:
    return kernel.attend(*call).flatten(0, 1)


def computed(device: torch.device, call: Callable[[], torch.Tensor]) -> Numbers:
    """The result of a call of torch, with the errors that say nothing about its kernel as the check knows them."""
    try:
        numbers: Numbers = call().detach().float().cpu().numpy()  # waits for it, and raises what went wrong there
        return numbers
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error
    except KernelError as error:  # no mistake: the table goes on
        raise NotComputedError(str(error)) from error
    except MemoryError:
        raise
    except Exception as error:
        if not _computes(device):
            raise DeviceBrokenError(first_line(error)) from error
        raise


def device_name(device: torch.device) -> str:
    """The device with its model, for people."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return processor_name() if device.type == "cpu" else str(device)


@cache
def made_of() -> str:
    """What a result of torch depends on beside the library and the processor."""
    here = Path(__file__).parent
    return f"torch {torch.__version__} {torch.version.cuda}, code {code_hash(here)}"


def reference(
    query: torch.Tensor,  # [tokens, heads, dim]
    key: torch.Tensor,  # [tokens, kv_heads, dim]
    value: torch.Tensor,  # [tokens, kv_heads, dim]
    segments: Segments,
    masking: Masking,
) -> torch.Tensor:  # float32 [tokens, heads, dim]
    """What a kernel must give: SDPA in float32 on the CPU."""
    here = Segments.of(segments.lengths, keys=segments.keys, prefixes=segments.continued)
    bias = None if masking.bias is None else masking.bias.float().cpu()
    q, k, v = (part.detach().float().cpu() for part in (query, key, value))
    return sdpa.attend(q, k, v, here, replace(masking, bias=bias))


def _call(
    heads: tuple[int, int, int],
    fields: dict[str, Any],
    segments: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    lengths: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Segments, Masking]:
    query_heads, kv_heads, dim = heads
    random = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(device=device, dtype=dtype)

    # Queries, keys and values side by side, as most models compute them.
    states = drawn(sum(lengths), query_heads + 2 * kv_heads, dim)
    query, key, value = states.split((query_heads, kv_heads, kv_heads), dim=1)
    bias = drawn(query_heads, max(lengths), max(lengths)) if fields.get("bias") else None
    masking = Masking(scale=2 * dim**-0.5, **{"causal": False, **fields, "bias": bias})
    return query, key, value, Segments.of(lengths, device, **segments), masking


def _computes(device: torch.device) -> bool:
    """Whether a device still computes anything: after some errors every call of CUDA fails, whatever the kernel."""
    try:
        return float(torch.ones((), device=device).add_(1)) == 2
    except RuntimeError:
        return False
