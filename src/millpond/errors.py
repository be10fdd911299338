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
    ├── CacheError
    ├── SinkError
    ├── FingerprintMismatchError (ValueError)
    └── MissingExtraError (ImportError)

Each also subclasses the builtin that a caller would catch, and its message names the value, the limit and the way out.
"""

from functools import partial
from typing import Any


class MillpondError(Exception):
    """The root: ``except MillpondError`` catches everything millpond raises on purpose."""


class ModelLoadError(MillpondError):
    """A checkpoint could not be found, read or built."""


class UnsupportedArchitectureError(ModelLoadError):
    """The checkpoint is of a family that millpond cannot run as packed rows."""


class WeightMismatchError(ModelLoadError):
    """The checkpoint's tensors do not fit the architecture its config describes."""


class InvalidRequestError(MillpondError, ValueError):
    """A request that can never succeed; raised before anything is queued."""


class UnsupportedTaskError(InvalidRequestError):
    """The loaded checkpoint does not serve the requested task."""


class InvalidDimensionsError(InvalidRequestError):
    """The requested width is not one that the checkpoint can be cut to.

    Attributes:
        dimensions: The requested width.
        native: The checkpoint's own.
        declared: The widths it was trained for, where it lists them.
        smallest: The least of them, where it does not.
        trained: Whether it can be cut at all.

    All are ``None`` where the width was refused before a checkpoint was looked at.
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
        index: Which text of the call.
        tokens: How many tokens it has.
        limit: How many it may have.
        at_least: It may have more than ``tokens``: of a text that is far too long only a part is tokenized.

    All are ``None`` where no text is at fault: a prompt or a template leaves room for none.
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
    """There is nothing to ingest at the path."""


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
        """Exceptions are rebuilt from their positional arguments alone, which would leave ``retry_after`` out."""
        return partial(type(self), retry_after=self.retry_after), self.args, self.__dict__


class EngineClosedError(MillpondError):
    """The engine was closed, or belongs to another process (it does not survive a fork)."""


class CacheError(MillpondError):
    """A vector cache file is damaged, foreign, or of a schema this version cannot read."""


class SinkError(MillpondError):
    """A database refused a request, or did not answer it."""


class FingerprintMismatchError(MillpondError, ValueError):
    """An index or a collection was built by another model."""


class MissingExtraError(MillpondError, ImportError):
    """An optional dependency is absent; the message holds the pip command."""
