"""Request: one text in the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from millpond.engine.call import Call


@dataclass(slots=True, frozen=True, eq=False)
class Request:
    """One distinct text of a call, tokenized.

    Attributes:
        call: Whose it is.
        slot: Its row among the call's distinct texts.
        ids: int32 ``[tokens]``.
    """

    call: Call
    slot: int
    ids: npt.NDArray[np.int32]

    @property
    def length(self) -> int:
        """Its tokens."""
        return len(self.ids)
