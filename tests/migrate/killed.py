"""A migration in a process of its own, which a test kills: the URL, and the most rows a second."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.migrate.engines import WordModel

from millpond.ingest import open_sink
from millpond.migrate.change import Change
from millpond.migrate.migration import Migration
from millpond.migrate.row_copy import CopyOptions

if __name__ == "__main__":
    url, rate = sys.argv[1:]
    engine = WordModel("new", dimensions=64)
    head = open_sink(url)
    head.open()  # type: ignore[attr-defined]
    print("ready", flush=True)
    options = CopyOptions(rows_per_second=float(rate), show_progress=False)
    outcome = Migration(head, Change(spec=engine.spec), options=options).run(engine)  # type: ignore[arg-type]
    assert outcome.phase == "live", outcome
    head.close()
