"""cached_property: functools' own, without the lock that it has in Python 3.11.

That lock belongs to the class: a child that is forked while a thread computes the value then waits for ever.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # type checkers know functools' name as a property
    from functools import cached_property
else:

    class cached_property(functools.cached_property):  # noqa: N801  # a decorator
        """A property that is computed on first use; threads that compute it at once all get the value stored first."""

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            """The value, computed and stored in the instance's ``__dict__``, where the next look-up finds it."""
            if instance is None:
                return self
            return instance.__dict__.setdefault(self.attrname, self.func(instance))


__all__ = ["cached_property"]
