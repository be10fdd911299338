"""The self-check of the attention kernels: what each gives, beside float32 SDPA on the CPU, call by call.

A forward pass under :meth:`CallChecks.watching` is served as ever, and each of its calls is compared: the kernel that
the table chooses computes it on its device, SDPA computes it in float32 on the CPU. So a forward through real weights
needs no second copy of them, and a difference is that of one kernel. A kernel that raises or differs is taken out of
the table, and the next one serves, and is compared.

Real states hide mistakes: an average of sixty-four values hardly changes with one of them, and a window of 128 does
nothing to a text of 64 tokens. So the first call of each kind is repeated with random numbers in its place, with a
narrow window and a low softcap if it has one.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from millpond.attention import kernels, sdpa
from millpond.attention.segments import Segments
from millpond.attention.signature import Kernel, KernelError, Masking
from millpond.native import library

logger = logging.getLogger(__name__)

# Tokens of the texts that are compared: one, two, less than a kernel's block, and a whole one.
LENGTHS = (1, 2, 17, 64)
# A kernel's result is right from this similarity on: the numbers of a row are off by less than a twentieth of its
# length. Rounding to bfloat16 is off by a two-hundredth.
LEAST = 0.999
# The same for each head of a call of random numbers: the largest errors of thousands of rows, which in bfloat16 with a
# random bias are 0.0007.
LEAST_BY_HEAD = 0.997
_SWITCH = "MILLPOND_SELF_CHECK"
# A random call has these where the real one has a window or a softcap, so that both matter.
_NARROW, _LOW_CAP = 9, 2.0
# The size of random queries: scores of this deviation, at which a wrong scale or mask shows.
_SPREAD = 2.0

_told: set[str] = set()
_telling = threading.Lock()
_probed: set[tuple[Any, ...]] = set()  # kinds of calls that were compared with random numbers in this process


@dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """One comparison.

    Attributes:
        kernel: What was compared, by its name in ``millpond env``.
        call: What it computed, for people.
        similarity: Least over all rows; ``None`` if it gave no result. See :func:`similarity`.
        least: The similarity that it needs.
        obstacle: Why there is no result: it cannot run here, or it raised.
        raised: Whether it raised.
        seconds: Time that it took, the first call's preparations included.
    """

    kernel: str
    call: str
    similarity: float | None = None
    least: float = LEAST
    obstacle: str | None = None
    raised: bool = False
    seconds: float = 0.0

    @property
    def wrong(self) -> bool:
        """Whether it raised, or its result is not the expected one."""
        return self.raised or (self.similarity is not None and not self.similarity >= self.least)

    @property
    def finding(self) -> str:
        """What was found, in words."""
        if self.raised:
            return f"raises here ({self.obstacle})"
        if self.similarity is None:
            return f"did not run ({self.obstacle})"
        if self.wrong:
            return f"gives other results here than float32 (similarity {self.similarity:.4f}, right from {self.least})"
        return f"agrees (similarity {self.similarity:.6f})"


class BudgetSpentError(Exception):
    """The self-check has taken as long as it may: the rest of the forward pass is left out."""


class DeviceBrokenError(Exception):
    """The device does not compute, or every kernel raises, the last one included: none of them is to blame."""


def is_on() -> bool:
    """Whether kernels are compared when a model is loaded: unless ``MILLPOND_SELF_CHECK=0`` is set."""
    return os.environ.get(_SWITCH, "").strip() != "0"


def similarity(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The least over all rows ``[n, d]`` of the cosine, which is less here if two rows differ in length.

    It is ``2 a b / (a a + b b)``: 1 for equal rows, and 0 if a number is not finite or the shapes differ. A row that is
    a thousand times as short as the longest counts as one of that length: it is zero but for rounding.
    """
    if found.shape != expected.shape:
        return 0.0
    a, b = (rows.detach().to(device="cpu", dtype=torch.float64).flatten(1) for rows in (found, expected))
    energy = (a.square().sum(-1) + b.square().sum(-1)) / 2
    floor = energy.max() * 1e-6 + 1e-30
    least = float((((a * b).sum(-1) + floor) / (energy + floor)).min())
    return least if least == least else 0.0  # NaN also for an infinity


def token_ids(count: int, vocabulary: int, *, start: int = 0) -> npt.NDArray[np.int32]:
    """``[count]`` ids from all over the vocabulary, others for another ``start``.

    numpy's random numbers are a library of their own, which takes time to load.
    """
    places = np.arange(start, start + count, dtype=np.uint64)
    ids: npt.NDArray[np.int32] = ((places * 2654435761 + 12345) % vocabulary).astype(np.int32)
    return ids


