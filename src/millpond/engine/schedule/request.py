"""Request: one tokenized item in the queue."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millpond.engine.schedule.call import Call
from millpond.values.inputs import TokenIds


@dataclass(slots=True, frozen=True, eq=False)
class Prefix:
    """Tokens that several requests of a call begin with: a reranker's template up to the document, for example.

    Requests share a prefix if they hold the same object.
    """

    length: int


@dataclass(slots=True, eq=False)  # one for every text: a frozen one would take five times as long to make
class Request:
    """One distinct item of a call, tokenized; not to be changed."""

    call: Call
    slot: int  # the item's slot in the call
    ids: npt.NDArray[np.int32]  # int32 `[tokens]`
    types: npt.NDArray[np.int8] | None = None  # int8 `[tokens]` token types; `None`: all 0
    attended: int | None = None  # only the first `attended` tokens may be attended to; `None`: all
    kept: npt.NDArray[np.bool_] | None = None  # bool `[tokens]` rows that a per-token result contains; `None`: all
    prefix: Prefix | None = None  # its common prefix; requests with the same prefix may compute it once

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    @property
    def skip(self) -> int:
        """Leading tokens that pooling leaves out: the call's prompt, which token ids do not get."""
        item = self.call.items[self.slot]
        return item.skip if isinstance(item, TokenIds) else self.call.plan.skip
