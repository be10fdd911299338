"""Drain: whether the server is shutting down."""

from __future__ import annotations


class Drain:
    """A server that is shutting down still answers, and announces that it takes no new work."""

    def __init__(self) -> None:
        self._begun = False

    @property
    def begun(self) -> bool:
        """Whether :meth:`begin` was called."""
        return self._begun

    def begin(self) -> None:
        """From now on ``/ready`` answers 503, and every connection is closed after its response."""
        self._begun = True
