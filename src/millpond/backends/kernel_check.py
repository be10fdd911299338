"""The self-check: what each kernel gives for random numbers, beside a reference in float32 or float64.

A kernel that raises or differs is disabled for the process; what serves instead is its backend's affair. What was right
is remembered in the user's cache folder, for this build of the kernels and this processor.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.native import library
from millpond.support.cache_folder import cache_folder

logger = logging.getLogger(__name__)

# Tokens of the texts that are compared: one, two, less than a kernel's block, and a whole one.
LENGTHS = (1, 2, 17, 64)
# An attention kernel is right from this similarity of every head on: the largest errors of thousands of rows are 0.0007
# in bfloat16 with a random bias, and a window that is wider by one is off by more than 0.01.
LEAST = 0.997
_SWITCH = "MILLPOND_SELF_CHECK"

Numbers = npt.NDArray[np.floating[Any]]

# Name and reason of what serves nothing in this process. Code that is wrong on a processor is wrong for every engine.
_disabled: dict[str, str] = {}
_disabling = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """One comparison."""

    kernel: str  # what was compared, by its name in `millpond env`
    call: str  # what it computed, for people
    similarity: float | None = None  # least over all rows; `None` if it gave no result. See :func:`similarity`.
    least: float = LEAST  # the similarity that it needs
    obstacle: str | None = None  # why there is no result: it cannot run here, or it raised
    raised: bool = False  # whether it raised
    seconds: float = 0.0  # time that it took, the first call's preparations included

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


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a kernel computes, and what it must give.

    ``found`` may raise MemoryError or :class:`NotComputedError`, which say nothing about the kernel.
    """

    call: str  # in words
    found: Callable[[], Numbers]  # gives the kernel's result, `[rows, n]`
    expected: Callable[[], Numbers]  # gives the reference's, `[rows, n]`


@dataclass(frozen=True, kw_only=True)
class Row:
    """A kernel on a device in a precision."""

    kernel: str  # its name in `millpond env`
    name: str  # its name in :func:`disable`, which all its rows share
    precision: str  # for people
    device: str  # where it runs, for people
    made_of: str  # what its result depends on beside library and processor: versions, and the code that calls it
    cases: Callable[[], Iterable[Case]]  # gives what is compared
    least: float = LEAST  # the similarity that each case needs
    # What follows if it is wrong, for people
    otherwise: str = "It is not used in this process any more; the next kernel of the table serves."

    @property
    def key(self) -> str:
        """Its name in the note of what was right."""
        return f"{self.kernel} {self.precision} on {self.device}, {self.made_of}"


class NotComputedError(Exception):
    """A kernel does not compute such calls, which is no mistake: the next one serves them."""


class DeviceBrokenError(Exception):
    """The device computes nothing any more: no kernel is to blame."""


def is_on() -> bool:
    """Whether kernels are compared when a model is loaded: unless ``MILLPOND_SELF_CHECK=0`` is set."""
    return os.environ.get(_SWITCH, "").strip() != "0"


def disable(name: str, reason: str) -> bool:
    """Let a kernel serve nothing for the rest of this process; any thread may do that while others compute."""
    with _disabling:
        return _disabled.setdefault(name, reason) is reason


def disabled(name: str) -> str | None:
    """Why a kernel was disabled; ``None`` if it was not."""
    return _disabled.get(name)


def check(rows: Sequence[Row], *, remembered: bool = True) -> list[KernelCheck]:
    """Run rows, and disable what is wrong, with one warning each."""
    known = _read_note() if remembered and rows else frozenset()
    found: dict[str, KernelCheck] = {}
    for row in rows:
        if row.key in known or row.key in found or disabled(row.name) is not None:
            continue
        result = run(row)
        if result is None:
            continue
        found[row.key] = result
        if result.wrong and disable(row.name, result.finding):
            warn(f"the kernel {row.kernel!r}", result, made_of=row.made_of, consequence=row.otherwise)
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
    call = f"{worst.call} on {row.device}, the least of {len(results)}"
    return replace(worst, call=call, seconds=sum(one.seconds for one in results))


def _result(row: Row, case: Case) -> KernelCheck:
    start = perf_counter()
    words: dict[str, Any] = {
        "kernel": row.kernel,
        "call": ", ".join(part for part in (row.precision, case.call) if part),
    }
    try:
        found = case.found()
        seconds = perf_counter() - start
    except MemoryError as error:
        return KernelCheck(**words, obstacle=f"no memory: {error}")
    except NotComputedError as error:
        return KernelCheck(**words, obstacle=str(error))
    except DeviceBrokenError:
        raise
    except Exception as error:
        logger.debug("%s raised in the self-check", row.kernel, exc_info=error)
        return KernelCheck(**words, obstacle=first_line(error), raised=True, seconds=perf_counter() - start)
    return KernelCheck(**words, similarity=similarity(found, case.expected()), least=row.least, seconds=seconds)


def first_line(error: BaseException) -> str:
    """The type of an error and the beginning of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def similarity(found: Numbers, expected: Numbers) -> float:
    """The least over all rows ``[n, d]`` of the cosine, which is less here if two rows differ in length.

    It is ``2 a b / (a a + b b)``: 1 for equal rows, and 0 if a number is not finite or the shapes differ. A row that is
    a thousand times as short as the longest counts as one of that length: it is zero but for rounding.
    """
    if found.shape != expected.shape:
        return 0.0
    a, b = (rows.astype(np.float64).reshape(len(rows), -1) for rows in (found, expected))
    with np.errstate(invalid="ignore", over="ignore"):
        energy = (np.square(a).sum(-1) + np.square(b).sum(-1)) / 2
        floor = energy.max() * 1e-6 + 1e-30
        least = float((((a * b).sum(-1) + floor) / (energy + floor)).min())
    return least if least == least else 0.0  # NaN also for an infinity


def warn(subject: str, found: KernelCheck, *, made_of: str, consequence: str) -> None:
    """Log what is wrong."""
    logger.warning(
        "%s %s: %s, %s. %s Please report it with the output of `millpond env --check`; %s=0 leaves the comparison out.",
        *(subject, found.finding, found.call, made_of, consequence, _SWITCH),
    )


def processor_name() -> str:
    """The CPU as a row's device, for people."""
    return f"cpu ({library.isa() or platform.machine()})"


def code_hash(*folders: Path) -> str:
    """Of the Python sources in folders and below."""
    sources = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:16]


# --- The note of what was right -------------------------------------------------------------------------------------


def _identity() -> dict[str, str]:
    """What all results hold for; anything else is another note."""
    return {
        "kernels": f"{library.source_hash():016x}",
        "processor": _processor(),
        "instructions": f"{library.isa()} {library.absent()} {library.unavailable()}",
    }


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
