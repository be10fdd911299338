"""The command line."""

import sys
from pathlib import PurePath

from millpond.cli.arguments.stop_signals import end_on_signals

# Before the slow imports: a signal that comes while ``millpond ingest`` starts ends it with the code of a stop, too.
if sys.argv[1:2] == ["ingest"] and PurePath(sys.argv[0]).name in ("millpond", "millpond.exe", "__main__.py", "-m"):
    end_on_signals()
