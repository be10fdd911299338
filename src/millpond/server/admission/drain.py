"""Drain: whether the server is about to stop."""

from __future__ import annotations


class Drain:
    """A server that is about to stop still answers, and says that nothing new should come."""

    def __init__(self) -> None:
        self._begun = False

    @property
    def begun(self) -> bool:
        """Whether :meth:`begin` was called."""
        return self._begun

    def begin(self) -> None:
        """From now on ``/ready`` answers 503, and every connection is closed behind its answer."""
        self._begun = True
