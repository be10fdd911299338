"""Packed weights on disk: a model's are packed once on a machine, and mapped by all processes that load it.

Files are in ``packed`` in millpond's cache folder. One that is damaged, or of other weights, kernels or code, is not
used but written anew. Those that were used longest ago are removed when all together take more than
``MILLPOND_PACKED_GB`` (10, or 0: weights are packed into each process's own memory), and those unused for 30 days.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from millpond.backends.kernel_check import cache_folder
from millpond.native import library

logger = logging.getLogger(__name__)

_LIMIT, _DEFAULT_GB = "MILLPOND_PACKED_GB", 10.0
_LEAST = 8 << 20  # bytes; fewer are packed in milliseconds
_HEADER = 4096  # bytes before the weights: the key and a checksum
_UNUSED = 30 * 86400.0  # seconds
_END, _PART = ".packed", ".part"  # a file that is complete, and one that is being written

Bytes = npt.NDArray[np.uint8]


def identity_of(paths: Iterable[Path]) -> list[tuple[str | int, ...]]:
    """What changes when one of the files is written or replaced; a file of the hub's cache is named by its content."""
    found: list[tuple[str | int, ...]] = []
    for path in sorted(paths):
        status = path.stat()
        times = (status.st_mtime_ns, status.st_ctime_ns)
        found.append((os.path.realpath(path), status.st_dev, status.st_ino, status.st_size, *times))
    return found


def mapped(key: str, size: int, write: Callable[[int], None]) -> Bytes | None:
    """The packed weights of a key, hexadecimal, in ``size`` bytes; ``None``: they have to be in the process's memory.

    ``write`` packs them to an address, if no file has them.
    """
    limit = _limit()
    if not _LEAST <= size <= limit:
        return None
    try:
        folder = cache_folder() / "packed"
        folder.mkdir(parents=True, exist_ok=True)
        held = _read(folder / f"{key}{_END}", key, size)
        if held is None and _write(folder, key, size, write):
            held = _read(folder / f"{key}{_END}", key, size)
            _remove_old(folder, limit, keep=f"{key}{_END}")
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no home folder
        logger.debug("packed weights are not kept: %s", error)
        return None
    return held


def _limit() -> int:
    """Most bytes that all files may take."""
    text = os.environ.get(_LIMIT, "").strip()
    try:
        return int(float(text or _DEFAULT_GB) * 1e9)
    except (ValueError, OverflowError):
        logger.warning("%s=%s is no number of gigabytes; %g is the limit", _LIMIT, text, _DEFAULT_GB)
        return int(_DEFAULT_GB * 1e9)


def _read(path: Path, key: str, size: int) -> Bytes | None:
    """A complete file's weights, mapped; ``None`` if there is no such file."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != _HEADER + size:
            return None
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel, or a file system, without huge pages of files
                whole.madvise(mmap.MADV_HUGEPAGE)
        weights = np.frombuffer(whole, np.uint8, size, _HEADER)
        if whole[:_HEADER] != _header(key, weights):
            logger.debug("%s is damaged and written anew", path)
            return None
        with suppress(OSError):  # of another user
            os.utime(path)  # when it was used
        return weights
    return None


def _header(key: str, weights: Bytes) -> bytes:
    loaded = library.portable()
    assert loaded is not None, "kernels are loaded before weights are packed"
    checksum = loaded.millpond_checksum(weights.ctypes.data, len(weights) // 8)
    return f"millpond packed weights\n{key}\n{len(weights)}\n{checksum:016x}\n".encode().ljust(_HEADER, b"\0")


def _write(folder: Path, key: str, size: int, write: Callable[[int], None]) -> bool:
    """Write a file, unless another process does so; whether there is a complete one now."""
    import fcntl  # not on Windows, where nothing is packed

    if shutil.disk_usage(folder).free < 2 * size:
        return False
    part = folder / f"{key}{_PART}"
    with part.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if not _is_at(file, part):  # another process has just completed it
            return False
        try:
            _fill(file, key, size, write)
            part.rename(folder / f"{key}{_END}")
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    return True


def _fill(file: BinaryIO, key: str, size: int, write: Callable[[int], None]) -> None:
    file.truncate(0)
    os.posix_fallocate(file.fileno(), 0, _HEADER + size)  # a full disk is an error here, not a signal later
    with mmap.mmap(file.fileno(), _HEADER + size) as whole:
        weights = np.frombuffer(whole, np.uint8, size, _HEADER)
        write(weights.ctypes.data)
        header = _header(key, weights)
        del weights  # else the map could not be closed
        whole[:_HEADER] = header


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _remove_old(folder: Path, limit: int, *, keep: str) -> None:
    """Remove what has not been used for long, and what was used longest ago where all takes more than the limit.

    Processes that have mapped a file go on with it.
    """
    files = [(path, path.stat()) for path in folder.iterdir() if path.suffix in (_END, _PART)]
    total = sum(status.st_size for _, status in files)
    for path, status in sorted(files, key=lambda pair: pair[1].st_mtime):
        unused = status.st_mtime < time.time() - _UNUSED
        if path.name == keep or not (unused or (total > limit and path.suffix == _END)):
            continue
        with suppress(OSError):
            path.unlink()
            total -= status.st_size
