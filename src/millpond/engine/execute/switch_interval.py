"""Switch interval: how long a thread waits for the interpreter's lock before another thread has to hand it over.

The thread that drives a GPU lets go of the lock with every operator and every wait for the device, while other threads
make requests of what the tokenizer gave, in Python. With Python's own five milliseconds it may wait that long each time
it wants the lock back: a hundred operators that take half a millisecond alone then take a hundred milliseconds.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import partial

from millpond.errors import InvalidRequestError

VARIABLE = "MILLPOND_SWITCH_INTERVAL"
# Seconds. Handing the lock over takes some ten microseconds.
_SHORT = 0.0002
_PYTHONS_OWN = 0.005


def shorten_switch_interval() -> Callable[[], None]:
    """Shorten the process's interval until the function that this returns is called, and that of every other call.

    It is set to ``MILLPOND_SWITCH_INTERVAL`` seconds, by default 0.0002; 0 leaves it as it is. It also stays as it is
    if the program has set it, now or later.

    Raises:
        InvalidRequestError: The variable is no number of seconds from 0 to 0.005.
    """
    return _interval.shorten(_seconds())


class _SwitchInterval:
    """Those who need the interval to be short."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # an engine may be collected, and end its use, in a thread that holds it
        self._users: set[object] = set()
        self._set: float | None = None  # what it was set to; None: nothing

    def shorten(self, seconds: float) -> Callable[[], None]:
        user = object()
        with self._lock:
            self._users.add(user)
            if self._set is None and seconds and _is(_PYTHONS_OWN):
                sys.setswitchinterval(seconds)
                self._set = seconds
        return partial(self._end, user)

    def _end(self, user: object) -> None:
        with self._lock:
            self._users.discard(user)
            if not self._users:
                self._restore()

    def after_in_child(self) -> None:
        """In a forked child nobody needs it: the threads of its parent's engines are not there."""
        self._lock = threading.RLock()
        self._users = set()
        self._restore()

    def _restore(self) -> None:
        if self._set is not None and _is(self._set):
            sys.setswitchinterval(_PYTHONS_OWN)
        self._set = None


def _is(seconds: float) -> bool:
    """Whether the interval is so many seconds; Python keeps whole microseconds."""
    return abs(sys.getswitchinterval() - seconds) < 1e-6


def _seconds() -> float:
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text) if text else _SHORT
    except ValueError:
        seconds = -1.0
    if not (seconds == 0 or 1e-6 <= seconds <= _PYTHONS_OWN):
        raise InvalidRequestError(
            f"{VARIABLE}={text!r} must be a number of seconds, at least 0.000001 and at most {_PYTHONS_OWN}, Python's "
            "own, or 0 to leave the program's switch interval as it is"
        )
    return seconds


_interval = _SwitchInterval()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_interval.after_in_child)
