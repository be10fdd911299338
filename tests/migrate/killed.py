"""A migration in a process of its own, which a test kills: the URL, and the most rows a second.

It prints a line for each moment at which it may be killed: ``begin``, ``write`` before each batch of rows, ``verify``,
and the phase before and after it is noted in the metadata.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.migrate.engines import WordModel

from millpond.ingest import open_sink
from millpond.ingest.pipeline import planner
from millpond.migrate import migration as module
from millpond.migrate.change import Change
from millpond.migrate.migration import Migration
from millpond.migrate.row_copy import CopyOptions


class Told(Migration):
    """A migration that says how far it is."""

    def _writer(self, *given: Any) -> Any:
        sink = super()._writer(*given)
        write = sink.write

        def told(batch: Any) -> None:
            print("write", flush=True)
            write(batch)

        sink.write = told  # type: ignore[method-assign]
        return sink

    def _note(self, succession: Any) -> None:
        print("noting", succession.phase, flush=True)
        super()._note(succession)
        print("noted", succession.phase, flush=True)


def verify_told(*given: Any) -> None:
    print("verify", flush=True)
    verify(*given)


if __name__ == "__main__":
    url, rate = sys.argv[1:]
    engine = WordModel("new", dimensions=64)
    head = open_sink(url)
    head.open()  # type: ignore[attr-defined]
    verify, module.verify_sample = module.verify_sample, verify_told
    planner.BATCH_RECORDS = 64
    print("begin", flush=True)
    options = CopyOptions(rows_per_second=float(rate), show_progress=False)
    outcome = Told(head, Change(spec=engine.spec), options=options).run(engine)  # type: ignore[arg-type]
    assert outcome.phase == "live", outcome
    head.close()
