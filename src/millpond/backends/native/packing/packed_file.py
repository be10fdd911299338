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

from millpond.native import library
from millpond.support.cache_folder import cache_folder

logger = logging.getLogger(__name__)

_LIMIT, _DEFAULT_GB = "MILLPOND_PACKED_GB", 10.0
_LEAST = 8 << 20  # bytes; fewer are packed in milliseconds
_HEADER = 4096  # bytes before the weights: the key and a checksum
_UNUSED = 30 * 86400.0  # seconds
_PATIENCE, _PAUSE = 60.0, 0.02  # seconds: for another process that packs the same weights, and between two looks
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
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = _read(folder / f"{key}{_END}", key, size)
        if held is None:
            held = _written(folder, key, size, write)
            _remove_old(folder, limit, keep=f"{key}{_END}")
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no home folder
        logger.debug("packed weights are not kept: %s", error)
        return None
    return held


def usage() -> str:
    """What the files take, and where they are, for people."""
    if not (limit := _limit()):
        return f"not kept ({_LIMIT}=0)"
    try:
        folder = cache_folder() / "packed"
        sizes = [path.stat().st_size for path in folder.iterdir()] if folder.is_dir() else []
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        return f"not kept: {error}"
    where = str(folder).replace(os.path.expanduser("~"), "~", 1)  # the home has the user's name
    return f"{sum(sizes) / 1e9:.2f} of at most {limit / 1e9:g} GB in {where}"


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


def _written(folder: Path, key: str, size: int, write: Callable[[int], None]) -> Bytes | None:
    """The weights of a file that this process writes, or another one meanwhile; ``None``: neither could."""
    if shutil.disk_usage(folder).free < 2 * size:
        return None
    path, part = folder / f"{key}{_END}", folder / f"{key}{_PART}"
    with part.open("a+b") as file:
        if not _locked(file):
            return None
        try:
            held = _read(path, key, size)
            if held is None and _is_at(file, part):
                _fill(file, key, size, write)
                part.rename(path)
                held = _read(path, key, size)
        finally:
            if _is_at(file, part):
                part.unlink(missing_ok=True)
    return held


def _locked(file: BinaryIO) -> bool:
    """Whether this process has the lock: while another packs the same weights, a copy of its own would take memory."""
    import fcntl  # not on Windows, where nothing is packed

    end = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(_PAUSE)
        else:
            return True


def _fill(file: BinaryIO, key: str, size: int, write: Callable[[int], None]) -> None:
    file.truncate(0)
    os.posix_fallocate(file.fileno(), 0, _HEADER + size)  # a full disk is an error here, not a signal later
    whole = mmap.mmap(file.fileno(), _HEADER + size)
    weights = np.frombuffer(whole, np.uint8, size, _HEADER)
    write(weights.ctypes.data)
    whole[:_HEADER] = _header(key, weights)


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _remove_old(folder: Path, limit: int, *, keep: str) -> None:
    """Remove what has not been used for long, and what was used longest ago where all takes more than the limit.

    Processes that have mapped a file go on with it.
    """
    files = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process has renamed or removed it
            if path.suffix in (_END, _PART):
                files.append((path, path.stat()))
    total = sum(status.st_size for _, status in files)
    for path, status in sorted(files, key=lambda pair: pair[1].st_mtime):
        unused = status.st_mtime < time.time() - _UNUSED
        if path.name == keep or not (unused or (total > limit and path.suffix == _END)):
            continue
        with suppress(OSError):
            path.unlink()
            total -= status.st_size
