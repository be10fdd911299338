"""The self-check: what each kernel gives for random numbers, beside a reference in float32 on the CPU.

A kernel that raises or differs is disabled for the process; the next one of the table serves. What was right is
remembered in the user's cache folder, for this build of the kernels, this processor (and GPU) and this torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from millpond.backends.kernel_check import LEAST, KernelCheck
from millpond.backends.torch.attention import kernels, sdpa
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import Kernel, KernelError, Masking
from millpond.native import library

logger = logging.getLogger(__name__)

# Tokens of the texts that are compared: one, two, less than a kernel's block, and a whole one.
LENGTHS = (1, 2, 17, 64)
_SWITCH = "MILLPOND_SELF_CHECK"
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


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a kernel computes, and what it must give."""

    call: str  # in words
    found: Callable[[], torch.Tensor]  # gives the kernel's result, `[rows, n]`
    expected: Callable[[], torch.Tensor]  # gives the reference's in float32 or float64, `[rows, n]`


@dataclass(frozen=True, kw_only=True)
class Row:
    """A kernel on a device in a precision."""

    kernel: str  # its name in `millpond env`
    name: str  # its name in :func:`millpond.backends.torch.attention.kernels.disable`, which all its rows share
    precision: str  # for people
    device: torch.device  # where it runs
    cases: Callable[[], Iterable[Case]]  # gives what is compared
    least: float = LEAST  # the similarity that each case needs
    # What follows if it is wrong, for people
    otherwise: str = "It is not used in this process any more; the next kernel of the table serves."

    @property
    def key(self) -> str:
        """Its name in the note of what was right."""
        return f"{self.kernel} {self.precision} on {device_name(self.device)}"


class DeviceBrokenError(Exception):
    """The device computes nothing any more: no kernel is to blame."""


def is_on() -> bool:
    """Whether kernels are compared when a model is loaded: unless ``MILLPOND_SELF_CHECK=0`` is set."""
    return os.environ.get(_SWITCH, "").strip() != "0"


def check(rows: Sequence[Row], *, remembered: bool = True) -> list[KernelCheck]:
    """Run rows, and disable what is wrong, with one warning each."""
    known = _read_note() if remembered else frozenset()
    found: dict[str, KernelCheck] = {}
    for row in rows:
        if row.key in known or row.key in found or kernels.disabled(row.name) is not None:
            continue
        result = run(row)
        if result is None:
            continue
        found[row.key] = result
        if result.wrong and kernels.disable(row.name, result.finding):
            warn(f"the kernel {row.kernel!r}", result, consequence=row.otherwise)
    right = {key for key, result in found.items() if result.similarity is not None and not result.wrong}
    if remembered and right:
        _write_note(known | right)
    return list(found.values())


def run(row: Row) -> KernelCheck | None:
    """The result of a row: that of the case with the least similarity, and the time of all; ``None`` without a case."""
    results = [_result(row, case) for case in row.cases()]
    if not results:
        return None
    worst = min(results, key=lambda one: -1.0 if one.raised else 2.0 if one.similarity is None else one.similarity)
    call = f"{worst.call} on {device_name(row.device)}, the least of {len(results)}"
    return replace(worst, call=call, seconds=sum(one.seconds for one in results))


def _result(row: Row, case: Case) -> KernelCheck:
    start = perf_counter()
    words: dict[str, Any] = {
        "kernel": row.kernel,
        "call": ", ".join(part for part in (row.precision, case.call) if part),
    }
    try:
        found = case.found().detach().cpu()  # waits for it, and raises what went wrong on the device
        seconds = perf_counter() - start
        near = similarity(found, case.expected())
    except (MemoryError, torch.OutOfMemoryError) as error:  # says nothing about the kernel
        return KernelCheck(**words, obstacle=f"no memory: {error}")
    except KernelError as error:  # no mistake: the table goes on
        return KernelCheck(**words, obstacle=str(error))
    except Exception as error:
        logger.debug("%s raised in the self-check", row.kernel, exc_info=error)
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        if not _computes(row.device):
            raise DeviceBrokenError(reason) from error
        return KernelCheck(**words, obstacle=reason, raised=True, seconds=perf_counter() - start)
    return KernelCheck(**words, similarity=near, least=row.least, seconds=seconds)


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


def warn(subject: str, found: KernelCheck, *, consequence: str) -> None:
    """Log what is wrong."""
    logger.warning(
        "%s %s: %s, torch %s. %s Please report it with the output of `millpond env --check`; %s=0 leaves the "
        "comparison out.",
        *(subject, found.finding, found.call, torch.__version__, consequence, _SWITCH),
    )


