"""Request: one text in the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from millpond.inputs import TokenIds

if TYPE_CHECKING:
    from millpond.engine.schedule.call import Call


@dataclass(slots=True, frozen=True, eq=False)
class Prefix:
    """What several requests of a call begin with: a reranker's template up to the document, say.

    Attributes:
        length: Its tokens.
    """

    length: int


@dataclass(slots=True, frozen=True, eq=False)
class Request:
    """One distinct item of a call, tokenized.

    Attributes:
        call: Whose it is.
        slot: Its row among the call's distinct items.
        ids: int32 ``[tokens]``.
        types: int8 ``[tokens]`` token types; ``None`` is all 0.
        attended: Only this many tokens, the first, may be attended to; ``None`` is all.
        kept: bool ``[tokens]`` rows that a per-token result has; ``None`` is all.
        prefix: What it begins with as others do; requests with one and the same may compute it once.
    """

    call: Call
    slot: int
    ids: npt.NDArray[np.int32]
    types: npt.NDArray[np.int8] | None = None
    attended: int | None = None
    kept: npt.NDArray[np.bool_] | None = None
    prefix: Prefix | None = None

    @property
    def length(self) -> int:
        """Its tokens."""
        return len(self.ids)

    @property
    def skip(self) -> int:
        """Leading tokens that pooling leaves out: the call's prompt, which token ids do not get."""
        item = self.call.items[self.slot]
        return item.skip if isinstance(item, TokenIds) else self.call.plan.skip
