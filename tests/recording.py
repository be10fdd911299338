"""A GPU backend that runs on the CPU, records the order of operations, and is as late and destructive as a GPU may be.

An upload overwrites the host's buffer afterwards, a download happens only in ``wait``, a replay overwrites the results
of all other graphs, and new buffers are filled with garbage. So code that reads a buffer too early or too late fails a
test. :func:`varlen_attn` replaces torch's kernel of that name, and does only what that documents: it reads lengths from
the tensor alone, and does not write rows that belong to no sequence (they are NaN here).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from millpond.backends.torch.attention import matmul_attention, native, varlen
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import Masking

GARBAGE = 1 << 30  # not a valid token, position or offset


class Recording:
    """A backend whose compute stream is the calling thread.

    Attributes:
        log: The operations in order: ``upload``, ``capture``, ``replay``, ``drain``, and ``download`` and ``wait`` with
            the number of the download.
        refuse: Called by each capture, which fails with the exception that this raises.
        fault: Called by each operation with its name; the operation fails with the exception that this raises.
        lost: Raised by every operation, as by a device that is lost; ``None``: it works.
    """

    def __init__(self, *, refuse: Callable[[], None] = lambda: None) -> None:
        self.log: list[str] = []
        self.refuse = refuse
        self.fault: Callable[[str], None] = lambda operation: None
        self.lost: Exception | None = None
        self.graphs: list[RecordedGraph] = []
        self.forgotten = 0
        self._downloads = 0

    def reach(self, operation: str) -> None:
        """An operation begins."""
        if self.lost is not None:
            raise self.lost
        self.fault(operation)

    @contextmanager
    def _nothing(self) -> Iterator[None]:
        yield

    def computing(self) -> AbstractContextManager[Any]:
        return self._nothing()

    def copying(self) -> AbstractContextManager[Any]:
        self.reach("copying")
        return self._nothing()

    def pinned(self, size: int) -> torch.Tensor:
        return torch.full((size,), GARBAGE, dtype=torch.int32)

    def buffer(self, size: int) -> torch.Tensor:
        return torch.full((size,), GARBAGE, dtype=torch.int32)

    def upload(self, host: torch.Tensor, buffer: torch.Tensor) -> None:
        self.reach("upload")
        assert host.shape == buffer.shape and not (host == GARBAGE).any()
        buffer.copy_(host)
        host.fill_(GARBAGE)
        self.log.append("upload")

    def download(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], RecordedEvent]:
        self.reach("download")
        number, self._downloads = self._downloads, self._downloads + 1
        self.log.append(f"download {number}")
        hosts = [torch.full_like(tensor, float("nan")) for tensor in tensors]
        return hosts, RecordedEvent(self, number, list(zip(hosts, tensors, strict=True)))

    def capture(self, forward: Callable[[], Any]) -> tuple[RecordedGraph, Any]:
        self.reach("capture")
        forward()
        self.refuse()
        out = forward()
        self.log.append("capture")
        graph = RecordedGraph(self, forward, out)
        self.graphs.append(graph)
        graph.spoil()  # capturing runs nothing
        return graph, out

    def forget(self) -> None:
        self.forgotten += 1

    def drain(self) -> None:
        self.reach("drain")
        self.log.append("drain")


class RecordedEvent:
    def __init__(self, backend: Recording, number: int, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._backend, self._number, self._copies = backend, number, copies

    @torch.inference_mode()
    def wait(self) -> None:
        self._backend.reach("wait")
        for host, tensor in self._copies:
            host.copy_(tensor)
        self._backend.log.append(f"wait {self._number}")


class RecordedGraph:
    def __init__(self, backend: Recording, forward: Callable[[], Any], out: Any) -> None:
        self._backend, self._forward, self._out = backend, forward, out

    def replay(self) -> None:
        self._backend.reach("replay")
        for graph in self._backend.graphs:
            graph.spoil()
        for result, new in zip(_tensors(self._out), _tensors(self._forward()), strict=True):
            result.copy_(new)
        self._backend.log.append("replay")

    def spoil(self) -> None:
        for tensor in _tensors(self._out):
            tensor.fill_(float("nan"))


def _tensors(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    parts = out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """torch's packed attention, computed one sequence at a time."""
    out = torch.full_like(query, float("nan"))
    groups = query.shape[1] // key.shape[1]
    assert groups == 1 or enable_gqa
    ends = cu_seq_q.tolist()
    for i, (start, stop) in enumerate(pairwise(ends)):
        length = stop - start
        assert 0 <= length <= min(max_q, max_k)
        q, k, v = (states[start:stop].transpose(0, 1) for states in (query, key, value))
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = q @ k.transpose(1, 2) * scale
        distance = torch.arange(length)[None] - torch.arange(length)[:, None]  # of key from query
        left, right = window_size
        allowed = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            allowed &= distance >= -left
        if right >= 0:
            allowed &= distance <= right
        if seqused_k is not None:
            allowed &= (torch.arange(length) < seqused_k[i])[None]
        scores = scores.masked_fill(~allowed, float("-inf"))
        out[start:stop] = (scores.softmax(-1).nan_to_num(nan=0.0) @ v).transpose(0, 1)
    return out


def backends_of_engines(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """Every engine that is loaded from here on is torch's, with a recording backend, and varlen serves it.

    Returns the recording backends.
    """
    pretend_varlen(monkeypatch)
    monkeypatch.setattr("millpond.backends.native.backend.cannot_run", lambda *model: "the backend records")
    made: list[Recording] = []

    def backend(device: torch.device) -> Recording:
        made.append(Recording())
        return made[-1]

    monkeypatch.setattr("millpond.backends.torch.backend._streams", backend)
    return made


def pretend_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel ``varlen`` serve CPU tensors by :func:`varlen_attn`, before all CPU kernels."""
    for kernel in (native, matmul_attention):
        monkeypatch.setattr(kernel, "fits", lambda *call: False)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(varlen, "parameters", lambda: frozenset(("scale", "window_size", "enable_gqa", "seqused_k")))

    def fits(query: Any, key: Any, value: Any, segments: Segments, masking: Masking) -> bool:
        return masking.softcap is None and masking.bias is None and varlen.limits_keys(segments, masking)

    monkeypatch.setattr(varlen, "fits", fits)
    monkeypatch.setattr(varlen, "unavailable", lambda: None)
