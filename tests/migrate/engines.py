"""An engine for migrations, which needs no model: words have directions, and a call is done when it is submitted."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from millpond.testing import WordEngine


class WordModel(WordEngine):
    """A WordEngine that ingest takes."""

    def submit(self, task: str, inputs: Sequence[Any], params: Any = None) -> Any:
        done: Future[Any] = Future()
        done.set_result(self.embed(list(inputs), dimensions=params.dimensions, normalize=params.normalize))
        return done
