"""Notices: a thread that says which paths below a folder have changed, by what the system notices."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from millpond.errors import InvalidRequestError, MissingExtraError

logger = logging.getLogger(__name__)

# Changes are said together that come within a step, and after so long at the latest.
_STEP, _DEBOUNCE = 100, 1000  # milliseconds
# A folder that was replaced, as by a disk that is mounted, is noticed by its number.
_LOOK_SECONDS = 5


class Notices:
    """Calls ``changed`` with paths, and ``lost`` when the folder is another one: then nothing is known of it.

    Args:
        folder: The folder.
        changed: Takes the paths of what changed.
        lost: Called when changes may have been missed.
        recursive: Whether the folders below are watched, too.
    """

    def __init__(
        self,
        folder: Path,
        changed: Callable[[Iterable[str]], None],
        lost: Callable[[], None],
        *,
        recursive: bool = True,
    ) -> None:
        try:
            self._library: Any = import_module(
                "watchfiles._rust_notify"
            )  # its documented backend, which begins at once
        except ImportError:
            raise MissingExtraError(
                "watching files needs watchfiles: pip install 'millpond[watch]'; or look every few seconds, by poll=5"
            ) from None
        self._folder, self._changed, self._lost, self._recursive = folder, changed, lost, recursive
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="millpond-notices", daemon=True)

    def start(self) -> None:
        """Begin, once the system watches the folder."""
        self._open()
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _open(self) -> None:
        self._identity = _identity(self._folder)
        try:
            self._watcher = self._library.RustNotify([str(self._folder)], False, False, 0, self._recursive, True)
        except OSError as error:
            raise InvalidRequestError(
                f"{str(self._folder)!r} cannot be watched ({error}); raise the system's limit "
                "(fs.inotify.max_user_watches), or look every few seconds, by poll=5"
            ) from error

    def _work(self) -> None:
        while not self._ended.is_set():
            try:
                found = self._watcher.watch(_DEBOUNCE, _STEP, _LOOK_SECONDS * 1000, self._ended)
            except RuntimeError as error:  # a name that is no UTF-8: this watcher says nothing else from then on
                self._again(f"what changed in {self._folder} is not known ({error}); all of its files are looked at")
                continue
            if found == "stop":
                return
            if isinstance(found, set):
                self._changed(path for _, path in found)
            if _identity(self._folder) != self._identity:
                self._again(
                    f"{self._folder} is another folder than before, or is gone; it is watched again when it is there"
                )

    def _again(self, why: str) -> None:
        """Watch the folder that is there now, or wait for one."""
        logger.warning("%s", why)
        while not self._ended.wait(1):
            if _identity(self._folder) is not None:
                try:
                    self._open()
                except (InvalidRequestError, FileNotFoundError) as error:
                    logger.warning("%s", error)
                    continue
                self._lost()
                return


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
