"""Runs ``millpond ingest`` in forked processes, which have imported everything already; a test kills them.

Reads a JSON object a line: ``argv``, ``log`` (a line for each computed batch: its rows), ``err``, and ``stdin``. Prints
the process id of the run, and its wait status once it has ended.
"""

import json
import os
import signal
import sys
from pkgutil import resolve_name

# Tests that were started in the background ignore them, and a run keeps what its parent ignores.
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
sys.argv = ["millpond", "ingest"]  # the program's own first step is then to end on signals
main = resolve_name("millpond.__main__:main")
Runner = resolve_name("millpond.engine.execute.runner:Runner")
for module in ("millpond.engine.engine", "millpond.ingest.pipeline.ingest"):
    resolve_name(module)


def start(argv, log, err, stdin):
    """The run, in a child process."""
    run = Runner.run
    log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def counted(self, requests):
        results = run(self, requests)
        os.write(log, b"%d\n" % len(results))
        return results

    Runner.run = counted
    descriptor = os.open(err, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.dup2(os.open(stdin, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.argv = ["millpond", *argv]
    main()


for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            start(**order)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(status, flush=True)
