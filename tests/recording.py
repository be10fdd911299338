"""A device that runs on the CPU, remembers the order of what it was told, and is as late and as forgetful as it may be.

Nothing is left to the good nature of a test: an upload spoils the host's buffer behind itself, a download is done when
somebody waits for it and not before, a replay spoils what all other graphs had as results, and buffers begin as
garbage. :func:`varlen_attn` stands in for torch's kernel of that name by what it documents: it reads lengths from the
tensor alone, and leaves rows that no sequence covers unwritten, which here is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from millpond.attention import matmul_attention, native, varlen
from millpond.attention.segments import Segments
from millpond.attention.signature import Masking

GARBAGE = 1 << 30  # no token, place or offset


class Recording:
    """A backend whose compute stream is the calling thread.

    Attributes:
        log: ``upload``, ``capture``, ``replay``, ``download`` and ``wait``, each with its number among its kind where
            order matters between them.
        refuse: Called by each capture; what it raises, the capture does.
    """

    def __init__(self, *, refuse: Callable[[], None] = lambda: None) -> None:
        self.log: list[str] = []
        self.refuse = refuse
        self.graphs: list[RecordedGraph] = []
        self.forgotten = 0
        self._downloads = 0

    @contextmanager
    def _nothing(self) -> Iterator[None]:
        yield

    def computing(self) -> AbstractContextManager[Any]:
        return self._nothing()

    def pinned(self, size: int) -> torch.Tensor:
        return torch.full((size,), GARBAGE, dtype=torch.int32)

    def buffer(self, size: int) -> torch.Tensor:
        return torch.full((size,), GARBAGE, dtype=torch.int32)

    def upload(self, host: torch.Tensor, buffer: torch.Tensor) -> None:
        assert host.shape == buffer.shape and not (host == GARBAGE).any()
        buffer.copy_(host)
        host.fill_(GARBAGE)
        self.log.append("upload")

    def download(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], RecordedEvent]:
        number, self._downloads = self._downloads, self._downloads + 1
        self.log.append(f"download {number}")
        hosts = [torch.full_like(tensor, float("nan")) for tensor in tensors]
        return hosts, RecordedEvent(self, number, list(zip(hosts, tensors, strict=True)))

    def capture(self, forward: Callable[[], Any]) -> tuple[RecordedGraph, Any]:
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
        self.log.append("drain")


class RecordedEvent:
    def __init__(self, backend: Recording, number: int, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._backend, self._number, self._copies = backend, number, copies

    @torch.inference_mode()
    def wait(self) -> None:
        for host, tensor in self._copies:
            host.copy_(tensor)
        self._backend.log.append(f"wait {self._number}")


class RecordedGraph:
    def __init__(self, backend: Recording, forward: Callable[[], Any], out: Any) -> None:
        self._backend, self._forward, self._out = backend, forward, out

    def replay(self) -> None:
        for graph in self._backend.graphs:
            graph.spoil()
        for place, new in zip(_tensors(self._out), _tensors(self._forward()), strict=True):
            place.copy_(new)
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
    """torch's packed attention, one sequence after the other."""
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


def pretend_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``varlen`` serve a CPU's calls as it serves a GPU's, over :func:`varlen_attn`; no CPU kernel comes first."""
    for kernel in (native, matmul_attention):
        monkeypatch.setattr(kernel, "fits", lambda *call: False)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(varlen, "parameters", lambda: frozenset(("scale", "window_size", "enable_gqa", "seqused_k")))

    def fits(query: Any, key: Any, value: Any, segments: Segments, masking: Masking) -> bool:
        return masking.softcap is None and masking.bias is None and varlen.limits_keys(segments, masking)

    monkeypatch.setattr(varlen, "fits", fits)
