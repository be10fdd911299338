"""kill -9 while a folder is indexed: afterwards no line of the index is stale, and none is missing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.mcp.test_folder_index import expected, mutate, stored
from tests.mcp.words_engine import WordsEngine

from millpond.mcp.folder.index import FolderIndex
from millpond.mcp.folder.store import UnitStore

pytestmark = pytest.mark.contract

# Tells of each change before it is made.
INDEXER = """
import sys
from pathlib import Path
from tests.mcp.words_engine import WordsEngine
from millpond.mcp.folder import index
from millpond.mcp.folder.store import UnitStore

index._BATCH_FILES = 1
engine = WordsEngine()
folder = index.FolderIndex(Path(sys.argv[1]), UnitStore(Path(sys.argv[2])), lambda: engine)
for name in ("write", "forget"):
    def told(*args, change=getattr(folder.store, name)):
        print("change", flush=True)
        change(*args)
    setattr(folder.store, name, told)
folder.update()
print("done", flush=True)
"""


@pytest.mark.parametrize("kills", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_a_killed_update_leaves_no_stale_and_no_missing_line(tmp_path: Path, kills: int):
    root, file, chance = tmp_path / "root", tmp_path / "index.db", random.Random(kills)
    root.mkdir()
    engine = WordsEngine()
    in_the_middle = 0
    for _ in range(kills):
        for _ in range(6):
            mutate(root, chance)
        process = subprocess.Popen(
            [sys.executable, "-c", INDEXER, str(root), str(file)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])},
        )
        assert process.stdout is not None
        for _ in range(chance.randrange(1, 5)):
            process.stdout.readline()
        time.sleep(chance.random() * 0.003)
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate(timeout=30)
        in_the_middle += "done" not in rest
        again = FolderIndex(root, UnitStore(file), lambda: engine)  # type: ignore[arg-type, return-value]
        again.update()
        assert [row[:6] for row in stored(again)] == expected(root)
        with again.store.reading() as snapshot:
            assert snapshot._connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            snapshot._connection.execute("SELECT rank FROM words WHERE words MATCH 'w1' LIMIT 1").fetchall()
        again.store.close()
    print(f"{in_the_middle} of {kills} kills were in the middle of an update")
    assert in_the_middle > kills / 2
