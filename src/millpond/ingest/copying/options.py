"""CopyOptions: what a copy is asked to do."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from millpond.errors import InvalidRequestError
from millpond.ingest.pipeline.dead_letter_file import DeadLetterFile
from millpond.ingest.pipeline.deletions import check_share
from millpond.ingest.pipeline.delivery import RetryPolicy


@dataclass(frozen=True, kw_only=True, eq=False)
class CopyOptions:
    """The options of :func:`~millpond.ingest.copy`, which describes them."""

    dense_only: bool = False
    sync: bool = False
    sync_max: float = 0.5
    rows_per_second: float | None = None
    dead_letters: str | os.PathLike[str] | DeadLetterFile | None = None
    show_progress: bool = True
    retry: RetryPolicy | None = None
    stop: threading.Event | None = None

    def __post_init__(self) -> None:
        check_share(self.sync_max)
        rate = self.rows_per_second
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1e9):
            raise InvalidRequestError(f"rows_per_second={rate!r} must be a number above 0, or None for no limit")
