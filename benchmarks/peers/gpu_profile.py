"""Profiles of a call on a GPU by torch.profiler: time by kernel, and time without one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Names of kernels and what they are, the first match counts.
KINDS = (
    ("attention", ("attend", "flash", "fmha", "attention")),
    ("products", ("gemm", "nvjet", "cutlass", "cublas", "splitK", "xmma")),
    ("norms", ("norm", "Norm")),
    ("activations", ("gelu", "Gelu", "GELU", "silu", "Silu", "gated")),
    ("rotations", ("rotate",)),
    ("pooling", ("segment", "pool")),
    ("embeddings", ("index", "gather", "embedding", "Embedding")),
    ("copies", ("memcpy", "Memcpy", "memset", "Memset", "copy")),
    ("elementwise", ("elementwise", "cat")),
)
_MOST = 12


def profiled(call: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of each kind and of the greatest kernels in a call, and how busy the device is."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in events:
        kernels[event.name].append((event.time_range.end - event.time_range.start) / 1e3)
    kinds: dict[str, float] = defaultdict(float)
    for name, times in kernels.items():
        kinds[kind_of(name)] += sum(times)
    greatest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:_MOST]
    wall = (max(end for _, end in spans) - spans[0][0]) / 1e3
    return {
        "wall_ms": round(wall, 2),
        "busy_ms": round(covered(spans) / 1e3, 2),
        "busy_share": round(covered(spans) / 1e3 / wall, 3),
        "kinds_ms": {name: round(each, 2) for name, each in sorted(kinds.items(), key=lambda item: -item[1])},
        "kernels": [{"name": name[:120], "count": len(ts), "ms": round(sum(ts), 2)} for name, ts in greatest],
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of sorted spans."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def kind_of(name: str) -> str:
    """What a kernel is for, by its name."""
    return next((kind for kind, words in KINDS if any(word in name for word in words)), "others")


def lines(found: dict[str, Any]) -> Iterator[str]:
    """A profile as text."""
    yield f"  wall {found['wall_ms']} ms, busy {found['busy_share']:.1%}"
    yield "  " + ", ".join(f"{name} {ms}" for name, ms in found["kinds_ms"].items())
    for kernel in found["kernels"]:
        yield f"  {kernel['ms']:9.2f} ms {kernel['count']:6}  {kernel['name'][:100]}"
