"""Copies a collection, and kills its own process at a random moment around one of its writes."""

import os
import random
import signal
import sys
import threading
from contextlib import closing

from millpond.ingest import copy, open_sink
from millpond.ingest.copying import copy_run

SECONDS = 0.04  # of the moment after a write has begun


def main(source_url, target_url, write, seed):
    """``write``: the number of the write at which the process dies; a negative one lets it live."""
    copy_run._PAGE_ROWS = 100
    chance, left = random.Random(int(seed)), [int(write)]
    with closing(open_sink(source_url)) as source, closing(open_sink(target_url)) as target:
        store = target.write

        def dying(batch):
            if left[0] == 0:
                moment = chance.random() * SECONDS
                timer = threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL))
                timer.daemon = True
                timer.start()
            left[0] -= 1
            store(batch)

        target.write = dying
        report = copy(source, target, show_progress=False)
        print(report.written, report.unchanged, report.good)


if __name__ == "__main__":
    main(*sys.argv[1:])