def device_name(device: torch.device) -> str:
    """The device with its model, for people."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({library.isa() or platform.machine()})" if device.type == "cpu" else str(device)


# --- The rows of the attention kernels ------------------------------------------------------------------------------


def attention_rows(device: torch.device, dtype: torch.dtype) -> list[Row]:
    """The kernels of the table that this machine has, but for the reference itself."""
    rows = []
    for kernel in kernels.KERNELS:
        itself = kernel is kernels.KERNELS[-1] and device.type == "cpu" and dtype is torch.float32
        if kernel.unavailable() is None and not itself:
            row = Row(
                kernel=kernel.NAME,
                name=kernel.NAME,
                precision=str(dtype).removeprefix("torch."),
                device=device,
                cases=partial(_attention_cases, kernel, device, dtype),
            )
            rows.append(row if kernel is not kernels.KERNELS[-1] else replace(row, otherwise=_NO_OTHER))
    return rows


def _attention_cases(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Every typical call that a kernel fits; each head of a token is compared by itself."""
    for heads, fields, segments in product(_HEADS, _MASKINGS, _SEGMENTS):
        shares = "prefixes" in segments  # as rerankers do, on a CPU
        if shares and (device.type != "cpu" or not fields.get("causal")):
            continue
        words = f"{heads[0]} heads of {heads[2]}" + ("" if heads[1] == heads[0] else f", {heads[1]} for keys")
        call = _call(heads, fields, segments, device, dtype)
        if not kernel.fits(*call):
            continue
        yield Case(
            call=", ".join([words, *kernels.options(*call[3:])]),
            found=lambda call=call: kernel.attend(*call).flatten(0, 1),  # type: ignore[misc]
            expected=lambda call=call: reference(*call).flatten(0, 1),  # type: ignore[misc]
        )


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Segments, Masking]:
    query_heads, kv_heads, dim = heads
    random = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(device=device, dtype=dtype)

    # Queries, keys and values side by side, as most models compute them.
    states = drawn(sum(LENGTHS), query_heads + 2 * kv_heads, dim)
    query, key, value = states.split((query_heads, kv_heads, kv_heads), dim=1)
    bias = drawn(query_heads, max(LENGTHS), max(LENGTHS)) if fields.get("bias") else None
    masking = Masking(scale=2 * dim**-0.5, **{"causal": False, **fields, "bias": bias})
    return query, key, value, Segments.of(LENGTHS, device, **segments), masking


def _computes(device: torch.device) -> bool:
    """Whether a device still computes anything: after some errors every call of CUDA fails, whatever the kernel."""
    try:
        return float(torch.ones((), device=device).add_(1)) == 2
    except RuntimeError:
        return False


# --- The note of what was right -------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where millpond keeps what it can make again: ``millpond`` in ``XDG_CACHE_HOME``, else in ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "millpond"


def _identity() -> dict[str, str]:
    """What a result holds for; anything else is another note."""
    return {
        "kernels": f"{library.source_hash():016x} {_code_hash()}",
        "processor": _processor(),
        "instructions": f"{library.isa()} {library.absent()} {library.unavailable()}",
        "torch": f"{torch.__version__} {torch.version.cuda}",
    }


def _code_hash() -> str:
    """Of the kernels in Python, and of what the native encoder is told."""
    here = Path(__file__).parent
    sources = sorted([*here.glob("*.py"), *(here.parent / "models" / "native").glob("*.py")])
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def _processor() -> str:
    """Its model, as far as the system tells."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        named = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in file}
        return " ".join(named.get(field, "") for field in ("model name", "stepping", "microcode"))
    return platform.processor() or platform.machine()


def _note(identity: dict[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "self-check" / f"{digest}.json"


def _read_note() -> frozenset[str]:
    """The keys of the rows that were right; none if the note is missing, damaged, or of something else."""
    try:
        identity = _identity()
        content = json.loads(_note(identity).read_text(encoding="utf-8"))
        if content["of"] == identity and all(isinstance(key, str) for key in content["right"]):
            return frozenset(content["right"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:  # RuntimeError: no home folder
        logger.debug("the self-check remembers nothing: %s", error)
    return frozenset()


def _write_note(right: frozenset[str] | set[str]) -> None:
    """Replace the note; a folder that cannot be written to leaves it as it is."""
    try:
        identity = _identity()
        path = _note(identity)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        draft.write_text(json.dumps({"of": identity, "right": sorted(right)}, indent=1), encoding="utf-8")
        draft.replace(path)
    except (OSError, RuntimeError) as error:
        logger.debug("the self-check could not remember its results: %s", error)