def warn_once(subject: str, check: KernelCheck, *, device: str, consequence: str) -> None:
    """One warning in a process for each subject; the same again is logged as information."""
    with _telling:
        level = logging.INFO if subject in _told else logging.WARNING
        _told.add(subject)
    logger.log(
        level,
        "%s %s: %s on %s, torch %s. %s Please report it with the output of `millpond env --check`; %s=0 leaves the "
        "comparison out.",
        subject,
        check.finding,
        check.call,
        device,
        torch.__version__,
        consequence,
        _SWITCH,
    )


def device_name(device: torch.device) -> str:
    """The device with its model, for people."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({library.isa() or platform.machine()})" if device.type == "cpu" else str(device)


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


class CallChecks:
    """Compares the calls of forward passes; used by one thread.

    Attributes:
        results: Every comparison, in order.
    """

    def __init__(self, *, seconds: float | None = None) -> None:
        """``seconds``: so long after the first call, which loads libraries, no other is compared; ``None``: all are."""
        self.results: list[KernelCheck] = []
        self._seconds = seconds
        self._end: float | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compare every call of this context; the first one after the budget raises :class:`BudgetSpentError`."""
        token = kernels.STAND_IN.set(self._attend)
        try:
            yield
        finally:
            kernels.STAND_IN.reset(token)

    def probe(self, masking: Masking, *, heads: tuple[int, int, int], like: torch.Tensor, **options: Any) -> None:
        """Compare what serves a call of random numbers.

        Args:
            masking: Its masking.
            heads: Query heads, key heads and width of the call.
            like: Gives device and precision.
            options: ``keys`` and ``prefixes`` of :meth:`Segments.of`.
        """
        query_heads, kv_heads, dim = heads
        total = sum(LENGTHS)
        random = torch.Generator().manual_seed(0)
        # Queries, keys and values side by side, as most models compute them.
        drawn = torch.randn((total, query_heads + 2 * kv_heads, dim), generator=random)
        drawn[:, :query_heads] *= _SPREAD / (abs(masking.scale) * dim**0.5 or 1.0)
        q, k, v = drawn.to(device=like.device, dtype=like.dtype).split((query_heads, kv_heads, kv_heads), dim=1)
        self._served(q, k, v, Segments.of(LENGTHS, like.device, **options), masking, by_head=True)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, masking: Masking
    ) -> torch.Tensor:
        if self._end is not None and perf_counter() > self._end:
            raise BudgetSpentError
        if _is_reference(kernels.select(query, key, value, segments, masking), query):
            out = kernels.KERNELS[-1].attend(query, key, value, segments, masking)
        else:
            out = self._served(query, key, value, segments, masking)
        self._probe_kind(query, key, segments, masking)
        if self._end is None and self._seconds is not None:
            self._end = perf_counter() + self._seconds
        return out

    def _probe_kind(self, query: torch.Tensor, key: torch.Tensor, segments: Segments, masking: Masking) -> None:
        """Compare random calls of a kind that this process has not compared yet."""
        kind = (
            *(str(query.device), query.dtype, query.shape[1:], key.shape[1:], masking.causal, masking.scale),
            *(part is None for part in (masking.window, masking.softcap, masking.bias, segments.keys)),
            *((kernel.NAME, kernel.attend) for kernel in kernels.KERNELS),  # a new kernel is compared anew
        )
        if kind in _probed:
            return
        bias = masking.bias
        if bias is not None:
            random = torch.Generator().manual_seed(1)
            bias = torch.randn((query.shape[1], max(LENGTHS), max(LENGTHS)), generator=random).to(bias)
        narrow = replace(
            masking,
            window=None if masking.window is None else min(masking.window, _NARROW),
            softcap=None if masking.softcap is None else min(masking.softcap, _LOW_CAP),
            bias=bias,
        )
        variants: list[dict[str, Any]] = [{}]
        if segments.keys is not None:
            variants.append({"keys": [max(1, length // 3) for length in LENGTHS]})
        if masking.causal and bias is None and query.device.type == "cpu":  # where rerankers share prefixes
            variants.append({"prefixes": (-1, -1, -1, 2)})
        for options in variants:
            self.probe(narrow, heads=(query.shape[1], key.shape[1], key.shape[2]), like=query, **options)
        _probed.add(kind)

    def _served(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: Segments,
        masking: Masking,
        *,
        by_head: bool = False,
    ) -> torch.Tensor:
        """The result of the first kernel whose result is right; the wrong ones before it are taken out."""
        call = (query, key, value, segments, masking)
        expected: torch.Tensor | None = None
        for _ in range(len(kernels.KERNELS) + 1):  # each turn takes one out, but for kinds that no longer fit
            kernel = kernels.select(*call)
            if _is_reference(kernel, query):
                return kernel.attend(*call)
            expected = reference(*call) if expected is None else expected
            if not expected.isfinite().all():  # of weights that overflow in this precision: there is no right result
                return kernel.attend(*call)
            check, out = compare(kernel, *call, expected=expected, by_head=by_head)
            self.results.append(check)
            if out is not None and not check.wrong:
                return out
            if not check.wrong and kernels.select(*call) is not kernel:
                logger.warning("%s", check.obstacle)  # it no longer fits such calls
                continue
            last = kernel is kernels.KERNELS[-1]
            if last and check.raised:
                raise DeviceBrokenError(check.obstacle)
            subject = f"the attention kernel {kernel.NAME!r}"
            if last:
                nothing = "No other kernel can serve these calls."
                warn_once(subject, check, device=device_name(query.device), consequence=nothing)
                return expected.to(query)
            if kernels.withdraw(kernel, check.finding):
                rest = "It is not used in this process any more; the next kernel of the table serves."
                warn_once(subject, check, device=device_name(query.device), consequence=rest)
        return reference(*call).to(query)


def compare(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    masking: Masking,
    *,
    expected: torch.Tensor,  # float32 [tokens, heads, dim], on the CPU
    by_head: bool = False,
) -> tuple[KernelCheck, torch.Tensor | None]:
    """What a kernel gives for a call that fits, beside what it must give, and the comparison.

    Args:
        kernel: The kernel.
        query: As of :meth:`Kernel.attend`.
        key: As of :meth:`Kernel.attend`.
        value: As of :meth:`Kernel.attend`.
        segments: As of :meth:`Kernel.attend`.
        masking: As of :meth:`Kernel.attend`.
        expected: See :func:`reference`.
        by_head: Compare each head of a token, not all heads of it at once.

    Raises:
        DeviceBrokenError: The kernel raised, and the device does not compute anything any more.
        MemoryError: There is no memory for the call, which says nothing about the kernel.
        torch.OutOfMemoryError: As above, on the device.
    """
    words = describe(query, key, segments, masking)
    start = perf_counter()
    try:
        out = kernel.attend(query, key, value, segments, masking)
        found = out.detach().cpu()  # waits for it, and raises what went wrong on the device
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except KernelError as error:  # no mistake: the table goes on
        return KernelCheck(kernel=kernel.NAME, call=words, obstacle=str(error)), None
    except Exception as error:
        logger.debug("%s raised in the self-check", kernel.NAME, exc_info=error)
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        if not _computes(query.device):
            raise DeviceBrokenError(reason) from error
        return KernelCheck(
            kernel=kernel.NAME, call=words, obstacle=reason, raised=True, seconds=perf_counter() - start
        ), None
    seconds = perf_counter() - start
    rows = 2 if by_head else 1
    near = 0.0
    if found.shape == expected.shape:
        near = similarity(found.flatten(0, rows - 1), expected.flatten(0, rows - 1))
    least = LEAST_BY_HEAD if by_head else LEAST
    return KernelCheck(kernel=kernel.NAME, call=words, similarity=near, least=least, seconds=seconds), out


def describe(query: torch.Tensor, key: torch.Tensor, segments: Segments, masking: Masking) -> str:
    """A call in a few words."""
    heads, dim = query.shape[1:]
    parts = [f"{str(query.dtype).removeprefix('torch.')}", f"{heads} heads of {dim}"]
    if key.shape[1] != heads:
        parts.append(f"{key.shape[1]} for keys")
    return ", ".join([*parts, *kernels.options(segments, masking)])


def _computes(device: torch.device) -> bool:
    """Whether a device still computes anything: after some errors every call of CUDA fails, whatever the kernel."""
    try:
        return float(torch.ones((), device=device).add_(1)) == 2
    except RuntimeError:
        return False


def _is_reference(kernel: Kernel, query: torch.Tensor) -> bool:
    """Whether the call would be compared with itself."""
    return kernel is kernels.KERNELS[-1] and query.device.type == "cpu" and query.dtype is torch.float32
