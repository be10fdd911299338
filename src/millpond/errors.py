"""Every exception millpond raises, in one tree.

::

    MillpondError
    ├── ModelLoadError
    │   ├── UnsupportedArchitectureError
    │   └── WeightMismatchError
    ├── InvalidRequestError (ValueError)
    │   ├── UnsupportedTaskError
    │   ├── InvalidDimensionsError
    │   ├── InputTooLongError
    │   └── SourceNotFoundError (FileNotFoundError)
    ├── UnknownModelError (LookupError)
    ├── EngineOverloadedError
    ├── EngineClosedError
    ├── DeviceLostError
    ├── CacheError
    ├── JournalError
    ├── SinkError
    │   ├── SinkUnavailableError
    │   ├── SinkTooLargeError
    │   └── SinkRejectedError
    ├── IndexCorruptedError
    ├── IndexLockedError (TimeoutError)
    ├── FingerprintMismatchError (ValueError)
    └── MissingExtraError (ImportError)

The builtin in brackets is a second base class, for callers who catch builtins. Every message names the value, the limit
and the way out.
"""

from functools import partial
from typing import Any


class MillpondError(Exception):
    """The base class: ``except MillpondError`` catches everything millpond raises on purpose."""

    @property
    def param(self) -> str | None:
        """The argument that the error is about, with which its message begins: ``max_length`` of ``max_length=64 is``.

        ``None`` if the message begins with anything else.
        """
        name, equals, _ = str(self).partition("=")
        return name if equals and name.isidentifier() else None


class ModelLoadError(MillpondError):
    """A checkpoint could not be found, read or built."""


class UnsupportedArchitectureError(ModelLoadError):
    """The checkpoint has an architecture that millpond cannot run as packed rows."""


class WeightMismatchError(ModelLoadError):
    """The checkpoint's tensors do not fit the architecture its config describes."""


class InvalidRequestError(MillpondError, ValueError):
    """A request that can never succeed; raised before anything is queued."""


class UnsupportedTaskError(InvalidRequestError):
    """The loaded checkpoint does not serve the requested task."""


class InvalidDimensionsError(InvalidRequestError):
    """The checkpoint's vectors cannot be cut to the requested width.

    Attributes:
        dimensions: The requested width.
        native: The checkpoint's own width.
        declared: The widths it was trained for, if it lists them.
        smallest: The smallest of them, if it lists none.
        trained: Whether its vectors can be cut at all.

    All are ``None`` if the width was refused before the checkpoint was considered.
    """

    def __init__(
        self,
        message: str,
        *,
        dimensions: int | None = None,
        native: int | None = None,
        declared: tuple[int, ...] | None = None,
        smallest: int | None = None,
        trained: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.dimensions = dimensions
        self.native = native
        self.declared = declared
        self.smallest = smallest
        self.trained = trained


class InputTooLongError(InvalidRequestError):
    """A text is longer than the model reads, and truncation was refused (or cannot help).

    Attributes:
        index: Index of the text in the call.
        tokens: Its number of tokens.
        limit: The highest number allowed.
        at_least: Whether it may have more than ``tokens``: only a part of a far too long text is tokenized.

    All are ``None`` if no text is at fault: a prompt or a template leaves no room for any text.
    """

    def __init__(
        self,
        message: str,
        *,
        index: int | None = None,
        tokens: int | None = None,
        limit: int | None = None,
        at_least: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.index = index
        self.tokens = tokens
        self.limit = limit
        self.at_least = at_least


class SourceNotFoundError(InvalidRequestError, FileNotFoundError):
    """The path of a source to ingest does not exist."""


class UnknownModelError(MillpondError, LookupError):
    """No model of that name is served here."""


class EngineOverloadedError(MillpondError):
    """The queue is full.

    Attributes:
        retry_after: Seconds after which a retry is likely to be admitted.
    """

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep ``retry_after``: exceptions are unpickled from their positional arguments only."""
        return partial(type(self), retry_after=self.retry_after), self.args, self.__dict__


class EngineClosedError(MillpondError):
    """The engine was closed, or belongs to another process (it does not survive a fork)."""


class DeviceLostError(MillpondError):
    """A device failed in a way that no later batch of this process can recover from.

    Attributes:
        device: Name of the device; ``None`` if it is not known.
        reason: The device's own error, in one line; ``None`` if it is not known.
    """

    def __init__(self, message: str, *, device: str | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.device = device
        self.reason = reason


class CacheError(MillpondError):
    """A vector cache file is damaged, not millpond's, or of a schema this version cannot read."""


class JournalError(MillpondError):
    """The journal of an ingestion cannot be read or written, is damaged, or of a schema this version cannot read."""


class SinkError(MillpondError):
    """A database refused a request, did not answer, or holds a row that cannot be read.

    Its subclasses tell what :func:`~millpond.ingest.ingest` can do about it; for any other the run stops.
    """


class SinkUnavailableError(SinkError):
    """The database did not answer in time, or is too busy; the same request may succeed later.

    Attributes:
        retry_after: Seconds that the database asks to wait; ``None`` if it did not say so.
    """

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SinkTooLargeError(SinkError):
    """The request is larger than the database takes; a part of it may be accepted."""


class SinkRejectedError(SinkError):
    """The database refuses a row of the request; the others may be accepted."""


class IndexCorruptedError(MillpondError):
    """A file of an index is damaged or missing, or of a format that this version cannot read; the message names it."""


class IndexLockedError(MillpondError, TimeoutError):
    """Another process or thread writes the index, and did for longer than a writer waits."""


class FingerprintMismatchError(MillpondError, ValueError):
    """An index or a collection was built by another model."""


class MissingExtraError(MillpondError, ImportError):
    """An optional dependency is absent; the message holds the pip command."""
